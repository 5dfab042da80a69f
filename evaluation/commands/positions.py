"""Commands about position encodings: list, show one, compare several in a timm model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from evaluation.commands.options import EvaluationCommand
from vlp.command_line import new_app

positions_app = new_app("Position encodings: list, show one, compare several in a timm model.")
app = new_app()
app.add_typer(positions_app, name="positions")

Plugin = Annotated[
    list[str] | None,
    Option("--plugin", metavar="FILE.py...", help="files or modules that register own encodings"),
]


def _grid(text: str) -> tuple[int, int]:
    """Read `14x14`."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: write ROWSxCOLUMNS, such as 14x14")
    return int(match[1]), int(match[2])


@positions_app.command("list", cls=EvaluationCommand)
def list_all(plugin: Plugin = None) -> None:
    """List all encodings with the places where they act."""
    from evaluation.probes.position_card import position_list
    from vlp.config import load_plugins

    load_plugins(plugin or ())
    print(position_list())


@positions_app.command(cls=EvaluationCommand)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="one of `vlp positions list`")],
    out: Annotated[Path | None, Option(metavar="FILE.png", help="draw its map, too")] = None,
    grid: Annotated[
        Any, Option(parser=_grid, metavar="ROWSxCOLUMNS", help="patches of the map")
    ] = "14x14",
    plugin: Plugin = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="options of the encoding")
    ] = None,
) -> None:
    """Show one encoding: options with types and defaults, parameters, a map over a grid.

    The map shows one query patch (x) with all patches: cosines of token encodings, mean logits of
    rotations, or the bias, with tables drawn from N(0, 1) if they start at zero.

    \b
      vlp positions show rope-axial theta=10 --grid 14x14 --out map.png
    """
    from evaluation.probes.position_card import draw_map, position_card
    from vlp.config import load_plugins, parse_override

    load_plugins(plugin or ())
    values = dict(map(parse_override, options or ()))
    print(position_card(name, grid, values))
    if out is not None:
        draw_map(name, grid, values, out)
        print(f"\nwritten to {out}")
