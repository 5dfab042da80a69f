"""Zero-shot classification by the class prompts nearest to an image (CLIP, section 3.1)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.encoder import GIBIBYTE, Block, BlockCache, require_finite
from evaluation.item_results import clustered_figures, evaluate_blocks, keep_scores
from evaluation.jobs import LABEL
from evaluation.options import EvalOptions
from evaluation.results import Figure, Result, Table, untrained_match_notes
from evaluation.samples import EvaluationError
from evaluation.work_sharding import ProcessGroup, evaluating, inference
from vlp.data.labelled_images import Labelled, open_labelled
from vlp.data.schema import normalised_caption
from vlp.io import lines_of
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel

PLAIN = ("a photo of a {}.",)


class Prompts(NamedTuple):
    """Labels (class names in the data), names (in prompts), and templates with a {}."""

    labels: tuple[str, ...]
    names: tuple[str, ...]
    templates: tuple[str, ...] = PLAIN

    def of_class(self, index: int) -> list[str]:
        """Return all prompts of one class."""
        return [template.replace("{}", self.names[index]) for template in self.templates]


def read_prompts(classes: str | Path, templates: str | Path | None = None) -> Prompts:
    """Read class names and templates, one a line, without blank lines.

    A line of classes may start with the label in the data: `n02084071<TAB>dog`.
    """
    lines = [line.split("\t", 1) for line in _lines(classes)]
    labels = tuple(line[0].strip() for line in lines)
    if len(set(labels)) < len(labels):
        repeated = next(label for label in labels if labels.count(label) > 1)
        raise EvaluationError(f"{classes}: the class {repeated!r} comes twice")
    if len(labels) < 2:
        raise EvaluationError(f"{classes}: one class leaves nothing to choose")
    prompts = PLAIN if templates is None else tuple(_lines(templates))
    for template in prompts:
        if "{}" not in template:
            raise EvaluationError(
                f"{templates}: the template {template!r} has no {{}} for the class name"
            )
    return Prompts(labels, tuple(line[-1].strip() for line in lines), prompts)


def class_features(
    prompts: Prompts,
    encode: Callable[[Sequence[str]], NDArray[np.floating]],
    processes: ProcessGroup,
) -> NDArray[np.float64]:
    """Compute (classes, d) normalised means of each class's prompt features (CLIP, 3.1.4).

    `encode` turns one class's prompts into (prompts, d) unit features; `processes` share classes.
    """

    def class_feature(index: int) -> NDArray[np.float64]:
        # Unit features are averaged, then normalised again, as in CLIP's prompt ensembles.
        mean = np.asarray(encode(prompts.of_class(index)), dtype=np.float64).mean(axis=0)
        return mean / max(float(np.linalg.norm(mean)), 1e-12)

    return np.stack(processes.map_blocks(len(prompts.labels), class_feature))


def _lines(path: str | Path) -> list[str]:
    try:
        lines = [line.strip() for line in lines_of(Path(path))]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from error
    if not lines:
        raise EvaluationError(f"{path}: is empty; write one name a line")
    return lines


class JoinedImages:
    """Images of several sources, by number; `limit` keeps the first ones."""

    def __init__(
        self, paths: Sequence[str | Path], labels: Sequence[str], field: str, limit: int | None
    ) -> None:
        if not paths:
            raise EvaluationError("no shard folder is given")
        if limit is not None and limit < 1:
            raise EvaluationError(f"limit {limit}: at least one image is needed")
        self.folders = tuple(map(str, paths))
        self._sources = [open_labelled(path, labels, field) for path in self.folders]
        self._ends = list(accumulate(map(len, self._sources)))
        self._length = self._ends[-1] if limit is None else min(limit, self._ends[-1])

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Labelled:
        """Return one of them; raises BadSample."""
        source = bisect_right(self._ends, number)
        return self._sources[source].read(number - (self._ends[source - 1] if source else 0))


MOST_CLASSES, ENDS = 20, 10
_PAIRS = 256


@dataclass(frozen=True)
class ZeroShotResult(Result):
    """Zero-shot figures; `classes` has the final stage's accuracy of each class with images."""

    classes: dict[str, Figure] = field(default_factory=dict)

    def table(self) -> Table:
        """Return a table of all figures, and of classes, the worst and best of many."""
        table = super().table()
        classes = list(self.classes.items())
        notes = list(table.notes)
        if len(classes) > MOST_CLASSES:
            # A table of a thousand classes tells less than its two ends.
            ordered = sorted(classes, key=lambda item: item[1].value)
            classes = [*ordered[:ENDS], *ordered[-ENDS:]]
            notes.append(f"Classes: the worst {ENDS} and the best {ENDS} of {len(ordered)}.")
        rows = [[f"class {name}", figure.percent(), ""] for name, figure in classes]
        return table._replace(rows=[*table.rows, *rows], notes=notes)

    def plain_figures(self) -> dict[str, Any]:
        """Return the figures of every task, and the classes."""
        classes = {name: figure._asdict() for name, figure in self.classes.items()}
        return {**super().plain_figures(), "classes": classes}


def evaluate_zeroshot(
    loaded: Loaded,
    shards: Sequence[str | Path],
    prompts: Prompts,
    options: EvalOptions = EvalOptions(),
    *,
    label_field: str = LABEL,
    match: int = 0,
    match_by: Literal["sum", "match"] = "sum",
) -> ZeroShotResult:
    """Compute `top-1`, `top-5` and the mean over classes; the same for any number of ranks.

    Shard folders, folders of class folders or tars of such are one set; the class is annotation
    `label_field`. Cross-modal log-odds for `match` classes of each image, averaged over a class's
    prompts, are added to similarity / temperature ("sum"), or replace it ("match").
    """
    if match < 0:
        raise EvaluationError(f"match {match}: the number of classes cannot be negative")
    images = JoinedImages(shards, prompts.labels, label_field, options.limit)
    model, top = loaded.model, min(match, len(prompts.labels))
    temperature = model.temperature().item()

    def encode(texts: Sequence[str]) -> TextFeatures:
        tokens = (part.to(torch_device) for part in loaded.text(list(texts)))
        with torch.no_grad(), inference(torch_device, options.precision):
            return model.encode_text(*tokens)

    def score_block(examples: Sequence[tuple[Labelled, Tensor]]) -> list[dict[str, Any]]:
        pixels = torch.stack([item for _, item in examples]).to(torch_device)
        with torch.no_grad(), inference(torch_device, options.precision):
            image = model.encode_image(pixels)
        similarity = require_finite(image.feature.double().cpu().numpy()) @ features.T
        # Unit features in float64: ties are equal prompts, not rounding.
        stages = {"dual": similarity}
        if top:
            nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :top]
            with torch.no_grad(), inference(torch_device, options.precision):
                odds = _log_odds(model, image, nearest, states)
            if match_by == "sum":
                odds += np.take_along_axis(similarity, nearest, 1) / temperature
            stages["match"] = rerank_scores(similarity, nearest, odds)
        return [
            _row(item, {name: scores[row] for name, scores in stages.items()}, prompts)
            for row, (item, _) in enumerate(examples)
        ]

    with evaluating(model, options.device) as torch_device:
        states: BlockCache[int] = BlockCache(
            lambda index: Block(encode(prompts.of_class(index))), GIBIBYTE
        )
        features = class_features(
            prompts,
            lambda texts: require_finite(encode(texts).feature.double().cpu().numpy()),
            ProcessGroup.current(),
        )
        rows, skipped = evaluate_blocks(
            images, partial(_pixels, loaded.preprocess), score_block, options, torch_device
        )
    notes = untrained_match_notes(model.match_is_trained or not top, "their new order")
    if twins := len(prompts.names) - len({normalised_caption(name) for name in prompts.names}):
        notes = (*notes, f"{twins} classes have the name of an earlier one and never win.")
    return _result(rows, skipped, images.folders, prompts, top, options.resamples, notes)


def rerank_scores(
    scores: NDArray[np.floating], nearest: NDArray[np.int64], new_scores: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return (images, classes) scores with `nearest`, in the order of `new_scores`, above the rest.

    `nearest` (images, top) are the best classes, `new_scores` their new scores.
    """
    # A NaN ranks last among `nearest`. The initial value serves blocks that are empty or all NaN.
    lowest = np.nanmin(new_scores, initial=0) - 1
    reranked = np.asarray(scores, dtype=np.float64) - np.max(scores) + lowest - 1
    np.put_along_axis(reranked, nearest, np.where(np.isnan(new_scores), lowest, new_scores), axis=1)
    return reranked


def _pixels(preprocess: Callable[[Any], Tensor], item: Labelled, number: int) -> Tensor:
    return preprocess(item.image)


def _log_odds(
    model: VLPModel, image: ImageFeatures, nearest: NDArray[np.int64], states: BlockCache[int]
) -> NDArray[np.float64]:
    """Compute (images, top) mean log-odds of a class's prompts."""
    pairs = [(row, int(number)) for row, classes in enumerate(nearest) for number in classes]
    prompts = len(states[pairs[0][1]].features.feature)
    step = max(1, _PAIRS // prompts)
    odds_of_parts = []
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        texts = TextFeatures(
            *(torch.cat(rows) for rows in zip(*(states[number].features for _, number in part)))
        )
        rows = torch.tensor([row for row, _ in part], device=image.states.device)
        odds = model.match(image.select(rows.repeat_interleave(prompts)), texts)
        odds_of_parts.append(odds.double().view(len(part), prompts).mean(1).cpu().numpy())
    return np.concatenate(odds_of_parts).reshape(nearest.shape)


def _row(
    item: Labelled, stages: dict[str, NDArray[np.floating]], prompts: Prompts
) -> dict[str, Any]:
    """Return the prediction, and ranks of the right class from 1."""
    # Ties and NaN count against the model.
    final = list(stages.values())[-1]
    return {
        "key": item.key or item.where,
        "label": prompts.labels[item.label],
        "prediction": prompts.labels[int(final.argmax())],
        "ranks": {
            name: int((~(scores < scores[item.label])).sum()) for name, scores in stages.items()
        },
        "image": item.image_name or item.where,
    }


def _result(
    rows: list[dict[str, Any]],
    skipped: dict[str, int],
    folders: tuple[str, ...],
    prompts: Prompts,
    reranked: int,
    resamples: int,
    untrained: tuple[str, ...],
) -> ZeroShotResult:
    classes = len(prompts.labels)
    ranks = {name: np.array([row["ranks"][name] for row in rows]) for name in rows[0]["ranks"]}
    *earlier, final = ranks
    values, chances = {}, {}
    for stage in (final, *earlier):
        for k in (1, 5):
            if k < classes:
                name = f"top-{k}" if stage == final else f"top-{k}, dual encoder"
                values[name], chances[name] = ranks[stage] <= k, k / classes
    keep_scores(rows, values)
    hits, labels = values["top-1"], np.array([row["label"] for row in rows])
    clusters = [row["image"] for row in rows]
    masks = {name: labels == name for name in prompts.labels if (labels == name).any()}
    share = sum(mask / mask.sum() for mask in masks.values())
    values["mean over classes"], chances["mean over classes"] = hits, 1 / classes
    figures = clustered_figures(
        values, clusters, chances, resamples, {"mean over classes": np.asarray(share)}
    )
    by_class = clustered_figures(dict.fromkeys(masks, hits), clusters, {}, resamples, masks)
    notes = [f"{classes} classes, {len(prompts.templates)} prompts each."]
    if reranked:
        notes.append(f"The best {reranked} classes were scored again by the cross-modal encoder.")
    notes += untrained
    if len(masks) < classes:
        notes.append(f"There are images of {len(masks)} classes.")
    return ZeroShotResult(
        kind="zeroshot",
        counts={"items": len(rows)},
        shards=folders,
        figures=figures,
        predictions=rows,
        skipped=skipped,
        notes=tuple(notes),
        classes=by_class,
    )
