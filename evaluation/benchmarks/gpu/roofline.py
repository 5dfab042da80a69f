"""Prediction of a pretraining step's time on a GPU, from counted bytes and FLOPs.

    python -m evaluation.benchmarks.gpu.roofline --config configs/pretrain/base.yaml

A step runs forward and backward on fake tensors, in the form for a GPU, while every operation is
counted: FLOPs of matrix products, bytes of tensors that it reads and writes. The optimiser and the
teacher pass over all parameters once. Products take the longer of their FLOPs at the GPU's peak
rate and their bytes at its bandwidth, all else takes the time of its bytes.

Error bars are readings of what a GPU reaches. *Fused*: products reach 75 % of the peak, and
element-wise operations cost nothing. *Compiled*: products reach 55 %; an element-wise operation is
part of the kernel that made its input, but what it reads beside that, and what a product or a
second reader takes of it, crosses memory. *As written*: 55 %, and every operation reads and writes
its tensors. The last two cost at least what a CPU takes to launch their kernels. A step lies
between *fused* and *compiled* with `training.compile`, between *fused* and *as written* without.
FLOPs are those of the model: what attention computes again is part of the share of the peak. Data
loading and communication are not in it. Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import math
import sys
import weakref
from collections.abc import Callable, Iterator
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
from vlp.positions import anchor_attention as anchor_attention  # registers its operators
from vlp.training.config import PretrainConfig

aten = torch.ops.aten

BANDWIDTH_SHARE = 0.85
LAUNCH = 6e-6
"""Seconds that a CPU takes to launch an operation."""
_FREE = {aten.detach.default, aten.empty.memory_format, torch.ops.prim.device.default}
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
    """One reading of what a GPU reaches: the share of the peak for products."""

    name: str
    product_share: float


FUSED, COMPILED = Assumption("fused", 0.75), Assumption("compiled", 0.55)
WRITTEN = Assumption("as written", 0.55)
ASSUMPTIONS = (FUSED, COMPILED, WRITTEN)


def ends(config: PretrainConfig) -> tuple[Assumption, Assumption]:
    """Return the near and the far end for a run, which is compiled or not."""
    compiled = config.training.compile in ("blocks", "step")
    return FUSED, COMPILED if compiled else WRITTEN


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
        return device if assumption == FUSED else max(device, self.operations * LAUNCH)


# What a compiler makes part of the kernel that computed its input, beside element-wise operations.
_JOINED = {
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.copy_.default,
    aten.stack.default,
    aten.native_layer_norm.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
}


def _attention(query: Tensor, key: Tensor, *_: Any, **options: Any) -> int:
    """FLOPs of both products over (..., Q, width) and (..., K, width), of any number of heads."""
    return 4 * math.prod(query.shape) * key.shape[-2]


def _attention_backward(_: Any, query: Tensor, key: Tensor, *__: Any, **options: Any) -> int:
    return 2 * _attention(query, key)


_FLOPS: dict[Any, Callable[..., int]] = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.vlp.anchor_attention: _attention,
    torch.ops.vlp.anchor_attention_backward: partial(_attention_backward, None),
}


class WorkCount:
    """Sum of the work of all operations that it sees, by assumption."""

    def __init__(self) -> None:
        self.work = {assumption.name: Work(0, 0, 0, 0) for assumption in ASSUMPTIONS}
        # Bytes of tensors that a compiled kernel has not written yet, and whether it was read.
        self._unwritten: dict[int, int] = {}
        self._read: set[int] = set()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation; views are free, and collective calls are no work."""
        if func.is_view or func.namespace == "c10d" or func in _FREE:
            return
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        counter = _FLOPS.get(func.overloadpacket)
        flops = counter(*args, **kwargs, out_val=out) if counter else 0
        joined = torch.Tag.pointwise in func.tags or func in _JOINED
        moved = {
            "fused": sum(x.nbytes for x in read + made) if flops or func in _STREAMED else 0,
            "compiled": self._crossing(read, made, joined),
            "as written": sum(x.nbytes for x in read + made),
        }
        for name, bytes_ in moved.items():
            step = Work(flops, bytes_, 0, 1) if flops else Work(0, 0, bytes_, bytes_ > 0)
            self.work[name] = Work(*map(sum, zip(self.work[name], step)))

    def _crossing(self, read: list[Tensor], made: list[Tensor], joined: bool) -> int:
        """Return the bytes that cross memory where an operation is compiled."""
        total = 0
        for x in read:
            key = x.untyped_storage()._cdata
            if key not in self._unwritten:
                total += x.nbytes
            elif joined and key not in self._read:
                self._read.add(key)
            else:
                total += x.nbytes + self._unwritten.pop(key)
        for x in made:
            if not joined:
                total += x.nbytes
                continue
            storage = x.untyped_storage()
            if storage._cdata not in self._unwritten:
                weakref.finalize(storage, self._forget, storage._cdata)
            self._unwritten[storage._cdata] = x.nbytes
            self._read.discard(storage._cdata)
        return total

    def _forget(self, key: int) -> None:
        self._unwritten.pop(key, None)
        self._read.discard(key)


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
