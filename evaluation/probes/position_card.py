"""What an encoding is: its options, where it acts, its parameters, and its map over a grid."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.probes.position_maps import PositionMap, position_map
from vlp.config import ConfigError, parse_yaml
from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    create_fitting_position,
    describe_options,
    list_positions,
    position_class,
)

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
        """Draw the map as a PNG.

        Raises:
            ConfigError: an encoding between an image and a text has none.
        """
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
    grid: tuple[int, int] = (14, 14),
    width: int = 64,
    heads: int = 2,
    options: Mapping[str, Any] | None = None,
) -> PositionCard:
    """Collect the facts about an encoding.

    Args:
        name: of `list_positions()`.
        grid: (rows, columns) of the map.
        width: channels of the layer.
        heads: attention heads.
        options: of the encoding.

    Raises:
        ConfigError: an unknown name, or options or sizes that do not fit.
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
    """Read `14x14`.

    Raises:
        ConfigError: it is something else.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--grid {text!r} is not ROWSxCOLUMNS, such as 14x14")
    return int(found[1]), int(found[2])


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Read `theta=10`, values in YAML.

    Raises:
        ConfigError: a word is something else.
    """
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
