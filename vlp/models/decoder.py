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
from vlp.data.text.tokenizer import predicted_positions
from vlp.layers.attention import attend, mask_bias
from vlp.layers.blocks import INIT_STD, NORM_EPS, FeedForward, TextEmbedding
from vlp.layers.causal import CausalAttention, Past
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import (
    BERT_EMBEDDING,
    BERT_LAYER,
    LoadReport,
    bert_state,
    check_bert_settings,
    copy_weights,
)
from vlp.models.vlp import REFERENCE_WIDTH, VLPModel


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

    The output is BERT's: dense layer, GELU, norm, tied word embedding (Press and Wolf 2017). head:
    (..., width) states and (vocabulary, width) embedding -> logits, as `MLMHead`.
    """

    def __init__(self, config: AnswerDecoderConfig, model: ModelConfig, head: nn.Module) -> None:
        super().__init__()
        text = model.text
        heads = config.heads or model.cross.heads
        intermediate = config.intermediate or model.cross.intermediate
        if text.width % heads:
            raise ConfigError(f"decoder.heads {heads} do not divide the model's width {text.width}")
        self.config = config
        # Calls pass a shared embedding, so that the text encoder alone owns it.
        self.embedding = (
            TextEmbedding(text.vocab_size, text.width, text.max_positions, text.position_sines)
            if config.embedding == "own"
            else None
        )
        self.layers = nn.ModuleList(
            AnswerLayer(text.width, heads, intermediate) for _ in range(config.layers)
        )
        std = INIT_STD * (REFERENCE_WIDTH / text.width) ** 0.5
        for part in self.layers.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=std)
                nn.init.zeros_(part.bias)
        self.head = head

    def remember(self, states: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute all keys and values of states (B, N, width); mask: (B, N) bool, True = real."""
        attentions = [part for part in self.modules() if isinstance(part, MemoryAttention)]
        layers = tuple(attention.project(states) for attention in attentions)
        bias = None if mask is None else mask_bias(mask, layers[0][0].dtype)[:, None, None]
        return Memory(layers, bias)

    def forward(
        self,
        ids: Tensor,
        memory: Memory,
        embedding: TextEmbedding,
        pasts: Sequence[Past] | None = None,
    ) -> Tensor:
        """Compute next-token states (B, L, width), or with `pasts` (B, 1, width) of the last token.

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
    embedding = _embedding_weights(decoder, model)
    # Weights have the same shapes for any number of heads, and compute something else.
    heads = config.heads or model.config.cross.heads
    if config.weights is not None:
        bert = bert_state(config.weights)
        if bert.settings is not None:
            sizes = [("num_attention_heads", "decoder.heads", heads)]
            check_bert_settings(bert.settings, sizes, config.weights)
        # BERT's word embedding is not read: the text encoder's went through further pretraining.
        layers, unused, initial = _bert_layers(decoder, bert.state, config.weights)
        source = f"{config.weights} -> answer decoder"
    elif config.start == "cross":
        if heads != model.config.cross.heads:
            raise ConfigError(
                f"decoder.heads={heads} does not fit decoder.start=cross: the cross-modal encoder "
                f"has {model.config.cross.heads} heads"
            )
        layers, unused, initial = _cross_layers(decoder, model)
        source = "cross-modal encoder -> answer decoder"
    else:
        layers, unused, initial = {}, [], [r"layers\."]
        source = "text encoder -> answer decoder"
    if not embedding and not layers:
        return []
    return [copy_weights(decoder, embedding | layers, source, unused, (_HEAD, *initial))]


def _embedding_weights(decoder: AnswerDecoder, model: VLPModel) -> dict[str, Tensor]:
    if decoder.embedding is None:
        return {}
    state = model.text_encoder.embedding.state_dict()
    return {f"embedding.{name}": tensor for name, tensor in state.items()}


def _cross_layers(
    decoder: AnswerDecoder, model: VLPModel
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return weights by the decoder's names, unused names, and patterns of further layers."""
    target = decoder.state_dict()
    weights: dict[str, Tensor] = {}
    unused = []
    for name, tensor in model.cross_encoder.state_dict().items():
        if name in target and ".positions." not in name:
            weights[name] = tensor
        else:
            unused.append(name)
    layers = {int(name.split(".")[1]) for name in weights}
    width = model.config.text.width
    for number in layers:
        # Layouts without an output projection equal one with the identity matrix.
        part = f"layers.{number}.cross_attention.output"
        if f"{part}.weight" not in weights:
            like = target[f"{part}.weight"]
            weights[f"{part}.weight"] = torch.eye(width, dtype=like.dtype, device=like.device)
            weights[f"{part}.bias"] = torch.zeros_like(target[f"{part}.bias"])
    further = [rf"layers\.{n}\." for n in range(len(decoder.layers)) if n not in layers]
    return weights, unused, further


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
    count = len(decoder.layers)
    if len(layers) < count:
        raise ValueError(f"{source} has {len(layers)} layers, the decoder {count}")
    weights = {
        f"layers.{number}.{name}": tensor
        for number, layer in enumerate(sorted(layers)[-count:])
        for name, tensor in layers[layer].items()
    }
    return weights, unused, list(_CROSS)


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
    counts as a token. One beam is greedy decoding.

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
    finished = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    beam_count = 1
    for _ in range(length):
        if bool(finished.all()):
            break
        previous_rows = parent + beam_count * torch.arange(rows, device=device)[:, None]
        beam_count = ids.shape[1]
        next_scores = step(ids.flatten(0, 1), previous_rows.flatten())
        next_scores = next_scores.unflatten(0, (rows, -1)).to(scores.dtype)
        vocabulary = next_scores.shape[-1]
        # A finished sequence only continues with the end token, at no cost.
        end_scores = torch.full((vocabulary,), -torch.inf, device=device)
        end_scores[end] = 0
        next_scores = torch.where(finished[..., None], end_scores, next_scores)
        # Growing beams compete by plain log-probability; the length penalty picks the result.
        total = (scores[..., None] + next_scores).flatten(1)
        scores, best = total.topk(min(beams, total.shape[1]), dim=1)
        parent, token = best // vocabulary, best % vocabulary
        ids = torch.cat([ids.take_along_dim(parent[..., None], 1), token[..., None]], -1)
        finished = finished.take_along_dim(parent, 1) | (token == end)
    tokens = ids.shape[-1] - 1 - (ids[..., 1:] == end).sum(-1) + finished
    best_beam = (scores / ((5 + tokens) / 6) ** penalty).argmax(1)
    return ids.take_along_dim(best_beam[:, None, None], 1)[:, 0, 1:]


class SpecialIds(NamedTuple):
    """Ids that frame a text, and `suppressed` ids, which are never generated."""

    start: int
    end: int
    suppressed: tuple[int, ...] = ()


@torch.no_grad()
def generate(
    decoder: AnswerDecoder,
    memory: Memory,
    embedding: TextEmbedding,
    special_ids: SpecialIds,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
    cached: bool = True,
) -> Tensor:
    """Generate a text for every memory row: (B, at most `length`) ids, no start, end-padded."""
    step = _Step(decoder, memory, embedding, special_ids.suppressed, cached)
    rows = len(memory.layers[0][0])
    device = memory.layers[0][0].device
    return beam_search(
        step, rows, special_ids.start, special_ids.end, length, beams, penalty, device
    )


class _Step:
    """Log-probabilities of the next token, with keys and values that follow their beams."""

    def __init__(
        self,
        decoder: AnswerDecoder,
        memory: Memory,
        embedding: TextEmbedding,
        suppressed: Sequence[int],
        cached: bool,
    ) -> None:
        self._decoder, self._embedding, self._suppressed = decoder, embedding, list(suppressed)
        self._memory, self._beam_memory = memory, memory
        self._pasts = [Past() for _ in decoder.layers] if cached else None

    def __call__(self, ids: Tensor, parents: Tensor) -> Tensor:
        rows = len(self._memory.layers[0][0])
        if len(ids) != len(self._beam_memory.layers[0][0]):
            beam_rows = torch.arange(rows, device=ids.device).repeat_interleave(len(ids) // rows)
            self._beam_memory = self._memory.select(beam_rows)
        # The first call has no cache yet.
        if self._pasts is not None and ids.shape[1] > 1:
            self._pasts = [_select_past(past, parents) for past in self._pasts]
        states = self._decoder(ids, self._beam_memory, self._embedding, self._pasts)
        logits = self._decoder.logits(states[:, -1], self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[:, self._suppressed] = -torch.inf
        return logits.log_softmax(-1)


def _select_past(past: Past, parents: Tensor) -> Past:
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
    """Compute logits (R, vocabulary) of the R real tokens; arguments: see `answer_likelihood`."""
    places = predicted_positions(ids, pad_id) if places is None else places
    states = decoder(ids[:, :-1], memory, embedding)
    # Padding does not pass the output layer, the most expensive one.
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
        places: (R,) `predicted_positions`; None computes them, which waits for a GPU.
    """
    places = predicted_positions(ids, pad_id) if places is None else places
    logits = answer_logits(decoder, memory, ids, embedding, pad_id, places)
    tokens = ids[:, 1:]
    targets = tokens.flatten()[places]
    scores = -functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    if soft is not None:
        scores = (1 - alpha) * scores - alpha * functional.cross_entropy(
            logits, soft, reduction="none"
        )

    def by_text(values: Tensor) -> Tensor:
        by_position = values.new_zeros(tokens.numel()).index_copy(0, places, values)
        return by_position.view_as(tokens).sum(1)

    correct = logits.argmax(-1) == targets
    return Likelihood(by_text(scores), by_text(correct), (tokens != pad_id).sum(1))


# ALBEF's k for the 3,128 answers of VQA v2.
CANDIDATES = 128

# Most logits in memory at once: 256 MiB in float32.
LOGITS = 2**26

# Answers in a round of the exact search.
_ROUND = 32
# Nats within which two answers are equally likely.
_ROUNDING = 1e-4


class Ranked(NamedTuple):
    """best (B,) int64 indices of answers, and log_probability (B,) of each."""

    best: Tensor
    log_probability: Tensor


class AnswerRanking:
    """Ranking of answers for each memory row by full likelihood.

    The first token's probability picks `candidates` answers; None: all, the exact maximum.

    Args:
        decoder: in evaluation mode.
        answers: (A, L) int64, [CLS] ... [SEP] and padding, unique, by frequency: of equally likely
            ones (within 1e-4 nats) the earlier wins.
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
        self._round = min(candidates or _ROUND, len(answers))
        self._max_tokens = logits // embedding.word.num_embeddings

    @torch.no_grad()
    def __call__(self, memory: Memory) -> Ranked:
        """Return the best answer of each of the B rows."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_scores = self._first_tokens(memory, len(rows))
        first_scores, order = first_scores.sort(dim=1, descending=True, stable=True)
        best = torch.full_like(rows, len(self._answers))
        scores = torch.full_like(first_scores[:, 0], -torch.inf)
        for start in range(0, len(self._answers) if self._exact else self._round, self._round):
            # An answer is never likelier than its first token, so those behind cannot win.
            undecided = rows[first_scores[:, start] + _ROUNDING >= scores]
            if not len(undecided):
                break
            candidates = order[undecided, start : start + self._round]
            new_scores = self._likelihoods(memory, undecided, candidates)
            # The best answer of earlier rounds is one more column.
            new_scores = torch.cat([scores[undecided][:, None], new_scores], 1)
            candidates = torch.cat([best[undecided][:, None], candidates], 1)
            top = new_scores.amax(1)
            scores[undecided] = top
            lower = new_scores + _ROUNDING < top[:, None]
            best[undecided] = candidates.masked_fill(lower, len(self._answers)).amin(1)
        return Ranked(best, scores)

    @torch.no_grad()
    def likelihoods(self, memory: Memory) -> Tensor:
        """Compute the log-probability of every answer for B rows, (B, A); -inf: no candidate."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_scores = self._first_tokens(memory, len(rows))
        candidates = first_scores.argsort(dim=1, descending=True, stable=True)
        if not self._exact:
            candidates = candidates[:, : self._round]
        scores = self._likelihoods(memory, rows, candidates)
        return torch.full_like(first_scores, -torch.inf).scatter(1, candidates, scores)

    def _first_tokens(self, memory: Memory, rows: int) -> Tensor:
        """Compute log p of each answer's first token, (B, A)."""
        start = self._answers[:1, :1].expand(rows, 1)
        states = self._decoder(start, memory, self._embedding)[:, 0]
        logits = self._decoder.logits(states, self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1)[:, self._answers[:, 1]]

    def _likelihoods(self, memory: Memory, rows: Tensor, candidates: Tensor) -> Tensor:
        """Compute log p of the answers `candidates` (rows, K) in chunks of similar length."""
        answers = candidates.flatten()
        memory_rows = rows.repeat_interleave(candidates.shape[1])
        order = self._tokens[answers].argsort(stable=True)
        parts = []
        for chunk in _chunks(self._tokens[answers[order]].tolist(), self._max_tokens):
            part = order[chunk]
            ids = self._answers[answers[part], : int(self._tokens[answers[part[-1]]])]
            part_memory = memory.select(memory_rows[part])
            parts.append(
                answer_likelihood(
                    self._decoder, part_memory, ids, self._embedding, self._pad_id
                ).log_probability
            )
        scores = torch.cat(parts)
        return torch.empty_like(scores).index_copy(0, order, scores).view(candidates.shape)


def _chunks(lengths: list[int], max_tokens: int) -> Iterator[slice]:
    """Split ascending lengths into chunks of one text or at most `max_tokens`, padding included."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > max_tokens:
            yield slice(start, stop)
            start = stop
