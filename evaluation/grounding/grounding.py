"""Visual grounding of referring expressions (RefCOCO, RefCOCO+, RefCOCOg) without training boxes.

An expression's map over patches is Grad-CAM of a cross-attention layer (ACE-RPE, section 4.2, after
ALBEF), or the cosine of words and patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.encoder import count_truncated, require_finite
from evaluation.grounding.grad_cam import grad_cam, layer_number
from evaluation.options import EvalOptions
from evaluation.results import Result, truncation_notes, untrained_match_notes
from evaluation.samples import EvaluationError
from evaluation.work_sharding import (
    clustered_figures,
    evaluate_blocks,
    evaluating,
    evaluation_autocast,
    set_scores,
)
from vlp.config import Precision
from vlp.data.boxes import overlaps
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import View, apply_view
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.text.tokenizer import TextTokens
from vlp.data.text.word_boxes import patches_in_box
from vlp.models.folder import Loaded
from vlp.tasks.grounding.metrics import RIGHT_IOU, box_scores, intersection_over_union
from vlp.tasks.grounding.task import read_map_config

ROW_FIELDS = ("key", "id", "ref_id", "text", "point", "box", "image", "scores")
By = Literal["gradcam", "similarity"]


class GroundingExample(NamedTuple):
    """Pixels (3, side, side), tokens (1, N) of the expression, (width, height) of the image."""

    pixels: torch.Tensor
    tokens: TextTokens
    size: tuple[int, int]


def evaluate_grounding(
    loaded: Loaded,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    *,
    by: By | None = None,
    layer: int | None = None,
    head: int | None = None,
    view: View = "image",
) -> Result:
    """Evaluate every expression of every sample; the same for any number of ranks.

    Figures are shares of expressions. `pointing`: all highest patches of the map lie in the box;
    chance is a random patch. For samples with proposals, `IoU ≥ 0.5`: the best-scored proposal has
    this IoU with the box; chance is a random proposal. `best possible`: any proposal has this IoU.

    Args:
        by: kind of map. None: the folder's after fine-tuning for grounding, else Grad-CAM. With the
            folder's kind, its layer and head are defaults, too.
        layer: cross-modal layer as in `grad_cam`.
        head: number of first word pieces that make the map; None: all, or the folder's. In English
            the first noun is the object: "the circle left of the square".
    """
    settings = read_map_config(loaded.folder)
    by = by or settings.by
    if by == "similarity" and layer is not None:
        raise EvaluationError("layer is an option of Grad-CAM: leave it out, or set by to gradcam")
    # A folder's layer and head were selected for its kind of map.
    if by == settings.by:
        layer = settings.layer if layer is None else layer
        head = settings.head if head is None else head
    items = Items(shards, _count_expressions, options.limit)
    try:
        layer_index = layer_number(loaded.model, layer) if by == "gradcam" else 0
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    if head is not None and head < 1:
        raise EvaluationError(f"head {head}: the map needs at least one word piece")
    last = len(loaded.model.cross_encoder.layers) - 1
    if by == "gradcam" and head is not None and layer_index == last:
        raise EvaluationError(
            f"word pieces have no Grad-CAM map in the last cross-modal layer, {last}: set an "
            "earlier layer, leave head out, or set by to similarity"
        )
    make = partial(
        _example, loaded.preprocess, loaded.text, loaded.model.config.image.patch_size, view
    )

    def score_block(examples: Sequence[tuple[Item, GroundingExample]]) -> list[dict[str, Any]]:
        inputs = [example for _, example in examples]
        maps = _maps(loaded, inputs, by, layer_index, head, torch_device, options.precision)
        return [_row(item, example.size, heat) for (item, example), heat in zip(examples, maps)]

    with evaluating(loaded.model, options.device) as torch_device:
        rows, skipped = evaluate_blocks(items, make, score_block, options, torch_device)
    has_proposals = np.array([row["right"] is not None for row in rows])
    values = {"pointing": np.array([row["hit"] for row in rows])}
    chances = {"pointing": float(np.mean([row["share"] for row in rows]))}
    if has_proposals.any():
        name = f"IoU ≥ {RIGHT_IOU}"
        values[name] = np.array([bool(row["right"]) for row in rows])
        values["best possible"] = np.array([bool(row["possible"]) for row in rows])
        chances[name] = float(np.mean([row["possible"] for row in rows if row["box"]]))
    masks = {name: has_proposals for name in values if name != "pointing"}
    figures = clustered_figures(
        values, [row["image"] for row in rows], chances, options.resamples, masks
    )
    set_scores(rows, values, masks)
    texts = [row["text"] for row in rows]
    trained = loaded.model.match_is_trained or by != "gradcam"
    first_pieces = "" if head is None else f", first {head} word pieces"
    source = (
        f"Grad-CAM of cross-modal layer {layer_index}" if by == "gradcam" else "cosine of tokens"
    )
    return Result(
        kind="grounding",
        counts={"items": len(rows)},
        shards=items.folders,
        figures=figures,
        predictions=[{name: row[name] for name in ROW_FIELDS if name in row} for row in rows],
        skipped=skipped,
        notes=(
            f"Maps: {source}{first_pieces}. View: {view}.",
            *untrained_match_notes(trained, "Grad-CAM"),
            *truncation_notes(count_truncated(loaded.text, texts), len(rows), "expressions"),
        ),
        view=view,
    )


def _example(
    preprocess: Callable[[Any], torch.Tensor],
    tokenize: Callable[[list[str]], TextTokens],
    patch_size: int,
    view: View,
    item: Item,
    index: int,
) -> GroundingExample:
    """Prepare an expression and its image, in any process."""
    image = decode_image(item.raw.image, item.where)
    expression = _expression_text(item, image.size)
    pixels = apply_view(preprocess(image)[None], view, patch_size, index)[0]
    return GroundingExample(pixels, tokenize([expression]), image.size)


def _count_expressions(annotation: Annotation) -> int:
    return len(annotation.expressions or ())


def _expression_text(item: Item, size: tuple[int, int]) -> str:
    """Return an expression's text; raise BadSample if it is blank or its box outside the image.

    size: (width, height) of the image in pixels.
    """
    expressions = item.raw.annotation.expressions or ()
    if item.part >= len(expressions):
        raise BadSample("no text", f"{item.where}: no expression")
    expression = expressions[item.part]
    if not overlaps(expression.box, size):
        raise BadSample(
            "bad annotation",
            f"{item.where}: box {expression.box} of expression {expression.id} lies outside the "
            f"image of {size[0]} x {size[1]} px",
        )
    if not expression.text.strip():
        raise BadSample("no text", f"{item.where}: expression {expression.id} is empty")
    return expression.text


def _maps(
    loaded: Loaded,
    examples: Sequence[GroundingExample],
    by: By,
    layer: int,
    head: int | None,
    device: torch.device,
    precision: Precision | None,
) -> NDArray[np.float64]:
    """Compute maps (expressions, rows, columns), at least 0 unless they are cosines."""
    model = loaded.model
    pixels = torch.stack([example.pixels for example in examples]).to(device)
    tokens = [
        torch.cat(parts).to(device) for parts in zip(*(example.tokens for example in examples))
    ]
    with torch.no_grad(), evaluation_autocast(device, precision):
        image, text = model.encode_image(pixels), model.encode_text(*tokens)
    # A map is the mean over tokens: words for cosines, also [CLS] and [SEP] for Grad-CAM.
    word_mask, attention_mask = text.word_mask, text.attention_mask
    if head is not None:
        word_mask = attention_mask = word_mask & (word_mask.cumsum(-1) <= head)
    if by == "gradcam":
        with evaluation_autocast(device, precision):
            maps = grad_cam(model, image, text, layer)
        # (B, N, rows, columns); the mean over tokens with [CLS] is ALBEF's.
        weights = attention_mask[..., None, None]
        heat = (maps * weights).sum(1) / weights.sum(1).clamp(min=1)
    else:
        # (B, M, N) in float64: rounding must not make two patches equal.
        cosine = image.tokens.double() @ text.tokens.double().transpose(1, 2)
        num_words = word_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = (cosine * word_mask[:, None]).sum(-1) / num_words
        heat = mean.unflatten(-1, model.config.image.grid)
    return require_finite(heat.double().cpu().numpy())


def _row(item: Item, size: tuple[int, int], heat: NDArray[np.float64]) -> dict[str, Any]:
    """Return the row of an expression, with the figures of its map `heat` (rows, columns).

    share: of patches in the expression's box. box: the best-scored proposal. right: this box has
    IoU ≥ RIGHT_IOU. possible: share of proposals that have it. The last three are None without
    proposals. size: width and height of the image.
    """
    annotation = item.raw.annotation
    expression = (annotation.expressions or [])[item.part]
    inside = patches_in_box(expression.box, heat.shape, size).reshape(heat.shape)
    # Equal maxima count as a hit only if all of them lie in the box.
    best = np.argwhere(heat == heat.max())
    y, x = best[0]
    centre = ((x + 0.5) * size[0] / heat.shape[1], (y + 0.5) * size[1] / heat.shape[0])
    extra = expression.model_extra or {}
    row: dict[str, Any] = {
        "key": item.raw.key,
        "id": expression.id,
        **({"ref_id": extra["ref_id"]} if "ref_id" in extra else {}),
        "text": expression.text,
        "point": [float(value) for value in centre],
        "hit": bool(inside[tuple(best.T)].all()),
        "share": float(inside.mean()),
        "image": item.raw.image_name,
        "box": None,
        "right": None,
        "possible": None,
    }
    if annotation.proposals:
        proposals = np.array(annotation.proposals, dtype=np.float64)
        overlap = intersection_over_union(proposals, expression.box)
        # Negative cosines count 0 in a box's sum, unless the whole map is negative.
        positive = heat.clip(min=0) if heat.max() > 0 else heat - heat.min()
        best_proposal = int(box_scores(positive, proposals, size).argmax())
        right = overlap >= RIGHT_IOU
        row |= {
            "box": proposals[best_proposal].tolist(),
            "right": bool(right[best_proposal]),
            "possible": float(right.mean()),
        }
    return row
