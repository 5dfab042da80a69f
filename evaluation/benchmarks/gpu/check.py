"""`vlp check gpu`: every part in a process of its own, a table of promised and measured figures."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu import (
    correctness,
    device,
    engines,
    equal_work,
    kernels,
    speed,
    waits,
)
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from vlp.config import ConfigError, load_config
from vlp.io import write_text
from vlp.training.config import PretrainConfig


class Part(NamedTuple):
    """One part: what measures, seconds that it may take.

    beside: it measures no speed, and runs beside others; tiny: small on a GPU, too.
    """

    measure: Callable[[Setting], Iterator[CheckedFigure]]
    limit: float
    beside: bool = False
    tiny: bool = False


COMPILING = "C compiling"
PARTS = {
    "A device": Part(device.measure, 30),
    "B kernels": Part(kernels.kernels, 240, beside=True),
    "B losses": Part(correctness.losses, 240, beside=True, tiny=True),
    "B tasks": Part(correctness.tasks, 240, beside=True, tiny=True),
    "B waits": Part(waits.waits, 240, beside=True, tiny=True),
    "B engines": Part(engines.resuming, 240, beside=True, tiny=True),
    f"{COMPILING} blocks": Part(speed.compiling_blocks, 240, beside=True),
    f"{COMPILING} without ACE-RPE": Part(speed.compiling_without_anchors, 240, beside=True),
    f"{COMPILING} step": Part(speed.compiling_steps, 240, beside=True),
    "C attention": Part(speed.attention, 20),
    "C loader": Part(speed.loading, 30),
    "C equal work": Part(equal_work.equal_work, 40),
    "C sizes": Part(speed.sizes, 60),
    "C blocks": Part(speed.blocks, 90),
    "C ACE-RPE": Part(speed.anchors, 90),
    "C encodings": Part(speed.encodings, 90),
    "C re-ranking": Part(speed.reranking, 60),
    "C step": Part(speed.whole_steps, 90),
}
"""By name, in order; the last have what time the others leave them of `SECONDS`.

Short ones come first: a second check, which finds compiled graphs on disk, has time for the rest.
"""
SEVERAL = {"D engines": Part(engines.several, 120, tiny=True)}
"""Where there are several GPUs, with time of their own."""
LATE = "took more than"
SECONDS = 480
"""Of all parts of one GPU together."""

_TINY = (
    "model.text.layers=1",
    "model.image.layers=1",
    "model.cross.layers=1",
    "model.text.width=16",
    "model.image.width=16",
    "model.text.heads=2",
    "model.image.heads=2",
    "model.cross.heads=2",
    "model.text.intermediate=16",
    "model.image.intermediate=16",
    "model.cross.intermediate=16",
    "model.text.vocab_size=64",
    "model.text.max_tokens=8",
    "model.text.max_positions=8",
    "model.image.image_size=16",
    "model.image.patch_size=8",
    "model.cross.anchor.groups=2",
    "model.embed_dim=16",
    "objectives.teacher={queue: 16}",
    "objectives.itm.group=4",
)


def run_check(config: Path, out: Path, dry: bool = False, only: str = "") -> int:
    """Run all parts, print and write the table; returns the exit code.

    Args:
        config: of the pretraining that is timed.
        out: folder of `check.md`, `figures.jsonl`, profiler traces and a log of each part.
        dry: go through all parts on the CPU at tiny sizes, without promises of speed.
        only: a prefix of the names of parts.

    Returns:
        0; 1 where a part failed or a figure of correctness breaks its promise; 2 without a GPU. A
        measurement of speed that there was no time for is no failure, and neither is one whose
        graphs could not be compiled ahead of it, such as for want of memory.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    if not dry and not torch.cuda.is_available():
        print("error: PyTorch sees no GPU; --dry goes through all parts here", file=sys.stderr)
        return 2
    parts = PARTS | (SEVERAL if dry or torch.cuda.device_count() > 1 else {})
    chosen = {name: part for name, part in parts.items() if name.startswith(only)}
    if not chosen:
        raise ConfigError(f"--only {only}: the parts are {', '.join(parts)}")
    out.mkdir(parents=True, exist_ok=True)
    place = torch.device("cpu" if dry else "cuda")
    public = ("model.text.weights=null", "model.image.weights=null")
    found: dict[str, list[CheckedFigure]] = {}
    failures: dict[str, str] = {}
    ends = time.monotonic() + SECONDS

    def run(name: str, part: Part) -> None:
        changes = (*public, *(_TINY if dry or part.tiny else ()))
        rows = (4,) if dry else (32, 64, 128)
        setting = Setting(load_config(config, PretrainConfig, changes), rows, place, dry, out)
        began = time.monotonic()
        limit = part.limit if name in SEVERAL else max(0.0, min(part.limit, ends - began))
        found[name], failure = _in_process(name, part._replace(limit=limit), setting)
        if failure:
            failures[name] = failure
        print(f"{name}: {failure or 'done'}, {time.monotonic() - began:.0f} s", flush=True)

    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload([__name__, "vlp.training.engines.deepspeed"])
    for several in _turns(chosen, dry):
        with ThreadPoolExecutor(len(several)) as pool:
            list(pool.map(run, several, (chosen[name] for name in several)))
    found = {name: found[name] for name in chosen}
    failures = {name: failures[name] for name in chosen if name in failures}
    wrong = sum(not _harmless(*each) for each in failures.items())
    _add_demand(found)
    if not dry:
        print(f"\n{_table(found)}")
    write_text(out / "check.md", _page(found, failures, dry))
    lines = (
        json.dumps({"part": name} | figure._asdict() | {"holds": figure.holds})
        for name, figures in found.items()
        for figure in figures
    )
    write_text(out / "figures.jsonl", "\n".join(lines) + "\n")
    for figure in (f for each in found.values() for f in each if f.correctness and not f.holds):
        wrong += 1
        print(f"wrong: {figure.name}: {figure.value:g}", file=sys.stderr)
    print(f"\nwritten to {out}")
    return 1 if wrong else 0


def _harmless(name: str, failure: str) -> bool:
    """Return whether a part that failed says nothing of correctness."""
    return name.startswith(COMPILING) or (name.startswith("C") and failure.startswith(LATE))


def _turns(parts: Mapping[str, Part], dry: bool) -> Iterator[list[str]]:
    """Yield names of parts that run at one time; a dry run, on few cores, does one by one."""
    for beside, group in groupby(parts, lambda name: parts[name].beside and not dry):
        names = list(group)
        yield from [names] if beside else ([name] for name in names)


def _in_process(name: str, part: Part, setting: Setting) -> tuple[list[CheckedFigure], str | None]:
    """Run a part; return its figures, those before a failure, too, and the failure."""
    stem = setting.out / name.replace(" ", "_")
    figures, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    figures.write_text("", encoding="utf-8")
    fork = multiprocessing.get_context("forkserver")
    process = fork.Process(target=_run, args=(part.measure, setting, figures, log))
    process.start()
    process.join(part.limit if not setting.dry else None)
    failure = None
    if process.is_alive():
        process.kill()
        process.join()
        failure = f"{LATE} {part.limit:.0f} s"
    elif process.exitcode:
        failure = f"failed, see {log}"
    lines = figures.read_text(encoding="utf-8").splitlines()
    return [CheckedFigure(**json.loads(line)) for line in lines], failure


def _run(
    measure: Callable[[Setting], Iterator[CheckedFigure]],
    setting: Setting,
    figures: Path,
    log: Path,
) -> None:
    """Run a part in this process, its output to a log."""
    with log.open("w", encoding="utf-8") as output, figures.open("a", encoding="utf-8") as found:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            for figure in measure(setting):
                found.write(json.dumps(figure._asdict()) + "\n")
                found.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            output.flush()


def _add_demand(found: dict[str, list[CheckedFigure]]) -> None:
    """Add how many loader workers the fastest pretraining needs."""
    loaded = [f.value for f in found.get("C loader", []) if f.name == speed.LOADED]
    timed = (found.get(name, []) for name in ("C sizes", "C blocks", "C step"))
    steps = [f.value for figures in timed for f in figures if f.unit == "pairs/s"]
    if loaded and steps:
        needed = CheckedFigure("loader workers that feed the GPU", max(steps) / loaded[0], "cores")
        found["C loader"].append(needed)


def _table(found: dict[str, list[CheckedFigure]]) -> str:
    rows = [[name, *f.cells()] for name, figures in found.items() for f in figures]
    return harness.table(["part", "figure", "promised", "measured", "holds"], rows)


def _page(found: dict[str, list[CheckedFigure]], failures: dict[str, str], dry: bool) -> str:
    where = harness.device_name(torch.device("cpu" if dry else "cuda"))
    head = "A dry run: figures of speed mean nothing." if dry else f"Device: {where}."
    lines = [f"# vlp check gpu\n\n{head} {time.strftime('%Y-%m-%d')}\n"]
    lines += [f"{', '.join(device.versions())}\n"]
    lines += ["| part | figure | promised | measured | holds |", "|---|---|---|---|---|"]
    for name, figures in found.items():
        lines += [f"| {' | '.join([name, *figure.cells()])} |" for figure in figures]
    lines += [f"\n{name}: {failure}" for name, failure in failures.items()]
    return "\n".join(lines) + "\n"
