"""One encoding: its options, where it acts, its parameters, and its map over a grid.

vlp positions show rope-axial theta=10 --out map.png
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlp.config import ConfigError, parse_yaml
from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    PositionEncoding,
    create_fitting_position,
    describe_options,
    list_positions,
    position_class,
)

GRID, QUERY = (14, 14), (4, 5)
WIDTH, HEADS = 64, 2
CONTENTS = 64
SMALL = 0.1
"""Random numbers that a table starts from are smaller."""
ON_CONTENTS = ("cope", "sape")
SHADES = " .:-=+*#%@"
PLACES = {
    "tokens": "on the tokens, once at the input",
    "inputs": "on what enters the projections of each layer",
    "rotate": "on queries and keys of each layer",
    "bias": "on the logits of each layer",
    "value": "on the output of attention of each layer",
}


class OptionFacts(NamedTuple):
    """One option: its type, its value or default, and what the docstring says of it."""

    name: str
    kind: str
    value: str
    meaning: str

    def line(self) -> str:
        """Lay out in one line."""
        said = f": {self.meaning}" if self.meaning else ""
        return f"  {self.name} ({self.kind}) = {self.value}{said}"


class PositionMap(NamedTuple):
    """A map (rows, columns), and what its numbers are."""

    kind: str
    values: NDArray[np.float64]


class PositionCard(NamedTuple):
    """Facts about one encoding; `map` is None for those between an image and a text."""

    name: str
    summary: str
    hooks: tuple[str, ...]
    options: tuple[OptionFacts, ...]
    parameters: Mapping[str, tuple[int, ...]]
    map: PositionMap | None
    query: tuple[int, int]

    def text(self) -> str:
        """Lay out for the terminal, with the map in ten shades."""
        lines = [f"{self.name}: {self.summary}", ""]
        lines += [f"acts {PLACES[hook]} ({hook})" for hook in self.hooks]
        sizes = {name: " x ".join(map(str, shape)) for name, shape in self.parameters.items()}
        total = sum(int(np.prod(shape)) for shape in self.parameters.values())
        lines += [f"parameters: {total:,}" + "".join(f"\n  {n} {s}" for n, s in sizes.items()), ""]
        lines += ["options:", *(option.line() for option in self.options), ""]
        if self.map is not None:
            lines += [f"map ({self.map.kind}) of the patch at +, {_span(self.map)}", *self._drawn()]
        return "\n".join(lines)

    def draw(self, file: Path) -> None:
        """Draw the map as a PNG."""
        from matplotlib.figure import Figure

        if self.map is None:
            raise ConfigError(f"{self.name} lies between an image and a text; it has no map")
        figure = Figure(figsize=(4.5, 4), layout="constrained")
        axes = figure.add_subplot()
        figure.colorbar(axes.imshow(self.map.values, cmap="viridis"), ax=axes)
        axes.plot(self.query[1], self.query[0], "x", color="red")
        axes.set_title(f"{self.name} ({self.map.kind})")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)

    def _drawn(self) -> list[str]:
        assert self.map is not None
        values = self.map.values
        low, high = float(values.min()), float(values.max())
        steps = np.rint((values - low) / ((high - low) or 1.0) * (len(SHADES) - 1)).astype(int)
        rows = [[SHADES[step] * 2 for step in row] for row in steps]
        rows[self.query[0]][self.query[1]] = "++"
        return ["".join(row) for row in rows]


def position_card(
    name: str,
    grid: tuple[int, int] = GRID,
    width: int = WIDTH,
    heads: int = HEADS,
    options: Mapping[str, Any] | None = None,
) -> PositionCard:
    """Collect the facts about an encoding.

    Args:
        name: of `list_positions()`.
        grid: (rows, columns) of the map.
        width: channels of the layer.
        heads: attention heads.
        options: of the encoding.
    """
    options = dict(options or {})
    query = (grid[0] * 2 // 7, grid[1] * 5 // 14)
    try:
        kind = position_class(name)
        sizes = {"width": width, "heads": heads, "grid": grid}
        made = create_fitting_position(name, sizes, **options)
        drawn = None
        if name not in CROSS_MODAL and made.hooks & {"tokens", "rotate", "bias"}:
            drawn = position_map(name, grid, query, width=width, heads=heads, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    described = _arguments(kind)
    facts = tuple(
        OptionFacts(
            option.name,
            option.kind,
            "required" if option.default is ... else repr(options.get(option.name, option.default)),
            described.get(option.name, ""),
        )
        for option in describe_options(name)
    )
    return PositionCard(
        name,
        _summary(kind),
        tuple(hook for hook in PositionEncoding.HOOKS if hook in made.hooks),
        facts,
        {key: tuple(parameter.shape) for key, parameter in made.named_parameters()},
        drawn,
        query,
    )


@torch.no_grad()
def position_map(
    name: str,
    grid: tuple[int, int] = GRID,
    query: tuple[int, int] = QUERY,
    seed: int = 0,
    width: int = WIDTH,
    heads: int = HEADS,
    **options: Any,
) -> PositionMap:
    """Compute the map of one encoding: one query patch against all patches.

    Of encodings of tokens it is the cosine of their vectors (Fig. 2 of Li et al. 2021), of
    rotations the mean logit of equal random contents, of biases the bias itself; tables that start
    at zero, or at small random numbers, are drawn from N(0, 1), so that shared rows show, as in
    Figs 5-9 of Wu et al. 2021. CoPE and SaPE see contents: an image of two regions, a disc on a
    ground.

    Args:
        name: of `list_positions()`, but for the cross-modal ones.
        grid: (rows, columns).
        query: (row, column) of the patch that asks.
        seed: of tables and contents.
        width: channels.
        heads: attention heads.
        options: of the encoding.
    """
    if name in CROSS_MODAL:
        raise ValueError(f"{name} lies between an image and a text; see `vlp anchors`")
    torch.manual_seed(seed)
    sizes = {"width": width, "heads": heads, "grid": grid}
    encoding = create_fitting_position(name, sizes, **options).double().eval()
    context = PositionContext(grid)
    place = query[0] * grid[1] + query[1]
    if "tokens" in encoding.hooks:
        vectors = encoding("tokens", torch.zeros(1, grid[0] * grid[1], width).double(), context)[0]
        values, kind = torch.cosine_similarity(vectors[place], vectors, dim=-1), "cosine"
    elif "rotate" in encoding.hooks:
        values, kind = _rotated(encoding, context, place, (heads, width // heads)), "logit"
    else:
        for parameter in encoding.parameters():
            # Zeros and small random numbers are not yet a bias; a start that an option sets is.
            constant = bool(parameter.any()) and parameter.min() == parameter.max()
            if parameter.abs().max() < SMALL and not constant:
                nn.init.normal_(parameter)
        values = _bias(encoding, context, place, name in ON_CONTENTS, (heads, width // heads))
        kind = "bias"
    return PositionMap(kind, values.view(grid).numpy())


def _rotated(
    encoding: PositionEncoding, context: PositionContext, place: int, heads: tuple[int, int]
) -> Tensor:
    """q_i . k_j where all contents are equal, averaged over contents: (T,)."""
    assert context.grid is not None
    tokens = context.grid[0] * context.grid[1]
    contents = torch.randn(CONTENTS, heads[0], 1, heads[1]).double().expand(-1, -1, tokens, -1)
    query, key = encoding("rotate", contents, contents, context)
    logits = (query[:, :, place, None] * key).sum(-1) / heads[1]
    return logits.mean((0, 1))


def _bias(
    encoding: PositionEncoding,
    context: PositionContext,
    place: int,
    on_contents: bool,
    heads: tuple[int, int],
) -> Tensor:
    """The bias of one query's row, of the first head: (T,)."""
    assert context.grid is not None
    tokens = context.grid[0] * context.grid[1]
    contents = torch.randn(1, heads[0], 1, heads[1]).double().expand(-1, -1, tokens, -1)
    if on_contents:
        other = torch.randn(1, heads[0], 1, heads[1]).double()
        contents = torch.where(disc(context.grid).flatten()[:, None], other, contents)
    bias = encoding("bias", contents, contents, context)
    return bias.expand(1, heads[0], tokens, tokens)[0, 0, place]


def disc(grid: tuple[int, int]) -> Tensor:
    """The region of the image that CoPE and SaPE are shown: (rows, columns) bool."""
    row, column = torch.arange(grid[0])[:, None], torch.arange(grid[1])
    centre = (grid[0] * 0.4, grid[1] * 0.4)
    radius = 0.28 * min(grid)
    return (row - centre[0]).square() + (column - centre[1]).square() < radius**2


def position_list() -> str:
    """List all encodings with the hooks they may use and what they are, a line each."""
    lines = []
    for name in list_positions():
        kind = position_class(name)
        hooks = [
            hook
            for hook in PositionEncoding.HOOKS
            if getattr(kind, hook) is not getattr(PositionEncoding, hook)
        ]
        place = "image-text " if name in CROSS_MODAL else ""
        lines.append(f"{name:<18} {place + ', '.join(hooks):<31} {_summary(kind)}")
    return "\n".join(lines)


def parse_grid(text: str) -> tuple[int, int]:
    """Read `14x14`."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--grid {text!r} is not ROWSxCOLUMNS, such as 14x14")
    return int(found[1]), int(found[2])


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Read `theta=10`, values in YAML."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not an option; write name=value, such as theta=10")
    return {key: parse_yaml(value) for key, _, value in (word.partition("=") for word in words)}


def _summary(kind: type) -> str:
    text = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r"^(`[^`]*`(, )?)+: ", "", text)


def _arguments(kind: type) -> dict[str, str]:
    """Return the first sentence about each argument in the docstring of a class."""
    text = inspect.getdoc(kind) or ""
    part = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    found: dict[str, str] = {}
    for line in part[1].splitlines() if part else ():
        if named := re.match(r"    (\w+): (.*)", line):
            name, found[named[1]] = named[1], named[2]
        elif found and line.strip():
            found[name] += f" {line.strip()}"
    return {key: re.split(r"(?<=[a-z])[.;] ", value)[0].rstrip(".") for key, value in found.items()}


def _span(drawn: PositionMap) -> str:
    return f"{drawn.values.min():.3g} (blank) to {drawn.values.max():.3g} (@)"
