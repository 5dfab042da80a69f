"""Swaps: two images and two captions, each caption true of exactly one of the images.

The images show the same objects rearranged (`place`, `relation`, `order`, `distance`), or the same
boxes with exchanged colours (`binding`), so neither a caption alone nor a bag of words suffices.
The scores are Winoground's (Thrush et al. 2022, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.encoder import require_finite
from evaluation.options import EvalOptions
from evaluation.results import Figure, Result, Table, untrained_match_notes
from evaluation.samples import EvaluationError
from evaluation.work_sharding import evaluate_blocks, evaluating, evaluation_autocast
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import View, apply_view
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.text.tokenizer import TextTokens
from vlp.metrics import bootstrap_means, percentile_interval
from vlp.models.cross_encoder import ImageFeatures
from vlp.models.folder import Loaded
from vlp.objectives.mlm import MLMHead
from vlp.scenes.negatives import SWAP_KINDS

CHANCE = {"text": 1 / 4, "image": 1 / 4, "group": 1 / 6, "pair": 1 / 2}
SCORES = tuple(CHANCE)
SCORERS = ("dual", "match", "words")


class Swap(NamedTuple):
    """Pixels (2, 3, side, side) and captions; caption i is true of image i alone."""

    pixels: torch.Tensor
    captions: tuple[str, str]
    kind: str


class SwapResult(Result):
    """Figures by (scorer, kind, score); kind `all` is over every swap.

    Scorers: `dual`, cosine of both encoders' features; `match`, the cross-modal encoder's log-odds;
    `words`, for a model with MLM head, log-probability of the words that differ between the
    captions, all masked. Scores: `text`, both images prefer their caption; `image`, both captions
    prefer their image; `group`, both `text` and `image`; `pair`, share of these four comparisons
    that are right. Ties are wrong.
    """

    def table(self) -> Table:
        """Return a row per scorer and kind, in percent."""
        rows = [
            [f"{scorer}, {kind}", *(self.figures[scorer, kind, s].percent() for s in SCORES)]
            for scorer, kind in dict.fromkeys(key[:2] for key in self.figures)
        ]
        rows.append(["chance", *(f"{100 * chance:.1f}" for chance in CHANCE.values())])
        title = f"Swaps, {self.counts['swaps']} of them"
        return Table(title, ["", *SCORES], rows, self.table_notes("swaps"))


def evaluate_swaps(
    loaded: Loaded,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    *,
    view: View = "image",
) -> SwapResult:
    """Score every swap; the same for any number of ranks.

    view: `image`; `shuffled`, with patches in random order; `blank`, all grey.
    """
    items = Items(shards, limit=options.limit)
    make = partial(_prepare, loaded.preprocess, loaded.model.config.image.patch_size, view)
    head = load_mlm_head(loaded)
    scorers = SCORERS if head is not None else SCORERS[:2]

    def score_block(examples: Sequence[tuple[Item, Swap]]) -> list[tuple[str, NDArray[np.float32]]]:
        swaps = [swap for _, swap in examples]
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            scores = _score(loaded, swaps, torch_device, head)
        return [(swap.kind, row) for swap, row in zip(swaps, scores)]

    with evaluating(loaded.model, options.device) as torch_device:
        rows, skipped = evaluate_blocks(items, make, score_block, options, torch_device)
    kinds = np.array([kind for kind, _ in rows])
    figures = {}
    # (swaps, scorers, scores)
    values = swap_scores(np.stack([scores for _, scores in rows]))
    for index, scorer in enumerate(scorers):
        for kind in (*(kind for kind in SWAP_KINDS if kind in kinds), "all"):
            subset = values[kinds == kind] if kind != "all" else values
            means = bootstrap_means(subset[:, index], resamples=options.resamples)
            low, high = percentile_interval(means)
            for column, name in enumerate(SCORES):
                value = float(subset[:, index, column].mean())
                figure = Figure(value, float(low[column]), float(high[column]), CHANCE[name])
                figures[scorer, kind, name] = figure
    notes = (f"View: {view}.", *untrained_match_notes(loaded.model.match_is_trained, "`match`"))
    counts = {"swaps": len(kinds)}
    return SwapResult("swaps", counts, items.folders, figures, None, skipped, notes, view)


def swap_scores(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute Winoground's scores from scores (..., image 2, caption 2) of all four pairs.

    Returns (..., 4): `text`, `image` and `group`, 0 or 1, and `pair`; see `SwapResult`.
    """
    matching = np.diagonal(scores, axis1=-2, axis2=-1)
    # Image i prefers caption i, and caption i prefers image i.
    by_caption = matching > np.diagonal(scores[..., ::-1], axis1=-2, axis2=-1)
    by_image = matching > np.diagonal(scores[..., ::-1, :], axis1=-2, axis2=-1)
    text, image = by_caption.all(-1), by_image.all(-1)
    pair = np.concatenate([by_caption, by_image], axis=-1).mean(-1)
    # Comparisons with NaN, and ties, are false.
    return np.stack([text, image, text & image, pair], axis=-1).astype(np.float64)


def _prepare(
    preprocess: Callable[[Any], torch.Tensor], patch_size: int, view: View, item: Item, index: int
) -> Swap:
    """Read and prepare a swap, in any process."""
    annotation = item.raw.annotation
    swap = (annotation.scene or {}).get("swap")
    if swap is None or item.raw.second_image is None or annotation.caption is None:
        raise EvaluationError(
            f"{item.where} is not a swap; generate swaps with `vlp data scenes --swaps N`"
        )
    images = (item.raw.image, item.raw.second_image)
    pixels = torch.stack([preprocess(decode_image(image, item.where)) for image in images])
    pixels = apply_view(pixels, view, patch_size, index)
    return Swap(pixels, (annotation.caption, swap["foil"]), swap["kind"])


def load_mlm_head(loaded: Loaded) -> MLMHead | None:
    """Return the MLM head of the model folder; None if it has no MLM head."""
    prefix = "mlm_head."
    state = {
        name.removeprefix(prefix): value
        for name, value in loaded.heads.items()
        if name.startswith(prefix)
    }
    if not state:
        return None
    text = loaded.model.config.text
    head = MLMHead(text.width, text.vocab_size)
    head.load_state_dict(state)
    return head.eval()


def differing_words(ids: torch.Tensor, word_mask: torch.Tensor) -> torch.Tensor:
    """Mark the tokens between the longest common prefix and suffix of two captions: (2, N) bool.

    ids: (2, N) int64; word_mask: (2, N) bool, True = a real word piece.
    """
    first, second = (row[mask].tolist() for row, mask in zip(ids, word_mask))
    prefix = _common_prefix_length(first, second)
    suffix = _common_prefix_length(first[prefix:][::-1], second[prefix:][::-1])
    differing = torch.zeros_like(word_mask)
    for row, mask in zip(differing, word_mask):
        positions = mask.nonzero()[:, 0]
        row[positions[prefix : len(positions) - suffix]] = True
    return differing


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    shorter = min(len(first), len(second))
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), shorter)


def _score(
    loaded: Loaded, swaps: Sequence[Swap], device: torch.device, head: MLMHead | None
) -> NDArray[np.float32]:
    """Compute scores (swaps, scorers, image 2, caption 2)."""
    model, count = loaded.model, len(swaps)
    images = model.encode_image(torch.cat([swap.pixels for swap in swaps]).to(device))
    tokens = loaded.text([caption for swap in swaps for caption in swap.captions])
    texts = model.encode_text(*(part.to(device) for part in tokens))
    # Image and caption of all four pairs of each swap, (4 * swaps,).
    image = torch.arange(2 * count, device=device).view(count, 2, 1).expand(-1, -1, 2).flatten()
    caption = torch.arange(2 * count, device=device).view(count, 1, 2).expand(-1, 2, -1).flatten()
    # Under autocast the cosines would be bf16, with many ties.
    with torch.autocast(device.type, enabled=False):
        dual = (images.feature[image].double() * texts.feature[caption].double()).sum(-1)
    scores = [dual.float(), model.match(images.select(image), texts.select(caption)).float()]
    if head is not None:
        scores.append(_word_scores(loaded, head, images, tokens, image, caption))
    all_scores = torch.stack(scores).view(len(scores), count, 2, 2).transpose(0, 1)
    return require_finite(all_scores.cpu().numpy())


def _word_scores(
    loaded: Loaded,
    head: MLMHead,
    images: ImageFeatures,
    tokens: TextTokens,
    image: torch.Tensor,
    caption: torch.Tensor,
) -> torch.Tensor:
    """Compute the log-probability of each caption's masked `differing_words`: (pairs,).

    image, caption: indices (pairs,) in `images` and `tokens`, which has the two captions of each
    swap in turn.
    """
    model, device = loaded.model, image.device
    swaps = zip(tokens.text_ids.split(2), tokens.word_mask.split(2))
    is_differing = torch.cat([differing_words(ids, word_mask) for ids, word_mask in swaps])
    masked_ids = tokens.text_ids.masked_fill(is_differing, loaded.text.mask_id)
    texts = model.encode_text(*(part.to(device) for part in tokens._replace(text_ids=masked_ids)))
    # `word_mask` still marks the masked words, as in training.
    states = model.cross(images.select(image), texts.select(caption), need_image=False)
    logits = head.to(device)(states.text, model.text_encoder.word_table)
    all_log_p = logits.float().log_softmax(-1)
    log_p = all_log_p.gather(-1, tokens.text_ids.to(device)[caption, :, None]).squeeze(-1)
    return (log_p * is_differing.to(device)[caption]).sum(-1)
