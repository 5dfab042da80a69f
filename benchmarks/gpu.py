"""Check of a GPU: correctness compared with a CPU, and speed of pretraining steps.

Each part runs in a process with a time limit. Kernels are checked by `make test-gpu`.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import typer
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness
from benchmarks.step import WARM_UP, WITH, WITHOUT, Trainee, added_share, random_batch, variants
from vlp import distributed
from vlp.config import ConfigError
from vlp.data.stream.batch import RankBatch
from vlp.io import write_tensors, write_text
from vlp.tasks.pretraining import Pretraining
from vlp.training import loop
from vlp.training.config import Compile, PretrainConfig, TrainingConfig
from vlp.training.engines.compile import compile_task
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.engine import Engine
from vlp.training.engines.environment import free_port, prepare_environment, start_deepspeed
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder

T = TypeVar("T")
WORDS = 15
MODES: tuple[Compile, ...] = ("none", "blocks")
# Prefixes of CUDA calls that launch work on the GPU.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")
# DDP, and stages of ZeRO.
ENGINES = ("ddp", "0", "1", "2", "3")
# Pairs per rank and steps of parts that measure no speed.
ROWS, STEPS = 4, 4
LOG_EVERY = 4


class Setting(NamedTuple):
    """Shared settings of a check."""

    config: PretrainConfig
    # Batch sizes of the timed steps, in pairs.
    rows: tuple[int, ...]
    device: torch.device
    # Run every part on the CPU at tiny sizes.
    dry: bool
    # Folder of the results.
    out: Path

    @property
    def middle(self) -> int:
        """Return the middle batch size, which is timed in every mode."""
        return self.rows[len(self.rows) // 2]

    @property
    def backend(self) -> str:
        """Return the backend of `torch.compile`; a dry run only captures graphs."""
        return "eager" if self.dry else "inductor"


class CheckedFigure(NamedTuple):
    """One measured figure; a value above `at_most` fails the check."""

    name: str
    value: float
    unit: str
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        """Return True if the value is within its limit; False for NaN."""
        return self.at_most is None or self.value <= self.at_most

    def cells(self) -> list[str]:
        """Return a row of the table: name, limit, value, and whether the limit holds."""
        most = "-" if self.at_most is None else f"{self.at_most:g}"
        verdict = "" if self.at_most is None else "yes" if self.holds else "NO"
        return [self.name, most, f"{self.value:.4g} {self.unit}".strip(), verdict]


Part = Callable[[Setting], Iterator[CheckedFigure]]


def product_rate(setting: Setting) -> float:
    """Measure the FLOP/s of a large bf16 matrix product, the best of ten."""
    side = 256 if setting.dry else 8192
    a, b = (torch.randn(side, side, device=setting.device).bfloat16() for _ in range(2))
    return 2 * side**3 / _fastest(setting, partial(torch.matmul, a, b))


def bandwidth(setting: Setting) -> float:
    """Measure the memory bandwidth of a copy: bytes/s, read and written."""
    source = torch.randn(1 << (16 if setting.dry else 28), device=setting.device)
    return 2 * source.nbytes / _fastest(setting, partial(torch.empty_like(source).copy_, source))


def _fastest(setting: Setting, work: partial[torch.Tensor]) -> float:
    return min(harness.seconds(work, setting.device) for _ in range(10))


def rates(setting: Setting) -> Iterator[CheckedFigure]:
    """Print versions; yield the product rate and the memory bandwidth."""
    print(harness.device_name(setting.device), *versions(), sep="\n")
    yield CheckedFigure("bf16 product", product_rate(setting) / 1e12, "TFLOP/s")
    yield CheckedFigure("memory", bandwidth(setting) / 1e9, "GB/s")


def versions() -> list[str]:
    """List versions of packages, CUDA and cuDNN."""
    packages = [f"{package} {version(package)}" for package in ("torch", "deepspeed", "timm")]
    return [*packages, f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]


def losses(setting: Setting) -> Iterator[CheckedFigure]:
    """Compare loss and gradient of a float32 step on the device and on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    batch = random_batch(setting.config.inputs, ROWS, 3)

    def step(device: torch.device, mode: Compile) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        task = _task(setting)
        compile_task(task.to(device), mode, device, setting.backend)
        loss = task(batch.to(device), 1).loss
        loss.backward()
        gradients = [p.grad.flatten().cpu() for p in task.parameters() if p.grad is not None]
        return float(loss.detach()), torch.cat(gradients)

    loss, gradient = step(torch.device("cpu"), "none")
    for mode in MODES:
        device_loss, device_gradient = step(setting.device, mode)
        name = f"a step, {mode}: relative error of"
        yield CheckedFigure(f"{name} loss", abs(device_loss - loss) / abs(loss), "", 1e-4)
        error = float((device_gradient - gradient).norm() / gradient.norm())
        yield CheckedFigure(f"{name} gradient", error, "", 1e-3)


def _task(setting: Setting) -> Pretraining:
    config = setting.config
    return Pretraining(config.model, config.objectives, "", "float32", log_every=10**6)


def waits(setting: Setting) -> Iterator[CheckedFigure]:
    """Count synchronisations with the device in an ordinary step and in a logged step."""
    config, device = watched_config(setting.config, ROWS), setting.device
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", "bf16", LOG_EVERY)
    batch = random_batch(config.inputs, ROWS, 3)
    steps = watched_steps(config, task, batch, partial(count_waits, device))
    for name, step, at_most in (("ordinary", steps[0], 0), ("logged", steps[-1], 1)):
        yield waits_figure(f"waits for the device in one {name} step", step, at_most, device)


def waits_figure(name: str, waits: list[str], at_most: int, device: torch.device) -> CheckedFigure:
    """Print the synchronisations; return their number, with limit `at_most` on a GPU."""
    print(f"{name}:", *waits, sep="\n  ")
    on_gpu = device.type == "cuda"
    return CheckedFigure(name, len(waits), "", at_most=at_most if on_gpu else None)


@contextmanager
def count_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list; synchronisations with the device within the context append a line each.

    On a GPU, from PyTorch's warnings, with file and line; on a CPU, from calls of `Tensor.item`.
    """
    waits: list[str] = []
    if device.type != "cuda":
        with _Reads(waits):
            yield waits
        return
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    warning = "called a synchronizing CUDA operation"
    waits += [
        f"{record.filename}:{record.lineno}" for record in records if warning in str(record.message)
    ]


class _Reads(TorchDispatchMode):
    """Context that records operations which read a number from a tensor."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


class EnoughSteps(Exception):
    """Raised after the last watched step, to end the training."""


class WatchedData(Generic[T]):
    """Data of one repeated batch (on the CPU) of `rows` samples, with a context for each step."""

    def __init__(
        self, batch: RankBatch, rows: int, watch: Callable[[], AbstractContextManager[T]]
    ) -> None:
        self.batch, self.rows, self.watch = batch, rows, watch
        self.fingerprint = {"source": "none"}
        # Values that the contexts of the steps after the warm-up yielded.
        self.steps: list[T] = []

    def floor(self, samples_consumed: int) -> int:
        """Return `samples_consumed`, as a run can resume anywhere."""
        return samples_consumed

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Return more batches than are trained on."""
        return 1000

    def samples_in_epoch(self, epoch: int) -> int:
        """Return more samples than are trained on."""
        return 10**9

    def batches(
        self, samples_consumed: int = 0, rank: int = 0, world_size: int = 1
    ) -> Generator[tuple[RankBatch, int], None, None]:
        """Yield the batch for warm-up steps, then for watched steps; the last one is logged."""
        for number in range(2 * LOG_EVERY):
            yield self.batch, self.rows * (number + 1)
        for number in range(2 * LOG_EVERY, 2 * LOG_EVERY + LOG_EVERY):
            with self.watch() as record:
                yield self.batch, self.rows * (number + 1)
            self.steps.append(record)
        raise EnoughSteps


def watched_config(config: PretrainConfig, rows: int) -> PretrainConfig:
    """Return a configuration for `watched_steps`, with `rows` pairs in a batch."""
    changes = {"batch": rows, "steps": 1000, "log_every": LOG_EVERY, "trackers": ()}
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"training": training})


def watched_steps(
    config: PretrainConfig,
    task: Any,
    batch: RankBatch,
    watch: Callable[[], AbstractContextManager[T]],
) -> list[T]:
    """Train on one batch within a context `watch()` per step; return the contexts' values.

    The last of these steps is logged. config: of `watched_config`; task: a `Task` and module that
    logs every `LOG_EVERY` steps.
    """
    data = WatchedData(batch, config.training.batch, watch)
    # Non-finite losses do not end the training.
    limit = patch.object(loop, "MAX_NON_FINITE", 10**6)
    with limit, tempfile.TemporaryDirectory() as folder, suppress(EnoughSteps):
        config = config.model_copy(update={"output": folder})
        engine = DdpEngine(task, config.training)
        train(config, task, data, engine, RunFolder(Path(folder), True))
    return data.steps


def resume(setting: Setting) -> Iterator[CheckedFigure]:
    """Save and resume under every engine on all devices; a dry run has ZeRO-1 on two ranks."""
    ranks, kinds = (2, ENGINES[2:3]) if setting.dry else (torch.cuda.device_count(), ENGINES)
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), free_port()
        processes = [
            multiprocessing.get_context("forkserver").Process(
                target=_run_rank, args=(setting, rank, ranks, port, kinds, folder)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if failures := [process.exitcode for process in processes if process.exitcode]:
            raise RuntimeError(f"{len(failures)} of {ranks} ranks failed")
        for line in (folder / "figures.jsonl").read_text(encoding="utf-8").splitlines():
            yield CheckedFigure(**json.loads(line))


def _run_rank(
    setting: Setting, rank: int, ranks: int, port: int, kinds: tuple[str, ...], folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if setting.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    prepare_environment()
    distributed.start(start_group=start_deepspeed)
    figures = [_resume_error(setting, kind, folder) for kind in kinds]
    if rank == 0:
        lines = (json.dumps(figure._asdict()) for figure in figures)
        (folder / "figures.jsonl").write_text("\n".join(lines), encoding="utf-8")
    distributed.barrier()
    distributed.end()


def _resume_error(setting: Setting, kind: str, folder: Path) -> CheckedFigure:
    """Return the largest difference of a weight after a resume and without a resume."""
    engine = _engine(setting, kind, folder)
    snapshot = folder / kind
    snapshot.mkdir(exist_ok=True)
    _train(setting, engine, 0, STEPS // 2)
    for file, tensors in engine.snapshot().items():
        if engine.rank == 0:
            write_tensors(snapshot / file, tensors)
    reference = _train(setting, engine, STEPS // 2, STEPS)
    new_engine = _engine(setting, kind, folder)
    new_engine.load(snapshot if new_engine.rank == 0 else None)
    weights = _train(setting, new_engine, STEPS // 2, STEPS)
    error = max(float((weights[name] - value).abs().max()) for name, value in reference.items())
    name = f"{'DDP' if kind == 'ddp' else f'ZeRO-{kind}'}, ranks: {engine.world_size}"
    return CheckedFigure(f"{name}: weights after a resume", error, "", 1e-5)


def _engine(setting: Setting, kind: str, folder: Path) -> Engine:
    torch.manual_seed(0)
    task = _task(setting)
    values = {"batch": ROWS * distributed.world_size(), "precision": "float32"}
    if kind == "ddp":
        return DdpEngine(task, TrainingConfig.model_validate(values))
    from vlp.training.engines.deepspeed import DeepSpeedEngine

    path = folder / f"{kind}_{distributed.rank()}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": int(kind)}}), encoding="utf-8")
    return DeepSpeedEngine(task, TrainingConfig.model_validate(values | {"engine": str(path)}))


def _train(setting: Setting, engine: Engine, first: int, last: int) -> dict[str, Tensor]:
    """Train on random batches, keyed by rank and step; return the weights."""
    for step in range(first, last):
        batch = random_batch(setting.config.inputs, ROWS, 3, seed=100 * engine.rank + step)
        engine.backward(engine.forward(batch.to(engine.device), step).loss)
        engine.step(1e-3)
    return {name: value.cpu().clone() for name, value in engine.parameters().items()}


def blocks(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the middle batch size, not compiled and compiled by `blocks`."""
    return chain.from_iterable(_time_steps(setting, mode, setting.middle) for mode in MODES)


def whole_steps(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the middle batch size, compiled by `step`."""
    return _time_steps(setting, "step", setting.middle)


def sizes(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the other batch sizes, not compiled, as each size would compile anew."""
    others = [rows for rows in setting.rows if rows != setting.middle]
    return chain.from_iterable(_time_steps(setting, "none", rows) for rows in others)


def _free_memory() -> None:
    # Compiled graphs of all sizes count towards one limit.
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _time_steps(setting: Setting, mode: Compile, rows: int) -> Iterator[CheckedFigure]:
    """Time steps of `rows` pairs; write the trace of a step, and its kernels by time."""
    device, on_gpu = setting.device, setting.device.type == "cuda"
    rate = product_rate(setting)
    trainee = Trainee(setting.config, device)
    batch = random_batch(setting.config.inputs, rows, WORDS).to(device)
    # FLOPs are proportional to the number of pairs: count them with the smallest batch.
    small = setting.rows[0]
    with FlopCounterMode(display=False) as counter:
        trainee.step(random_batch(setting.config.inputs, small, WORDS).to(device))
    compile_task(trainee.task, mode, device, setting.backend)
    trainee.run(batch, WARM_UP)
    seconds = min(trainee.run(batch, 1 if setting.dry else 10) for _ in range(1 + on_gpu))
    share = 100 * counter.get_total_flops() * rows / small / seconds / rate
    name = f"pretraining, {rows} pairs, {mode}"
    yield CheckedFigure(name, rows / seconds, "pairs/s")
    yield CheckedFigure(f"{name}: of the product rate", share, "%")
    peak = harness.peak_memory(partial(trainee.run, batch, 1), device)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device)
    yield CheckedFigure(f"{name}: peak memory", peak / 2**30, "GiB")
    # On a CPU `count_waits` would break a compiled graph.
    if on_gpu:
        with count_waits(device) as waits:
            trainee.run(batch, 1)
        yield waits_figure(f"{name}: waits for the device", waits, 0, device)
    with profile(activities=harness.activities(device)) as profiler:
        trainee.run(batch, 1)
    stem = f"{mode}_{rows}"
    profiler.export_chrome_trace(str(setting.out / f"trace_{stem}.json.gz"))
    events = profiler.profiler.kineto_results.events()
    launches = sum(event.name().startswith(LAUNCHES) for event in events)
    yield CheckedFigure(f"{name}: launches", launches, "")
    if on_gpu:
        busy = _write_kernels(setting.out / f"kernels_{stem}.txt", events)
        yield CheckedFigure(f"{name}: kernels and copies, of a step", 100 * busy / seconds, "%")
    del trainee, batch
    _free_memory()


def _write_kernels(path: Path, events: Iterable[Any]) -> float:
    """Write a profile's kernels, copies and clears by total time; return the seconds of all."""
    durations: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            durations[event.name()].append(event.duration_ns())
    lines = [
        f"{sum(times) / 1e6:9.3f} ms {len(times):5d} {name}\n"
        for name, times in sorted(durations.items(), key=lambda item: -sum(item[1]))
    ]
    write_text(path, "".join(lines))
    return sum(map(sum, durations.values())) / 1e9


def anchors(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps with and without ACE-RPE by turns, not compiled and compiled."""
    rows, rounds, steps = setting.middle, 12, 4
    if setting.dry:
        rounds = steps = 1
    configs = variants(setting.config)
    batch = random_batch(setting.config.inputs, rows, WORDS).to(setting.device)
    for mode in MODES:
        trainees = {
            name: Trainee(config, setting.device, mode, setting.backend)
            for name, config in configs.items()
        }
        runs = {name: partial(trainee.run, batch, steps) for name, trainee in trainees.items()}
        seconds = harness.interleave(runs, rounds, warm_up=1)
        name = f"ACE-RPE, {rows} pairs, {mode}: added time of a step"
        added, (low, high) = added_share(np.array(seconds[WITH]), np.array(seconds[WITHOUT]))
        print(f"{name}: {added:+.2%} [{low:+.2%}, {high:+.2%}]")
        yield CheckedFigure(name, 100 * added, "%")
        yield CheckedFigure(f"{name}, lower bound of 95 %", 100 * low, "%")
        yield CheckedFigure(f"{name}, upper bound of 95 %", 100 * high, "%")
        del trainees, runs
        _free_memory()


# Function and time limit in seconds of each part.
PARTS: dict[str, tuple[Part, float]] = {
    "A device": (rates, 60),
    "B losses": (losses, 300),
    "B waits": (waits, 300),
    "B engines": (resume, 300),
    "C sizes": (sizes, 120),
    "C blocks": (blocks, 600),
    "C ACE-RPE": (anchors, 900),
    "C step": (whole_steps, 900),
}
_TINY = (
    *(f"model.{part}.layers=1" for part in ("text", "image", "cross")),
    *(f"model.{part}.heads=2" for part in ("text", "image", "cross")),
    *(f"model.{part}.intermediate=16" for part in ("text", "image", "cross")),
    "model.text={width: 16, vocab_size: 64, max_tokens: 8, max_positions: 8}",
    "model.image={width: 16, image_size: 16, patch_size: 8}",
    "model.cross.anchor.groups=2",
    "model.embed_dim=16",
    "objectives.teacher={queue: 16}",
    "objectives.itm.group=4",
)


def run_check(config: Path, out: Path, dry: bool = False, only: str = "") -> int:
    """Run the parts with prefix `only`; return 0, 1 after a failure, or 2 without a GPU."""
    if not dry and not torch.cuda.is_available():
        print("error: PyTorch finds no GPU; add --dry to run all parts on the CPU", file=sys.stderr)
        return 2
    names = [name for name in PARTS if name.startswith(only)]
    if not names:
        raise ConfigError(f"--only {only}: the parts are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    device, rows = torch.device("cpu" if dry else "cuda"), (4,) if dry else (32, 64, 128)
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    figures_by_part: dict[str, list[CheckedFigure]] = {}
    failures: dict[str, str] = {}
    for name in names:
        part, limit = PARTS[name]
        changes = _TINY if dry or name[0] == "B" else ()
        part_config = harness.load_pretraining(config, None, *changes, public=False)
        setting, start = Setting(part_config, rows, device, dry, out), time.monotonic()
        figures_by_part[name], failure = _run_in_process(name, part, limit, setting)
        if failure:
            failures[name] = failure
        print(f"{name}: {failure or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
    figures = [
        (name, figure) for name, part_figures in figures_by_part.items() for figure in part_figures
    ]
    head = ["part", "figure", "limit", "value", "holds"]
    cells = [[name, *figure.cells()] for name, figure in figures]
    title = "dry run: figures of speed are meaningless" if dry else harness.device_name(device)
    lines = [f"# {title}, {time.strftime('%Y-%m-%d')}", "", ", ".join(versions()), ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
    lines += [f"\n{name}: {failure}" for name, failure in failures.items()]
    write_text(out / "check.md", "\n".join(lines) + "\n")
    write_text(
        out / "figures.jsonl",
        "".join(
            json.dumps({"part": name} | figure._asdict() | {"holds": figure.holds}) + "\n"
            for name, figure in figures
        ),
    )
    print(f"\n{harness.table(head, cells)}\n\nwritten to {out}")
    violations = [figure for _, figure in figures if not figure.holds]
    for figure in violations:
        print(f"wrong: {figure.name}: {figure.value:g}", file=sys.stderr)
    return 1 if violations or failures else 0


def _run_in_process(
    name: str, part: Part, limit: float, setting: Setting
) -> tuple[list[CheckedFigure], str | None]:
    """Run a part in a process; return its figures up to a failure, and the failure or None."""
    stem = setting.out / name.replace(" ", "_")
    figures, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    figures.write_text("", encoding="utf-8")
    fork = multiprocessing.get_context("forkserver")
    process = fork.Process(target=_run_part, args=(part, setting, figures, log))
    process.start()
    process.join(limit if not setting.dry else None)
    failure = None
    if process.is_alive():
        process.kill()
        process.join()
        failure = f"took more than {limit:.0f} s"
    elif process.exitcode:
        failure = f"failed, see {log}"
    lines = figures.read_text(encoding="utf-8").splitlines()
    return [CheckedFigure(**json.loads(line)) for line in lines], failure


def _run_part(part: Part, setting: Setting, figures: Path, log: Path) -> None:
    """Run a part in this process, with its output in a log."""
    with (
        log.open("w", encoding="utf-8") as output,
        figures.open("a", encoding="utf-8") as figure_file,
    ):
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            for figure in part(setting):
                figure_file.write(json.dumps(figure._asdict()) + "\n")
                figure_file.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()


def gpu(
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the results")],
    config: harness.Config = Path("configs/pretrain/base.yaml"),
    dry: bool = False,
    only: str = "",
) -> None:
    """Check correctness and speed of pretraining on this machine's GPUs.

    --out gets check.md, figures.jsonl, profiler traces and a log of each part. --dry goes through
    all parts on the CPU at tiny sizes. --only runs the parts with a prefix: A (rates of the
    device), B (losses, waits for the device, resuming under DDP and ZeRO on all GPUs), C (speed of
    steps, compiled or not, cost of ACE-RPE). Compiled graphs stay on disk: a part that ran out of
    time resumes in a second check. The exit code is 1 if a part fails or a result is wrong, and 2
    without a GPU.
    """
    if code := run_check(config, out, dry, only):
        raise typer.Exit(code)


COMMANDS = (gpu,)
