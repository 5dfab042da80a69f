"""Pointing accuracy: does the patch most similar to a word lie in the box of the named object?

The generated corpus knows which word names which object, and so do COCO's categories
(`python -m data_tools coco --instances`). Two bars stand beside the accuracy: chance (any patch)
and 'some object' (the model points to an object, but not to the right one), which is much higher,
since there are few objects. Only what exceeds the second bar shows that a word finds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evaluation.core.eval_mode import evaluating
from evaluation.core.feature_cache import precision_context
from evaluation.core.results import Figure, Table, write_report
from evaluation.core.samples import CaptionedSample, EvaluationError, Samples, count_kinds
from evaluation.core.work_sharding import Ranks
from vlp.data.image.patches import patches_in_box
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.text.word_boxes import WordBox, named_words, word_positions
from vlp.metrics.bootstrap import bootstrap_means, percentile_interval
from vlp.models.cross_encoder import PairIndices
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.objectives.monitors.anchor_statistics import anchor_sums, from_sums
from vlp.positions.anchor import group_similarity

KINDS = ("colour", "shape", "object")


class KindFigures(NamedTuple):
    """Figures of one kind of word; shares between 0 and 1.

    words: number of words. pointing: the most similar patch lies in the named object's
    box. some_object: expected `pointing` of a model that points into the box of an object chosen
    at random. any_object: the most similar patch lies in any object's box. anchors: of a word's
    anchors (patch and channel group with S at least the threshold) the share that lies in its box,
    over words that have any; None where no word has.
    """

    words: int
    pointing: Figure
    some_object: float
    any_object: Figure
    anchors: Figure | None


class PathFigures(NamedTuple):
    """Statistics of ACE-RPE over all words and patches, means over channel groups.

    anchors: share of entries (patch, word) with S at least the threshold. reachable: share of
    entries with a path. spread: standard deviation of a word's path over the patches it reaches,
    in patches and tokens; near 0 the position says nothing.
    """

    anchors: float
    reachable: float
    spread: float


@dataclass(frozen=True)
class PointingResult:
    """Pointing accuracy by kind of word (`colour`, `shape`, `object`).

    paths: None for a model without ACE-RPE.
    """

    scenes: int
    shards: tuple[str, ...]
    kinds: dict[str, KindFigures]
    skipped: dict[str, int] = field(default_factory=dict)
    paths: PathFigures | None = None

    def table(self) -> Table:
        """One row for each kind of word, in percent."""
        rows = [
            [
                f"{kind} words ({figures.words})",
                figures.pointing.percent(),
                f"{100 * figures.some_object:.1f}",
                f"{100 * figures.pointing.chance:.1f}",
                figures.any_object.percent(),
                f"{100 * figures.any_object.chance:.1f}",
                "–" if figures.anchors is None else figures.anchors.percent(),
            ]
            for kind, figures in self.kinds.items()
        ]
        head = [
            "",
            "in its box",
            "bar: some object",
            "chance",
            "in any box",
            "chance",
            "anchors in its box",
        ]
        notes = ["Percent; in brackets 95 % bootstrap intervals over images."]
        if self.paths is not None:
            notes.append(
                f"Of all patches and words {self.paths.anchors:.1%} are anchors, "
                f"{self.paths.reachable:.1%} have a path; a word's paths have a standard deviation "
                f"of {self.paths.spread:.2f}."
            )
        title = f"Pointing of the most similar patch, {self.scenes} images"
        return Table(title, head, rows, notes)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; figures are shares."""
        kinds = {}
        for kind, figures in self.kinds.items():
            plain = figures._asdict()
            for name in ("pointing", "any_object", "anchors"):
                plain[name] = None if plain[name] is None else plain[name]._asdict()
            kinds[kind] = plain
        return {
            "task": "pointing",
            "shards": list(self.shards),
            "scenes": self.scenes,
            "skipped": self.skipped,
            "kinds": kinds,
            "paths": None if self.paths is None else self.paths._asdict(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write `pointing.json` and `pointing.md`."""
        return write_report(folder, "pointing", self.table(), self.to_json())


class WordPointing(NamedTuple):
    """Pointing results of one word: (words,) arrays of a block when stacked."""

    scene: int
    kind: int
    hit: bool
    any_hit: bool
    share: float
    any_share: float
    bar: float
    anchors: int
    anchors_inside: int


def evaluate_pointing(
    loaded: Loaded,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    resamples: int = 1000,
    progress: bool = False,
) -> PointingResult:
    """Ask every named word of every caption; the same for any number of ranks.

    Args:
        loaded: model, text and image preparation.
        shards: folders whose samples have `words`.
        limit: only the first so many images.
        batch: images of one encoder call.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the encoders.
        resamples: bootstrap draws over images.
        progress: a bar on the first rank.

    Raises:
        EvaluationError: the shards do not know what words name, or hold nothing usable.
        ConfigError: a shard folder cannot be read.
    """
    ranks = Ranks.current()
    samples = Samples(shards, limit)

    def score_block(block: int) -> tuple[list[WordPointing], torch.Tensor, list[SkippedSample]]:
        numbers = range(len(samples))[block * batch : (block + 1) * batch]
        read = [(number, samples.read(number)) for number in numbers]
        good = [(number, sample) for number, sample in read if isinstance(sample, CaptionedSample)]
        with torch.no_grad(), precision_context(torch_device, precision):
            scored, sums = _score_scenes(loaded, good, torch_device)
        bar.update(len(numbers))
        return scored, sums, [sample for _, sample in read if isinstance(sample, SkippedSample)]

    quiet = not (progress and ranks.first)
    with (
        evaluating(loaded.model, device) as torch_device,
        tqdm(total=len(ranks.share(len(samples))), desc="point", disable=quiet) as bar,
    ):
        parts = ranks.map_blocks(-(-len(samples) // batch), score_block)
    skipped = count_kinds([skip for *_, skipped in parts for skip in skipped])
    scored = [word for words, *_ in parts for word in words]
    if not scored:
        raise EvaluationError(
            f"{', '.join(samples.folders)}: no word to score in {len(samples)} samples "
            f"(skipped: {skipped})"
        )
    return PointingResult(
        scenes=len({word.scene for word in scored}),
        shards=tuple(map(str, shards)),
        kinds={
            kind: _figures([word for word in scored if word.kind == number], resamples)
            for number, kind in enumerate(KINDS)
            if any(word.kind == number for word in scored)
        },
        skipped=skipped,
        paths=_paths(torch.stack([sums for _, sums, _ in parts]).sum(0)),
    )


def _score_scenes(
    loaded: Loaded, scenes: Sequence[tuple[int, CaptionedSample]], device: torch.device
) -> tuple[list[WordPointing], torch.Tensor]:
    """All words of the scenes, and the sums over their paths (5, G); 0 without ACE-RPE."""
    model = loaded.model
    scored: list[WordPointing] = []
    sums = torch.zeros(5, model.config.cross.anchor.groups, dtype=torch.float64)
    if not scenes:
        return scored, sums
    pixels = torch.stack([loaded.preprocess(sample.image) for _, sample in scenes])
    images = model.encode_image(pixels.to(device))
    for row, (number, sample) in enumerate(scenes):
        tokens = loaded.text(sample.captions)
        texts = model.encode_text(*(part.to(device) for part in tokens))
        patches, pieces = model.anchor_features(images, texts)
        with torch.autocast(device.type, enabled=False):
            cosine = (_unit(patches[row]) @ _unit(pieces).transpose(-2, -1)).float()
            groups = group_similarity(
                patches[row].float(), pieces.float(), model.config.cross.anchor.groups
            )
        anchor = (groups >= model.anchor_threshold).sum(-1)  # (captions, M, N) groups that anchor
        scored += score_words(
            number,
            sample,
            [loaded.text.words(caption) for caption in sample.captions],
            cosine.cpu().numpy(),
            anchor.cpu().numpy(),
            model.config.image.grid,
        )
        if "anchor" in model.config.cross.position:
            sums += _path_sums(model, images, texts, row).cpu()
    return scored, sums


def _path_sums(
    model: VLPModel, images: ImageFeatures, texts: TextFeatures, row: int
) -> torch.Tensor:
    """Sums of `anchor_sums` over all captions of the image in one row."""
    captions = torch.arange(len(texts.word_mask), device=texts.word_mask.device)
    field = model.anchors(images, texts, PairIndices(captions, torch.full_like(captions, row)))
    assert field is not None
    return anchor_sums(
        field.similarity,
        model.anchor_threshold.clamp(min=1e-3),  # as the paths' own
        field.path[:, 1:],
        field.reachable,
        texts.word_mask,
    )


def _paths(sums: torch.Tensor) -> PathFigures | None:
    """None where nothing was summed."""
    if not sums.any():
        return None
    return PathFigures(*(groups.mean().item() for groups in from_sums(sums)))


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Unit length along the last axis, in float64: equal cosines must not be made by rounding."""
    return torch.nn.functional.normalize(x.double(), dim=-1)


def score_words(
    scene: int,
    sample: CaptionedSample,
    pieces: Sequence[Sequence[str]],
    cosine: NDArray[np.float32],
    anchors: NDArray[np.integer],
    grid: tuple[int, int],
) -> list[WordPointing]:
    """Score all named words of one image.

    A word of several pieces has the mean of their cosines. Equal cosines count against the model:
    the word hits only if every most similar patch lies in the box. A word cut off by the
    tokenizer's length is left out.

    Args:
        scene: number of the image.
        sample: its image and annotation.
        pieces: word pieces of each caption, [CLS] and [SEP] in.
        cosine: (captions, M, N) of whole token features.
        anchors: (captions, M, N) number of groups in which patch and token anchor.
        grid: patches (rows, columns).

    Raises:
        EvaluationError: the shards do not tell which word names which object.
    """
    if sample.annotation.words is None:
        raise EvaluationError(
            "these shards do not know which word names what; `python -m data_tools scenes` writes "
            "some that do, and `python -m data_tools coco --instances`"
        )
    words = [word for word in named_words(sample.annotation) if word.kind in KINDS]
    boxes = dict.fromkeys([*map(tuple, sample.annotation.boxes or ()), *(w.box for w in words)])
    inside = {box: patches_in_box(box, grid, sample.image.size) for box in boxes}
    objects = np.stack(list(inside.values())) if inside else np.zeros((0, 1), dtype=bool)
    somewhere = np.logical_or.reduce(objects, axis=0)
    scored = []
    for word in words:
        positions = _positions(word, pieces[word.caption])
        if positions is None:
            continue
        scores = cosine[word.caption][:, positions].mean(axis=1)
        best = np.flatnonzero(scores == scores.max())
        own = inside[word.box]
        near = anchors[word.caption][:, positions].sum(axis=1)
        scored.append(
            WordPointing(
                scene=scene,
                kind=KINDS.index(word.kind),
                hit=bool(best.size and own[best].all()),
                any_hit=bool(best.size and somewhere[best].all()),
                share=float(own.mean()),
                any_share=float(somewhere.mean()),
                bar=float(np.mean([(own & other).sum() / other.sum() for other in objects])),
                anchors=int(near.sum()),
                anchors_inside=int(near[own].sum()),
            )
        )
    return scored


def _positions(word: WordBox, pieces: Sequence[str]) -> list[int] | None:
    words = word_positions(pieces)
    return list(words[word.position]) if word.position < len(words) else None


def _figures(words: Sequence[WordPointing], resamples: int) -> KindFigures:
    table = np.array(words, dtype=np.float64)
    column = {name: table[:, number] for number, name in enumerate(WordPointing._fields)}
    _, scene = np.unique(column["scene"], return_inverse=True)
    with_anchors = column["anchors"] > 0
    share_inside = column["anchors_inside"] / np.maximum(column["anchors"], 1)
    values = [column["hit"], column["any_hit"], share_inside * with_anchors]
    weights = [np.ones(len(words)), np.ones(len(words)), with_anchors.astype(np.float64)]
    chances = [column["share"], column["any_share"], column["share"]]
    figures: list[Figure | None] = []
    for value, weight, chance in zip(values, weights, chances):
        if not weight.any():
            figures.append(None)
            continue
        sums, counts = np.bincount(scene, value)[:, None], np.bincount(scene, weight)[:, None]
        low, high = percentile_interval(bootstrap_means(sums, counts, resamples=resamples))
        mean = value.sum() / weight.sum()
        expected = (chance * weight).sum() / weight.sum()
        figures.append(Figure(float(mean), float(low[0]), float(high[0]), float(expected)))
    pointing, any_object, anchors = figures
    assert pointing is not None  # every word has weight 1 in the first two
    assert any_object is not None
    return KindFigures(len(words), pointing, float(column["bar"].mean()), any_object, anchors)
