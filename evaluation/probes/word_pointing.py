"""Pointing accuracy: share of words with the most similar patch in the box of the named object.

Boxes come from the generated corpus, or from COCO's categories (`vlp data coco --instances`). Two
references: chance (a random patch), and `some object` (the box of a random object), which is much
higher as there are few objects: only accuracy above it shows word grounding. In photographs objects
lie near the centre, so controls that read no text are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from tqdm import tqdm

from evaluation.encoder import require_finite
from evaluation.grounding.grad_cam import grad_cam, layer_number
from evaluation.options import EvalOptions
from evaluation.results import Figure, Result, Table, untrained_match_notes
from evaluation.samples import (
    BlockReader,
    EvaluationError,
    Samples,
    count_kinds,
    drop_blank_captions,
    format_kinds,
)
from evaluation.work_sharding import (
    ProcessGroup,
    clustered_figures,
    evaluating,
    evaluation_autocast,
)
from vlp.data.boxes import overlaps
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.text.word_boxes import patches_in_box, token_positions, words_with_boxes
from vlp.metrics import bootstrap_means, percentile_interval
from vlp.models.cross_encoder import ImageFeatures, PairIndices, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import group_similarity
from vlp.positions.anchor_field import AnchorPaths
from vlp.tasks.pretraining.statistics import anchor_sums, statistics_of_sums

POINTERS = ("cosine", "anchors", "path", "Grad-CAM")
CONTROLS = ("image attention", "mean box", "centre")


@contextmanager
def last_attention(encoder: nn.Module, grid: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Collect the attention of [CLS] in the last block of a timm transformer, mean over heads.

    Each call of the encoder appends (B, rows * columns), averaged to `grid`, to the list that the
    context yields. It stays empty if the encoder has no attention of timm.
    """
    maps: list[Tensor] = []
    attentions = [
        module
        for module in encoder.modules()
        if hasattr(module, "fused_attn")
        and isinstance(getattr(module, "attn_drop", None), nn.Module)
    ]
    if not attentions:
        yield maps
        return
    attention = attentions[-1]

    def unfuse(module: nn.Module, _: object) -> None:
        module.fused_attn = False  # type: ignore[assignment]

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # (B, heads, prefix + patches, prefix + patches); the encoder's grid may be finer.
        (weights,) = inputs
        factor = isqrt(weights.shape[-1] // (grid[0] * grid[1]))
        encoder_grid = grid[0] * factor, grid[1] * factor
        prefix = weights.shape[-1] - encoder_grid[0] * encoder_grid[1]
        # Without a [CLS], the mean over patch queries.
        query_weights = weights[:, :, 0] if prefix else weights.mean(2)
        patches = query_weights.mean(1)[:, prefix:].float().unflatten(-1, encoder_grid)
        maps.append(avg_pool2d(patches[:, None], factor).flatten(1))

    # timm computes no probabilities in fused attention.
    fused = attention.fused_attn
    hooks = [
        attention.register_forward_pre_hook(unfuse),
        attention.attn_drop.register_forward_pre_hook(collect),  # type: ignore[union-attr]
    ]
    try:
        yield maps
    finally:
        attention.fused_attn = fused
        for hook in hooks:
            hook.remove()


def word_maps(
    model: VLPModel, image: ImageFeatures, texts: TextFeatures, paths: AnchorPaths | None
) -> dict[str, NDArray[np.floating]]:
    """Return maps (captions, M, N) of an image's captions by `path` and `Grad-CAM`.

    `path`: mean over channel groups of 1 / P (Eq. 7), 0 where not reachable; left out without
    ACE-RPE. `Grad-CAM`: of the middle cross-modal layer; left out if this is the last layer.
    """
    maps: dict[str, NDArray[np.floating]] = {}
    if paths is not None:
        path = paths.image_path[:, 1:].float()
        inverse = torch.where(paths.reachable, 1 / path.clamp(min=1), 0)
        maps["path"] = inverse.mean(-1).cpu().numpy()
    layers = len(model.cross_encoder.layers)
    # In the last layer only [CLS] has a map.
    if layers and layer_number(model) < layers - 1:
        rows = torch.zeros(len(texts.states), dtype=torch.long, device=texts.states.device)
        heat = grad_cam(model, image.select(rows), texts)
        maps["Grad-CAM"] = heat.flatten(2).transpose(1, 2).cpu().numpy()
    return maps


def centre_map(grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return the negative distance of each patch from the image's centre, (rows * columns,)."""
    rows, columns = (np.abs(np.arange(side) - (side - 1) / 2) / side for side in grid)
    return -np.hypot(rows[:, None], columns[None]).ravel()


def share_of_best(scores: NDArray[np.floating], inside: NDArray[np.bool_]) -> float:
    """Return the share of the highest-scored patches that lie `inside`; both (M,).

    With several maxima a share between 0 and 1, so that a constant map has chance accuracy.
    """
    best = scores == np.nanmax(scores, initial=-np.inf)
    return float(inside[best].mean()) if best.any() else 0.0


def mean_box_shares(
    masks: Sequence[NDArray[np.bool_]], samples: Sequence[int]
) -> NDArray[np.float64]:
    """Return for each word `share_of_best` of the mean mask over all other images.

    masks: (M,) of each word, patches of its boxes. samples: index of each word's sample.
    """
    _, image_index = np.unique(samples, return_inverse=True)
    counts = np.bincount(image_index)
    means = np.zeros((len(counts), len(masks[0])))
    # All images have equal weight, whatever their number of words.
    np.add.at(means, image_index, np.stack(masks) / counts[image_index, None])
    others = means.sum(0) - means
    return np.array([share_of_best(others[image], mask) for image, mask in zip(image_index, masks)])


def pointer_figures(
    word_shares: Sequence[Mapping[str, float]],
    chance: float,
    samples: Sequence[int],
    resamples: int,
) -> dict[str, Figure]:
    """Compute the accuracy of pointers and controls, and of pointers minus the best control.

    Differences are called `POINTER - CONTROL`. word_shares: for each word, `share_of_best` by name
    of the pointer or control. samples: index of each word's sample; intervals resample samples.
    """
    shares = {name: np.array([word[name] for word in word_shares]) for name in word_shares[0]}
    values = {name: shares[name] for name in (*POINTERS, *CONTROLS) if name in shares}
    # The best control on the evaluated words: differences favour the control.
    best = max((name for name in CONTROLS if name in shares), key=lambda name: shares[name].mean())
    chances = dict.fromkeys(values, chance)
    for name in POINTERS:
        if name in shares:
            values[f"{name} - {best}"] = shares[name] - shares[best]
    return clustered_figures(values, list(samples), chances, resamples)


KINDS = ("colour", "shape", "object", "objects")

REFERENCES = ("any patch", "some object")
CONTROL_NOTES = (
    "Equal maxima share the point. cosine: the most similar patch; anchors: the patch that most",
    "channel groups anchor; path: the shortest; Grad-CAM: of the middle cross-modal layer.",
    "Controls read no word: attention of the image encoder's last block, the other images' boxes.",
)


class KindFigures(NamedTuple):
    """Figures of one kind of word; shares between 0 and 1."""

    # Number of words.
    words: int
    # Share of words with the most similar patch in the box of the named object.
    pointing: Figure
    # Expected `pointing` if the most similar patch lies in the box of a random object.
    some_object: float
    # Share of words with the most similar patch in the box of any object.
    any_object: Figure
    # Share of a word's anchors (patch and channel group with S >= threshold) inside its box, mean
    # over words with anchors; None without such words.
    anchors: Figure | None
    # `pointer_figures`; None if not requested.
    controls: dict[str, Figure] | None = None


@dataclass(frozen=True)
class PointingResult(Result):
    """Pointing accuracy by kind of word.

    Kinds are `colour`, `shape`, `object`, and `objects` (words for any of several objects); with
    controls also `small object`, the `object` words with small boxes. paths: `AnchorStatistics` by
    name, means over channel groups; empty without ACE-RPE.
    """

    kinds: dict[str, KindFigures] = field(default_factory=dict)
    paths: dict[str, float] = field(default_factory=dict)

    def table(self) -> Table:
        """Return a row per kind of word, or with controls two columns, in percent."""
        scenes, notes = self.counts["scenes"], self.table_notes()
        if any(figures.controls for figures in self.kinds.values()):
            title = f"Pointing, {scenes} images"
            return Table(title, *self._pointer_table(), [*notes, *CONTROL_NOTES])
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
        return Table(f"Pointing of the most similar patch, {scenes} images", head, rows, notes)

    def table_notes(self, over: str = "images", skipped: str = "samples") -> list[str]:
        """Return the notes under the table, with statistics of the paths."""
        first, *rest = super().table_notes(over, skipped)
        if not self.paths:
            return [first, *rest]
        paths = (
            "Of all patches and words {anchors:.1%} are anchors, {reachable:.1%} have a path; a "
            "word's paths have a standard deviation of {spread:.2f}."
        )
        return [first, paths.format(**self.paths), *rest]

    def _pointer_table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows: columns of each kind are accuracy, and gain over the best control.

        Rows are pointers, controls and references.
        """
        names = (*POINTERS, *CONTROLS)
        head, columns = [""], [[*POINTERS, *map("control: {}".format, CONTROLS), *REFERENCES]]
        for kind, figures in self.kinds.items():
            controls = figures.controls or {}
            # The differences `POINTER - CONTROL` name the best control.
            best = next(name.partition(" - ")[2] for name in controls if " - " in name)
            gains = [controls.get(f"{name} - {best}") for name in names]
            references = (figures.pointing.chance, figures.some_object)
            head += [f"{kind} words ({figures.words})", f"above {best}"]
            columns.append([controls[name].percent() if name in controls else "" for name in names])
            columns[-1] += [f"{100 * share:.1f}" for share in references]
            columns.append(["" if gain is None else gain.percent() for gain in gains])
            columns[-1] += [""] * len(references)
        return head, [list(row) for row in zip(*columns)]

    def plain_figures(self) -> dict[str, Any]:
        """Return figures by kind of word and statistics of the paths, as plain JSON values."""
        kinds = {}
        for kind, figures in self.kinds.items():
            plain = figures._asdict()
            for name in ("pointing", "any_object", "anchors"):
                plain[name] = None if plain[name] is None else plain[name]._asdict()
            controls = plain.pop("controls")
            if controls is not None:
                plain["controls"] = {name: figure._asdict() for name, figure in controls.items()}
            kinds[kind] = plain
        return {"kinds": kinds, "paths": self.paths or None}


# Share of the image below which an object's box is small; few small objects lie in the centre.
SMALL = 0.1


class _PointingSample(NamedTuple):
    """A sample with prepared image."""

    sample_index: int
    # (3, side, side).
    pixels: torch.Tensor
    # (width, height) of the image in pixels.
    size: tuple[int, int]
    captions: list[str]
    annotation: Annotation


class WordPointing(NamedTuple):
    """Pointing results of one word."""

    # Index of the sample, and of the kind in `KINDS`.
    sample_index: int
    kind: int
    # The most similar patch lies in the word's boxes; in the box of any object.
    hit: bool
    any_hit: bool
    # Share of patches in the word's boxes; in the box of any object.
    share: float
    any_share: float
    # Expected hit of a patch in the box of a random object.
    some_object: float
    # Anchors (patch and channel group): all, and in the word's boxes.
    anchors: int
    anchors_inside: int
    # (M,): patches of the word's boxes.
    inside: NDArray[np.bool_]
    # `share_of_best` of other pointers and controls, by name.
    shares: dict[str, float]


def evaluate_pointing(
    loaded: Loaded,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    *,
    controls: bool = False,
) -> PointingResult:
    """Evaluate every word with a box in every caption; the same for any number of ranks.

    controls: also evaluate the pointers anchors, path and Grad-CAM, and controls without text:
    attention of the image encoder's [CLS], mean box of the other images, and centre.
    """
    processes = ProcessGroup.current()
    samples = Samples(shards, options.limit)

    def score_block(block: int) -> tuple[list[WordPointing], torch.Tensor, list[SkippedSample]]:
        block_samples = reader[block]
        usable = [sample for sample in block_samples if isinstance(sample, _PointingSample)]
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            words, sums = _score_samples(loaded, usable, torch_device, controls)
        bar.update(len(block_samples))
        return words, sums, [skip for skip in block_samples if isinstance(skip, SkippedSample)]

    quiet = not (options.progress and processes.first)
    with (
        evaluating(loaded.model, options.device) as torch_device,
        tqdm(total=len(processes.share(len(samples))), desc="point", disable=quiet) as bar,
    ):
        count = -(-len(samples) // options.batch)
        reader = BlockReader(
            partial(_read_block, samples, options.batch, loaded.preprocess),
            torch_device,
            options.workers,
        )
        with reader.prefetch(processes.share(count)):
            parts = processes.map_blocks(count, score_block)
    skipped = count_kinds([skip for _, _, block_skipped in parts for skip in block_skipped])
    words = [word for block_words, _, _ in parts for word in block_words]
    if not words:
        raise EvaluationError(
            f"{', '.join(samples.folders)}: no word with a box in {len(samples)} samples "
            f"(skipped: {format_kinds(skipped) or 'none'})"
        )
    by_kind = {
        kind: [word for word in words if word.kind == index] for index, kind in enumerate(KINDS)
    }
    if controls:
        masks, sample_indices = [w.inside for w in words], [w.sample_index for w in words]
        for word, share in zip(words, mean_box_shares(masks, sample_indices)):
            word.shares["mean box"] = share
        by_kind["small object"] = [word for word in by_kind["object"] if word.share < SMALL]
    trained = loaded.model.match_is_trained or not controls
    kinds = {kind: _figures(group, options.resamples) for kind, group in by_kind.items() if group}
    return PointingResult(
        kind="pointing",
        counts={"scenes": len({word.sample_index for word in words})},
        shards=tuple(map(str, shards)),
        figures={kind: figures.pointing for kind, figures in kinds.items()},
        skipped=skipped,
        notes=untrained_match_notes(trained, "Grad-CAM"),
        kinds=kinds,
        paths=_paths(torch.stack([sums for _, sums, _ in parts]).sum(0)),
    )


def _read_block(
    samples: Samples, batch: int, preprocess: Callable[[Any], torch.Tensor], block: int
) -> list[_PointingSample | SkippedSample]:
    """Read and prepare the samples of a block, in any process."""
    block_samples: list[_PointingSample | SkippedSample] = []
    for index in range(len(samples))[block * batch : (block + 1) * batch]:
        sample = drop_blank_captions(samples.read(index))
        if isinstance(sample, SkippedSample):
            block_samples.append(sample)
            continue
        annotation, size = sample.annotation, sample.image.size
        word_boxes = [box for word in words_with_boxes(annotation) for box in word.boxes]
        outside = [
            box for box in (*(annotation.boxes or ()), *word_boxes) if not overlaps(box, size)
        ]
        if outside:
            where = f"{'/'.join(sample.image_identity)}: box {outside[0]} lies outside the image"
            block_samples.append(SkippedSample("bad annotation", where))
        else:
            pixels = preprocess(sample.image)
            block_samples.append(_PointingSample(index, pixels, size, sample.captions, annotation))
    return block_samples


def _score_samples(
    loaded: Loaded, samples: Sequence[_PointingSample], device: torch.device, controls: bool
) -> tuple[list[WordPointing], torch.Tensor]:
    """Score all words of the samples; also return their `anchor_sums` (5, G), 0 without ACE-RPE."""
    model = loaded.model
    grid, groups = model.config.image.grid, model.config.cross.anchor.groups
    words: list[WordPointing] = []
    sums = torch.zeros(5, groups, dtype=torch.float64)
    if not samples:
        return words, sums
    pixels = torch.stack([sample.pixels for sample in samples])
    with last_attention(model.image_encoder, grid) if controls else nullcontext() as attention_maps:
        images = model.encode_image(pixels.to(device))
    for row, sample in enumerate(samples):
        tokens = loaded.text(sample.captions)
        texts = model.encode_text(*(part.to(device) for part in tokens))
        image_tokens, text_tokens = model.anchor_features(images, texts)
        patches = image_tokens[row]
        with torch.autocast(device.type, enabled=False):
            cosines = (_unit(patches) @ _unit(text_tokens).transpose(-2, -1)).float()
            cosine = require_finite(cosines.cpu().numpy())
            similarity = group_similarity(patches.float(), text_tokens.float(), groups)
        # (captions, M, N): number of channel groups in which the patch anchors the token.
        anchors = (similarity >= model.anchor_threshold).sum(-1).cpu().numpy()
        paths = None
        if "anchor" in model.config.cross.position:
            captions = torch.arange(len(sample.captions), device=device)
            pairs = PairIndices(captions, torch.full_like(captions, row))
            paths = model.anchor_paths(images, texts, pairs)
            assert paths is not None
            sums += anchor_sums(
                paths.similarity,
                model.path_settings.threshold,
                paths.image_path[:, 1:],
                paths.reachable,
                texts.word_mask,
            ).cpu()
        maps = {}
        if controls:
            maps = {"cosine": cosine, "anchors": anchors, "centre": centre_map(grid)}
            maps |= word_maps(
                model, images.select(torch.tensor([row], device=device)), texts, paths
            )
            if attention_maps:
                maps["image attention"] = attention_maps[0][row].cpu().numpy()
        pieces = [loaded.text.pieces(caption) for caption in sample.captions]
        words += score_words(
            sample.sample_index, sample.annotation, sample.size, pieces, cosine, anchors, grid, maps
        )
    return words, sums


def _paths(sums: torch.Tensor) -> dict[str, float]:
    """Return path figures of `anchor_sums`; none if they are 0."""
    groups_by_name = statistics_of_sums(sums)._asdict() if sums.any() else {}
    return {name: groups.mean().item() for name, groups in groups_by_name.items()}


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Normalise the last axis in float64, so that rounding makes no cosines equal."""
    return torch.nn.functional.normalize(x.double(), dim=-1)


def score_words(
    sample_index: int,
    annotation: Annotation,
    size: tuple[int, int],
    pieces: Sequence[Sequence[str]],
    cosine: NDArray[np.float32],
    anchors: NDArray[np.integer],
    grid: tuple[int, int],
    maps: Mapping[str, NDArray[Any]],
) -> list[WordPointing]:
    """Score all words of one image that have boxes.

    Args:
        size: width and height in pixels.
        pieces: word pieces of each caption, with [CLS] and [SEP].
        cosine: (captions, M, N) of patch and token features.
        anchors: (captions, M, N) number of channel groups in which the patch anchors the token.
        maps: by name of pointer or control, (captions, M, N), or (M,) without text.
    """
    if annotation.words is None:
        raise EvaluationError(
            "these shards have no boxes of words; `vlp data scenes` and `vlp data coco "
            "--instances` write them"
        )
    words = [word for word in words_with_boxes(annotation) if word.kind in KINDS]
    word_boxes = [box for word in words for box in word.boxes]
    boxes = dict.fromkeys([*map(tuple, annotation.boxes or ()), *word_boxes])
    box_masks = {box: patches_in_box(box, grid, size) for box in boxes}
    in_any_box = np.logical_or.reduce(list(box_masks.values()), axis=0)
    results = []
    for word in words:
        tokens_of_words = token_positions(pieces[word.caption])
        # The tokenizer may truncate the caption before the word.
        if word.index >= len(tokens_of_words):
            continue
        tokens = list(tokens_of_words[word.index])
        # A word of several pieces has their mean. Ties count against the model: all best patches
        # must lie in a box.
        scores = cosine[word.caption][:, tokens].mean(axis=1)
        best = np.flatnonzero(scores == scores.max())
        in_box = np.logical_or.reduce([box_masks[box] for box in word.boxes])
        anchor_counts = anchors[word.caption][:, tokens].sum(axis=1)
        shares = {}
        for name, heat in maps.items():
            is_of_text = heat.ndim > 1
            word_heat = heat[word.caption][:, tokens].mean(axis=1) if is_of_text else heat
            shares[name] = share_of_best(word_heat, in_box)
        results.append(
            WordPointing(
                sample_index=sample_index,
                kind=KINDS.index(word.kind),
                hit=bool(best.size and in_box[best].all()),
                any_hit=bool(best.size and in_any_box[best].all()),
                share=float(in_box.mean()),
                any_share=float(in_any_box.mean()),
                # Boxes of other objects may overlap the word's.
                some_object=float(
                    np.mean([(in_box & mask).sum() / mask.sum() for mask in box_masks.values()])
                ),
                anchors=int(anchor_counts.sum()),
                anchors_inside=int(anchor_counts[in_box].sum()),
                inside=in_box,
                shares=shares,
            )
        )
    return results


def _figures(words: Sequence[WordPointing], resamples: int) -> KindFigures:
    """Compute the figures of the words of one kind."""

    def column(name: str) -> NDArray[np.float64]:
        return np.array([getattr(word, name) for word in words], dtype=float)

    samples = [word.sample_index for word in words]
    _, image_index = np.unique(samples, return_inverse=True)
    ones, share, num_anchors = np.ones(len(words)), column("share"), column("anchors")
    pointing = _mean_figure(column("hit"), ones, share, image_index, resamples)
    any_object = _mean_figure(column("any_hit"), ones, column("any_share"), image_index, resamples)
    anchors, has_anchors = None, (num_anchors > 0).astype(float)
    if has_anchors.any():
        share_inside = column("anchors_inside") / np.maximum(num_anchors, 1)
        anchors = _mean_figure(share_inside, has_anchors, share, image_index, resamples)
    controls = None
    if words[0].shares:
        shares = [word.shares for word in words]
        controls = pointer_figures(shares, pointing.chance, samples, resamples)
    some_object = float(column("some_object").mean())
    return KindFigures(len(words), pointing, some_object, any_object, anchors, controls)


def _mean_figure(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    chances: NDArray[np.float64],
    image_index: NDArray[np.int64],
    resamples: int,
) -> Figure:
    """Compute the weighted mean over words, with an interval over images; arguments: (words,)."""
    values = values * weights
    sums = np.bincount(image_index, values)[:, None]
    counts = np.bincount(image_index, weights)[:, None]
    low, high = percentile_interval(bootstrap_means(sums, counts, resamples=resamples))
    mean, chance = values.sum() / weights.sum(), (chances * weights).sum() / weights.sum()
    return Figure(float(mean), float(low[0]), float(high[0]), float(chance))
