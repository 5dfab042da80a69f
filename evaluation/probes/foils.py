"""Foils: scores of captions compared with the same captions with one thing exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evaluation.encoder import count_truncated, require_finite
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
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import View, apply_view
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.text.foils import FOIL_KINDS, make_foils
from vlp.models.folder import Loaded

SCORERS = ("match", "dual")
# Pairs of one call of the cross-modal encoder.
MATCH_BATCH = 128


class FoiledImage(NamedTuple):
    """Pixels (3, side, side), and (caption, foil, kind) of every foil."""

    pixels: torch.Tensor
    foils: list[tuple[str, str, str]]


def evaluate_foils(
    loaded: Loaded,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    *,
    seed: int = 0,
    view: View = "image",
) -> Result:
    """Compare every caption with its foils; the same for any number of ranks.

    Figures are called `SCORER, KIND`: share of pairs in which the caption scores higher than the
    foil; chance is 1/2, and ties are wrong. Scorers: `match`, the cross-modal encoder's log-odds;
    `dual`, the cosine of both encoders' features. Kinds: `all` and `FOIL_KINDS`.
    """
    items = Items(shards, limit=options.limit)
    make = partial(_prepare, loaded.preprocess, loaded.model.config.image.patch_size, view, seed)

    def score_block(examples: Sequence[tuple[Item, FoiledImage]]) -> list[dict[str, Any]]:
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            return list(_score_pairs(loaded, examples, torch_device))

    with evaluating(loaded.model, options.device) as torch_device:
        try:
            rows, skipped = evaluate_blocks(items, make, score_block, options, torch_device)
        except EvaluationError as error:
            raise EvaluationError(f"{error}; foils need English captions") from error
    kinds = np.array([row["kind"] for row in rows])
    values, masks = {}, {}
    for scorer in SCORERS:
        correct = np.array([row[scorer][0] > row[scorer][1] for row in rows])
        for kind in ("all", *(kind for kind in FOIL_KINDS if kind in kinds)):
            values[f"{scorer}, {kind}"] = correct
            masks[f"{scorer}, {kind}"] = (kinds == kind) | (kind == "all")
    images = [row["image"] for row in rows]
    figures = clustered_figures(
        values, images, dict.fromkeys(values, 0.5), options.resamples, masks
    )
    set_scores(rows, values, masks)
    pairs = ", ".join(f"{(kinds == kind).sum()} {kind}" for kind in FOIL_KINDS if kind in kinds)
    texts = list({row[name] for row in rows for name in ("caption", "foil")})
    notes = (
        f"Pairs of {len(set(images))} images: {pairs}. View: {view}.",
        *truncation_notes(count_truncated(loaded.text, texts), len(texts), "captions and foils"),
        *untrained_match_notes(loaded.model.match_is_trained, "`match`"),
    )
    counts = {"items": len(rows)}
    return Result("foils", counts, items.folders, figures, rows, skipped, notes, view)


def examples(result: Result, count: int) -> Iterator[str]:
    """Yield at most `count` pairs of each kind as text: kind, caption, foil, and scores of both."""
    for kind in FOIL_KINDS:
        # One pair per image, as captions of an image have similar foils.
        by_image: dict[str, dict[str, Any]] = {}
        for row in result.predictions or ():
            if row["kind"] == kind and len(by_image) < count:
                by_image.setdefault(row["image"], row)
        for row in by_image.values():
            scores = ", ".join(f"{name} {row[name][0]:.3f} {row[name][1]:.3f}" for name in SCORERS)
            yield f"{kind}\n  {row['caption']}\n  {row['foil']}\n  {scores}"


def _prepare(
    preprocess: Callable[[Any], torch.Tensor],
    patch_size: int,
    view: View,
    seed: int,
    item: Item,
    index: int,
) -> FoiledImage:
    """Prepare an image and make its foils, in any process."""
    captions = captions_of(item.raw.annotation)
    if not captions:
        raise BadSample("no text", item.where)
    pixels = preprocess(decode_image(item.raw.image, item.where))
    foils = make_foils(captions, seed, item.raw.key)
    return FoiledImage(
        apply_view(pixels[None], view, patch_size, index)[0],
        [
            (caption, foil.text, foil.kind)
            for caption, group in zip(captions, foils)
            for foil in group
        ],
    )


def _score_pairs(
    loaded: Loaded, examples: Sequence[tuple[Item, FoiledImage]], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for each caption and foil with different tokens.

    Its scores are [of the caption, of the foil] by name of the scorer.
    """
    # (index of the image, caption, foil, kind).
    foils = [
        (image, *foil) for image, (_, example) in enumerate(examples) for foil in example.foils
    ]
    if not foils:
        return
    model = loaded.model
    texts = list(dict.fromkeys(text for _, caption, foil, _ in foils for text in (caption, foil)))
    text_index = {text: index for index, text in enumerate(texts)}
    tokens = loaded.text(texts)
    text_features = model.encode_text(*(part.to(device) for part in tokens))
    pixels = torch.stack([example.pixels for _, example in examples])
    image_features = model.encode_image(pixels.to(device))
    # A caption has several foils, but each pair (image, text) is scored once.
    pairs = list(
        dict.fromkeys(
            (image, text_index[text])
            for image, caption, foil, _ in foils
            for text in (caption, foil)
        )
    )
    # Scores in the order of `SCORERS`, by (image, text) pair.
    scores: dict[tuple[int, int], list[float]] = {}
    for start in range(0, len(pairs), MATCH_BATCH):
        chunk = pairs[start : start + MATCH_BATCH]
        image_indices, text_indices = torch.tensor(chunk, device=device).T
        images, captions = image_features.select(image_indices), text_features.select(text_indices)
        dual = (images.feature.double() * captions.feature.double()).sum(-1)
        match = model.match(images, captions).double()
        chunk_scores = require_finite(torch.stack([match, dual], dim=1).cpu().numpy())
        scores |= dict(zip(chunk, chunk_scores.tolist()))
    for image, caption, foil, kind in foils:
        caption_index, foil_index = text_index[caption], text_index[foil]
        # Equal tokens: the tokenizer truncated the texts before the exchange.
        if not torch.equal(tokens.text_ids[caption_index], tokens.text_ids[foil_index]):
            by_scorer = zip(scores[image, caption_index], scores[image, foil_index])
            item = examples[image][0]
            yield {
                "key": item.raw.key,
                "image": item.raw.image_name,
                "kind": kind,
                "caption": caption,
                "foil": foil,
                **dict(zip(SCORERS, map(list, by_scorer))),
            }
