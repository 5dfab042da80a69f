"""Commands about position encodings: list, show one, compare several in a timm model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from evaluation.commands.options import EvaluationCommand, one_process
from vlp.process.command_line import Overrides, new_app, positive

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
    bias itself, with tables drawn from N(0, 1).

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


@positions_app.command(cls=EvaluationCommand)
def compare(
    model: Annotated[str, Option(metavar="NAME", help="of timm, such as vit_small_patch16_224")],
    encodings: Annotated[
        str,
        Option(
            metavar="NAME,...",
            help="of `vlp positions list`, as irpe-product:qk where it acts; none: no positions",
        ),
    ],
    data: Annotated[
        Path,
        Option(metavar="DIR", help="with train and test (or val): class folders, or tars of them"),
    ],
    test: Annotated[
        Path | None, Option(metavar="DIR", help="images to evaluate on, where --data has none")
    ] = None,
    out: Annotated[Path, Option(metavar="DIR", help="runs and report")] = Path("runs/compare"),
    seeds: Annotated[str, Option(metavar="N,...", help="two or more")] = "0,1,2",
    epochs: Annotated[int, Option(parser=positive, metavar="N", help="over the images")] = 10,
    steps: Annotated[
        int | None, Option(parser=positive, metavar="N", help="in place of --epochs")
    ] = None,
    image_size: Annotated[int, Option(parser=positive, metavar="N", help="pixels")] = 224,
    pretrained: Annotated[bool, Option("--pretrained", help="start from timm's weights")] = False,
    absolute: Annotated[
        Literal["keep", "drop"],
        Option(help="encodings stand beside the model's own positions, or replace them"),
    ] = "drop",
    reference: Annotated[
        str, Option(metavar="NAME", help="what is compared with; own: the model as it is")
    ] = "own",
    jobs: Annotated[int, Option(parser=positive, metavar="N", help="runs side by side")] = 1,
    plan: Annotated[bool, Option("--plan", help="only print what would be run")] = False,
    plugin: Plugin = None,
    overrides: Overrides = None,
) -> None:
    """Train a timm model with each of several encodings, and compare them over seeds.

    The report has means with intervals, differences to the reference with paired t-tests and Holm's
    correction: report.md, report.tex, figures.csv, figures.png and curves.png in --out. Runs that
    are finished are kept, so the same command goes on where it stopped.

    \b
      vlp positions compare --model vit_small_patch16_224 --encodings rope-mixed,irpe-product:k \\
          --data images --epochs 30 task.model.options='{depth: 6}' training.batch=64
    """
    import torch

    from evaluation.ablations.comparison import (
        check_models,
        find_data,
        parse_encodings,
        write_comparison,
    )
    from evaluation.ablations.config import AblationConfig
    from evaluation.commands.reports import ablate
    from vlp.config import ConfigError, load_config, load_plugins, parse_yaml

    one_process("a comparison runs side by side by itself: --jobs, not torchrun")
    load_plugins(plugin or ())
    parts = parse_encodings(encodings)
    if reference not in (*parts, "own", "none"):
        raise ConfigError(f"--reference {reference} is neither own, none nor in --encodings")
    if not all(each.strip().isdigit() for each in seeds.split(",")):
        raise ConfigError(f"--seeds {seeds}: write whole numbers with commas, such as 0,1,2")
    training: dict[str, object] = {
        "task.data.image_size": image_size,
        "training.precision": "bf16" if torch.cuda.is_available() else "float32",
        **({"training.steps": steps} if steps else {"training.epochs": epochs}),
    }
    for override in overrides or ():
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not an override; write key.sub=value")
        training[key] = parse_yaml(value)
    settings = {"name": model, "pretrained": pretrained}
    file = write_comparison(
        out, settings, parts, find_data(data, test), [int(each) for each in seeds.split(",")],
        training, absolute, reference, jobs, [str(Path(p).resolve()) if p.endswith(".py") else p
                                              for p in plugin or ()],
    )  # fmt: skip
    check_models(load_config(file, AblationConfig), file)
    ablate(file, plan=plan)
