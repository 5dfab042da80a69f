"""`vlp info`: a run, or the installation; `vlp config keys`: configuration keys."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import PydanticUndefined
from typer import Option

from vlp.command_line import Command, new_app
from vlp.config import Config, schema_fields
from vlp.lock import owner_of

OPTIONAL = ("pycocoevalcap", "pycocotools", "gradio", "wandb", "mlflow-skinny")
PROJECT_PACKAGES = ("vlp", "data_tools", "evaluation", "launch", "configs")


def info(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="run folder")] = None,
) -> int:
    """Print a run's progress and settings; without RUN the versions, devices and locations.

    \b
      vlp info runs/base
    """
    if run is None:
        _print_installation()
        return 0
    from evaluation.samples import EvaluationError

    try:
        for title, rows in _run_tables(run):
            print(title)
            for name, value in rows:
                print(f"  {name:22} {value}")
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run_tables(folder: Path) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    """Yield titles and (name, value) rows: summary, last figures, starts, settings."""
    from evaluation.report.sources import read_sources, settings, training_summary
    from vlp.training.run_folder import read_starts

    [source] = read_sources([folder])
    starts: list[dict[str, Any]] = read_starts(folder)["starts"]
    step_lines = [line for line in source.log if "samples" in line]
    owner = owner_of(folder)
    if owner is None:
        yield str(folder), list(training_summary(source))
    else:
        total = starts[-1].get("total_steps") if starts else None
        yield f"{folder}, written by {owner}", list(_running_rows(step_lines, total))
    validations = [line for line in source.log if "validation/mean" in line]
    for title, lines in (("last figures", step_lines), ("last validation", validations)):
        if lines:
            numbers = {k: v for k, v in lines[-1].items() if isinstance(v, int | float)}
            yield title, [(name, f"{value:.4g}") for name, value in numbers.items()]
    for start in starts:
        title = f"started {start.get('started')} at step {start.get('step')}"
        yield title, list(_start_rows(start))
    yield "settings", settings(source)


def _running_rows(
    lines: Sequence[Mapping[str, Any]], total: int | None
) -> Iterator[tuple[str, str]]:
    """Yield the step of an active run and the time left, by the pace of the last two log lines."""
    if not lines:
        yield "step", f"0 of {total}, none logged yet"
        return
    last = lines[-1]
    yield "step", f"{last['step']} of {total}"
    if len(lines) > 1 and total:
        previous = lines[-2]
        pace = (last["seconds"] - previous["seconds"]) / max(last["step"] - previous["step"], 1)
        yield "time left", f"{(total - last['step']) * pace / 3600:.2f} h, {pace:.3g} s a step"


def _start_rows(start: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "command", shlex.join(start.get("command", []))
    for item in start.get("devices", []):
        yield "ranks", f"{item['ranks']} on {item['host']}, {item['device']}"
    for item in start.get("git", []):
        changes = " + changes" if item["changed"] else ""
        yield "commit", f"{item['repository']} {item['commit']}{changes}"
    versions = start.get("versions", {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    data = start.get("data", {})
    yield "data", ", ".join(f"{name} {value[:12]}" for name, value in data.items())


def _print_installation() -> None:
    import torch

    import vlp
    from vlp.training.run_folder import PACKAGES, versions

    print(f"vlp {vlp.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("\nversions")
    version_by_name = versions((*PACKAGES, *OPTIONAL))
    for name in (*PACKAGES, *OPTIONAL):
        print(f"  {name:14} {version_by_name.get(name, 'not installed')}")
    print("\ndevices")
    print(f"  {'cpu':14} {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        print(f"  {f'cuda:{index}':14} {properties.name}, {memory:.0f} GiB")
    print("\nlocations")
    for name in PROJECT_PACKAGES:
        spec = importlib.util.find_spec(name)
        paths = [] if spec is None else list(spec.submodule_search_locations or ())
        print(f"  {name:14} {paths[0] if paths else 'not installed'}")


config_app = new_app("Look up configuration keys.")


@config_app.command(cls=Command)
def keys(
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="regular expression that a key matches")
    ] = None,
    of: Annotated[
        Literal["pretrain", "finetune", "vision"], Option(help="kind of training")
    ] = "pretrain",
) -> int:
    """List configuration keys with defaults and descriptions.

    \b
      vlp config keys warmup
    """
    from vlp.training.config import FinetuneConfig, PretrainConfig, VisionConfig

    schemas: dict[str, type[Config]] = {
        "pretrain": PretrainConfig,
        "finetune": FinetuneConfig,
        "vision": VisionConfig,
    }
    try:
        matches = re.compile(pattern or "").search
    except re.error as error:
        raise typer.BadParameter(f"PATTERN {pattern!r}: {error}") from error
    for path, field in schema_fields(schemas[of]):
        if matches(path):
            default = field.get_default(call_default_factory=True, validated_data={})
            is_plain = isinstance(default, str | int | float | tuple | None)
            default_text = f" = {default}" if is_plain and default is not PydanticUndefined else ""
            print(f"{path}{default_text}\n    {field.description or ''}".rstrip())
    return 0
