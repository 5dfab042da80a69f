"""Prediction of weak and strong scaling of a pretraining to 1,024 GPUs.

    python -m evaluation.benchmarks.gpu.scaling --config configs/pretrain/base_64.yaml

Nothing is measured. Compute is that of the roofline, at both of its ends, with as many contrastive
candidates as the batch has. Calls and bytes of communication are those that tests trace
(`planning/collectives.py`), and their time is that of `planning/network.py`: nodes of 8 GPUs,
NVLink of 450 GB/s, a network of 400 Gb/s a node, 80 % of both reached. Gradients travel beside the
backward pass, two thirds of the step, where the engine lets them.

Efficiency is a GPU's throughput over that of one GPU alone: with the same pairs a GPU (weak), or
per GPU with the same batch, which one GPU alone might not hold (strong). Prints both tables and,
last, one JSON line per figure. Takes about two minutes of a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu.roofline import GPUS
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.planning.count import StepCount, count_groups, scale, smallest_rows
from evaluation.benchmarks.planning.network import Cluster
from evaluation.benchmarks.planning.plan import Plan, engine_plans, make_plan, with_training
from vlp.config import ConfigError
from vlp.training.config import PretrainConfig

TARGETS = {64: 0.97, 256: 0.94, 1024: 0.90}
"""Weak scaling that the project must reach, by GPUs."""


def weak(
    config: PretrainConfig, rows: int, sizes: list[int], gpu: str, cluster: Cluster
) -> Iterator[tuple[int, Plan, dict[str, Plan]]]:
    """Yield numbers of GPUs, the plan of one GPU alone, and that of every engine."""
    alone: Plan | None = None
    for ranks in (1, *sizes):
        larger = with_training(config, batch=rows * ranks)
        count = scale(larger, count_groups(larger, rows), ranks)
        if alone is None:
            alone = make_plan(larger, count, 1, GPUS[gpu], cluster)
        else:
            yield ranks, alone, _engines(larger, count, ranks, gpu, cluster)


def strong(
    config: PretrainConfig, batch: int, sizes: list[int], gpu: str, cluster: Cluster
) -> Iterator[tuple[int, Plan, dict[str, Plan]]]:
    """Yield numbers of GPUs, the plan of one GPU alone, and that of every engine."""
    config = with_training(config, batch=batch)
    counts = count_groups(config, batch)
    alone = make_plan(config, scale(config, counts, 1), 1, GPUS[gpu], cluster)
    for ranks in sizes:
        count = scale(config, counts, ranks)
        yield ranks, alone, _engines(config, count, ranks, gpu, cluster)


def _engines(
    config: PretrainConfig, count: StepCount, ranks: int, gpu: str, cluster: Cluster
) -> dict[str, Plan]:
    return dict(engine_plans(config, count, ranks, GPUS[gpu], cluster))


def _line(
    ranks: int, pairs: int, alone: Plan, engines: Mapping[str, Plan], share: int
) -> tuple[list[str], dict[str, tuple[float, ...]]]:
    """Return a row of a table, and each engine's efficiency at both ends.

    Args:
        ranks: GPUs.
        pairs: of a GPU.
        alone: plan of one GPU.
        engines: plans by name.
        share: among how many GPUs the work of the one is shared.
    """
    found = {
        name: tuple(one / share / step for one, step in zip(alone.step, plan.step))
        for name, plan in engines.items()
    }
    compute = next(iter(engines.values())).compute
    cells = [f"{100 * near:.1f} to {100 * far:.1f}" for near, far in found.values()]
    times = " to ".join(f"{1e3 * x:,.0f}" for x in compute)
    return [f"{ranks:,}", f"{pairs:,}", times, *cells], found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, numbers of GPUs, pairs and the kind of GPU."""
    parser.add_argument("--gpus", default="8,64,256,1024", metavar="N,…", help="numbers of GPUs")
    parser.add_argument("--rows", type=int, default=120, help="pairs of a GPU in weak scaling")
    parser.add_argument("--batch", type=int, default=32768, help="of strong scaling")
    parser.add_argument("--gpu", default="H100", help=f"of {', '.join(GPUS)}")
    harness.add_config(parser)


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Print both tables, yield the efficiency of every engine at both ends."""
    if options.gpu not in GPUS:
        raise ConfigError(f"unknown GPU {options.gpu}; known are {', '.join(GPUS)}")
    config = harness.load_pretraining(options)
    sizes, group, cluster = (
        [int(n) for n in options.gpus.split(",")],
        smallest_rows(config),
        Cluster(),
    )
    if options.rows % group or any(options.batch % (group * n) for n in sizes):
        raise ConfigError(f"pairs of a GPU must be whole sample groups of {group}")
    print(f"predicted for {options.gpu}, not measured; efficiency in %, near to far end\n")
    for name, found in (
        ("weak", weak(config, options.rows, sizes, options.gpu, cluster)),
        ("strong", strong(config, options.batch, sizes, options.gpu, cluster)),
    ):
        lines, head = [], ["GPUs", "pairs a GPU", "compute, ms"]
        for ranks, alone, engines in found:
            pairs = options.rows if name == "weak" else options.batch // ranks
            line, shares = _line(ranks, pairs, alone, engines, 1 if name == "weak" else ranks)
            lines.append(line)
            head = [*head[:3], *shares]
            for engine, ends in shares.items():
                for end, value in zip(("near", "far"), ends):
                    figure = f"scaling/{name}/{ranks}/{engine.replace(' ', '_')}/{end}"
                    yield Measurement(
                        figure, value, "", TARGETS.get(ranks) if name == "weak" else None
                    )
        print(f"{name} scaling\n{harness.table(head, lines)}\n")


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
