"""Re-ranking compared with a plain loop over queries, as in ALBEF's evaluation.

A whole set takes hours on a CPU. So a few queries of either direction are timed in the loop, and a
few images with all the set's pairs for them in ours, by turns; the rest is extrapolated.
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
from evaluation.work_sharding import ProcessGroup, inference
from vlp.config import Precision
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.itm_scorer import ITMScorer
from vlp.models.vlp import VLPModel

# Noise of a caption's feature against its image's; the nearest of both directions then overlap.
_NOISE = 1.5
LAYOUTS = ("text", "albef", "ace")
LOOP, OURS = "plain loop", "ours"
_BUCKET = "a bucket of texts"
# A query, its scores by a loop, and by ours.
_Compared = tuple[Direction, int, NDArray[np.float32], NDArray[np.float32]]


def random_model(config: ModelConfig) -> VLPModel:
    """Return a model with random weights and scores that depend on all parts, ACE-RPE included."""
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


class StandIns:
    """Blocks of random features in place of an encoder's, as the cost depends on sizes alone.

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
        self.images: BlockCache[int] = BlockCache(self._encode_images, memory)
        self.texts: BlockCache[int] = BlockCache(self._encode_texts, memory)
        draw = np.random.default_rng(0)
        longest = config.text.max_tokens
        lengths = SHORTEST + np.floor(draw.gamma(SHAPE, SCALE, texts)).astype(np.int64)
        self.lengths = np.sort(lengths.clip(max=longest))
        last = np.arange(0, texts, batch) + batch - 1
        self.text_widths = self.lengths[last.clip(max=texts - 1)]
        if self.itm_scorer.reads_padding:
            self.text_widths = np.full_like(self.text_widths, longest)
        self.collection = self._collection(draw, images, texts)

    def text(self, index: int, tokens: int) -> TextFeatures:
        """Return one caption's features, a single row, padded to `tokens`."""
        block, row = self.collection.text_location[index]
        fields = self.texts[int(block)].features.select(torch.tensor([row], device=self.device))
        states, feature, *others = fields
        states, *others = (_pad(field, self.length(index), tokens) for field in (states, *others))
        return TextFeatures(states, feature, *others)

    def length(self, index: int) -> int:
        """Return the tokens of a caption."""
        block, row = self.collection.text_location[index]
        return int(self.lengths[block * self.batch + row])

    def image(self, index: int) -> ImageFeatures:
        """Return one image's features, a single row."""
        block, row = self.collection.image_location[index]
        return self.images[int(block)].features.select(torch.tensor([row], device=self.device))

    def _collection(self, draw: np.random.Generator, images: int, texts: int) -> Collection:
        image = torch.from_numpy(draw.standard_normal((images, self.embed_dim), np.float32))
        owner = np.sort(np.arange(texts) % images)
        noise = torch.from_numpy(draw.standard_normal((texts, self.embed_dim), np.float32))
        rank = draw.permutation(texts)
        number = np.arange(images)
        return Collection(
            image=functional.normalize(image, dim=-1).to(self.device),
            text=functional.normalize(image[owner] + _NOISE * noise, dim=-1).to(self.device),
            captions=[str(text) for text in range(texts)],
            image_of_text=owner,
            image_location=np.stack([number // self.batch, number % self.batch], axis=1),
            text_location=np.stack([rank // self.batch, rank % self.batch], axis=1),
            skipped={},
            samples=[],
        )

    def _encode_images(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block)
        rows = self._rows(block, len(self.collection.image))
        states = self._random(generator, rows, 1 + self.patches, self.width)
        tokens = self._random(generator, rows, self.patches, self.embed_dim)
        # Never read: the collection has them.
        feature = states[:, 0, :1]
        return Block(ImageFeatures(states, feature, functional.normalize(tokens, dim=-1)))

    def _encode_texts(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block + 1)
        rows, tokens = self._rows(block, len(self.lengths)), int(self.text_widths[block])
        first = block * self.batch
        length = torch.from_numpy(self.lengths[first : first + rows]).to(self.device)[:, None]
        position = torch.arange(tokens, device=self.device)
        return Block(
            TextFeatures(
                states=(states := self._random(generator, rows, tokens, self.width)),
                feature=states[:, 0, :1],
                tokens=functional.normalize(
                    self._random(generator, rows, tokens, self.embed_dim), dim=-1
                ),
                attention_mask=position < length,
                word_mask=(position > 0) & (position < length - 1),
            )
        )

    def _rows(self, block: int, items: int) -> int:
        return min(self.batch, items - block * self.batch)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device)


def _pad(field: Tensor, length: int, tokens: int) -> Tensor:
    short = (0, tokens - length)
    return functional.pad(field[:, :length], (0, 0, *short) if field.ndim == 3 else short)


class Sizes(NamedTuple):
    """The set, and how much of it is measured: in a round one query of either direction."""

    images: int = 1000
    texts: int = 5000
    nearest: int = 128
    rounds: int = 2
    match_batch: int | None = None


class RerankTimes(NamedTuple):
    """Seconds of the whole set by way, extrapolated, and the agreement of both ways."""

    seconds: dict[str, float]
    # Milliseconds of a pair.
    pair: dict[str, float]
    # Scored pairs.
    pairs: dict[str, int]
    # Largest difference of two scores, in deviations of a query's scores.
    difference: float
    # Largest step by which one way's order contradicts the other's, in the same unit.
    inversion: float
    # Share of compared queries with the same rank of the right candidate.
    same_ranks: float

    def speedup(self) -> float:
        """Return the ratio of the loop's wall time to ours."""
        return self.seconds[LOOP] / self.seconds[OURS]


class _Timer:
    """Mean seconds of calls by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spent: dict[str, tuple[float, int]] = {}

    def __call__(self, name: str, times: int, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        harness.synchronize(self.device)
        seconds, before = self._spent.get(name, (0.0, 0))
        self._spent[name] = seconds + time.perf_counter() - start, before + times
        return result

    def mean(self, name: str) -> float:
        """Return the mean seconds of a call."""
        seconds, times = self._spent[name]
        return seconds / times


class CandidateSet:
    """A set of pairs, with both ways to score them."""

    def __init__(self, stand_ins: StandIns, sizes: Sizes, loop_precision: Precision | None) -> None:
        self.stand_ins, self.sizes = stand_ins, sizes
        self.loop_precision = loop_precision or stand_ins.precision
        self.model = stand_ins.itm_scorer.model
        collection = stand_ins.collection
        self.answers: dict[Direction, NDArray[np.int64]] = dict(
            zip(DIRECTIONS, collection.positives())
        )
        sides: dict[Direction, tuple[Tensor, Tensor]] = {
            "text_to_image": (collection.text, collection.image),
            "image_to_text": (collection.image, collection.text),
        }
        self.candidates = {
            direction: search(*sides[direction], self.answers[direction], sizes.nearest)
            for direction in DIRECTIONS
        }
        self.pairs = nearest_pairs(
            self.candidates["text_to_image"], self.candidates["image_to_text"]
        )
        self.scorer = PairScorer(stand_ins, collection)

    def query(self, direction: Direction, query: int) -> tuple[ImageFeatures, TextFeatures]:
        """Return the features of a query, one row, and of its candidates."""
        candidates = self.candidates[direction].nearest[query].tolist()
        images, texts = (
            (candidates, [query]) if direction == "text_to_image" else ([query], candidates)
        )
        longest = self.model.config.text.max_tokens
        return (
            ImageFeatures(*_stack([self.stand_ins.image(index) for index in images])),
            TextFeatures(*_stack([self.stand_ins.text(index, longest) for index in texts])),
        )

    @torch.no_grad()
    def loop(self, images: ImageFeatures, texts: TextFeatures) -> NDArray[np.float32]:
        """Run one turn of the plain loop: the query is repeated, then all pairs in one call."""
        device = self.stand_ins.device
        row = torch.arange(self.sizes.nearest, device=device)
        images = images.select(row % len(images.states))
        texts = texts.select(row % len(texts.states))
        with inference(device, self.loop_precision):
            return self.model.match(images, texts).float().cpu().numpy()

    def ours(self, pairs: CandidatePairs) -> NDArray[np.float32]:
        """Score pairs as `evaluation retrieval` does."""
        groups, order = self.scorer.groups(pairs), self.scorer.order(pairs)
        batch = match_batch_for(self.stand_ins.device, self.sizes.match_batch)
        return match_pairs(pairs, self.scorer, groups, order, batch, processes=ProcessGroup())

    def buckets_of(self, image: int) -> list[CandidatePairs]:
        """Return all pairs of an image, by bucket of texts."""
        rows = np.flatnonzero(self.pairs.image == image)
        image_pairs = CandidatePairs(self.pairs.image[rows], self.pairs.text[rows])
        groups = self.scorer.groups(image_pairs)
        return [
            CandidatePairs(*(side[groups == group] for side in image_pairs))
            for group in np.unique(groups)
        ]

    def rank(self, direction: Direction, query: int, scores: NDArray[np.float32]) -> int:
        """Rank of a query's right candidate by new scores of its nearest."""
        rows = slice(query, query + 1)
        candidates = self.candidates[direction]
        nearest = Search(candidates.ranks[rows], candidates.nearest[rows], candidates.scores[rows])
        return int(reranked_ranks(nearest, scores[None], self.answers[direction][rows])[0])


def measure(
    config: ModelConfig,
    sizes: Sizes,
    device: torch.device,
    precision: Precision,
    loop_precision: Precision | None = None,
) -> RerankTimes:
    """Time both ways on some queries and images, and compare their scores.

    precision: of ours; loop_precision: of the loop; None: the same.
    """
    model = random_model(config).to(device)
    options: dict[str, Any] = {"memory": 2 * GIBIBYTE, "device": device, "precision": precision}
    candidate_set = CandidateSet(
        StandIns(model, sizes.images, sizes.texts, **options), sizes, loop_precision
    )
    timer, draw = _Timer(device), np.random.default_rng(1)
    *images, idle = draw.choice(sizes.images, sizes.rounds + 1, replace=False).tolist()
    texts = draw.choice(sizes.texts, sizes.rounds, replace=False).tolist()
    # The first calls of a process are slow, on a GPU the first of each shape.
    for pairs in candidate_set.buckets_of(idle):
        candidate_set.ours(CandidatePairs(pairs.image[:8], pairs.text[:8]))
    if device.type == "cuda":
        _take_turns(candidate_set, _Timer(device), images, texts, idle)
    return _extrapolate(
        candidate_set, timer, _take_turns(candidate_set, timer, images, texts, idle)
    )


def _take_turns(
    candidate_set: CandidateSet, timer: _Timer, images: list[int], texts: list[int], idle: int
) -> list[_Compared]:
    """Time every way, a round for each image and text; return scores of a query both ways."""
    compared: list[_Compared] = []
    for number, (image, text) in enumerate(zip(images, texts)):
        queries: dict[Direction, int] = {"text_to_image": text, "image_to_text": image}
        turns: list[Callable[[], dict[Any, Any]]] = [
            partial(_run_loop, candidate_set, timer, queries),
            partial(_run_ours, candidate_set, timer, image, idle),
        ]
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
            compared.append((direction, query, scores[direction], ours))
    return compared


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
    candidate_set: CandidateSet, timer: _Timer, image: int, idle: int
) -> dict[int, float]:
    """Score an image by text."""
    scores: dict[int, float] = {}
    # Buckets serve many images, and their preparation is timed separately.
    for pairs in candidate_set.buckets_of(image):
        timer(_BUCKET, 1, candidate_set.ours, CandidatePairs(np.array([idle]), pairs.text[:1]))
        pair_scores = timer(OURS, len(pairs.text), candidate_set.ours, pairs)
        scores |= dict(zip(pairs.text.tolist(), pair_scores.tolist()))
    return scores


def _extrapolate(
    candidate_set: CandidateSet, timer: _Timer, compared: list[_Compared]
) -> RerankTimes:
    sizes = candidate_set.sizes
    queries: dict[Direction, int] = {"text_to_image": sizes.texts, "image_to_text": sizes.images}
    seconds = {LOOP: sum(queries[direction] * timer.mean(direction) for direction in DIRECTIONS)}
    shelves = len(np.unique(candidate_set.scorer.groups(candidate_set.pairs) // sizes.images))
    # A pair that is near in both directions is one pair of ours and two of the loop's.
    our_pairs = len(candidate_set.pairs.text)
    seconds[OURS] = our_pairs * timer.mean(OURS) + shelves * timer.mean(_BUCKET)
    loop_pairs = min(sizes.nearest, sizes.images) * sizes.texts
    loop_pairs += min(sizes.nearest, sizes.texts) * sizes.images
    pairs = {LOOP: loop_pairs, OURS: our_pairs}
    return RerankTimes(
        seconds=seconds,
        pair={way: 1e3 * seconds[way] / pairs[way] for way in pairs},
        pairs=pairs,
        difference=max(float(np.abs(a - b).max() / a.std()) for *_, a, b in compared),
        inversion=max(inversion(a, b) for *_, a, b in compared),
        same_ranks=float(
            np.mean(
                [
                    candidate_set.rank(direction, query, a)
                    == candidate_set.rank(direction, query, b)
                    for direction, query, a, b in compared
                ]
            )
        ),
    )


def inversion(scores: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """Return the largest rise of `scores` in the falling order of `others`, in deviations, or 0."""
    ordered = scores[np.argsort(-others, kind="stable")]
    return float((ordered - np.minimum.accumulate(ordered)).max() / scores.std())


def _stack(features: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*features)]


def table(layout: str, times: RerankTimes) -> str:
    """Lay out a line for each way, and how far both agree."""
    rows = []
    for way, pairs in times.pairs.items():
        minutes = f"{times.seconds[way] / 60:.1f}"
        faster = "" if way == OURS else f"{times.speedup():.1f} x"
        rows.append([way, str(pairs), f"{times.pair[way]:.2f}", minutes, faster])
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
    padded to `max_tokens`. Ours is what `vlp evaluate retrieval` runs. ALBEF's evaluation knows
    float32 alone: --loop-precision float32 beside --precision bf16.
    """
    sizes, torch_device = (
        Sizes(images, texts, nearest, rounds, match_batch),
        harness.select_device(device),
    )
    for layout in layouts.split(","):
        changed = f"model.cross.layout={layout}"
        model = harness.load_pretraining(config, overrides, changed).model
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
