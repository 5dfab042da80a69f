"""Trainings that a comparison is made of: done side by side, once each, and resumable.

A run that is finished is never done again, one that was cut off goes on from its checkpoint.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator

from data_tools.executor import Executor, go_on
from vlp.config import ConfigError, load_config
from vlp.io import parse_json, write_json
from vlp.signals import end_with_parent

if TYPE_CHECKING:
    from vlp.training.config import RunConfig

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
RESULT, SETTINGS = "result.json", "settings.json"
_WATCH_SECONDS = 0.5

Evaluate = Callable[[Path, int], dict[str, float]]
"""Model folder and number of threads to figures by name; None where a run is not evaluated."""

Results = dict[tuple[str, int], dict[str, Any]]
"""Contents of `result.json`, by variant and seed."""


def _told_once(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse `training.steps` beside `training`: their order would say which of them counts."""
    for key in overrides:
        for outer in overrides:
            if key.startswith(f"{outer}."):
                raise ValueError(
                    f"{key} and {outer} are both there; on the command line write "
                    f"overrides='{{{key}: ...}}' for the first"
                )
    return overrides


Overrides = Annotated[Mapping[str, Any], AfterValidator(_told_once)]
"""Values by dotted key of the configuration that runs train with."""


class Run(NamedTuple):
    """One training: where it lies, what it is made of, and the script that does it.

    `settings` has `config`, a file as `portable` names it, `overrides` by dotted key, and
    `configuration`, the values of both; whatever else is in it makes the run another one. `words`
    come before `--config` on the script's command line.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    script: str = "pretrain.py"
    words: tuple[str, ...] = ()

    def changes(self) -> list[str]:
        """The overrides as a command line has them."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings["overrides"].items()]

    def read(self) -> RunConfig:
        """Read the configuration that the script trains with.

        Raises:
            ConfigError: it cannot be used.
        """
        from vlp.training.config import PretrainConfig
        from vlp.training.finetune_config import FinetuneConfig
        from vlp.training.vision_config import VisionConfig

        schemas: dict[str, type[RunConfig]] = {
            "pretrain.py": PretrainConfig,
            "train_vision.py": VisionConfig,
        }
        file = LAUNCH.parent / self.settings["config"]
        schema = schemas.get(self.script, FinetuneConfig)
        return load_config(file, schema, self.changes(), "its overrides")


def portable(file: Path) -> str:
    """A file of this checkout by its place in it, so that results may move with the checkout."""
    root, file = LAUNCH.parent, file.resolve()
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from a file: JSON knows no tuples."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def finished(run: Run) -> dict[str, Any] | None:
    """The result of a run that is done, or None.

    Raises:
        ConfigError: its folder holds a run of other settings, finished or not.
    """
    result, begun = (
        parse_json(file.read_text(encoding="utf-8")) if file.is_file() else None
        for file in (run.folder / RESULT, run.folder / SETTINGS)
    )
    if (stored := result["settings"] if result else begun) is not None:
        _require_same(run, stored)
    return result


def _require_same(run: Run, stored: Mapping[str, Any]) -> None:
    """Refuse stored settings that are not the run's, but for what changes no training."""
    from vlp.training.config_differences import compare

    told, own = dict(stored), dict(run.settings)
    before, now = told.pop("configuration", None), own.pop("configuration", None)
    why = ""
    if told == own:
        if before in (None, now):  # earlier versions stored none
            return
        differences = compare(before, now, run.read())
        if not (found := differences.fatal + differences.tolerated):
            return
        why = f" ({found[0]})"
    raise ConfigError(
        f"{run.folder} holds a run of other settings{why}: delete it, or change output"
    )


def write_csv(file: Path, results: Results) -> None:
    """Every figure of every run, a line each."""
    names = sorted({name for result in results.values() for name in result["figures"]})
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["variant", "seed", *names])
        for (variant, seed), result in sorted(results.items()):
            cells = [result["figures"].get(name, "") for name in names]
            writer.writerow([variant, seed, *cells])


def do_runs(
    runs: Sequence[Run], jobs: int, evaluate: Evaluate | None, say: Callable[[str], object] = print
) -> None:
    """Do what is not done yet, `jobs` side by side; they share the cores.

    Raises:
        ConfigError: there is no checkout to train from, a folder holds a run of other settings,
            or a training failed (its log is named).
    """
    if not LAUNCH.is_dir():
        raise ConfigError(f"comparisons train with {LAUNCH}, which only a checkout has")
    todo = [run for run in runs if finished(run) is None]
    say(f"{len(runs)} runs, {len(runs) - len(todo)} of them done")
    # They share the cores.
    work = partial(_named, evaluate=evaluate, threads=max(1, (os.cpu_count() or 1) // jobs))
    results = Executor(jobs, fresh=True).map(work, todo, ordered=False)
    for number, (name, seconds) in enumerate(results, 1):
        say(f"  {number}/{len(todo)} {name}: {seconds:.0f} s")


def _named(run: Run, evaluate: Evaluate | None, threads: int) -> tuple[str, float]:
    go_on()
    try:
        return run.name, execute(run, evaluate, threads)
    except Exception as error:
        error.add_note(f"This was {run.name}, in {run.folder}.")
        raise


def execute(run: Run, evaluate: Evaluate | None, threads: int) -> float:
    """Train and evaluate one run with so many threads; returns the seconds it took.

    `training` in its result is the cost of training alone: steps and seconds, of all starts.
    """
    started = time.monotonic()
    if not (run.folder / "model").is_dir():
        _train(run, threads)
    result: dict[str, Any] = {"settings": run.settings, "figures": {}}
    if evaluate is not None:
        result["figures"] = evaluate(run.folder / "model", threads)
    report = run.folder / "report.json"
    if report.is_file():
        trained = parse_json(report.read_text(encoding="utf-8"))
        result["training"] = {"steps": trained["step"], "seconds": trained["seconds"]}
    result["seconds"] = time.monotonic() - started
    write_json(run.folder / RESULT, result, indent=1)
    return time.monotonic() - started


def _train(run: Run, threads: int) -> None:
    from vlp.training.engines.environment import free_port

    log = run.folder.with_suffix(".log")
    write_json(run.folder / SETTINGS, run.settings, indent=1)
    script = str(LAUNCH / run.script)
    config = str(LAUNCH.parent / run.settings["config"])
    command = [sys.executable, script, *run.words, "--config", config, "--resume"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(LAUNCH.parent), os.environ.get("PYTHONPATH")])
        ),
    }
    with log.open("ab") as file:
        training = subprocess.Popen(
            [*command, f"output={run.folder}", *run.changes()],
            env=environment, stdout=file, stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )  # fmt: skip
    code = _end_of(training)
    if code or not (run.folder / "model").is_dir():
        raise ConfigError(f"{run.name} ended with code {code}; see {log}")


def _end_of(training: subprocess.Popen[bytes]) -> int:
    """Wait for a training; when nobody wants it any more, it ends with a checkpoint."""
    while True:
        try:
            go_on()
            return training.wait(_WATCH_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        except BaseException:
            training.terminate()
            training.wait()
            raise
