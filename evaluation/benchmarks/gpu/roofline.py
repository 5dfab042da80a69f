"""Prediction of a pretraining step's time on a GPU, from counted bytes and FLOPs.

    python -m evaluation.benchmarks.gpu.roofline --config configs/pretrain/base.yaml

A step runs forward and backward on fake tensors, in the form for a CPU, while every operation is
counted: FLOPs of matrix products, bytes of tensors that it reads and writes. The optimiser and the
teacher pass over all parameters once. Products take the longer of their FLOPs at the GPU's peak
rate and their bytes at its bandwidth, all else takes the time of its bytes.

Error bars are two readings of what a GPU reaches. *Fused*: products reach 75 % of the peak,
element-wise operations cost nothing, and logits of attention never lie in memory. *As written*:
products reach 55 % of the peak, every operation reads and writes its tensors, and costs at least
the time that a CPU takes to launch it. It counts the form for a CPU, whose attention is explicit
and whose paths are searched pair by pair: an upper bound. A real step should lie between both. Data
loading and communication are not in it. Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.planning.fake_step import fake_step, meta_task
from vlp.config import ConfigError
from vlp.training.config import PretrainConfig

aten = torch.ops.aten

BANDWIDTH_SHARE = 0.85
LAUNCH = 6e-6
"""Seconds that a CPU takes to launch an operation."""
_FREE = {aten.detach.default, aten.empty.memory_format}
_BATCHED = {aten.bmm.default, aten.baddbmm.default}
# In the fused assumption these read and write memory; what stands between them does not.
_STREAMED = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
}


class GPU(NamedTuple):
    """Dense bf16 FLOP/s, bytes/s of memory and its bytes, as the vendor states them."""

    flops: float
    bandwidth: float
    memory: float = 80e9


GPUS = {
    "H100": GPU(989e12, 3.35e12),
    "H200": GPU(989e12, 4.8e12, 141e9),
    "A100": GPU(312e12, 2.039e12),
}


class Assumption(NamedTuple):
    """One end of the error bars: share of the peak that products reach, and what is counted."""

    name: str
    product_share: float
    fused: bool


ASSUMPTIONS = (Assumption("fused", 0.75, True), Assumption("as written", 0.55, False))


class Work(NamedTuple):
    """Sums over operations, (FLOPs of products, bytes moved by them, other bytes, operations)."""

    flops: float
    product_bytes: float
    other_bytes: float
    operations: float

    def seconds(self, gpu: GPU, assumption: Assumption) -> float:
        """Return the time of all operations."""
        bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
        products = max(
            self.flops / (gpu.flops * assumption.product_share), self.product_bytes / bandwidth
        )
        device = products + self.other_bytes / bandwidth
        return device if assumption.fused else max(device, self.operations * LAUNCH)


class WorkCount:
    """Sum of the work of all operations that it sees, by assumption."""

    def __init__(self) -> None:
        self.work = {assumption.name: Work(0, 0, 0, 0) for assumption in ASSUMPTIONS}

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation; views are free, and collective calls are no work."""
        if func.is_view or func.namespace == "c10d" or func in _FREE:
            return
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        sizes = [x.nbytes for x in read + [x for x in tree_leaves(out) if isinstance(x, Tensor)]]
        counter = flop_registry.get(func.overloadpacket)
        flops = counter(*args, **kwargs, out_val=out) if counter else 0
        for assumption in ASSUMPTIONS:
            if flops:
                # Of attention the largest is the logits, which fused kernels never write.
                kept = sorted(sizes)[:-1] if assumption.fused and func in _BATCHED else sizes
                step = Work(flops, sum(kept), 0, 1)
            elif assumption.fused and func not in _STREAMED:
                continue
            else:
                step = Work(0, 0, sum(sizes), 1)
            self.work[assumption.name] = Work(*map(sum, zip(self.work[assumption.name], step)))


def count_step(config: PretrainConfig, rows: int, words: int = 15) -> dict[str, Work]:
    """Count the forward and the backward pass of a step of some pairs, by assumption."""
    counting = WorkCount()
    fake_step(config, rows, [counting], words)
    return counting.work


def parameter_passes(config: PretrainConfig) -> Work:
    """Count what a step does to all parameters: clipping, AdamW, and the teacher's average."""
    task = meta_task(config)
    floats = 3 + 7 + 3 * (config.objectives.teacher is not None)  # read or written a parameter
    return Work(0, 0, 4 * floats * sum(p.numel() for p in task.parameters()), 30)


def predictions(config: PretrainConfig, rows: int) -> dict[str, Work]:
    """Return the work of a whole step of some pairs, by assumption."""
    passes = parameter_passes(config)
    return {
        name: Work(*map(sum, zip(work, passes))) for name, work in count_step(config, rows).items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, the pairs and the GPU."""
    parser.add_argument("--rows", default="32,64,128", metavar="N,…", help="pairs of a GPU's step")
    parser.add_argument("--gpu", default="H100", help=f"of {', '.join(GPUS)}")
    harness.add_config(parser)


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Print the table, yield both ends of each prediction."""
    if options.gpu not in GPUS:
        raise ConfigError(f"unknown GPU {options.gpu}; known are {', '.join(GPUS)}")
    gpu = GPUS[options.gpu]
    public = ("model.text.weights=null", "model.image.weights=null")
    config = harness.load_pretraining(options, *public)
    lines = []
    for rows in map(int, options.rows.split(",")):
        works = predictions(config, rows)
        for assumption in ASSUMPTIONS:
            work = works[assumption.name]
            seconds = work.seconds(gpu, assumption)
            share = 100 * work.flops / seconds / gpu.flops
            moved = work.product_bytes + work.other_bytes
            cells = [work.flops / 1e12, moved / 1e9, 1e3 * seconds, rows / seconds, share]
            lines.append([str(rows), assumption.name, *(f"{cell:.1f}" for cell in cells)])
            name = f"roofline/{options.gpu}/{rows}/{assumption.name.replace(' ', '_')}"
            yield Measurement(f"{name}/pairs", rows / seconds, "pairs/s")
            yield Measurement(f"{name}/share_of_peak", share, "%")
    head = ["pairs", "assumption", "TFLOP", "GB", "ms", "pairs/s", "% of peak"]
    print(f"predicted for {options.gpu}, not measured\n{harness.table(head, lines)}\n")


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
