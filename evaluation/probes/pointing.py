"""Pointing accuracy: does the patch most similar to a word lie in the box of the named object?

The generated corpus knows which word names which object, and so do COCO's categories
(`python -m data_tools coco --instances`). Two bars stand beside the accuracy: chance (any patch)
and 'some object' (the model points to an object, but not to the right one), which is much higher,
since there are few objects. Only what exceeds the second bar shows that a word finds its own.

In photographs things lie where the photographer aims; there controls that read no text set the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evaluation.core.block_reader import BlockReader
from evaluation.core.eval_mode import evaluating, inference
from evaluation.core.results import Figure
from evaluation.core.samples import CaptionedSample, EvaluationError, Samples, count_kinds
from evaluation.core.untrained_match import untrained_match_notes
from evaluation.core.work_sharding import Ranks
from evaluation.probes.kept_captions import count_kept_captions
from evaluation.probes.pointers import (
    centre_map,
    last_attention,
    mean_box_shares,
    pointer_figures,
    share_of_best,
    word_maps,
)
from evaluation.probes.pointing_result import KINDS, KindFigures, PathFigures, PointingResult
from vlp.config import Precision
from vlp.data.image.patches import patches_in_box
from vlp.data.schema import Annotation
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.text.word_boxes import WordBox, named_words, word_positions
from vlp.metrics.bootstrap import bootstrap_means, percentile_interval
from vlp.models.cross_encoder import PairIndices
from vlp.models.features import TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.objectives.monitors import anchor_sums, from_sums
from vlp.positions.anchor import group_similarity
from vlp.positions.anchor_field import AnchorField

SMALL = 0.1
"""An object in a box of less than so much of its image is small: few of them lie in the centre."""


class _Scene(NamedTuple):
    """An image as the model reads it (3, size, size), its own width and height, and its words."""

    number: int
    pixels: torch.Tensor
    size: tuple[int, int]
    captions: list[str]
    annotation: Annotation


class WordPointing(NamedTuple):
    """Pointing results of one word.

    own: (M,), the patches of its boxes; shares: of other pointers' best patches in them, by name.
    """

    scene: int
    kind: int
    hit: bool
    any_hit: bool
    share: float
    any_share: float
    bar: float
    anchors: int
    anchors_inside: int
    own: NDArray[np.bool_]
    shares: dict[str, float]


def evaluate_pointing(
    loaded: Loaded,
    shards: Sequence[str | Path],
    *,
    controls: bool = False,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
    resamples: int = 1000,
    progress: bool = False,
) -> PointingResult:
    """Ask every named word of every caption; the same for any number of ranks.

    Args:
        loaded: model, text and image preparation.
        shards: folders whose samples have `words`.
        controls: also point by anchors, paths and Grad-CAM, and without text: by the attention of
            the image encoder's [CLS], the mean of the other images' boxes, and the centre.
        limit: only the first so many images.
        batch: images of one encoder call.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the encoders; None: bf16 on a GPU, float32 elsewhere.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.
        resamples: bootstrap draws over images.
        progress: a bar on the first rank.

    Raises:
        EvaluationError: the shards do not know what words name, or hold nothing usable.
        ConfigError: a shard folder cannot be read.
    """
    ranks = Ranks.current()
    samples = Samples(shards, limit)

    def score_block(block: int) -> tuple[list[WordPointing], torch.Tensor, list[SkippedSample]]:
        read = reader[block]
        good = [scene for scene in read if isinstance(scene, _Scene)]
        with torch.no_grad(), inference(torch_device, precision):
            scored, sums = _score_scenes(loaded, good, torch_device, controls)
        bar.update(len(read))
        return scored, sums, [skip for skip in read if isinstance(skip, SkippedSample)]

    quiet = not (progress and ranks.first)
    with (
        evaluating(loaded.model, device) as torch_device,
        tqdm(total=len(ranks.share(len(samples))), desc="point", disable=quiet) as bar,
    ):
        count = -(-len(samples) // batch)
        reader = BlockReader(
            partial(_read_block, samples, batch, loaded.preprocess), torch_device, workers
        )
        with reader.ahead(ranks.share(count)):
            parts = ranks.map_blocks(count, score_block)
    skipped = count_kinds([skip for *_, skipped in parts for skip in skipped])
    scored = [word for words, *_ in parts for word in words]
    if not scored:
        raise EvaluationError(
            f"{', '.join(samples.folders)}: no word to score in {len(samples)} samples "
            f"(skipped: {skipped})"
        )
    by_kind = {
        kind: [word for word in scored if word.kind == number] for number, kind in enumerate(KINDS)
    }
    if controls:
        mean_boxes = mean_box_shares([word.own for word in scored], [word.scene for word in scored])
        for word, share in zip(scored, mean_boxes):
            word.shares["mean box"] = share
        by_kind["small object"] = [word for word in by_kind["object"] if word.share < SMALL]
    trained = loaded.model.match_is_trained or not controls
    return PointingResult(
        scenes=len({word.scene for word in scored}),
        shards=tuple(map(str, shards)),
        kinds={kind: _figures(words, resamples) for kind, words in by_kind.items() if words},
        skipped=skipped,
        paths=_paths(torch.stack([sums for _, sums, _ in parts]).sum(0)),
        remarks=untrained_match_notes(trained, "Grad-CAM"),
    )


def _read_block(
    samples: Samples, batch: int, preprocess: Callable[[Any], torch.Tensor], block: int
) -> list[_Scene | SkippedSample]:
    """Read and prepare the scenes of a block, in any process."""
    read: list[_Scene | SkippedSample] = []
    for number in range(len(samples))[block * batch : (block + 1) * batch]:
        sample = count_kept_captions(samples.read(number))
        if isinstance(sample, CaptionedSample):
            pixels, size = preprocess(sample.image), sample.image.size
            read.append(_Scene(number, pixels, size, sample.captions, sample.annotation))
        else:
            read.append(sample)
    return read


def _score_scenes(
    loaded: Loaded,
    scenes: Sequence[_Scene],
    device: torch.device,
    controls: bool,
) -> tuple[list[WordPointing], torch.Tensor]:
    """All words of the scenes, and the sums over their paths (5, G); 0 without ACE-RPE."""
    model = loaded.model
    grid, groups = model.config.image.grid, model.config.cross.anchor.groups
    scored: list[WordPointing] = []
    sums = torch.zeros(5, groups, dtype=torch.float64)
    if not scenes:
        return scored, sums
    pixels = torch.stack([scene.pixels for scene in scenes])
    with last_attention(model.image_encoder, grid) if controls else nullcontext() as attended:
        images = model.encode_image(pixels.to(device))
    for row, scene in enumerate(scenes):
        tokens = loaded.text(scene.captions)
        texts = model.encode_text(*(part.to(device) for part in tokens))
        patches, pieces = model.anchor_features(images, texts)
        with torch.autocast(device.type, enabled=False):
            cosine = (_unit(patches[row]) @ _unit(pieces).transpose(-2, -1)).float().cpu().numpy()
            similarity = group_similarity(patches[row].float(), pieces.float(), groups)
        # (captions, M, N) groups that anchor
        anchor = (similarity >= model.anchor_threshold).sum(-1).cpu().numpy()
        field = None
        if "anchor" in model.config.cross.position:
            captions = torch.arange(len(scene.captions), device=device)
            pairs = PairIndices(captions, torch.full_like(captions, row))
            field = model.anchors(images, texts, pairs)
            sums += _path_sums(model, field, texts).cpu()
        maps = {}
        if controls:
            maps = {"cosine": cosine, "anchors": anchor, "centre": centre_map(grid)}
            maps |= word_maps(
                model, images.select(torch.tensor([row], device=device)), texts, field
            )
            if attended:
                maps["image attention"] = attended[0][row].cpu().numpy()
        names = [loaded.text.words(caption) for caption in scene.captions]
        about = scene.annotation, scene.size
        scored += score_words(scene.number, *about, names, cosine, anchor, grid, maps)
    return scored, sums


def _path_sums(model: VLPModel, field: AnchorField | None, texts: TextFeatures) -> torch.Tensor:
    """Sums of `anchor_sums` over all captions of an image."""
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
    annotation: Annotation,
    size: tuple[int, int],
    pieces: Sequence[Sequence[str]],
    cosine: NDArray[np.float32],
    anchors: NDArray[np.integer],
    grid: tuple[int, int],
    maps: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> list[WordPointing]:
    """Score all named words of one image.

    A word of several pieces has the mean of their cosines. Equal cosines count against the model:
    the word hits only if every most similar patch lies in the box. A word cut off by the
    tokenizer's length is left out.

    Args:
        scene: number of the image.
        annotation: of the image.
        size: its width and height in pixels.
        pieces: word pieces of each caption, [CLS] and [SEP] in.
        cosine: (captions, M, N) of whole token features.
        anchors: (captions, M, N) number of groups in which patch and token anchor.
        grid: patches (rows, columns).
        maps: of other pointers, (captions, M, N), or (M,) where they read no text.

    Raises:
        EvaluationError: the shards do not tell which word names which object.
    """
    if annotation.words is None:
        raise EvaluationError(
            "these shards do not know which word names what; `python -m data_tools scenes` writes "
            "some that do, and `python -m data_tools coco --instances`"
        )
    words = [word for word in named_words(annotation) if word.kind in KINDS]
    named = [box for word in words for box in word.boxes]
    boxes = dict.fromkeys([*map(tuple, annotation.boxes or ()), *named])
    inside = {box: patches_in_box(box, grid, size) for box in boxes}
    objects = np.stack(list(inside.values())) if inside else np.zeros((0, 1), dtype=bool)
    somewhere = np.logical_or.reduce(objects, axis=0)
    scored = []
    for word in words:
        positions = _positions(word, pieces[word.caption])
        if positions is None:
            continue
        scores = cosine[word.caption][:, positions].mean(axis=1)
        best = np.flatnonzero(scores == scores.max())
        own = np.logical_or.reduce([inside[box] for box in word.boxes])
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
                own=own,
                shares={
                    name: share_of_best(
                        found[word.caption][:, positions].mean(axis=1) if found.ndim > 1 else found,
                        own,
                    )
                    for name, found in maps.items()
                },
            )
        )
    return scored


def _positions(word: WordBox, pieces: Sequence[str]) -> list[int] | None:
    words = word_positions(pieces)
    return list(words[word.position]) if word.position < len(words) else None


def _figures(words: Sequence[WordPointing], resamples: int) -> KindFigures:
    numbers = WordPointing._fields[:-2]
    table = np.array([word[: len(numbers)] for word in words], dtype=np.float64)
    column = {name: table[:, number] for number, name in enumerate(numbers)}
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
    controls = None
    if words[0].shares:
        shares, scenes = [word.shares for word in words], [word.scene for word in words]
        controls = pointer_figures(shares, pointing.chance, scenes, resamples)
    bar = float(column["bar"].mean())
    return KindFigures(len(words), pointing, bar, any_object, anchors, controls)
