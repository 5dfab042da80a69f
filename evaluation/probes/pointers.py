"""Maps over the patches by which a model points at what a word names, and maps without text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from evaluation.core.results import Figure
from evaluation.downstream.result import clustered_figures
from evaluation.grounding.gradcam import grad_cam, layer_number
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.positions.anchor_field import AnchorField

POINTERS = ("cosine", "anchors", "path", "Grad-CAM")
CONTROLS = ("image attention", "mean box", "centre")


@contextmanager
def last_attention(encoder: nn.Module, grid: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Collect what [CLS] attends to in the last block of a timm transformer, mean over heads.

    Without a [CLS], it is the mean over the patches' own queries. Attention is not fused
    meanwhile. The list gets one (B, rows * columns) for each call; none where the encoder has no
    attention of timm's.

    Args:
        encoder: a module with the transformer in it.
        grid: patches (rows, columns); finer patches of the transformer are averaged.
    """
    found: list[Tensor] = []
    layers = [
        module
        for module in encoder.modules()
        if hasattr(module, "fused_attn")
        and isinstance(getattr(module, "attn_drop", None), nn.Module)
    ]
    if not layers:
        yield found
        return
    attention = layers[-1]

    def unfuse(module: nn.Module, _: object) -> None:
        module.fused_attn = False  # type: ignore[assignment]

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (weights,) = inputs  # (B, heads, prefix + patches, as many)
        times = isqrt(weights.shape[-1] // (grid[0] * grid[1]))
        fine = grid[0] * times, grid[1] * times
        prefix = weights.shape[-1] - fine[0] * fine[1]
        seen = weights[:, :, 0] if prefix else weights.mean(2)
        squares = seen.mean(1)[:, prefix:].float().unflatten(-1, fine)
        found.append(avg_pool2d(squares[:, None], times).flatten(1))

    fused = attention.fused_attn
    hooks = [
        attention.register_forward_pre_hook(unfuse),
        attention.attn_drop.register_forward_pre_hook(take),  # type: ignore[union-attr]
    ]
    try:
        yield found
    finally:
        attention.fused_attn = fused
        for hook in hooks:
            hook.remove()


def word_maps(
    model: VLPModel, image: ImageFeatures, texts: TextFeatures, field: AnchorField | None
) -> dict[str, NDArray[np.floating]]:
    """Return maps (captions, M, N) of one image's captions by the cross-modal encoder.

    `path` is the mean over channel groups of 1 / P (Eq. 7), 0 where not reachable; `Grad-CAM` is
    of the middle layer, and missing where that is the last, which knows [CLS] alone.

    Args:
        model: of the features.
        image: of one image.
        texts: of its captions.
        field: paths of the captions; None leaves `path` out.
    """
    maps: dict[str, NDArray[np.floating]] = {}
    if field is not None:
        path = field.path[:, 1:].float()
        near = torch.where(field.reachable, 1 / path.clamp(min=1), 0)
        maps["path"] = near.mean(-1).cpu().numpy()
    layers = len(model.cross_encoder.layers)
    if layers and layer_number(model) < layers - 1:
        rows = torch.zeros(len(texts.states), dtype=torch.long, device=texts.states.device)
        heat = grad_cam(model, image.select(rows), texts)
        maps["Grad-CAM"] = heat.flatten(2).transpose(1, 2).cpu().numpy()
    return maps


def centre_map(grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return nearness to the centre of the image, (rows * columns,)."""
    down, along = (np.abs(np.arange(side) - (side - 1) / 2) / side for side in grid)
    return -np.hypot(down[:, None], along[None]).ravel()


def share_of_best(scores: NDArray[np.floating], own: NDArray[np.bool_]) -> float:
    """Return the share of the best patches that lie in the named box: ties share the point.

    A map without any difference points like chance.

    Args:
        scores: (M,).
        own: (M,), patches of the box.
    """
    best = scores == np.nanmax(scores, initial=-np.inf)
    return float(own[best].mean()) if best.any() else 0.0


def mean_box_shares(
    masks: Sequence[NDArray[np.bool_]], scenes: Sequence[int]
) -> NDArray[np.float64]:
    """Return `share_of_best` of the mean mask of all other images, each counted once.

    Args:
        masks: (M,) of each word, the patches of its box.
        scenes: the number of each word's image.
    """
    _, own = np.unique(scenes, return_inverse=True)
    counts = np.bincount(own)
    means = np.zeros((len(counts), len(masks[0])))
    np.add.at(means, own, np.stack(masks) / counts[own, None])
    others = means.sum(0) - means
    return np.array([share_of_best(others[image], mask) for image, mask in zip(own, masks)])


def pointer_figures(
    pointed: Sequence[Mapping[str, float]],
    chance: float,
    scenes: Sequence[int],
    resamples: int,
) -> dict[str, Figure]:
    """Compute the accuracy of each pointer and control, and of each pointer above the best control.

    The last are named `POINTER - CONTROL`; 95 % intervals are from the same resampled images.

    Args:
        pointed: by name, `share_of_best` of each word's map.
        chance: expected accuracy of a random patch.
        scenes: the number of each word's image.
        resamples: bootstrap draws over images.
    """
    shares = {name: np.array([word[name] for word in pointed]) for name in pointed[0]}
    values = {name: shares[name] for name in (*POINTERS, *CONTROLS) if name in shares}
    best = max((name for name in CONTROLS if name in shares), key=lambda name: shares[name].mean())
    chances = dict.fromkeys(values, chance)
    for name in POINTERS:
        if name in shares:
            values[f"{name} - {best}"] = shares[name] - shares[best]
    return clustered_figures(values, list(scenes), chances, resamples)
