"""Re-ranking, against a plain loop over queries that does what ALBEF's evaluation does.

    OMP_NUM_THREADS=2 python -m evaluation.benchmarks.rerank --config configs/pretrain/small.yaml

The plain loop takes each query with its k nearest candidates, repeats the query k times, and runs
the cross-modal encoder over the k pairs in one call, with features of both encoders at hand and
texts padded to `max_tokens`, as ALBEF's are. Ours is what `evaluation retrieval` runs. Model,
layout and features are the same, weights and features random. Precision is the same as well, but
for `--precision bf16 --loop-precision float32`: ALBEF's evaluation knows float32 alone.

A whole set takes hours on a CPU. So a few queries of either direction are timed in the loop, and
a few images with all the pairs that the whole set has for them in ours; they take turns, round by
round. The rest is extrapolated: queries times the mean of a query against pairs times the mean of
a pair, with what ours does once for its texts. A pair that is near in both directions is one pair
of ours and two of the loop's. A second loop pads texts no further than the longest of each call.
Scores of both ways are held together, and the ranks that follow from them.

Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.stand_ins import StandIns, random_model
from evaluation.encoder import GIBIBYTE
from evaluation.ranks import Ranks, inference
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
from vlp.config import Precision
from vlp.models.config import ModelConfig
from vlp.models.features import ImageFeatures, TextFeatures

LAYOUTS = ("text", "albef", "ace")
PADDED, CUT, OURS = "plain loop", "plain loop, texts cut", "ours"
_SHELF = "a shelf of texts"
_Compared = tuple[Direction, int, NDArray[np.float32], NDArray[np.float32]]
"""A query, its scores by a loop, and by ours."""


class Sizes(NamedTuple):
    """The set, and how much of it is measured: in a round one query of either direction."""

    images: int = 1000
    texts: int = 5000
    nearest: int = 128
    rounds: int = 2
    match_batch: int | None = None


class RerankTimes(NamedTuple):
    """Seconds of the whole set by way, by the clock and of the processor, extrapolated.

    pair: milliseconds of a pair by way, by the clock; pairs: how many a way scores. difference:
    the largest between scores of both ways; inversion: the largest step by which one way's order
    contradicts the other's; both in deviations of a query's scores. same_ranks: share of the
    compared queries whose right candidate has the same rank both ways.
    """

    clock: dict[str, float]
    processor: dict[str, float]
    pair: dict[str, float]
    pairs: dict[str, int]
    difference: float
    inversion: float
    same_ranks: float

    def speedup(self, way: str = PADDED) -> float:
        """Return the ratio of a loop's wall time to ours."""
        return self.clock[way] / self.clock[OURS]


class _Timer:
    """Seconds by the clock and of the processor, and how often, by what was done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spent: dict[str, NDArray[np.float64]] = {}

    def __call__(self, what: str, times: int, work: Callable[..., Any], *arguments: Any) -> Any:
        clock, processor = time.perf_counter(), time.process_time()
        result = work(*arguments)
        harness.synchronize(self.device)
        taken = [time.perf_counter() - clock, time.process_time() - processor, times]
        self._spent[what] = self._spent.get(what, np.zeros(3)) + np.array(taken)
        return result

    def mean(self, what: str) -> NDArray[np.float64]:
        """Seconds of one time, by the clock and of the processor."""
        *seconds, times = self._spent[what]
        return np.array(seconds) / times


class _Set:
    """A set whose pairs are to be scored, and both ways to do it."""

    def __init__(self, stand_ins: StandIns, sizes: Sizes, loop_precision: Precision | None) -> None:
        self.stand_ins, self.sizes = stand_ins, sizes
        self.loop_precision = loop_precision or stand_ins.precision
        self.model = stand_ins.itm_scorer.model
        collection = stand_ins.collection
        self.right: dict[Direction, NDArray[np.int64]] = {
            "text_to_image": collection.image_of_text[:, None],
            "image_to_text": collection.texts_of_image(),
        }
        sides: dict[Direction, tuple[Tensor, Tensor]] = {
            "text_to_image": (collection.text, collection.image),
            "image_to_text": (collection.image, collection.text),
        }
        self.near = {to: search(*sides[to], self.right[to], sizes.nearest) for to in DIRECTIONS}
        self.pairs = nearest_pairs(self.near["text_to_image"], self.near["image_to_text"])
        self.scorer = PairScorer(stand_ins, collection)

    def query(self, to: Direction, query: int, cut: bool) -> tuple[ImageFeatures, TextFeatures]:
        """Features of a query and of its candidates, before it is repeated."""
        near = self.near[to].nearest[query].tolist()
        images, texts = (near, [query]) if to == "text_to_image" else ([query], near)
        longest = self.model.config.text.max_tokens
        if cut:
            longest = max(self.stand_ins.length(text) for text in texts)
        return (
            ImageFeatures(*_stacked([self.stand_ins.image(each) for each in images])),
            TextFeatures(*_stacked([self.stand_ins.text(each, longest) for each in texts])),
        )

    @torch.no_grad()
    def loop(self, images: ImageFeatures, texts: TextFeatures) -> NDArray[np.float32]:
        """One turn of the plain loop: the query is repeated, then all pairs in one call."""
        device = self.stand_ins.device
        row = torch.arange(self.sizes.nearest, device=device)
        images = images.select(row % len(images.states))
        texts = texts.select(row % len(texts.states))
        with inference(device, self.loop_precision):
            return self.model.match(images, texts).float().cpu().numpy()

    def ours(self, pairs: CandidatePairs) -> NDArray[np.float32]:
        """Scores of some pairs as `evaluation retrieval` finds them."""
        groups, order = self.scorer.groups(pairs), self.scorer.order(pairs)
        batch = match_batch_for(self.stand_ins.device, self.sizes.match_batch)
        return match_pairs(pairs, self.scorer, groups, order, batch, ranks=Ranks())

    def shelves_of(self, image: int) -> list[CandidatePairs]:
        """All pairs of an image, by shelf of texts."""
        rows = np.flatnonzero(self.pairs.image == image)
        mine = CandidatePairs(self.pairs.image[rows], self.pairs.text[rows])
        groups = self.scorer.groups(mine)
        return [
            CandidatePairs(*(side[groups == one] for side in mine)) for one in np.unique(groups)
        ]

    def rank(self, to: Direction, query: int, scores: NDArray[np.float32]) -> int:
        """Rank of a query's right candidate by new scores of its nearest."""
        one = slice(query, query + 1)
        near = self.near[to]
        found = Search(near.ranks[one], near.nearest[one], near.scores[one])
        return int(reranked_ranks(found, scores[None], self.right[to][one])[0])


def measure(
    config: ModelConfig,
    sizes: Sizes,
    device: torch.device,
    precision: Precision,
    loop_precision: Precision | None = None,
) -> RerankTimes:
    """Time both ways on some queries and images, and compare what they say.

    Args:
        config: of the model.
        sizes: of the set.
        device: where.
        precision: of ours.
        loop_precision: of the loop; None: the same.
    """
    model = random_model(config).to(device)
    options: dict[str, Any] = {"memory": 2 * GIBIBYTE, "device": device, "precision": precision}
    whole = _Set(StandIns(model, sizes.images, sizes.texts, **options), sizes, loop_precision)
    timer, draw = _Timer(device), np.random.default_rng(1)
    *images, idle = draw.choice(sizes.images, sizes.rounds + 1, replace=False).tolist()
    texts = draw.choice(sizes.texts, sizes.rounds, replace=False).tolist()
    for pairs in whole.shelves_of(idle):  # the first calls of a process are slow
        whole.ours(CandidatePairs(pairs.image[:8], pairs.text[:8]))
    if device.type == "cuda":  # and there the first of each shape
        _take_turns(whole, _Timer(device), images, texts, idle)
    return _extrapolated(whole, timer, _take_turns(whole, timer, images, texts, idle))


def _take_turns(
    whole: _Set, timer: _Timer, images: list[int], texts: list[int], idle: int
) -> list[_Compared]:
    """Time every way, a round for each image and text; return what both ways say of a query."""
    compared: list[_Compared] = []
    for number, (image, text) in enumerate(zip(images, texts)):
        queries: dict[Direction, int] = {"text_to_image": text, "image_to_text": image}
        turns: list[Callable[[], dict[Any, Any]]] = [
            partial(_run_loop, whole, timer, PADDED, queries),
            partial(_run_loop, whole, timer, CUT, queries),
            partial(_run_ours, whole, timer, image, idle),
        ]
        scores: dict[Any, Any] = {}
        for turn in turns[number % 3 :] + turns[: number % 3]:
            scores |= turn()
        for to, query in queries.items():
            near = whole.near[to].nearest[query]
            if to == "text_to_image":
                ours = whole.ours(CandidatePairs(near, np.full_like(near, text)))
            else:
                ours = np.array([scores[candidate] for candidate in near.tolist()])
            compared += [(to, query, scores[way, to], ours) for way in (PADDED, CUT)]
    return compared


def _run_loop(
    whole: _Set, timer: _Timer, way: str, queries: dict[Direction, int]
) -> dict[tuple[str, Direction], NDArray[np.float32]]:
    scores = {}
    for to, query in queries.items():
        features = whole.query(to, query, cut=way == CUT)
        scores[way, to] = timer(f"{way} {to}", 1, whole.loop, *features)
    return scores


def _run_ours(whole: _Set, timer: _Timer, image: int, idle: int) -> dict[int, float]:
    """Scores of an image by text; shelves serve many images and are timed apart."""
    scores: dict[int, float] = {}
    for pairs in whole.shelves_of(image):
        timer(_SHELF, 1, whole.ours, CandidatePairs(np.array([idle]), pairs.text[:1]))
        found = timer(OURS, len(pairs.text), whole.ours, pairs)
        scores |= dict(zip(pairs.text.tolist(), found.tolist()))
    return scores


def _extrapolated(whole: _Set, timer: _Timer, compared: list[_Compared]) -> RerankTimes:
    sizes = whole.sizes
    queries: dict[Direction, int] = {"text_to_image": sizes.texts, "image_to_text": sizes.images}
    seconds = {
        way: sum((queries[to] * timer.mean(f"{way} {to}") for to in DIRECTIONS), np.zeros(2))
        for way in (PADDED, CUT)
    }
    shelves = len(np.unique(whole.scorer.groups(whole.pairs) // sizes.images))
    mine = len(whole.pairs.text)
    seconds[OURS] = mine * timer.mean(OURS) + shelves * timer.mean(_SHELF)
    both = min(sizes.nearest, sizes.images) * sizes.texts
    both += min(sizes.nearest, sizes.texts) * sizes.images
    pairs = {PADDED: both, CUT: both, OURS: mine}
    return RerankTimes(
        clock={way: float(total[0]) for way, total in seconds.items()},
        processor={way: float(total[1]) for way, total in seconds.items()},
        pair={way: float(1e3 * seconds[way][0] / pairs[way]) for way in pairs},
        pairs=pairs,
        difference=max(float(np.abs(a - b).max() / a.std()) for *_, a, b in compared),
        inversion=max(inversion(a, b) for *_, a, b in compared),
        same_ranks=float(
            np.mean(
                [
                    whole.rank(to, query, a) == whole.rank(to, query, b)
                    for to, query, a, b in compared
                ]
            )
        ),
    )


def inversion(scores: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """The largest rise of `scores` in the falling order of `others`, in deviations; 0: none."""
    ordered = scores[np.argsort(-others, kind="stable")]
    return float((ordered - np.minimum.accumulate(ordered)).max() / scores.std())


def _stacked(features: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*features)]


def table(layout: str, found: RerankTimes) -> str:
    """Lay out a line for each way, and how far both agree."""
    rows = []
    for way, pairs in found.pairs.items():
        minutes = [f"{times[way] / 60:.1f}" for times in (found.clock, found.processor)]
        faster = "" if way == OURS else f"{found.speedup(way):.1f} x"
        rows.append([way, str(pairs), f"{found.pair[way]:.2f}", *minutes, faster])
    head = [f"layout {layout}", "pairs", "ms a pair", "minutes", "CPU min", "ours is"]
    return (
        f"{harness.table(head, rows)}\nscores differ by {found.difference:.1e} deviations at most, "
        f"orders by {found.inversion:.1e}; {found.same_ranks:.0%} of ranks are the same"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the model, and the sizes of the set."""
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="of the cross-modal encoder")
    for name, value in Sizes._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for option, default in (("--precision", "float32"), ("--loop-precision", None)):
        parser.add_argument(option, choices=["float32", "bf16"], default=default)
    harness.add_config(parser, help="its `model` gives the sizes")


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Measure every layout, print its table, yield the figures."""
    sizes = Sizes(**{name: getattr(options, name) for name in Sizes._fields})
    for layout in options.layouts.split(","):
        model = harness.load_pretraining(options, f"model.cross.layout={layout}").model
        found = measure(model, sizes, device, options.precision, options.loop_precision)
        print(table(layout, found), end="\n\n", flush=True)
        name, processor = f"rerank/{layout}", found.processor
        yield Measurement(f"{name}/speedup", found.speedup(), "x", 2.0, 10.0)
        yield Measurement(f"{name}/speedup_texts_cut", found.speedup(CUT), "x")
        yield Measurement(f"{name}/speedup_processor", processor[PADDED] / processor[OURS], "x")
        yield Measurement(f"{name}/pair", found.pair[OURS], "ms")
        yield Measurement(f"{name}/difference", found.difference, "deviations", 1e-3)
        yield Measurement(f"{name}/same_ranks", 100 * found.same_ranks, "%", 100.0)


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
