"""Re-ranking compared with a plain loop over queries, as in ALBEF's evaluation.

A whole data set takes hours on a CPU: the loop is timed on a few queries of either direction, ours
on all pairs of a few images, by turns, and both are extrapolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks import harness
from benchmarks.harness import Figure
from benchmarks.step import SCALE, SHAPE, SHORTEST
from evaluation.encoder import GIBIBYTE, Block, BlockCache, Collection
from evaluation.retrieval.rerank import (
    CandidatePairs,
    PairScorer,
    Search,
    match_batch_for,
    match_pairs,
    nearest_pairs,
    reranked_ranks,
    search,
)
from evaluation.retrieval.retrieval import DIRECTIONS, Direction
from evaluation.work_sharding import ProcessGroup, evaluation_autocast
from vlp.config import Precision
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.itm_scorer import ITMScorer
from vlp.models.vlp import VLPModel

# Noise of a caption's feature relative to its image's: the candidates of both directions overlap.
_NOISE = 1.5
LAYOUTS = ("text", "albef", "ace")
LOOP, OURS = "plain loop", "ours"
_BUCKET = "a bucket of texts"
# Direction and index of a query, and scores of its candidates by the loop and by ours.
_QueryScores = tuple[Direction, int, NDArray[np.float32], NDArray[np.float32]]


def random_model(config: ModelConfig) -> VLPModel:
    """Return a model with random weights, whose scores depend on ACE-RPE, too."""
    data = config.model_dump()
    data["text"]["weights"] = data["image"]["weights"] = None
    torch.manual_seed(0)
    model = VLPModel(ModelConfig.model_validate(data)).eval()
    with torch.no_grad():
        for name, parameter in model.cross_encoder.named_parameters():
            if "table" in name:
                parameter.normal_(std=0.02)
        model.match_head.weight.normal_(std=config.text.width**-0.5)
        model.anchor_threshold.fill_(0.1)
    return model


class RandomBlocks:
    """`EncodedBlocks` of random features, as the cost depends on sizes alone.

    batch: rows of a block; memory: bytes of cached blocks, for images and for captions each.
    """

    def __init__(
        self,
        model: VLPModel,
        images: int,
        texts: int,
        *,
        batch: int = 64,
        memory: int,
        device: torch.device,
        precision: Precision = "float32",
    ) -> None:
        config = model.config
        self.itm_scorer = ITMScorer(model)
        self.batch, self.device = batch, device
        self.precision: Precision | None = precision
        self.width, self.embed_dim = config.text.width, config.embed_dim
        self.patches = config.image.grid[0] * config.image.grid[1]
        self.image_blocks: BlockCache[int] = BlockCache(self._encode_images, memory)
        self.text_blocks: BlockCache[int] = BlockCache(self._encode_texts, memory)
        rng = np.random.default_rng(0)
        max_tokens = config.text.max_tokens
        lengths = SHORTEST + np.floor(rng.gamma(SHAPE, SCALE, texts)).astype(np.int64)
        self.lengths = np.sort(lengths.clip(max=max_tokens))
        last_rows = np.arange(0, texts, batch) + batch - 1
        self.text_lengths = self.lengths[last_rows.clip(max=texts - 1)]
        if self.itm_scorer.reads_padding:
            self.text_lengths = np.full_like(self.text_lengths, max_tokens)
        self.collection = self._collection(rng, images, texts)

    def text(self, index: int, tokens: int) -> TextFeatures:
        """Return the features of a caption, as a batch of one, padded to `tokens`."""
        block, row = self.collection.text_location[index]
        fields = self.text_blocks[int(block)].features.select(
            torch.tensor([row], device=self.device)
        )
        states, feature, *others = fields
        states, *others = (_pad(field, self.length(index), tokens) for field in (states, *others))
        return TextFeatures(states, feature, *others)

    def length(self, index: int) -> int:
        """Return the number of tokens of a caption."""
        block, row = self.collection.text_location[index]
        return int(self.lengths[block * self.batch + row])

    def image(self, index: int) -> ImageFeatures:
        """Return the features of an image, as a batch of one."""
        block, row = self.collection.image_location[index]
        return self.image_blocks[int(block)].features.select(
            torch.tensor([row], device=self.device)
        )

    def _collection(self, rng: np.random.Generator, images: int, texts: int) -> Collection:
        image = torch.from_numpy(rng.standard_normal((images, self.embed_dim), np.float32))
        image_of_text = np.sort(np.arange(texts) % images)
        noise = torch.from_numpy(rng.standard_normal((texts, self.embed_dim), np.float32))
        text = image[image_of_text] + _NOISE * noise
        # Index of each caption among the captions sorted by length.
        sorted_index = rng.permutation(texts)
        index = np.arange(images)
        return Collection(
            image_features=functional.normalize(image, dim=-1).to(self.device),
            text_features=functional.normalize(text, dim=-1).to(self.device),
            captions=[str(text) for text in range(texts)],
            image_of_text=image_of_text,
            image_location=np.stack([index // self.batch, index % self.batch], axis=1),
            text_location=np.stack([sorted_index // self.batch, sorted_index % self.batch], axis=1),
            skipped={},
            samples=[],
        )

    def _encode_images(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block)
        rows = self._rows(block, len(self.collection.image_features))
        states = self._random(generator, rows, 1 + self.patches, self.width)
        tokens = self._random(generator, rows, self.patches, self.embed_dim)
        # Not read: search reads the features of the collection.
        feature = states[:, 0, :1]
        return Block(ImageFeatures(states, feature, functional.normalize(tokens, dim=-1)))

    def _encode_texts(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block + 1)
        rows, tokens = self._rows(block, len(self.lengths)), int(self.text_lengths[block])
        first = block * self.batch
        length = torch.from_numpy(self.lengths[first : first + rows]).to(self.device)[:, None]
        position = torch.arange(tokens, device=self.device)
        states = self._random(generator, rows, tokens, self.width)
        text_tokens = self._random(generator, rows, tokens, self.embed_dim)
        return Block(
            TextFeatures(
                states=states,
                feature=states[:, 0, :1],
                tokens=functional.normalize(text_tokens, dim=-1),
                attention_mask=position < length,
                word_mask=(position > 0) & (position < length - 1),
            )
        )

    def _rows(self, block: int, items: int) -> int:
        return min(self.batch, items - block * self.batch)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device)


def _pad(field: Tensor, length: int, tokens: int) -> Tensor:
    padding = (0, tokens - length)
    return functional.pad(field[:, :length], (0, 0, *padding) if field.ndim == 3 else padding)


class Sizes(NamedTuple):
    """Images, texts and candidates per query; a round measures a query of either direction."""

    images: int = 1000
    texts: int = 5000
    nearest: int = 128
    rounds: int = 2
    match_batch: int | None = None


class RerankTimes(NamedTuple):
    """Times of `LOOP` and `OURS`, extrapolated to the whole data set, and their agreement."""

    # Of the whole data set.
    seconds: dict[str, float]
    # Milliseconds of a pair.
    pair: dict[str, float]
    # Scored pairs.
    pairs: dict[str, int]
    # Largest difference of two scores, in standard deviations of a query's scores.
    difference: float
    # Largest `inversion` of a query's scores, in the same unit.
    inversion: float
    # Share of compared queries with the same rank of the best positive.
    same_ranks: float

    def speedup(self) -> float:
        """Return the ratio of the loop's wall time to ours."""
        return self.seconds[LOOP] / self.seconds[OURS]


class _Timer:
    """Mean seconds per unit of work, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._totals: dict[str, tuple[float, int]] = {}

    def __call__(self, name: str, units: int, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        harness.synchronize(self.device)
        seconds, total_units = self._totals.get(name, (0.0, 0))
        self._totals[name] = seconds + time.perf_counter() - start, total_units + units
        return result

    def mean(self, name: str) -> float:
        """Return the mean seconds of a unit."""
        seconds, units = self._totals[name]
        return seconds / units


class CandidateSet:
    """Candidate pairs of both directions, scored by the loop and by ours."""

    def __init__(
        self, blocks: RandomBlocks, sizes: Sizes, loop_precision: Precision | None
    ) -> None:
        self.blocks, self.sizes = blocks, sizes
        self.loop_precision = loop_precision or blocks.precision
        self.model = blocks.itm_scorer.model
        collection = blocks.collection
        self.positives: dict[Direction, NDArray[np.int64]] = dict(
            zip(DIRECTIONS, collection.positives())
        )
        features: dict[Direction, tuple[Tensor, Tensor]] = {
            "text_to_image": (collection.text_features, collection.image_features),
            "image_to_text": (collection.image_features, collection.text_features),
        }
        self.candidates = {
            direction: search(*features[direction], self.positives[direction], sizes.nearest)
            for direction in DIRECTIONS
        }
        self.pairs = nearest_pairs(
            self.candidates["text_to_image"], self.candidates["image_to_text"]
        )
        self.scorer = PairScorer(blocks, collection)

    def query(self, direction: Direction, query: int) -> tuple[ImageFeatures, TextFeatures]:
        """Return image and text features of a query (a batch of one) and its candidates."""
        candidates = self.candidates[direction].nearest[query].tolist()
        images, texts = (
            (candidates, [query]) if direction == "text_to_image" else ([query], candidates)
        )
        max_tokens = self.model.config.text.max_tokens
        return (
            ImageFeatures(*_stack([self.blocks.image(index) for index in images])),
            TextFeatures(*_stack([self.blocks.text(index, max_tokens) for index in texts])),
        )

    @torch.no_grad()
    def loop(self, images: ImageFeatures, texts: TextFeatures) -> NDArray[np.float32]:
        """Score one query by the plain loop: repeat it, and score all pairs in one call."""
        device = self.blocks.device
        row = torch.arange(self.sizes.nearest, device=device)
        images = images.select(row % len(images.states))
        texts = texts.select(row % len(texts.states))
        with evaluation_autocast(device, self.loop_precision):
            return self.model.match(images, texts).float().cpu().numpy()

    def ours(self, pairs: CandidatePairs) -> NDArray[np.float32]:
        """Score pairs as `evaluation retrieval` does."""
        groups, order = self.scorer.groups(pairs), self.scorer.order(pairs)
        batch = match_batch_for(self.blocks.device, self.sizes.match_batch)
        return match_pairs(pairs, self.scorer, groups, order, batch, processes=ProcessGroup())

    def buckets_of(self, image: int) -> list[CandidatePairs]:
        """Return an image's pairs, split by bucket of texts."""
        rows = np.flatnonzero(self.pairs.image == image)
        image_pairs = CandidatePairs(self.pairs.image[rows], self.pairs.text[rows])
        groups = self.scorer.groups(image_pairs)
        return [
            CandidatePairs(*(side[groups == group] for side in image_pairs))
            for group in np.unique(groups)
        ]

    def rank(self, direction: Direction, query: int, scores: NDArray[np.float32]) -> int:
        """Return the rank of a query's best positive by new `scores` of its candidates."""
        rows = slice(query, query + 1)
        candidates = self.candidates[direction]
        dual = Search(
            candidates.ranks[rows], candidates.nearest[rows], candidates.similarities[rows]
        )
        return int(reranked_ranks(dual, scores[None], self.positives[direction][rows])[0])


def measure(
    config: ModelConfig,
    sizes: Sizes,
    device: torch.device,
    precision: Precision,
    loop_precision: Precision | None = None,
) -> RerankTimes:
    """Time the loop and ours on some queries and images, and compare their scores.

    precision: of ours; loop_precision: of the loop; None: the same as ours.
    """
    model = random_model(config).to(device)
    options: dict[str, Any] = {"memory": 2 * GIBIBYTE, "device": device, "precision": precision}
    candidate_set = CandidateSet(
        RandomBlocks(model, sizes.images, sizes.texts, **options), sizes, loop_precision
    )
    timer, rng = _Timer(device), np.random.default_rng(1)
    *images, spare = rng.choice(sizes.images, sizes.rounds + 1, replace=False).tolist()
    texts = rng.choice(sizes.texts, sizes.rounds, replace=False).tolist()
    # The first calls of a process are slow, on a GPU the first of each shape.
    for pairs in candidate_set.buckets_of(spare):
        candidate_set.ours(CandidatePairs(pairs.image[:8], pairs.text[:8]))
    if device.type == "cuda":
        _take_turns(candidate_set, _Timer(device), images, texts, spare)
    return _extrapolate(
        candidate_set, timer, _take_turns(candidate_set, timer, images, texts, spare)
    )


def _take_turns(
    candidate_set: CandidateSet, timer: _Timer, images: list[int], texts: list[int], spare: int
) -> list[_QueryScores]:
    """Time the loop and ours by turns, a round for each image and text; return all scores.

    spare: an image that is not measured, to prepare buckets of texts.
    """
    query_scores: list[_QueryScores] = []
    for number, (image, text) in enumerate(zip(images, texts)):
        queries: dict[Direction, int] = {"text_to_image": text, "image_to_text": image}
        turns: list[Callable[[], dict[Any, Any]]] = [
            partial(_run_loop, candidate_set, timer, queries),
            partial(_run_ours, candidate_set, timer, image, spare),
        ]
        # By direction from the loop, by text of the image from ours.
        scores: dict[Any, Any] = {}
        for turn in turns[:: 1 if number % 2 else -1]:
            scores |= turn()
        for direction, query in queries.items():
            candidates = candidate_set.candidates[direction].nearest[query]
            if direction == "text_to_image":
                ours = candidate_set.ours(
                    CandidatePairs(candidates, np.full_like(candidates, text))
                )
            else:
                ours = np.array([scores[candidate] for candidate in candidates.tolist()])
            query_scores.append((direction, query, scores[direction], ours))
    return query_scores


def _run_loop(
    candidate_set: CandidateSet, timer: _Timer, queries: dict[Direction, int]
) -> dict[Direction, NDArray[np.float32]]:
    scores = {}
    for direction, query in queries.items():
        scores[direction] = timer(
            direction, 1, candidate_set.loop, *candidate_set.query(direction, query)
        )
    return scores


def _run_ours(
    candidate_set: CandidateSet, timer: _Timer, image: int, spare: int
) -> dict[int, float]:
    """Return the scores of all pairs of an image, by text."""
    scores: dict[int, float] = {}
    # A bucket of texts is prepared once for many images, so it is timed separately.
    for pairs in candidate_set.buckets_of(image):
        timer(_BUCKET, 1, candidate_set.ours, CandidatePairs(np.array([spare]), pairs.text[:1]))
        pair_scores = timer(OURS, len(pairs.text), candidate_set.ours, pairs)
        scores |= dict(zip(pairs.text.tolist(), pair_scores.tolist()))
    return scores


def _extrapolate(
    candidate_set: CandidateSet, timer: _Timer, query_scores: list[_QueryScores]
) -> RerankTimes:
    sizes = candidate_set.sizes
    queries: dict[Direction, int] = {"text_to_image": sizes.texts, "image_to_text": sizes.images}
    seconds = {LOOP: sum(queries[direction] * timer.mean(direction) for direction in DIRECTIONS)}
    buckets = len(np.unique(candidate_set.scorer.groups(candidate_set.pairs) // sizes.images))
    # A pair in the top of both directions is scored once by ours and twice by the loop.
    our_pairs = len(candidate_set.pairs.text)
    seconds[OURS] = our_pairs * timer.mean(OURS) + buckets * timer.mean(_BUCKET)
    loop_pairs = min(sizes.nearest, sizes.images) * sizes.texts
    loop_pairs += min(sizes.nearest, sizes.texts) * sizes.images
    pairs = {LOOP: loop_pairs, OURS: our_pairs}
    same_ranks = [
        candidate_set.rank(direction, query, loop) == candidate_set.rank(direction, query, ours)
        for direction, query, loop, ours in query_scores
    ]
    return RerankTimes(
        seconds=seconds,
        pair={way: 1e3 * seconds[way] / pairs[way] for way in pairs},
        pairs=pairs,
        difference=max(
            float(np.abs(loop - ours).max() / loop.std()) for *_, loop, ours in query_scores
        ),
        inversion=max(inversion(loop, ours) for *_, loop, ours in query_scores),
        same_ranks=float(np.mean(same_ranks)),
    )


def inversion(scores: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """Return the largest rise of `scores` in the descending order of `others`; 0: same order.

    In standard deviations of `scores`.
    """
    sequence = scores[np.argsort(-others, kind="stable")]
    return float((sequence - np.minimum.accumulate(sequence)).max() / scores.std())


def _stack(features: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*features)]


def table(layout: str, times: RerankTimes) -> str:
    """Format a row for the loop and for ours, and their agreement."""
    rows = []
    for way, pairs in times.pairs.items():
        minutes = f"{times.seconds[way] / 60:.1f}"
        speedup = "" if way == OURS else f"{times.speedup():.1f} x"
        rows.append([way, str(pairs), f"{times.pair[way]:.2f}", minutes, speedup])
    head = [f"layout {layout}", "pairs", "ms a pair", "minutes", "ours is"]
    return (
        f"{harness.table(head, rows)}\nscores differ by {times.difference:.1e} deviations at most, "
        f"orders by {times.inversion:.1e}; {times.same_ranks:.0%} of ranks are the same"
    )


def rerank(
    config: harness.Config,
    layouts: str = ",".join(LAYOUTS),
    images: int = 1000,
    texts: int = 5000,
    nearest: int = 128,
    rounds: int = 2,
    match_batch: int | None = None,
    precision: Precision = "float32",
    loop_precision: Precision | None = None,
    device: harness.Device = None,
    overrides: harness.Overrides = None,
) -> None:
    """Time re-ranking and a plain loop over queries that does what ALBEF's evaluation does.

    The loop takes each query with its --nearest candidates, repeats the query, and runs the
    cross-modal encoder over the pairs in one call, with features of both encoders at hand and texts
    padded to `max_tokens`. Ours is what `vlp evaluate retrieval` runs. ALBEF's evaluation has only
    float32: compare --precision bf16 with --loop-precision float32.
    """
    sizes = Sizes(images, texts, nearest, rounds, match_batch)
    torch_device = harness.select_device(device)
    for layout in layouts.split(","):
        change = f"model.cross.layout={layout}"
        model = harness.load_pretraining(config, overrides, change).model
        times = measure(model, sizes, torch_device, precision, loop_precision)
        print(table(layout, times), end="\n\n", flush=True)
        name = f"rerank/{layout}"
        figures = [
            Figure(f"{name}/speedup", times.speedup(), "x"),
            Figure(f"{name}/pair", times.pair[OURS], "ms"),
            Figure(f"{name}/difference", times.difference, "deviations"),
            Figure(f"{name}/same_ranks", 100 * times.same_ranks, "%"),
        ]
        harness.print_figures(figures, torch_device)


COMMANDS = (rerank,)
