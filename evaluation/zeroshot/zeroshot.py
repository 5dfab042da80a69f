"""Zero-shot classification: which class's prompts lie nearest to an image (CLIP, section 3.1)?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.core.eval_mode import evaluating, inference
from evaluation.core.feature_cache import GIBIBYTE, Block, BlockCache
from evaluation.core.results import Figure, Table
from evaluation.core.samples import EvaluationError
from evaluation.core.untrained_match import untrained_match_notes
from evaluation.core.work_sharding import Ranks
from evaluation.downstream.blocks import evaluate_blocks
from evaluation.downstream.result import TaskResult, clustered_figures, keep_scores
from evaluation.zeroshot.labelled_images import LABEL, Classed, ClassedImages
from evaluation.zeroshot.prompts import Prompts, class_features
from vlp.config import Precision
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel

MANY, SHOWN = 20, 10
_PAIRS = 256


@dataclass(frozen=True)
class ZeroShotResult(TaskResult):
    """`classes`: accuracy of the final stage by class, of those that there are images of."""

    classes: dict[str, Figure] = field(default_factory=dict)

    def table(self) -> Table:
        """All figures, and the classes; of many, those that do worst and best."""
        table = super().table()
        named = list(self.classes.items())
        notes = list(table.notes)
        if len(named) > MANY:
            ordered = sorted(named, key=lambda one: one[1].value)
            named = [*ordered[:SHOWN], *ordered[-SHOWN:]]
            notes.append(f"Classes: the worst {SHOWN} and the best {SHOWN} of {len(ordered)}.")
        rows = [[f"class {name}", figure.percent(), ""] for name, figure in named]
        return table._replace(rows=[*table.rows, *rows], notes=notes)

    def to_json(self) -> dict[str, Any]:
        """As of every task, and the classes."""
        named = {name: figure._asdict() for name, figure in self.classes.items()}
        return {**super().to_json(), "classes": named}


def evaluate_zeroshot(
    loaded: Loaded,
    shards: Sequence[str | Path],
    prompts: Prompts,
    *,
    label_field: str = LABEL,
    match: int = 0,
    match_by: Literal["sum", "match"] = "sum",
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
    resamples: int = 1000,
    progress: bool = False,
) -> ZeroShotResult:
    """`top-1`, `top-5` and the mean over classes; the same for any number of ranks.

    Args:
        loaded: model, text and image preparation.
        shards: shard folders, folders of class folders, or tars of such, evaluated as one set.
        prompts: classes and templates.
        label_field: of the annotations in shards, where the class stands.
        match: classes of each image that the cross-modal encoder scores again; 0 is none. Its
            log-odds are averaged over a class's prompts.
        match_by: they are added to similarity / temperature ("sum"), or replace it ("match"); see
            `evaluation.retrieval.retrieval`.
        limit: only the first so many images.
        batch: images of one encoder call.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the encoders; None: bf16 on a GPU, float32 elsewhere.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.
        resamples: bootstrap draws over images.
        progress: a bar on the first rank.

    Raises:
        EvaluationError: no image can be used, or `match` is negative.
        ConfigError: a place cannot be read.
    """
    if match < 0:
        raise EvaluationError(f"match {match}: the number of classes cannot be negative")
    images = ClassedImages(shards, prompts, label_field, limit)
    model, top = loaded.model, min(match, len(prompts.labels))
    temperature = model.temperature().item()

    def encode(texts: Sequence[str]) -> TextFeatures:
        tokens = (part.to(torch_device) for part in loaded.text(list(texts)))
        with torch.no_grad(), inference(torch_device, precision):
            return model.encode_text(*tokens)

    def score_block(made: Sequence[tuple[Classed, Tensor]]) -> list[dict[str, Any]]:
        pixels = torch.stack([one for _, one in made]).to(torch_device)
        with torch.no_grad(), inference(torch_device, precision):
            image = model.encode_image(pixels)
        similarity = image.feature.double().cpu().numpy() @ features.T
        stages = {"dual": similarity}
        if top:
            near = np.argsort(-similarity, axis=1, kind="stable")[:, :top]
            with torch.no_grad(), inference(torch_device, precision):
                odds = _log_odds(model, image, near, states)
            if match_by == "sum":
                odds += np.take_along_axis(similarity, near, 1) / temperature
            stages["match"] = reordered(similarity, near, odds)
        return [
            _row(one, {name: scores[row] for name, scores in stages.items()}, prompts)
            for row, (one, _) in enumerate(made)
        ]

    with evaluating(model, device) as torch_device:
        states: BlockCache[int] = BlockCache(
            lambda number: Block(encode(prompts.of(number))), GIBIBYTE
        )
        features = class_features(
            prompts, lambda texts: encode(texts).feature.double().cpu().numpy(), Ranks.current()
        )
        rows, skipped = evaluate_blocks(
            images,
            batch,
            partial(_pixels, loaded.preprocess),
            score_block,
            progress,
            device=torch_device,
            workers=workers,
        )
    untrained = untrained_match_notes(model.match_is_trained or not top, "their new order")
    return _result(rows, skipped, images.folders, prompts, top, resamples, untrained)


def reordered(
    scores: NDArray[np.floating], near: NDArray[np.int64], new: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Scores after the best few were put into a new order among themselves, before all others.

    Args:
        scores: (images, classes).
        near: (images, few) the best classes.
        new: (images, few) their new scores; NaN is the lowest.
    """
    lowest = np.nanmin(new, initial=0) - 1
    found = np.asarray(scores, dtype=np.float64) - np.max(scores) + lowest - 1
    np.put_along_axis(found, near, np.where(np.isnan(new), lowest, new), axis=1)
    return found


def _pixels(preprocess: Callable[[Any], Tensor], one: Classed, number: int) -> Tensor:
    return preprocess(one.image)


def _log_odds(
    model: VLPModel,
    image: ImageFeatures,
    near: NDArray[np.int64],
    states: BlockCache[int],
) -> NDArray[np.float64]:
    """(images, few) mean log-odds of a class's prompts."""
    pairs = [(row, int(number)) for row, own in enumerate(near) for number in own]
    prompts = len(states[pairs[0][1]].features.feature)
    step = max(1, _PAIRS // prompts)
    found = []
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        texts = TextFeatures(
            *(torch.cat(rows) for rows in zip(*(states[number].features for _, number in part)))
        )
        rows = torch.tensor([row for row, _ in part], device=image.states.device)
        odds = model.match(image.select(rows.repeat_interleave(prompts)), texts)
        found.append(odds.double().view(len(part), prompts).mean(1).cpu().numpy())
    return np.concatenate(found).reshape(near.shape)


def _row(one: Classed, stages: dict[str, NDArray[np.floating]], prompts: Prompts) -> dict[str, Any]:
    """Ranks of the right class from 1; a class that scores as high counts before it."""
    final = list(stages.values())[-1]
    return {
        "key": one.key,
        "label": prompts.labels[one.label],
        "prediction": prompts.labels[int(final.argmax())],
        "ranks": {
            name: int((~(scores < scores[one.label])).sum()) for name, scores in stages.items()
        },
        "image": one.image_id,
    }


def _result(
    rows: list[dict[str, Any]],
    skipped: dict[str, int],
    folders: tuple[str, ...],
    prompts: Prompts,
    top: int,
    resamples: int,
    untrained: tuple[str, ...],
) -> ZeroShotResult:
    classes = len(prompts.labels)
    ranks = {name: np.array([row["ranks"][name] for row in rows]) for name in rows[0]["ranks"]}
    *before, final = ranks
    values, chances = {}, {}
    for stage in (final, *before):
        for k in (1, 5):
            if k < classes:
                name = f"top-{k}" if stage == final else f"top-{k}, dual encoder"
                values[name], chances[name] = ranks[stage] <= k, k / classes
    keep_scores(rows, values)
    right, labels = values["top-1"], np.array([row["label"] for row in rows])
    clusters = [row["image"] for row in rows]
    own = {name: labels == name for name in prompts.labels if (labels == name).any()}
    share = sum(mask / mask.sum() for mask in own.values())
    values["mean over classes"], chances["mean over classes"] = right, 1 / classes
    figures = clustered_figures(
        values, clusters, chances, resamples, {"mean over classes": np.asarray(share)}
    )
    by_class = clustered_figures(dict.fromkeys(own, right), clusters, {}, resamples, own)
    notes = [f"{classes} classes, {len(prompts.templates)} prompts each."]
    if top:
        notes.append(f"The best {top} classes were scored again by the cross-modal encoder.")
    notes += untrained
    if len(own) < classes:
        notes.append(f"There are images of {len(own)} classes.")
    return ZeroShotResult(
        kind="zeroshot",
        items=len(rows),
        shards=folders,
        figures=figures,
        predictions=rows,
        skipped=skipped,
        notes=tuple(notes),
        classes=by_class,
    )
