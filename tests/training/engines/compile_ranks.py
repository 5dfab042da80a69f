"""One rank of test_compile.py: compiled blocks under DDP, ZeRO-1 and ZeRO-3.

usage: compile_ranks.py FOLDER. Each engine trains compiled and as written, and each goes on from
the other's checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compile_toy import ROWS, configuration, task_of
from torch import Tensor

from benchmarks.step import random_batch
from vlp import distributed
from vlp.training.config import TrainingConfig
from vlp.training.engines.compile import compile_task
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.deepspeed import DeepSpeedEngine
from vlp.training.engines.engine import Engine, write_snapshot
from vlp.training.engines.environment import start_deepspeed

FOLDER = Path(sys.argv[1])
STEPS = 4


def make(kind: str, compiled: bool) -> Engine:
    config = configuration(masked=False)
    task = task_of(config)
    compile_task(task, "blocks" if compiled else "none", torch.device("cpu"), backend="eager")
    values = {"batch": ROWS * distributed.world_size(), "precision": "float32"}
    if kind == "ddp":
        return DdpEngine(task, TrainingConfig(**values))
    path = FOLDER / f"{kind}_{distributed.rank()}.json"
    zero = {"stage": int(kind), "stage3_param_persistence_threshold": 0}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return DeepSpeedEngine(task, TrainingConfig(engine=str(path), **values))


def steps(engine: Engine, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        batch = random_batch(
            configuration(masked=False).inputs, ROWS, 3, seed=2 * step + engine.rank
        )
        engine.backward(engine.forward(batch, step).loss)
        engine.step(1e-2)
    return {name: value.clone() for name, value in engine.parameters().items()}


def resumed(kind: str, home: Path, compiled: bool) -> dict[str, Tensor]:
    engine = make(kind, compiled)
    engine.load(home if engine.rank == 0 else None)
    return steps(engine, STEPS // 2, STEPS)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


distributed.start(join=start_deepspeed)
for kind in ("ddp", "1", "3"):
    ends = []
    for compiled in (False, True):
        engine = make(kind, compiled)
        steps(engine, 0, STEPS // 2)
        home = FOLDER / f"{kind}_{compiled}"
        home.mkdir(exist_ok=True)
        write_snapshot(engine, home)
        ends.append(steps(engine, STEPS // 2, STEPS))
        ends.append(resumed(kind, home, not compiled))
    assert max(distance(ends[0], end) for end in ends) < 1e-5, kind
    if distributed.rank() == 0:
        print(f"{kind} holds", flush=True)
distributed.end()
