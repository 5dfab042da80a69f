"""Answer decoder: generation with beam search, likelihood and ranking of given answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.data.text.tokenizer import predicted_positions
from vlp.layers.attention import CausalAttention, Past, attend, mask_bias
from vlp.layers.blocks import INIT_STD, NORM_EPS, FeedForward, TextEmbedding
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import (
    LoadReport,
    check_bert_settings,
    copy_weights,
    last_bert_layers,
)
from vlp.models.pretrained.published import read_bert
from vlp.models.vlp import REFERENCE_WIDTH, VLPModel
from vlp.precision import at_least_float32, require_finite


class AnswerDecoderConfig(Config):
    """Sizes and initial weights of the decoder, which has the width of the encoders."""

    layers: int = Field(6, ge=1, description="number of layers")
    heads: int | None = Field(None, ge=1, description="null: the cross-modal encoder's")
    intermediate: int | None = Field(None, ge=1, description="null: the cross-modal encoder's")
    embedding: Literal["shared", "own"] = Field(
        "shared", description="word embedding: the text encoder's, or a copy trained separately"
    )
    start: Literal["cross", "none"] = Field(
        "cross",
        description="cross: layers start from the cross-modal encoder's, as in ALBEF; none: from "
        "random weights",
    )
    weights: str | None = Field(
        None, description="folder or hub name of a public BERT whose last layers replace `start`"
    )


class Memory(NamedTuple):
    """Keys and values of the cross-attention of each decoder layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]  # (B, heads, N, head width) each
    bias: Tensor | None  # (B, 1, 1, N), large and negative at padding; None without padding

    def select(self, rows: Tensor) -> Memory:
        """Select rows (int64), with repetitions."""
        layers = tuple((key[rows], value[rows]) for key, value in self.layers)
        return Memory(layers, None if self.bias is None else self.bias[rows])


class MemoryAttention(nn.Module):
    """Cross-attention to keys and values that `project` computes once for all answers."""

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
        """Attend from states (B, L, width) to the memory -> (B, L, width)."""
        out = attend(self._heads(self.query(states)), key, value, bias=bias)
        return self.output(out.transpose(1, 2).flatten(-2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AnswerLayer(nn.Module):
    """Post-norm causal self-attention, cross-attention and feed-forward block.

    Parameters have the names of `CrossLayer`, as a decoder may be initialised from such layers.
    """

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
    """Autoregressive text decoder; padding after a text does not change the states before it.

    head: output layer that maps states (..., width) and word embeddings (vocabulary, width) to
    logits, as `MLMHead` does (tied embedding, Press and Wolf 2017).
    """

    def __init__(self, config: AnswerDecoderConfig, model: ModelConfig, head: nn.Module) -> None:
        super().__init__()
        text = model.text
        heads = config.heads or model.cross.heads
        intermediate = config.intermediate or model.cross.intermediate
        if text.width % heads:
            raise ConfigError(f"decoder.heads {heads} do not divide the model's width {text.width}")
        self.config = config
        # A shared embedding is an argument of each call, so that only the text encoder owns it.
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
        """Project encoder states (B, N, width) to each layer's keys and values.

        mask: (B, N) bool, True = not padding; None: no padding.
        """
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
        """Compute states that predict the next token: (B, L, width), or (B, 1, width) with `pasts`.

        Args:
            ids: (B, L) int64, [CLS] first.
            memory: of B rows.
            embedding: of the text encoder; not read if `config.embedding` is `own`.
            pasts: each layer's cached keys and values of all tokens but the last. Those of the last
                token are appended, and only its state is returned.
        """
        states = self._text_embedding(embedding)(ids)
        if pasts is not None:
            states = states[:, -1:]
        for number, layer in enumerate(self.layers):
            key, value = memory.layers[number]
            past = None if pasts is None else pasts[number]
            states = layer(states, key, value, memory.bias, past)
        return states

    def logits(self, states: Tensor, embedding: TextEmbedding) -> Tensor:
        """Map states (..., width) to logits (..., vocabulary)."""
        out: Tensor = self.head(states, self._text_embedding(embedding).word.weight)
        return out

    def _text_embedding(self, embedding: TextEmbedding) -> TextEmbedding:
        return embedding if self.embedding is None else self.embedding


# Patterns of the decoder's parameters that BERT lacks, and of those that every encoder lacks.
_CROSS = (r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\.")
_HEAD = r"head\."


def initialise_decoder(decoder: AnswerDecoder, model: VLPModel) -> list[LoadReport]:
    """Initialise layers and embedding as configured; the caller initialises the head."""
    config = decoder.config
    if model.config.text.architecture:
        raise ConfigError(
            "text.architecture: answers and captions need the built-in text encoder; start from a "
            "model with text.architecture=null"
        )
    embedding: dict[str, Tensor] = {}
    if decoder.embedding is not None:
        state = model.text_encoder.embedding.state_dict()
        embedding = {f"embedding.{name}": tensor for name, tensor in state.items()}
    # Weights of another number of heads have the same shapes, but another function.
    heads = config.heads or model.config.cross.heads
    if config.weights is not None:
        bert = read_bert(config.weights)
        if bert.settings is not None:
            sizes = [("num_attention_heads", "decoder.heads", heads)]
            check_bert_settings(bert.settings, sizes, config.weights)
        # BERT's word embedding is not used: the text encoder's was pretrained further.
        layers, unused = last_bert_layers(
            bert.state, len(decoder.layers), config.weights, "decoder.layers"
        )
        initial_parts = list(_CROSS)
        source = f"{config.weights} -> answer decoder"
    elif config.start == "cross":
        if heads != model.config.cross.heads:
            raise ConfigError(
                f"decoder.heads={heads} does not fit decoder.start=cross: the cross-modal encoder "
                f"has {model.config.cross.heads} heads; set decoder.heads=null"
            )
        layers, unused, initial_parts = _cross_layers(decoder, model)
        source = "cross-modal encoder -> answer decoder"
    else:
        layers, unused, initial_parts = {}, [], [r"layers\."]
        source = "text encoder -> answer decoder"
    if not embedding and not layers:
        return []
    return [copy_weights(decoder, embedding | layers, source, unused, (_HEAD, *initial_parts))]


def _cross_layers(
    decoder: AnswerDecoder, model: VLPModel
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return the cross-modal encoder's weights by the decoder's names, and its unused names.

    The third result has patterns of the decoder's layers that the encoder lacks.
    """
    target = decoder.state_dict()
    weights: dict[str, Tensor] = {}
    unused = []
    for name, tensor in model.cross_encoder.state_dict().items():
        if name in target and ".positions." not in name:
            weights[name] = tensor
        else:
            unused.append(name)
    numbers = {int(name.split(".")[1]) for name in weights}
    for number in numbers:
        # Layouts `ace` and `text` have no output projection: the identity is equivalent.
        output = f"layers.{number}.cross_attention.output"
        if f"{output}.weight" not in weights:
            identity = torch.eye(model.config.text.width)
            weights[f"{output}.weight"] = identity.to(target[f"{output}.weight"])
            weights[f"{output}.bias"] = torch.zeros_like(target[f"{output}.bias"])
    initial_parts = [rf"layers\.{n}\." for n in range(len(decoder.layers)) if n not in numbers]
    return weights, unused, initial_parts


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

    A sequence's score is its log-probability over ((5 + tokens) / 6) ^ penalty (Wu et al. 2016, Eq.
    14); the end counts as a token. One beam is greedy decoding.

    Args:
        step: function of ids (rows * beams, t), `start` first, and parents (rows * beams,), that
            returns log-probabilities of the next id (rows * beams, vocabulary). Sequence i
            continues sequence parents[i] of the previous call. A row's beams are adjacent; the
            first call has one beam per row.
        length: maximum number of ids after the first.
        penalty: exponent of the length penalty; 0 favours short sequences.
    """
    if beams < 1 or length < 1:
        raise ValueError(f"beam search needs at least 1 beam and 1 token, not {beams} and {length}")
    ids = torch.full((rows, 1, 1), start, device=device)
    parent_beam = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(rows, 1, device=device)
    has_ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    parent_beam_count = 1
    for _ in range(length):
        if bool(has_ended.all()):
            break
        # `parent_beam` is the index in a row of the previous call, `parents` that among all beams.
        parents = parent_beam + parent_beam_count * torch.arange(rows, device=device)[:, None]
        parent_beam_count = ids.shape[1]
        next_scores = step(ids.flatten(0, 1), parents.flatten())
        next_scores = next_scores.unflatten(0, (rows, -1)).to(scores.dtype)
        vocabulary = next_scores.shape[-1]
        # A sequence that has ended only continues with the end token, at no cost.
        end_scores = torch.full((vocabulary,), -torch.inf, device=device)
        end_scores[end] = 0
        next_scores = torch.where(has_ended[..., None], end_scores, next_scores)
        # Growing beams compete by plain log-probability; the length penalty picks the result.
        total = (scores[..., None] + next_scores).flatten(1)
        scores, best = total.topk(min(beams, total.shape[1]), dim=1)
        parent_beam, token = best // vocabulary, best % vocabulary
        ids = torch.cat([ids.take_along_dim(parent_beam[..., None], 1), token[..., None]], -1)
        has_ended = has_ended.take_along_dim(parent_beam, 1) | (token == end)
    # `topk` ranks NaN highest, so a NaN of any step is still among the scores.
    require_finite(scores.amax(1))
    # The end counts once; its repetitions are padding.
    tokens = ids.shape[-1] - 1 - (ids[..., 1:] == end).sum(-1) + has_ended
    best_beam = (scores / ((5 + tokens) / 6) ** penalty).argmax(1)
    return ids.take_along_dim(best_beam[:, None, None], 1)[:, 0, 1:]


class SpecialIds(NamedTuple):
    """Ids of a text's first token and of its end."""

    start: int
    end: int
    suppressed: tuple[int, ...] = ()  # never generated


@torch.no_grad()
def generate(
    decoder: AnswerDecoder,
    memory: Memory,
    embedding: TextEmbedding,
    special_ids: SpecialIds,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
) -> Tensor:
    """Generate a text for each of B memory rows, without the start.

    Returns (B, at most `length`) int64 ids, padded with the end. Arguments as in `beam_search`.
    """
    rows, device = len(memory.layers[0][0]), memory.layers[0][0].device
    beam_memory, pasts = memory, [Past() for _ in decoder.layers]

    def step(ids: Tensor, parents: Tensor) -> Tensor:
        nonlocal beam_memory, pasts
        # The number of beams changed: repeat the memory's rows.
        if len(ids) != len(beam_memory.layers[0][0]):
            beam_rows = torch.arange(rows, device=device).repeat_interleave(len(ids) // rows)
            beam_memory = memory.select(beam_rows)
        # In the first call caches are empty.
        if ids.shape[1] > 1:
            pasts = [_select_past(past, parents) for past in pasts]
        states = decoder(ids, beam_memory, embedding, pasts)
        logits = at_least_float32(decoder.logits(states[:, -1], embedding))
        logits[:, list(special_ids.suppressed)] = -torch.inf
        return logits.log_softmax(-1)

    return beam_search(
        step, rows, special_ids.start, special_ids.end, length, beams, penalty, device
    )


def _select_past(past: Past, parents: Tensor) -> Past:
    assert past.key is not None
    assert past.value is not None
    return Past(past.key[parents], past.value[parents])


class Likelihood(NamedTuple):
    """Likelihood of each text with its end, (rows,) each."""

    log_probability: Tensor  # in nats
    correct: Tensor  # number of tokens that have the highest logit
    tokens: Tensor  # number of tokens


def answer_logits(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    positions: Tensor | None,
) -> Tensor:
    """Compute logits (R, vocabulary) of R predicted tokens; arguments as in `answer_likelihood`."""
    positions = predicted_positions(ids, pad_id) if positions is None else positions
    states = decoder(ids[:, :-1], memory, embedding)
    # The output layer is the most expensive one: leave padding out.
    return at_least_float32(decoder.logits(states.flatten(0, 1)[positions], embedding))


def answer_likelihood(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    smoothing: float = 0.0,
    soft_target: Tensor | None = None,
    alpha: float = 0.0,
    positions: Tensor | None = None,
) -> Likelihood:
    """Compute log p(text) = sum of log p(token | previous tokens), in float32 or better.

    Args:
        ids: (rows, L) int64, [CLS] ... [SEP] and padding.
        smoothing: label smoothing; the result is then the negative smoothed cross-entropy.
        soft_target: (R, vocabulary), a teacher's probabilities for the R predicted tokens.
        alpha: weight of `soft_target` in each token's target.
        positions: (R,) `predicted_positions`; None computes them, which waits for a GPU.
    """
    positions = predicted_positions(ids, pad_id) if positions is None else positions
    logits = answer_logits(decoder, memory, ids, embedding, pad_id, positions)
    tokens = ids[:, 1:]
    targets = tokens.flatten()[positions]
    scores = -functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    if soft_target is not None:
        soft_losses = functional.cross_entropy(logits, soft_target, reduction="none")
        scores = (1 - alpha) * scores - alpha * soft_losses

    def sum_by_text(values: Tensor) -> Tensor:
        by_position = values.new_zeros(tokens.numel()).index_copy(0, positions, values)
        return by_position.view_as(tokens).sum(1)

    correct = logits.argmax(-1) == targets
    return Likelihood(sum_by_text(scores), sum_by_text(correct), (tokens != pad_id).sum(1))


# ALBEF's k for the 3,128 answers of VQA v2.
CANDIDATES = 128

# Maximum number of logits in memory: 256 MiB in float32.
MAX_LOGITS = 2**26

# Number of answers in a round of the exact search.
_ROUND_SIZE = 32
# Log-probabilities that differ less, in nats, count as equal.
_TOLERANCE = 1e-4


class BestAnswers(NamedTuple):
    """The best answer of each of B rows."""

    best: Tensor  # (B,) int64 index of the answer
    log_probability: Tensor  # (B,) in nats


class AnswerRanking:
    """Ranking of answers for each memory row by the likelihood of all their tokens.

    Args:
        decoder: in evaluation mode.
        answers: (A, L) int64, [CLS] ... [SEP] and padding, unique, by falling frequency: of equally
            likely answers (within 1e-4 nats) the first wins.
        candidates: number of answers to rank, those with the likeliest first tokens; None: all.
    """

    def __init__(
        self,
        decoder: AnswerDecoder,
        answers: Tensor,
        embedding: TextEmbedding,
        pad_id: int,
        candidates: int | None = CANDIDATES,
    ) -> None:
        if not len(answers) or (candidates is not None and candidates < 1):
            raise ValueError(
                f"a ranking needs at least 1 answer and 1 candidate, not {len(answers)} and "
                f"{candidates}"
            )
        self._decoder, self._embedding, self._pad_id = decoder, embedding, pad_id
        self._answers = answers
        self._tokens = (answers != pad_id).sum(1)
        self._exact = candidates is None
        # Without the exact search there is one round, of all candidates.
        self._round_size = min(candidates or _ROUND_SIZE, len(answers))
        self._max_tokens = MAX_LOGITS // embedding.word.num_embeddings

    @torch.no_grad()
    def __call__(self, memory: Memory) -> BestAnswers:
        """Return the best answer of each of the B rows."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_scores = self._first_token_scores(memory, len(rows))
        first_scores, order = first_scores.sort(dim=1, descending=True, stable=True)
        # No answer yet: a larger index than any answer's, which `amin` never chooses.
        best = torch.full_like(rows, len(self._answers))
        best_scores = torch.full_like(first_scores[:, 0], -torch.inf)
        searched = len(self._answers) if self._exact else self._round_size
        for start in range(0, searched, self._round_size):
            # An answer is never likelier than its first token: a row is decided once no first
            # token of the remaining answers reaches its best score.
            undecided = rows[first_scores[:, start] + _TOLERANCE >= best_scores]
            if not len(undecided):
                break
            candidates = order[undecided, start : start + self._round_size]
            scores = self._scores(memory, undecided, candidates)
            # The first column is the best answer of earlier rounds.
            scores = torch.cat([best_scores[undecided][:, None], scores], 1)
            candidates = torch.cat([best[undecided][:, None], candidates], 1)
            top = scores.amax(1)
            best_scores[undecided] = top
            is_lower = scores + _TOLERANCE < top[:, None]
            best[undecided] = candidates.masked_fill(is_lower, len(self._answers)).amin(1)
        return BestAnswers(best, best_scores)

    @torch.no_grad()
    def likelihoods(self, memory: Memory) -> Tensor:
        """Compute each answer's log-probability for B rows, (B, A); -inf if it is no candidate."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_scores = self._first_token_scores(memory, len(rows))
        candidates = first_scores.argsort(dim=1, descending=True, stable=True)
        if not self._exact:
            candidates = candidates[:, : self._round_size]
        scores = self._scores(memory, rows, candidates)
        return torch.full_like(first_scores, -torch.inf).scatter(1, candidates, scores)

    def _first_token_scores(self, memory: Memory, rows: int) -> Tensor:
        """Compute the log-probability of each answer's first token, (B, A)."""
        start = self._answers[:1, :1].expand(rows, 1)
        states = self._decoder(start, memory, self._embedding)[:, 0]
        logits = at_least_float32(self._decoder.logits(states, self._embedding))
        return logits.log_softmax(-1)[:, self._answers[:, 1]]

    def _scores(self, memory: Memory, rows: Tensor, candidates: Tensor) -> Tensor:
        """Compute the log-probabilities (R, K) of K answers for each of R rows of the memory.

        rows: (R,) int64; candidates: (R, K) int64, indices of answers.
        """
        answers = candidates.flatten()
        memory_rows = rows.repeat_interleave(candidates.shape[1])
        # Answers of similar length share a batch.
        lengths, order = self._tokens[answers].sort(stable=True)
        chunk_scores = []
        for chunk in _chunks(lengths.tolist(), self._max_tokens):
            indices, longest = order[chunk], int(lengths[chunk][-1])
            likelihood = answer_likelihood(
                self._decoder,
                memory.select(memory_rows[indices]),
                self._answers[answers[indices], :longest],
                self._embedding,
                self._pad_id,
            )
            chunk_scores.append(likelihood.log_probability)
        scores = torch.cat(chunk_scores)
        return torch.empty_like(scores).index_copy(0, order, scores).view(candidates.shape)


def _chunks(lengths: list[int], max_tokens: int) -> Iterator[slice]:
    """Yield slices of ascending `lengths`: at most `max_tokens` each, padded, or a single text."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > max_tokens:
            yield slice(start, stop)
            start = stop
