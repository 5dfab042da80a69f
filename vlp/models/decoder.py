"""Answer decoder: generation with beam search, likelihood and ranking of given answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.data.text.tokenizer import predicted_places
from vlp.layers.attention import attend, mask_bias
from vlp.layers.blocks import BERT_DEVIATION, NORM_EPS, FeedForward, TextEmbedding
from vlp.layers.causal import CausalAttention, Past
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import (
    BERT_EMBEDDING,
    BERT_LAYER,
    LoadReport,
    bert_state,
    copy_weights,
)
from vlp.models.vlp import BERT_WIDTH, VLPModel


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
    """Keys and values of each decoder layer, (B, heads, N, head width).

    bias: (B, 1, 1, N) of padding, or None.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor | None

    def select(self, rows: Tensor) -> Memory:
        """Select rows (int64), with repetitions."""
        layers = tuple((key[rows], value[rows]) for key, value in self.layers)
        return Memory(layers, None if self.bias is None else self.bias[rows])


class MemoryAttention(nn.Module):
    """Cross-attention with keys and values computed once for all tokens and answers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (B, N, width) to keys and values, (B, heads, N, head width) each."""
        return self._heads(self.key(states)), self._heads(self.value(states))

    def forward(self, states: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Attend to the memory: (B, L, width) -> (B, L, width)."""
        out = attend(self._heads(self.query(states)), key, value, bias=bias)
        return self.output(out.transpose(1, 2).flatten(-2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AnswerLayer(nn.Module):
    """Post-norm self-attention (causal), cross-attention, feed-forward; named as `CrossLayer`'s."""

    def __init__(self, width: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = MemoryAttention(width, heads)
        self.cross_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(
        self, states: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, past: Past | None
    ) -> Tensor:
        """Map (B, L, width) to (B, L, width); with `past` L is 1, the next token."""
        states = self.attention_norm(states + self.attention(states, past=past))
        states = self.cross_norm(states + self.cross_attention(states, key, value, bias))
        return self.feed_forward_norm(states + self.feed_forward(states))


class AnswerDecoder(nn.Module):
    """Autoregressive text decoder; padding after a text changes nothing before it.

    It embeds words itself, or by the text encoder's embedding, which every call passes so that one
    module owns it. The output is BERT's: dense layer, GELU, norm, tied word embedding (Press and
    Wolf 2017). head: (..., width) states and (vocabulary, width) embedding -> logits, as `MLMHead`.
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
        """Compute every layer's keys and values of states (B, N, width).

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
        """Compute next-token states (B, L, width); with `pasts` only of the last token, (B, 1,
        width).

        Args:
            ids: (B, L) int64, [CLS] first.
            memory: of B rows.
            pasts: cache of each layer for all tokens but the last, which is added to it.
        """
        states = self._words(embedding)(ids)
        if pasts is not None:
            states = states[:, -1:]
        for number, layer in enumerate(self.layers):
            past = None if pasts is None else pasts[number]
            states = layer(states, *memory.layers[number], memory.bias, past)
        return states

    def logits(self, states: Tensor, embedding: TextEmbedding) -> Tensor:
        """Map (..., width) to (..., vocabulary)."""
        out: Tensor = self.head(states, self._words(embedding).word.weight)
        return out

    def _words(self, embedding: TextEmbedding) -> TextEmbedding:
        return embedding if self.embedding is None else self.embedding


# BERT has no cross-attention, and an encoder no output layer.
_CROSS = (r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\.")
_HEAD = r"head\."


def start_decoder(decoder: AnswerDecoder, model: VLPModel) -> list[LoadReport]:
    """Initialise layers and embedding as configured; the caller initialises a head (`mlm_head`)."""
    config = decoder.config
    if model.config.text.architecture:
        raise ConfigError(
            "text.architecture: answers and captions are written with the embedding of our own "
            "BERT layers; start from a model whose text.architecture is null"
        )
    found, may_miss = _own_embedding(decoder, model), [_HEAD]
    if config.weights is not None:
        bert = bert_state(config.weights)
        there = (bert.settings or {}).get("num_attention_heads")
        here = config.heads or model.config.cross.heads
        if there not in (None, here):  # the same shapes, and another function
            raise ConfigError(
                f"{config.weights} has {there} heads and the decoder {here}; set "
                f"decoder.heads={there}"
            )
        own, unused, more = _bert_layers(decoder, bert.state, config.weights)
        # BERT's word embedding is the text encoder's before further pretraining.
        source = f"{config.weights} -> answer decoder"
    elif config.start == "cross":
        own, unused, more = _cross_layers(decoder, model)
        source = "cross-modal encoder -> answer decoder"
    else:
        own, unused, more = {}, [], [r"layers\."]
        source = "text encoder -> answer decoder"
    if not found and not own:
        return []
    return [copy_weights(decoder, found | own, source, unused, (*may_miss, *more))]


def _own_embedding(decoder: AnswerDecoder, model: VLPModel) -> dict[str, Tensor]:
    if decoder.embedding is None:
        return {}
    state = model.text_encoder.embedding.state_dict()
    return {f"embedding.{name}": tensor for name, tensor in state.items()}


def _cross_layers(
    decoder: AnswerDecoder, model: VLPModel
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return tensors by the decoder's names; layers missing in the encoder keep their start."""
    here = decoder.state_dict()
    found: dict[str, Tensor] = {}
    unused = []
    for name, tensor in model.cross_encoder.state_dict().items():
        if name in here and ".positions." not in name:
            found[name] = tensor
        else:
            unused.append(name)
    layers = {int(name.split(".")[1]) for name in found}
    width = model.config.text.width
    for number in layers:
        # Layouts without an output projection hand on what was attended to as it is.
        part = f"layers.{number}.cross_attention.output"
        if f"{part}.weight" not in found:
            like = here[f"{part}.weight"]
            found[f"{part}.weight"] = torch.eye(width, dtype=like.dtype, device=like.device)
            found[f"{part}.bias"] = torch.zeros_like(here[f"{part}.bias"])
    further = [rf"layers\.{n}\." for n in range(len(decoder.layers)) if n not in layers]
    return found, unused, further


def _bert_layers(
    decoder: AnswerDecoder, state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return BERT's last layers, as many as the decoder has."""
    layers: dict[int, dict[str, Tensor]] = {}
    unused, unknown = [], []
    for key, tensor in state.items():
        name = key.removeprefix("bert.")
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module)
        if layer and layer[2] in BERT_LAYER:
            layers.setdefault(int(layer[1]), {})[f"{BERT_LAYER[layer[2]]}.{kind}"] = tensor
        elif module in BERT_EMBEDDING or name.startswith(("pooler.", "cls.", "embeddings.")):
            unused.append(key)
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of BERT: {', '.join(unknown)}")
    ours = len(decoder.layers)
    if len(layers) < ours:
        raise ValueError(f"{source} has {len(layers)} layers, the decoder {ours}")
    found = {
        f"layers.{number}.{name}": tensor
        for number, layer in enumerate(sorted(layers)[-ours:])
        for name, tensor in layers[layer].items()
    }
    return found, unused, list(_CROSS)


Step = Callable[[Tensor, Tensor], Tensor]


def beam_search(
    step: Step,
    rows: int,
    start: int,
    end: int,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the best sequence of every row: (rows, at most `length`) ids, padded with `end`.

    Scores are log-probabilities over ((5 + tokens) / 6) ^ penalty (Wu et al. 2016, Eq. 14); the end
    counts as a token. Growing beams compete by plain log-probability. One beam is greedy decoding.

    Args:
        step: (rows * beams, t) ids, `start` first, and the row of the previous call that each one
            continues (itself in the first call) -> log-probabilities (rows * beams, vocabulary). A
            row's beams are adjacent; their number may vary between calls.
        length: most ids after the first.
        penalty: of length; 0 favours short sequences.
    """
    if beams < 1 or length < 1:
        raise ValueError(f"a search of {beams} beams and {length} tokens finds nothing")
    ids = torch.full((rows, 1, 1), start, device=device)
    parent = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(rows, 1, device=device)
    over = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    before = 1
    for _ in range(length):
        if bool(over.all()):
            break
        continued = parent + before * torch.arange(rows, device=device)[:, None]
        before = ids.shape[1]
        next_scores = step(ids.flatten(0, 1), continued.flatten())
        next_scores = next_scores.unflatten(0, (rows, -1)).to(scores.dtype)
        vocabulary = next_scores.shape[-1]
        # A sequence that is over goes on in one way, which costs nothing.
        only_end = torch.full((vocabulary,), -torch.inf, device=device)
        only_end[end] = 0
        next_scores = torch.where(over[..., None], only_end, next_scores)
        total = (scores[..., None] + next_scores).flatten(1)
        scores, best = total.topk(min(beams, total.shape[1]), dim=1)
        parent, token = best // vocabulary, best % vocabulary
        ids = torch.cat([ids.take_along_dim(parent[..., None], 1), token[..., None]], -1)
        over = over.take_along_dim(parent, 1) | (token == end)
    tokens = ids.shape[-1] - 1 - (ids[..., 1:] == end).sum(-1) + over
    chosen = (scores / ((5 + tokens) / 6) ** penalty).argmax(1)
    return ids.take_along_dim(chosen[:, None, None], 1)[:, 0, 1:]


class Marks(NamedTuple):
    """Ids that frame a text, and `silent` ids, which are never generated."""

    start: int
    end: int
    silent: tuple[int, ...] = ()


@torch.no_grad()
def generate(
    decoder: AnswerDecoder,
    memory: Memory,
    embedding: TextEmbedding,
    marks: Marks,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
    cached: bool = True,
) -> Tensor:
    """Generate a text for every memory row: (B, at most `length`) ids, no start, end-padded."""
    step = _Step(decoder, memory, embedding, marks.silent, cached)
    rows = len(memory.layers[0][0])
    device = memory.layers[0][0].device
    return beam_search(step, rows, marks.start, marks.end, length, beams, penalty, device)


class _Step:
    """Log-probabilities of the next token, with keys and values that follow their beams."""

    def __init__(
        self,
        decoder: AnswerDecoder,
        memory: Memory,
        embedding: TextEmbedding,
        silent: Sequence[int],
        cached: bool,
    ) -> None:
        self._decoder, self._embedding, self._silent = decoder, embedding, list(silent)
        self._memory, self._own = memory, memory
        self._pasts = [Past() for _ in decoder.layers] if cached else None

    def __call__(self, ids: Tensor, parents: Tensor) -> Tensor:
        rows = len(self._memory.layers[0][0])
        if len(ids) != len(self._own.layers[0][0]):
            owner = torch.arange(rows, device=ids.device).repeat_interleave(len(ids) // rows)
            self._own = self._memory.select(owner)
        if self._pasts is not None and ids.shape[1] > 1:
            self._pasts = [_continued(past, parents) for past in self._pasts]
        states = self._decoder(ids, self._own, self._embedding, self._pasts)
        logits = self._decoder.logits(states[:, -1], self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[:, self._silent] = -torch.inf
        return logits.log_softmax(-1)


def _continued(past: Past, parents: Tensor) -> Past:
    assert past.key is not None
    assert past.value is not None
    return Past(past.key[parents], past.value[parents])


class Likelihood(NamedTuple):
    """Log-probability of each text, with its end, (rows,).

    right and tokens: (rows,) numbers of greedily correct tokens, and of all tokens.
    """

    log_probability: Tensor
    right: Tensor
    tokens: Tensor


def answer_logits(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    places: Tensor | None = None,
) -> Tensor:
    """Compute (R, vocabulary) logits of the R real tokens of all texts, in float32 or better.

    Only real tokens pass the output layer; arguments are as in `answer_likelihood`.
    """
    places = predicted_places(ids, pad_id) if places is None else places
    states = decoder(ids[:, :-1], memory, embedding)
    logits: Tensor = decoder.logits(states.flatten(0, 1)[places], embedding)
    return logits if logits.dtype == torch.float64 else logits.float()


def answer_likelihood(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    smoothing: float = 0.0,
    soft: Tensor | None = None,
    alpha: float = 0.0,
    places: Tensor | None = None,
) -> Likelihood:
    """Compute log p(text) = sum of log p(token | previous tokens), in float32 or better.

    Args:
        ids: (rows, L) int64, [CLS] ... [SEP] and padding.
        smoothing: label smoothing; the result is then the negative smoothed cross-entropy.
        soft: (R, vocabulary) predictions of a teacher for the R real tokens, rows that sum to 1.
        alpha: weight of `soft` in each token's target.
        places: (R,) `predicted_places`; None computes them, which waits for a GPU.
    """
    places = predicted_places(ids, pad_id) if places is None else places
    logits = answer_logits(decoder, memory, ids, embedding, pad_id, places)
    tokens = ids[:, 1:]
    wanted = tokens.flatten()[places]
    each = -functional.cross_entropy(logits, wanted, reduction="none", label_smoothing=smoothing)
    if soft is not None:
        each = (1 - alpha) * each - alpha * functional.cross_entropy(logits, soft, reduction="none")

    def by_text(values: Tensor) -> Tensor:
        spread = values.new_zeros(tokens.numel()).index_copy(0, places, values)
        return spread.view_as(tokens).sum(1)

    right = logits.argmax(-1) == wanted
    return Likelihood(by_text(each), by_text(right), (tokens != pad_id).sum(1))


CANDIDATES = 128
"""ALBEF's k for the 3,128 answers of VQA v2."""

LOGITS = 2**26
"""Most logits in memory at once: 256 MiB in float32."""

_STEP = 32
_ROUNDING = 1e-4


class Ranked(NamedTuple):
    """best (B,) int64 numbers of answers, and log_probability (B,) of each."""

    best: Tensor
    log_probability: Tensor


class AnswerRanking:
    """Ranks answers for each memory row by full likelihood.

    The first token's probability picks `candidates` answers. Ties (1e-4 nats) go to the earlier
    answer, among candidates too: many share their first token, so sort the list by frequency. With
    `candidates` None, answers are tried by the probability of their first token until no other can
    win, since an answer is never likelier than its first token: the exact maximum for less work.

    Args:
        decoder: in evaluation mode.
        answers: (A, L) int64, [CLS] ... [SEP] and padding; no two the same.
        logits: most in memory at once (tokens of several answers times the vocabulary).
    """

    def __init__(
        self,
        decoder: AnswerDecoder,
        answers: Tensor,
        embedding: TextEmbedding,
        pad_id: int,
        candidates: int | None = CANDIDATES,
        logits: int = LOGITS,
    ) -> None:
        if not len(answers) or (candidates is not None and candidates < 1):
            raise ValueError(
                f"ranking {len(answers)} answers by {candidates} candidates finds none"
            )
        self._decoder, self._embedding, self._pad_id = decoder, embedding, pad_id
        self._answers = answers
        self._tokens = (answers != pad_id).sum(1)
        self._exact = candidates is None
        self._wide = min(candidates or _STEP, len(answers))
        self._most = logits // embedding.word.num_embeddings

    @torch.no_grad()
    def __call__(self, memory: Memory) -> Ranked:
        """Return the best answer of each of the B rows."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_odds = self._first_tokens(memory, len(rows))
        first_odds, order = first_odds.sort(dim=1, descending=True, stable=True)
        best = torch.full_like(rows, len(self._answers))
        odds = torch.full_like(first_odds[:, 0], -torch.inf)
        for start in range(0, len(self._answers) if self._exact else self._wide, self._wide):
            undecided = rows[first_odds[:, start] + _ROUNDING >= odds]
            if not len(undecided):
                break
            tried = order[undecided, start : start + self._wide]
            found = self._likelihoods(memory, undecided, tried)
            # What was best so far is one more column.
            found = torch.cat([odds[undecided][:, None], found], 1)
            tried = torch.cat([best[undecided][:, None], tried], 1)
            top = found.amax(1)
            odds[undecided] = top
            behind = found + _ROUNDING < top[:, None]
            best[undecided] = tried.masked_fill(behind, len(self._answers)).amin(1)
        return Ranked(best, odds)

    @torch.no_grad()
    def likelihoods(self, memory: Memory) -> Tensor:
        """Compute the log-probability of every answer for B rows, (B, A); -inf: no candidate."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_odds = self._first_tokens(memory, len(rows))
        tried = first_odds.argsort(dim=1, descending=True, stable=True)
        if not self._exact:
            tried = tried[:, : self._wide]
        found = self._likelihoods(memory, rows, tried)
        return torch.full_like(first_odds, -torch.inf).scatter(1, tried, found)

    def _first_tokens(self, memory: Memory, rows: int) -> Tensor:
        """Compute log p of each answer's first token, (B, A)."""
        start = self._answers[:1, :1].expand(rows, 1)
        states = self._decoder(start, memory, self._embedding)[:, 0]
        logits = self._decoder.logits(states, self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1)[:, self._answers[:, 1]]

    def _likelihoods(self, memory: Memory, rows: Tensor, tried: Tensor) -> Tensor:
        """Compute log p of the answers `tried` (rows, K), in pieces of similar length."""
        number = tried.flatten()
        owner = rows.repeat_interleave(tried.shape[1])
        order = self._tokens[number].argsort(stable=True)
        parts = []
        for piece in _pieces(self._tokens[number[order]].tolist(), self._most):
            part = order[piece]
            ids = self._answers[number[part], : int(self._tokens[number[part[-1]]])]
            own = memory.select(owner[part])
            parts.append(
                answer_likelihood(
                    self._decoder, own, ids, self._embedding, self._pad_id
                ).log_probability
            )
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy(0, order, found).view(tried.shape)


def _pieces(lengths: list[int], most: int) -> Iterator[slice]:
    """Split an ascending list into parts of one item or at most `most` longest times number."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > most:
            yield slice(start, stop)
            start = stop
