"""Commands that train a grid of variants and seeds: `ablate`, `reproduce`, `positions compare`."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from evaluation.commands.options import EvaluationCommand, require_single_process
from evaluation.commands.positions import Plugin, positions_app
from vlp.command_line import Overrides, nearest, new_app, positive

if TYPE_CHECKING:
    from evaluation.ablations.config import AblationConfig

app = new_app()
RESULTS = Path("configs/ablation/results/tables.yaml")
# Variants of the model with its default positions, and without positions.
OWN, NONE = "own", "none"


@app.command(cls=EvaluationCommand)
def ablate(
    config: Annotated[Path, Option(metavar="FILE", help="variants, seeds and tables")],
    report: Annotated[
        bool, Option("--report", help="only print the tables of finished runs; train nothing")
    ] = False,
    only: Annotated[
        str,
        Option(
            metavar="NAME,...", help="train these variants now; the tables show all that are there"
        ),
    ] = "",
    plan: Annotated[bool, Option("--plan", help="only print what would be run")] = False,
    overrides: Overrides = None,
) -> None:
    """Train variants of a model with several seeds, evaluate them, and print tables.

    Finished runs are reused, so the same command resumes an ablation. If only the evaluation
    changed, finished runs are evaluated again.

    \b
      vlp ablate --config configs/ablation/cross_distance.yaml
    """
    from evaluation.ablations.config import AblationConfig
    from vlp.config import config_file, load_config

    # Paths of the training configurations are relative to the file's folder.
    config = config_file(config)
    ablation = load_config(config, AblationConfig, overrides or ())
    _run(ablation, config, only, plan=plan, report=report)


@app.command(cls=EvaluationCommand)
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="of a result; without it: the list")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="of the runs (default runs/reproduce/NAME)")
    ] = None,
    seeds: Annotated[str, Option(metavar="N,...", help="instead of the result's")] = "",
    only: Annotated[str, Option(metavar="NAME,...", help="train these variants alone")] = "",
    plan: Annotated[bool, Option("--plan", help="only print what would be run")] = False,
    overrides: Overrides = None,
) -> int:
    """Run a result of docs/results again, and print its stored tables and the new ones.

    Finished runs in --out are reused, so the same command resumes an interrupted result.

    \b
      vlp reproduce fourier_widgets --seeds 0,1 --only embed,sine
    """
    from evaluation.ablations.config import AblationConfig, ResultsConfig
    from evaluation.ablations.grid import VLP
    from evaluation.ablations.tables import read_figures, stored_tables
    from vlp.config import config_file, load_config

    registry = config_file(RESULTS)
    results = load_config(registry, ResultsConfig).tables
    if name is None:
        print("\n".join(f"{key}: {result.about}" for key, result in results.items()))
        return 0
    if name not in results:
        raise typer.BadParameter(f"unknown result {name!r}; {nearest(name, list(results))}")
    result = results[name]
    if result.ablation is None:
        return subprocess.run([*VLP, *shlex.split(result.command)], check=False).returncode
    source = registry.parent.parent / result.ablation
    changes = [*result.overrides, f"output={out or f'runs/reproduce/{name}'}"]
    changes += [f"seeds=[{seeds}]"] if seeds else []
    config = load_config(source, AblationConfig, [*changes, *(overrides or ())])
    if (stored := registry.parent / f"{name}.csv").is_file():
        figures = read_figures(stored)
        print("Stored:", *(table.text() for table in stored_tables(config, figures)), sep="\n\n")
    _run(config, source, only or ",".join(result.variants), plan=plan)
    return 0


@positions_app.command(cls=EvaluationCommand)
def compare(
    model: Annotated[str, Option(metavar="NAME", help="of timm, such as vit_small_patch16_224")],
    encodings: Annotated[
        str,
        Option(
            metavar="NAME,...",
            help="of `vlp positions list`, with roles and options as in irpe-product:qk:mode=bias; "
            "none: no positions",
        ),
    ],
    train: Annotated[str, Option(metavar="DIR", help="class folders of images, or a tar of them")],
    test: Annotated[str, Option(metavar="DIR", help="the same, to evaluate on")],
    out: Annotated[Path, Option(metavar="DIR", help="runs and report")] = Path("runs/compare"),
    seeds: Annotated[str, Option(metavar="N,...", help="two or more")] = "0,1,2",
    epochs: Annotated[
        int | None, Option(parser=positive, metavar="N", help="over the images (default 10)")
    ] = None,
    minutes_a_run: Annotated[
        int | None,
        Option(
            parser=positive,
            metavar="N",
            help="in place of --epochs: as many steps for all as the slowest encoding trains in "
            "these minutes, timed first",
        ),
    ] = None,
    absolute: Annotated[
        Literal["keep", "drop"],
        Option(help="encodings stand beside the model's own positions, or replace them"),
    ] = "drop",
    reference: Annotated[
        str, Option(metavar="NAME", help="encoding to compare with; own: the unchanged model")
    ] = OWN,
    jobs: Annotated[int, Option(parser=positive, metavar="N", help="runs side by side")] = 1,
    plan: Annotated[
        bool, Option("--plan", help="only print what would be run; --minutes-a-run times first")
    ] = False,
    plugin: Plugin = None,
    overrides: Overrides = None,
) -> None:
    """Train a timm model with each of several encodings, and compare them over seeds.

    The report has means with intervals, differences to the reference with paired t-tests and Holm's
    correction: report.md, report.tex, figures.csv and tests.csv in --out. Finished runs are reused,
    so the same command resumes a comparison.

    \b
      vlp positions compare --model vit_small_patch16_224 --encodings rope-mixed,irpe-product:k \\
          --train images/train --test images/test --epochs 30 task.data.image_size=112
    """
    import torch

    from evaluation.ablations.config import AblationConfig
    from evaluation.ablations.grid import check, check_settings, steps_within
    from evaluation.ablations.grid import plan as plan_runs
    from vlp.config import ConfigError, dump_yaml, load_plugins, parse_override, validate
    from vlp.io import write_text
    from vlp.models.vision.backbone import create_backbone

    load_plugins(plugin or ())
    # Encoding of each variant. `own` or `none` is the first row if it is the reference.
    variants: dict[str, dict[str, Any]] = {}
    first_row = [reference] if reference in (OWN, NONE) else []
    for spec in first_row + encodings.split(","):
        name, *settings = spec.strip().split(":")
        encoding: dict[str, Any] = {"name": name, "options": {}}
        for setting in settings:
            key, equals, _ = setting.partition("=")
            if key in encoding["options"] or (not equals and "roles" in encoding):
                raise ConfigError(f"{spec.strip()!r}: give roles and each option once")
            if equals:
                encoding["options"][key] = parse_override(setting)[1]
            else:
                encoding["roles"] = setting
        variants[spec.strip()] = {} if name in (OWN, NONE) else encoding
    changes: dict[str, Any] = {
        "task.model.name": model,
        "task.data.train": train,
        "task.data.test": test,
        "training.precision": "bf16" if torch.cuda.is_available() else "float32",
        "training.epochs": epochs or 10,
    }
    user_changes = dict(map(parse_override, overrides or ()))
    changes |= user_changes
    if minutes_a_run and (epochs or user_changes.keys() & {"training.steps", "training.epochs"}):
        raise ConfigError("--minutes-a-run sets the steps: leave out --epochs and training.steps")
    values = {
        "output": str(out),
        "plugins": [str(Path(p).resolve()) if p.endswith(".py") else p for p in plugin or ()],
        "seeds": parse_override(f"seeds=[{seeds}]")[1],
        "jobs": jobs,
        "training": {"config": "training.yaml", "overrides": changes},
        "variants": {
            name: {
                "overrides": {
                    "task.model.positions": [encoding] if encoding else [],
                    "task.model.absolute": {OWN: "keep", NONE: "drop"}.get(name, absolute),
                }
            }
            for name, encoding in variants.items()
        },
        "tables": [
            {
                "title": f"Position encodings in {model}",
                "figures": {"top-1": "top1", "top-5": "top5", "loss": "loss"},
                "reference": reference,
                "decimals": 2,
                "rows": [{"label": name, "variant": name} for name in variants],
            }
        ],
    }
    config = validate(values, AblationConfig, "vlp positions compare")
    training = "task: {kind: classification}\n"
    # Everything is checked, encodings by building the models, before --out is written.
    with tempfile.TemporaryDirectory() as scratch:
        write_text(Path(scratch) / "training.yaml", training)
        check_settings(runs := plan_runs(config, Path(scratch) / "comparison.yaml"))
        for run in {run.variant: run for run in runs}.values():
            task: Any = run.read().task  # type: ignore[attr-defined]
            untrained = task.model.model_copy(update={"pretrained": False})
            create_backbone(untrained, num_classes=2, img_size=task.data.image_size)
    # The comparison is an ablation: its file can be edited and run by `vlp ablate`.
    file = out / "comparison.yaml"
    write_text(out / "training.yaml", training)
    if minutes_a_run:
        runs = plan_runs(config, file)
        changes["training.steps"] = steps_within(60 * minutes_a_run, runs, out, changes, jobs)
        config = validate(values, AblationConfig, "vlp positions compare")
    check(plan_runs(config, file))
    write_text(file, f"# vlp ablate --config {file}\n{dump_yaml(values)}")
    _run(config, file, plan=plan)


def _run(
    config: AblationConfig,
    source: Path,
    only: str = "",
    *,
    plan: bool = False,
    report: bool = False,
) -> None:
    """Run an ablation and print its tables; plan: print the runs; report: train nothing."""
    from evaluation.ablations.grid import check, results, run_ablation
    from evaluation.ablations.grid import plan as plan_runs
    from evaluation.ablations.tables import report as report_tables
    from evaluation.ablations.tables import to_frame

    require_single_process("run an ablation without torchrun; `jobs` sets the runs side by side")
    names = tuple(only.split(",")) if only else ()
    if plan:
        check(runs := plan_runs(config, source, names))
        print(*(f"vlp {step.run}" for step in config.prepare), sep="\n")
        print(*(run.name for run in runs if run.result(config.evaluation()) is None))
        print(f"{len(runs)} runs, {config.jobs} side by side; above those to do")
        return
    figures = results(config, source) if report else run_ablation(config, source, names)
    print(report_tables(config, to_frame(figures)))
    print(f"\nwritten to {config.output}: tables and figures")
