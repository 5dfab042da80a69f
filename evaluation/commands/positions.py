"""Commands about position encodings: list, show one, compare several in a timm model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from evaluation.commands.options import EvaluationCommand
from vlp.command_line import new_app, positive

positions_app = new_app("Position encodings: list, show one, compare several in a timm model.")
app = new_app()
app.add_typer(positions_app, name="positions")

Plugin = Annotated[
    list[str] | None,
    Option("--plugin", metavar="FILE.py...", help="files or modules that register own encodings"),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="one of `vlp positions list`")]


@positions_app.command("list", cls=EvaluationCommand)
def list_all(plugin: Plugin = None) -> None:
    """List all encodings: where they act, what they are."""
    from evaluation.probes.position_card import position_list
    from vlp.config import load_plugins

    load_plugins(plugin or ())
    print(position_list())


@positions_app.command(cls=EvaluationCommand)
def show(
    name: Name,
    out: Annotated[
        Path | None, Option(metavar="FILE.png", help="draw its map, as well as printing it")
    ] = None,
    grid: Annotated[str, Option(metavar="ROWSxCOLUMNS", help="patches of the map")] = "14x14",
    width: Annotated[int, Option(parser=positive, metavar="N", help="channels")] = 64,
    heads: Annotated[int, Option(parser=positive, metavar="N", help="attention heads")] = 2,
    plugin: Plugin = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="options of the encoding")
    ] = None,
) -> None:
    """Show one encoding: options with types and defaults, parameters, a map over a grid.

    The map is of one query patch (+): cosines of tokens' vectors, mean logits of rotations, or the
    bias itself, with tables drawn from N(0, 1) where they start at zero.

    \b
      vlp positions show rope-axial theta=10 --grid 14x14 --out map.png
    """
    from evaluation.probes.position_card import parse_grid, parse_options, position_card
    from vlp.config import load_plugins

    load_plugins(plugin or ())
    card = position_card(name, parse_grid(grid), width, heads, parse_options(options or ()))
    print(card.text())
    if out is not None:
        card.draw(out)
        print(f"\nwritten to {out}")
