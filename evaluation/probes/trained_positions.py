"""Position encodings of a trained vision model, as panels for `draw_panels`.

    vlp encodings --model runs/vision/x/model --image horse.png --out horse-maps.png

Encodings of attention are shown by what they add to the logits (Fig. 5 of Wu et al. 2021, Fig. 4 of
SaPE^2), those of tokens by dot products of their places (Figs 5 to 12 and 15 of Li et al. 2021),
all by their weights (Fig. 13 there): before and after training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from evaluation.probes.anchor_maps import read_pair
from evaluation.probes.position_maps import GRID
from evaluation.samples import EvaluationError, evenly_spread
from vlp.data.labelled_images import open_labelled
from vlp.data.shards.sample_files import BadSample
from vlp.positions import PositionContext, PositionEncoding
from vlp.positions.coordinates import patch_centres
from vlp.positions.fourier import FourierPosition
from vlp.positions.learned import LearnedGridPosition, TokenEncoding
from vlp.tasks.classification.task import Classification
from vlp.tasks.task import PlainTask
from vlp.tasks.vision_only import load_task, untrained_task

TEST_IMAGES = 64


class PatchMaps(NamedTuple):
    """Maps of every reference patch over all patches: values (rows, columns, rows, columns)."""

    title: str
    values: NDArray[np.float64]

    def mosaic(self, references: int) -> tuple[NDArray[np.float64], list[tuple[int, int]]]:
        """Lay the maps of evenly spread reference patches out as they lie on the grid.

        Args:
            references: a side; no more than the grid has are taken.

        Returns:
            An image whose gaps between maps are NaN, and the (row, column) of every reference in
            its own map there.
        """
        rows, columns = self.values.shape[:2]
        down, right = (_spread(side, references) for side in (rows, columns))
        image = np.full((len(down) * (rows + 1) - 1, len(right) * (columns + 1) - 1), np.nan)
        marks = []
        for i, row in enumerate(down):
            for j, column in enumerate(right):
                top, left = i * (rows + 1), j * (columns + 1)
                image[top : top + rows, left : left + columns] = self.values[row, column]
                marks.append((top + row, left + column))
        return image, marks


class WeightChange(NamedTuple):
    """Weights of all encodings of a model, before (None: not known) and after training."""

    before: NDArray[np.float64] | None
    after: NDArray[np.float64]


class Shown(NamedTuple):
    """An image that is drawn beside its maps."""

    image: Image.Image


Panel = PatchMaps | WeightChange | Shown


def trained_panels(
    folder: str | Path, image: str | Path | None = None, layers: Sequence[int] = (0, -1)
) -> list[Panel]:
    """Panels of one model.

    Args:
        folder: the run's `model`; beside the run's `config.yaml` the start of its weights is known.
        image: file that encodings of attention are shown on; None is the mean over 64 images of a
            classifier's test data.
        layers: of those whose attention has encodings, from 0 or negative from the end.

    Raises:
        ConfigError: the test data cannot be opened.
        EvaluationError: an image cannot be read; the model has no encoding that can be shown, no
            such layer, or encodings of attention and is no classifier.
        FileNotFoundError: a file is missing.
        ValueError: the folder is damaged.
    """
    stages = {"before": _start(Path(folder)), "after": load_task(folder)}
    known = {stage: task for stage, task in stages.items() if task is not None}
    panels: list[Panel] = []
    for name, encoding in known["after"].named_modules():
        if isinstance(encoding, TokenEncoding):
            for stage, task in known.items():
                values = place_products(task.get_submodule(name))
                panels.append(_described(f"{encoding.name}, {stage}: dot products", values[None]))
    if any({"bias", "rotate"} & one.hooks for one in _encodings(known["after"])):
        pixels, images = _pixels(known["after"], image)
        panels += [] if image is None else [Shown(images[0])]
        added = {
            stage: attention_maps(task.get_submodule("model"), pixels)
            for stage, task in known.items()
        }
        for layer in _chosen(folder, list(added["after"]), layers):
            for stage, found in added.items():
                if np.ptp(found[layer]):
                    title = f"{layer}, {stage}: added to logits"
                    panels.append(_described(title, found[layer], images))
    weights = {stage: place_weights(task) for stage, task in known.items()}
    if len(weights["after"]):
        panels.append(WeightChange(weights.get("before"), weights["after"]))
    if not panels:
        raise EvaluationError(f"{folder}: the model has no position encoding that can be shown")
    return panels


@torch.no_grad()
def attention_maps(model: nn.Module, pixels: Tensor) -> dict[str, NDArray[np.float64]]:
    """What the encodings of each layer add to its logits, averaged over heads.

    That is the bias, and for rotations the change of q . k / sqrt(d). Prefix tokens are left out.

    Args:
        model: called on the pixels.
        pixels: (B, 3, height, width), normalised.

    Returns:
        (B or 1, rows, columns, rows, columns) by the layer's name: queries, then keys.
    """
    found: dict[str, NDArray[np.float64]] = {}

    def watch(layer: str) -> Callable[..., None]:
        def keep(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            added = _added(*arguments, output=output)
            if added is not None:
                context: PositionContext = arguments[-1]
                assert context.grid is not None
                patches = added[:, context.prefix_tokens :, context.prefix_tokens :]
                values = patches.reshape(-1, *context.grid, *context.grid).double().numpy()
                found[layer] = values + found.get(layer, 0.0)

        return keep

    handles = [
        module.register_forward_hook(watch(name.partition(".positions")[0]))
        for name, module in model.named_modules()
        if isinstance(module, PositionEncoding)
    ]
    try:
        model(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def place_products(encoding: nn.Module) -> NDArray[np.float64]:
    """Dot products of the vectors of all places of a grid: the encoding's own, else 14 x 14.

    Of Fourier features it is those before the MLP (appendix B of Li et al. 2021).

    Returns:
        (rows, columns, rows, columns).

    Raises:
        ValueError: the encoding does not fit the grid, or needs more than a grid.
    """
    assert isinstance(encoding, TokenEncoding)
    if isinstance(encoding, LearnedGridPosition):
        grid = len(encoding.table_rows), len(encoding.table_columns)
    else:
        grid = getattr(encoding, "grid", None) or GRID
    tokens = torch.zeros(1, grid[0] * grid[1], encoding.width)
    if isinstance(encoding, FourierPosition):
        vectors = encoding.features(tokens, PositionContext(grid))[0].flatten(-2)
    else:
        vectors = encoding.places(tokens, PositionContext(grid))[0]
    return (vectors @ vectors.mT).view(*grid, *grid).double().numpy()


def correlation(values: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Correlate two measures of pairs of two patches; NaN where one of them is constant.

    Args:
        values: (rows, columns, rows, columns).
        other: (patches, patches).
    """
    apart = ~np.eye(len(other), dtype=bool)
    with np.errstate(invalid="ignore"):
        r = np.corrcoef(values.reshape(other.shape)[apart], other[apart])
    return float(r[0, 1])


def place_weights(model: nn.Module) -> NDArray[np.float64]:
    """Tables and frequencies of all encodings, flat; MLPs and weights of channels are left out."""
    found = [
        parameter.detach().double().flatten().numpy()
        for encoding in _encodings(model)
        for name, parameter in encoding.named_parameters()
        if parameter.ndim > 1 and not name.startswith("modulator")
    ]
    return np.concatenate(found) if found else np.empty(0)


def _encodings(model: nn.Module) -> list[PositionEncoding]:
    return [module for module in model.modules() if isinstance(module, PositionEncoding)]


def _chosen(folder: str | Path, names: Sequence[str], layers: Sequence[int]) -> list[str]:
    try:
        return list(dict.fromkeys(names[layer] for layer in layers))
    except IndexError as error:
        raise EvaluationError(
            f"{folder}: layers {list(layers)} are not all among the {len(names)} whose attention "
            "has encodings; number them from 0, or from the end by -1"
        ) from error


def _start(folder: Path) -> PlainTask | None:
    run = folder.parent / "config.yaml"
    if not run.is_file():
        return None
    return untrained_task(folder, yaml.safe_load(run.read_text("utf-8"))["training"]["seed"])


def _pixels(task: PlainTask, image: str | Path | None) -> tuple[Tensor, list[Image.Image]]:
    if not isinstance(task, Classification):
        raise EvaluationError(
            "encodings of attention are shown of classifiers alone: give the folder of a training "
            "of kind classification"
        )
    data = task.config.data
    if image is not None:
        chosen = [read_pair(image, "").image]
    else:
        images = open_labelled(data.test, task.classes)
        try:
            numbers = evenly_spread(len(images), TEST_IMAGES)
            chosen = [images.read(number).image for number in numbers]
        except BadSample as error:
            raise EvaluationError(str(error)) from error
    return torch.stack([data.preprocessing(one) for one in chosen]), chosen


def _described(
    title: str, values: NDArray[np.float64], images: Sequence[Image.Image] = ()
) -> PatchMaps:
    """Average maps (images, rows, columns, rows, columns); the title says how they correlate.

    That is with nearness and, image by image, with likeness of the patches' mean colours.
    """
    rows, columns = values.shape[1:3]
    near = _closeness(patch_centres((rows, columns), torch.float64))
    alike = [_closeness(_colours(image, rows, columns)) for image in images]
    said = [f"nearness {np.mean([correlation(each, near) for each in values]):.2f}"]
    if alike:
        each = np.broadcast_to(values, (len(alike), *values.shape[1:]))
        said.append(f"colour {np.mean([correlation(*pair) for pair in zip(each, alike)]):.2f}")
    return PatchMaps(f"{title}\nr with {', '.join(said)}", values.mean(0))


def _colours(image: Image.Image, rows: int, columns: int) -> Tensor:
    """Mean colours of an image's patches, (patches, 3)."""
    means = image.resize((columns, rows), Image.Resampling.BOX)
    return torch.from_numpy(np.array(means, np.float64)).flatten(0, 1)


def _closeness(points: Tensor) -> NDArray[np.float64]:
    """Minus the distance of every pair of points (n, coordinates): (n, n)."""
    return -torch.cdist(points, points).numpy()


def _added(
    hook: str, query: Tensor, key: Tensor | PositionContext, *_: Any, output: Any
) -> Tensor | None:
    """Return what one call of a hook adds to the logits of the mean head, (B or 1, T, T)."""
    if hook == "bias" and output is not None:
        added: Tensor = output.float().mean(1)
        return added.expand(-1, query.shape[-2], query.shape[-2])
    if hook == "rotate":
        turned, turned_key = output
        assert isinstance(key, Tensor)
        change = turned.float() @ turned_key.float().mT - query.float() @ key.float().mT
        return change.mean(1) * query.shape[-1] ** -0.5
    return None


def _spread(side: int, count: int) -> list[int]:
    """Middles of `count` equal parts of a side, at most all of it."""
    count = min(side, count)
    return [int((number + 0.5) * side / count) for number in range(count)]
