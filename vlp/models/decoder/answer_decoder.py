"""A decoder that writes answers and captions while attending to what the encoders have joined.

The "additional 6-layer transformer" of question answering (ACE-RPE paper, section 4.2; ALBEF,
section 4): BERT's post-norm layers with causal self-attention, cross-attention and feed-forward.
[CLS] starts a text and [SEP] ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field
from torch import Tensor, nn

from vlp.config import Config, ConfigError
from vlp.layers.attention import attend, mask_bias
from vlp.layers.causal import CausalAttention, Past
from vlp.layers.post_norm import NORM_EPS, FeedForward
from vlp.layers.stream import LayerNorm
from vlp.layers.text_embedding import BERT_DEVIATION, TextEmbedding
from vlp.models.config import ModelConfig
from vlp.models.vlp import BERT_WIDTH


class AnswerDecoderConfig(Config):
    """Sizes and start of the decoder; its width is the encoders'."""

    layers: int = Field(6, ge=1, description="number of layers")
    heads: int | None = Field(None, ge=1, description="null: the cross-modal encoder's")
    intermediate: int | None = Field(None, ge=1, description="null: the cross-modal encoder's")
    embedding: Literal["shared", "own"] = Field(
        "shared", description="of words: the text encoder's, or a copy that is trained by itself"
    )
    start: Literal["cross", "none"] = Field(
        "cross", description="layers start as the cross-modal encoder's, as ALBEF's do, or anew"
    )
    weights: str | None = Field(
        None, description="folder or hub name of a public BERT, whose last layers are the start"
    )


class Memory(NamedTuple):
    """Memory of the decoder's attention: keys and values of each layer, (B, heads, N, head width).

    bias: (B, 1, 1, N) of padding, or None.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor | None

    def select(self, rows: Tensor) -> Memory:
        """Rows (int64), each as often as it is named."""
        layers = tuple((key[rows], value[rows]) for key, value in self.layers)
        return Memory(layers, None if self.bias is None else self.bias[rows])


class MemoryAttention(nn.Module):
    """Cross-attention whose keys and values are made once and used by every token and answer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, width) -> keys and values, (B, heads, N, head width) each."""
        return self._heads(self.key(states)), self._heads(self.value(states))

    def forward(self, states: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """(B, L, width) -> (B, L, width)."""
        out = attend(self._heads(self.query(states)), key, value, bias=bias)
        return self.output(out.transpose(1, 2).flatten(-2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AnswerLayer(nn.Module):
    """Causal self-attention, cross-attention, feed-forward; each added and then normalised.

    Names are those of `vlp.layers.post_norm.CrossLayer`, whose weights it can start from.
    """

    def __init__(self, width: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width, heads)
        self.attention_norm = LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = MemoryAttention(width, heads)
        self.cross_norm = LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = LayerNorm(width, eps=NORM_EPS)

    def forward(
        self, states: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, past: Past | None
    ) -> Tensor:
        """(B, L, width) -> (B, L, width); with `past` L is 1, the token that comes next."""
        states = self.attention_norm(states + self.attention(states, past=past))
        states = self.cross_norm(states + self.cross_attention(states, key, value, bias))
        return self.feed_forward_norm(states + self.feed_forward(states))


class AnswerDecoder(nn.Module):
    """Writes texts token by token; padding behind a text changes nothing in front of it.

    Words are embedded by the text encoder's embedding, handed in at every call so that it is owned
    once, or by the decoder's own. The output is BERT's: dense layer, GELU, norm, and the word
    embedding of the input once more (Press and Wolf 2017).

    Args:
        config: sizes.
        model: those of the encoders.
        head: (..., width) states and (vocabulary, width) word embedding -> logits, as
            `vlp.objectives.mlm.MLMHead`.

    Raises:
        ConfigError: heads that do not divide the width.
    """

    def __init__(self, config: AnswerDecoderConfig, model: ModelConfig, head: nn.Module) -> None:
        super().__init__()
        text = model.text
        heads = config.heads or model.cross.heads
        intermediate = config.intermediate or model.cross.intermediate
        if text.width % heads:
            raise ConfigError(f"decoder.heads {heads} do not divide the model's width {text.width}")
        self.config = config
        self.embedding = (
            TextEmbedding(text.vocab_size, text.width, text.max_positions, text.position_sines)
            if config.embedding == "own"
            else None
        )
        self.layers = nn.ModuleList(
            AnswerLayer(text.width, heads, intermediate) for _ in range(config.layers)
        )
        deviation = BERT_DEVIATION * (BERT_WIDTH / text.width) ** 0.5
        for part in self.layers.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=deviation)
                nn.init.zeros_(part.bias)
        self.head = head

    def remember(self, states: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute the keys and values that every layer attends to.

        Args:
            states: (B, N, width).
            mask: (B, N) bool, True = real; None is all.
        """
        crosses = [part for part in self.modules() if isinstance(part, MemoryAttention)]
        layers = tuple(cross.project(states) for cross in crosses)
        bias = None if mask is None else mask_bias(mask, layers[0][0].dtype)[:, None, None]
        return Memory(layers, bias)

    def forward(
        self,
        ids: Tensor,
        memory: Memory,
        embedding: TextEmbedding,
        pasts: Sequence[Past] | None = None,
    ) -> Tensor:
        """States that say what follows each token.

        Args:
            ids: (B, L) int64, [CLS] first.
            memory: of as many rows.
            embedding: the text encoder's.
            pasts: of each layer, of every token but the last, which is then computed alone and
                added to them.

        Returns:
            (B, L, width); with `pasts` (B, 1, width).

        Raises:
            ValueError: more tokens than the embedding has positions.
        """
        states = self._words(embedding)(ids)
        if pasts is not None:
            states = states[:, -1:]
        for number, layer in enumerate(self.layers):
            past = None if pasts is None else pasts[number]
            states = layer(states, *memory.layers[number], memory.bias, past)
        return states

    def logits(self, states: Tensor, embedding: TextEmbedding) -> Tensor:
        """(..., width) -> (..., vocabulary)."""
        out: Tensor = self.head(states, self._words(embedding).word.weight)
        return out

    def _words(self, embedding: TextEmbedding) -> TextEmbedding:
        return embedding if self.embedding is None else self.embedding
