"""Zero-shot classification by the class prompts nearest to an image (CLIP, section 3.1)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.encoder import GIBIBYTE, Block, BlockCache, count_truncated, require_finite
from evaluation.jobs import LABEL
from evaluation.options import EvalOptions
from evaluation.results import Figure, Result, Table, truncation_notes, untrained_match_notes
from evaluation.samples import EvaluationError
from evaluation.work_sharding import (
    ProcessGroup,
    clustered_figures,
    evaluate_blocks,
    evaluating,
    evaluation_autocast,
    set_scores,
)
from vlp.data.labelled_images import LabelledImage, open_labelled
from vlp.data.text.tokenizer import TextTokens
from vlp.io import lines_of
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel

TEMPLATES = ("a photo of a {}.",)


class Prompts(NamedTuple):
    """Classes: labels in the data, names in prompts, and templates with a {} for the name."""

    labels: tuple[str, ...]
    names: tuple[str, ...]
    templates: tuple[str, ...] = TEMPLATES

    def of_class(self, index: int) -> list[str]:
        """Return all prompts of one class."""
        return [template.replace("{}", self.names[index]) for template in self.templates]


def read_prompts(classes: str | Path, templates: str | Path | None = None) -> Prompts:
    """Read files of class names and templates, one a line; blank lines are ignored.

    A line of classes may start with the label in the data: `n02084071<TAB>dog`.
    """
    lines = [line.split("\t", 1) for line in _lines(classes)]
    labels = tuple(line[0].strip() for line in lines)
    if len(set(labels)) < len(labels):
        repeated = next(label for label in labels if labels.count(label) > 1)
        raise EvaluationError(f"{classes}: the class {repeated!r} is listed twice")
    if len(labels) < 2:
        raise EvaluationError(f"{classes}: list at least two classes")
    template_lines = TEMPLATES if templates is None else tuple(_lines(templates))
    for template in template_lines:
        if "{}" not in template:
            raise EvaluationError(
                f"{templates}: the template {template!r} has no {{}} for the class name"
            )
    return Prompts(labels, tuple(line[-1].strip() for line in lines), template_lines)


def _lines(path: str | Path) -> list[str]:
    try:
        lines = [line.strip() for line in lines_of(Path(path))]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from error
    if not lines:
        raise EvaluationError(f"{path} is empty; write a name or template on each line")
    return lines


class ConcatImages:
    """Labelled images of several folders or tars as one data set, of at most `limit` images."""

    def __init__(
        self, paths: Sequence[str | Path], labels: Sequence[str], field: str, limit: int | None
    ) -> None:
        if not paths:
            raise EvaluationError("name a shard folder: --shards DIR")
        self.folders = tuple(map(str, paths))
        self._sources = [open_labelled(path, labels, field) for path in self.folders]
        self._ends = list(accumulate(map(len, self._sources)))
        self._length = self._ends[-1] if limit is None else min(limit, self._ends[-1])

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> LabelledImage:
        """Read image `number`, from 0, of the data set; raise BadSample to skip it."""
        source = bisect_right(self._ends, number)
        start = self._ends[source - 1] if source else 0
        return self._sources[source].read(number - start)


# With more than 20 classes, the table has the 10 worst and the 10 best.
MAX_ROWS, END_ROWS = 20, 10
# Pairs of one call of the cross-modal encoder.
MATCH_BATCH = 256


@dataclass(frozen=True)
class ZeroShotResult(Result):
    """Zero-shot figures; `classes`: accuracy by class, of classes with images, after re-ranking."""

    classes: dict[str, Figure] = field(default_factory=dict)

    def table(self) -> Table:
        """Return a row per figure and class; of many classes, the worst and the best."""
        table = super().table()
        classes = list(self.classes.items())
        notes = list(table.notes)
        if len(classes) > MAX_ROWS:
            ordered = sorted(classes, key=lambda item: item[1].value)
            classes = [*ordered[:END_ROWS], *ordered[-END_ROWS:]]
            ends = f"the worst {END_ROWS} and the best {END_ROWS}"
            notes.append(f"Classes: {ends} of {len(ordered)}.")
        rows = [[f"class {name}", figure.percent(), ""] for name, figure in classes]
        return table._replace(rows=[*table.rows, *rows], notes=notes)

    def plain_figures(self) -> dict[str, Any]:
        """Return figures and accuracy by class, as plain JSON values."""
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

    Args:
        shards: shard folders, folders of class folders, or tars of class folders, as one data set.
        label_field: field of a shard's annotation with the class.
        match: number of nearest classes of each image that the cross-modal encoder re-ranks.
        match_by: "sum" re-ranks by similarity / temperature + match score, "match" by the match
            score alone: the mean log-odds of a class's prompts.
    """
    images = ConcatImages(shards, prompts.labels, label_field, options.limit)
    model, top = loaded.model, min(match, len(prompts.labels))
    temperature = model.temperature().item()

    @lru_cache(10_000)  # 10 bytes a token
    def tokens_of_class(index: int) -> TextTokens:
        return loaded.text(prompts.of_class(index))

    def encode(index: int) -> TextFeatures:
        tokens = (part.to(torch_device) for part in tokens_of_class(index))
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            return model.encode_text(*tokens)

    def class_feature(index: int) -> NDArray[np.float64]:
        # The unit features of a class's prompts are averaged, then normalised again (CLIP, 3.1.4).
        mean = require_finite(encode(index).feature.double().cpu().numpy()).mean(axis=0)
        return mean / max(float(np.linalg.norm(mean)), 1e-12)

    def score_block(examples: Sequence[tuple[LabelledImage, Tensor]]) -> list[dict[str, Any]]:
        pixels = torch.stack([inputs for _, inputs in examples]).to(torch_device)
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            image = model.encode_image(pixels)
        # In float64, ties are equal prompts, not rounding.
        image_features = require_finite(image.feature.double().cpu().numpy())
        similarity = image_features @ features_of_classes.T
        stages = {"dual": similarity}
        if top:
            nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :top]
            with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
                new_scores = require_finite(_log_odds(model, image, nearest, prompt_features))
            if match_by == "sum":
                new_scores += np.take_along_axis(similarity, nearest, axis=1) / temperature
            stages["match"] = rerank_scores(similarity, nearest, new_scores)
        return [
            _row(item, {name: scores[row] for name, scores in stages.items()}, prompts)
            for row, (item, _) in enumerate(examples)
        ]

    with evaluating(model, options.device) as torch_device:
        prompt_features: BlockCache[int] = BlockCache(lambda index: Block(encode(index)), GIBIBYTE)
        processes = ProcessGroup.current()
        features_of_classes = np.stack(processes.map_blocks(len(prompts.labels), class_feature))
        rows, skipped = evaluate_blocks(
            images, partial(_pixels, loaded.preprocess), score_block, options, torch_device
        )
    notes = untrained_match_notes(model.match_is_trained or not top, "re-ranking")
    notes += _prompt_notes(prompts, loaded.text, tokens_of_class)
    return _result(rows, skipped, images.folders, prompts, top, options.resamples, notes)


def rerank_scores(
    scores: NDArray[np.floating], nearest: NDArray[np.int64], new_scores: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return scores (images, classes): `new_scores` of the classes `nearest`, others below these.

    nearest, new_scores: (images, top), nearest indices of classes.
    """
    highest_other = np.min(new_scores) - 1
    reranked = np.asarray(scores, dtype=np.float64) - np.max(scores) + highest_other
    np.put_along_axis(reranked, nearest, new_scores, axis=1)
    return reranked


def _prompt_notes(
    prompts: Prompts,
    text: Callable[[Sequence[str]], TextTokens],
    tokens_of_class: Callable[[int], TextTokens],
) -> tuple[str, ...]:
    """Return notes on truncated prompts, and on classes with the tokens of an earlier class."""
    num_truncated, ids_of_classes = 0, set()
    for index in range(len(prompts.labels)):
        num_truncated += count_truncated(text, prompts.of_class(index))
        ids_of_classes.add(tokens_of_class(index).text_ids.numpy().tobytes())
    notes = truncation_notes(num_truncated, len(prompts.labels) * len(prompts.templates), "prompts")
    if repeats := len(prompts.labels) - len(ids_of_classes):
        note = f"{repeats} classes have the tokens of an earlier class and are never predicted."
        notes = (*notes, note)
    return notes


def _pixels(preprocess: Callable[[Any], Tensor], item: LabelledImage, index: int) -> Tensor:
    return preprocess(item.image)


def _log_odds(
    model: VLPModel,
    image: ImageFeatures,
    nearest: NDArray[np.int64],
    prompt_features: BlockCache[int],
) -> NDArray[np.float64]:
    """Compute match log-odds (images, top) of `nearest`, each the mean over a class's prompts."""
    pairs = [(row, int(index)) for row, classes in enumerate(nearest) for index in classes]
    num_prompts = len(prompt_features[pairs[0][1]].features.feature)
    step = max(1, MATCH_BATCH // num_prompts)
    parts = []
    for start in range(0, len(pairs), step):
        chunk = pairs[start : start + step]
        blocks = [prompt_features[index].features for _, index in chunk]
        texts = TextFeatures(*map(torch.cat, zip(*blocks)))
        rows = torch.tensor([row for row, _ in chunk], device=image.states.device)
        log_odds = model.match(image.select(rows.repeat_interleave(num_prompts)), texts)
        parts.append(log_odds.double().view(len(chunk), num_prompts).mean(1).cpu().numpy())
    return np.concatenate(parts).reshape(nearest.shape)


def _row(
    item: LabelledImage, stages: dict[str, NDArray[np.floating]], prompts: Prompts
) -> dict[str, Any]:
    """Return a row with the prediction of the last stage, and the right class's ranks, from 1.

    stages: scores (classes,) by stage.
    """
    *_, final = stages.values()
    return {
        "key": item.key or item.where,
        "label": prompts.labels[item.label],
        "prediction": prompts.labels[int(final.argmax())],
        # Ties and NaN count against the model.
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
    top: int,
    resamples: int,
    more_notes: tuple[str, ...],
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
    set_scores(rows, values)
    hits, labels = values["top-1"], np.array([row["label"] for row in rows])
    clusters = [row["image"] for row in rows]
    masks = {name: labels == name for name in prompts.labels if (labels == name).any()}
    # Every class has the same total weight.
    item_weights = np.asarray(sum(mask / mask.sum() for mask in masks.values()))
    values["mean over classes"], chances["mean over classes"] = hits, 1 / classes
    figures = clustered_figures(
        values, clusters, chances, resamples, {"mean over classes": item_weights}
    )
    by_class = clustered_figures(dict.fromkeys(masks, hits), clusters, {}, resamples, masks)
    notes = [f"{classes} classes, {len(prompts.templates)} prompts each."]
    if top:
        notes.append(f"The best {top} classes were scored again by the cross-modal encoder.")
    notes += more_notes
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
