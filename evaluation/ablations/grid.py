"""Runs of an ablation: each variant trained with each seed by `vlp train` or `vlp finetune`.

Finished runs are reused, interrupted runs resume, and a changed evaluation needs no new training.
OUTPUT/VARIANT/SEED is a run's folder; `result.json` holds its figures, `queries.csv` ranks.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.executor import Executor, raise_if_stopped
from evaluation.ablations.config import AblationConfig
from evaluation.vision.frozen import FrozenConfig, fit, load_tokens
from vlp.config import ConfigError, load_config, parse_yaml, read_values, save_config
from vlp.io import parse_json, remove, write_json
from vlp.signals import end_with_parent
from vlp.training.config import FinetuneConfig, PretrainConfig, RunConfig, VisionConfig
from vlp.training.run_folder import compare, read_log

VLP = (sys.executable, "-m", "launch")
RESULT = "result.json"
_POLL_SECONDS = 0.2
# Steps of a run whose rate is measured over the second half; the first steps load and compile.
_TIMED_STEPS = 24

# Figures by variant and seed.
Results = dict[tuple[str, int], dict[str, float]]
# Evaluates a run's folder with a number of threads; returns the contents of `result.json`.
Evaluate = Callable[[Path, int], dict[str, Any]]


class Run(NamedTuple):
    """One training: name `VARIANT/SEED`, folder, command, and the configuration of the command."""

    name: str
    folder: Path
    command: Sequence[str]
    config: Path = Path()
    changes: Sequence[str] = ()
    schema: type[RunConfig] = PretrainConfig

    @property
    def variant(self) -> str:
        """Return the name without the seed."""
        return self.name.rpartition("/")[0]

    def read(self) -> RunConfig:
        """Return the resolved configuration of the training."""
        return load_config(self.config, self.schema, self.changes, "its overrides")

    def result(self, evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the stored result; None if missing or of another evaluation (None: any)."""
        file = self.folder / RESULT
        stored = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else None
        return stored if stored and evaluation in (None, stored["evaluation"]) else None


def plan(config: AblationConfig, source: Path, only: Sequence[str] = ()) -> list[Run]:
    """List the runs of the variants `only` (empty: of all variants); `source` is `config`'s file.

    Variants with the most seeds come first, seed by seed, so that an interrupted ablation has
    complete seeds.
    """
    if unknown := sorted(set(only) - set(config.variants)):
        names = ", ".join(config.variants)
        raise ConfigError(f"unknown variants {', '.join(unknown)}; there are {names}")
    seeds = {
        name: config.seeds[: variant.seeds]
        for name, variant in config.variants.items()
        if not only or name in only
    }
    order = [(name, index) for name, group in seeds.items() for index in range(len(group))]
    order.sort(key=lambda entry: (-len(seeds[entry[0]]), entry[1]))
    file = source.parent / config.training.config
    task = read_values(file)[0].get("task")
    schema: type[RunConfig] = PretrainConfig if task is None else VisionConfig
    subcommand = ["train"]
    if config.fine_tuned is not None:
        schema, subcommand = FinetuneConfig, ["finetune", task["kind"] if task else ""]
    runs = []
    for name, index in order:
        seed = seeds[name][index]
        folder = Path(config.output) / name / str(seed)
        overrides = {**config.training.overrides, **config.variants[name].overrides}
        overrides |= {"training.seed": seed, "output": str(folder)}
        changes = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        changes = [change.replace("{seed}", str(seed)) for change in changes]
        command = [*VLP, *subcommand, "--config", str(file), "--ranks", "1", "--resume", *changes]
        runs.append(Run(f"{name}/{seed}", folder, command, file, changes, schema))
    return runs


def check(runs: Sequence[Run]) -> None:
    """Raise ConfigError for wrong settings, or a folder with a run of other settings."""
    check_settings(runs)
    for run in runs:
        if (file := run.folder / "config.yaml").is_file():
            config = run.read()
            saved = parse_yaml(file.read_text(encoding="utf-8"))
            # A run resumes despite tolerated differences, but its figures would mix two settings.
            comparison = compare(saved, config.model_dump(mode="json"), config)
            if differences := comparison.fatal + comparison.tolerated:
                raise ConfigError(
                    f"{run.folder} holds a run of other settings ({differences[0]}): delete it, or "
                    "change output"
                )


def check_settings(runs: Sequence[Run]) -> None:
    """Raise ConfigError for wrong settings of a variant.

    Seeds of a variant share settings, so one run of each variant is read.
    """
    for run in {run.variant: run for run in runs}.values():
        try:
            run.read()
        except ConfigError as error:
            raise ConfigError(f"variant {run.variant}: {error}") from error


def results(config: AblationConfig, source: Path) -> Results:
    """Return the figures of all finished runs."""
    run_results = {
        (run.variant, int(run.folder.name)): run.result(config.evaluation())
        for run in plan(config, source)
    }
    return {key: result["figures"] for key, result in run_results.items() if result is not None}


def run_ablation(config: AblationConfig, source: Path, only: Sequence[str] = ()) -> Results:
    """Prepare, train and evaluate whatever lacks a result; return figures of all finished runs."""
    from evaluation.ablations.figures import evaluate_run

    runs = plan(config, source, only)
    check(runs)
    for number, step in enumerate(config.prepare):
        if step.makes is None or not Path(step.makes).exists():
            print(f"vlp {step.run}")
            log = Path(config.output) / f"prepare-{number}.log"
            run_with_log([*VLP, *shlex.split(step.run)], log, os.cpu_count() or 1)
    if config.frozen is not None:
        _train_frozen(runs, config, config.frozen)
    else:
        evaluate = partial(evaluate_run, config=config)
        do_runs(runs, config.jobs, evaluate, config.evaluation())
    return results(config, source)


def steps_within(
    seconds: float, runs: Sequence[Run], out: Path, overrides: Mapping[str, Any], jobs: int
) -> int:
    """Return the steps of the slowest variant in `seconds`, without start and evaluation.

    `out`/rate.json keeps the rates, so that a resumed comparison has the same steps.
    """
    file, folder = out / "rate.json", out / "rate"
    variants = list(dict.fromkeys(run.variant for run in runs))
    stored = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rates = stored["step_seconds"] if stored.get("overrides") == dict(overrides) else {}
    if new := [variant for variant in variants if variant not in rates]:
        print(f"timing {_TIMED_STEPS} steps of {', '.join(new)}")
        remove(folder)
        time_run = partial(_time_steps, folder=folder, threads=(os.cpu_count() or 1) // jobs or 1)
        # As many runs side by side as later, since they share the machine.
        timed = sorted(runs, key=lambda run: run.variant not in new)[: max(jobs, len(new))]
        measured = Executor(jobs, spawn=True).map(time_run, timed)
        # Of two seeds of a variant the slower counts.
        new_rates = dict(sorted(measured, key=lambda rate: rate[1]))
        rates |= {variant: new_rates[variant] for variant in new}
        write_json(file, {"overrides": dict(overrides), "step_seconds": rates})
        remove(folder)
    slowest = max(variants, key=rates.__getitem__)
    steps = max(1, int(seconds / rates[slowest]))
    print(
        f"{steps} steps a run: the slowest encoding, {slowest}, takes {rates[slowest]:.3g} s a step"
    )
    return steps


def _time_steps(run: Run, folder: Path, threads: int) -> tuple[str, float]:
    """Train a variant for a few steps; return its name and the seconds of a step."""
    target = folder / run.name
    half = _TIMED_STEPS // 2
    changes = [f"output={json.dumps(str(target))}", f"training.steps={_TIMED_STEPS}"]
    changes += [f"training.log_every={half}", "training.trackers=[]"]
    run_with_log([*run.command, *changes], Path(f"{target}.log"), threads)
    first, last = (record["seconds"] for record in read_log(target / "log.jsonl")[0])
    return run.variant, (last - first) / half


def do_runs(
    runs: Sequence[Run],
    jobs: int,
    evaluate: Evaluate,
    evaluation: dict[str, Any] | None = None,
) -> None:
    """Train and evaluate the runs without a result of this evaluation, `jobs` side by side."""
    todo = _unfinished(runs, evaluation)
    # Runs share the cores. The user may set threads: of "4,2", the outer of two nested levels.
    outer_level = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(outer_level or max(1, (os.cpu_count() or 1) // jobs))
    work = partial(_work, evaluate=evaluate, threads=threads)
    done = Executor(jobs, spawn=True).map(work, todo, ordered=False)
    for number, (name, seconds) in enumerate(done, 1):
        print(f"  {number}/{len(todo)} {name}: {seconds:.0f} s")


def _unfinished(runs: Sequence[Run], evaluation: dict[str, Any] | None) -> list[Run]:
    """Return the runs without a result of this evaluation; print how many are done."""
    todo = [run for run in runs if run.result(evaluation) is None]
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done")
    return todo


def _work(run: Run, evaluate: Evaluate, threads: int) -> tuple[str, float]:
    """Train and evaluate one run; return its name and the seconds."""
    # Raises if the pool was interrupted, before the next training starts.
    raise_if_stopped()
    started = time.monotonic()
    try:
        # A training writes the model folder last: without it, the training resumes.
        if not (run.folder / "model").is_dir():
            run_with_log(run.command, run.folder.with_suffix(".log"), threads)
        write_json(run.folder / RESULT, evaluate(run.folder, threads), indent=1)
    except Exception as error:
        error.add_note(f"This was {run.name}, in {run.folder}.")
        raise
    return run.name, time.monotonic() - started


def _train_frozen(runs: Sequence[Run], config: AblationConfig, frozen: FrozenConfig) -> None:
    """Train and test runs one after another; all read the same stored tokens."""
    evaluation = config.evaluation()
    todo = _unfinished(runs, evaluation)
    for number, run in enumerate(todo, 1):
        training = run.read()
        if not isinstance(training, VisionConfig):
            raise ConfigError(f"frozen: {run.config} is no training of a vision model")
        file = Path(config.output) / "tokens.safetensors"
        figures = fit(training, frozen, load_tokens(file, training, frozen, config.limit))
        save_config(training, run.folder / "config.yaml")
        write_json(run.folder / RESULT, {"evaluation": evaluation, "figures": figures}, indent=1)
        print(f"  {number}/{len(todo)} {run.name}")


def run_with_log(command: Sequence[str], log: Path, threads: int) -> None:
    """Run a command with its output in `log`, and terminate it if the caller is interrupted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # In a checkout, the command imports the modules of the checkout, too.
    path = os.pathsep.join(filter(None, sys.path))
    omp_threads = os.environ.get("OMP_NUM_THREADS") or str(threads)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": omp_threads, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )
    try:
        while process.poll() is None:
            raise_if_stopped()
            time.sleep(_POLL_SECONDS)
    finally:
        # An interrupted training writes a checkpoint; for an ended process this does nothing.
        process.terminate()
        process.wait()
    if process.returncode:
        raise ConfigError(f"{log.stem} ended with code {process.returncode}; see {log}")
