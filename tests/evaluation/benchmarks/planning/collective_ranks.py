"""One rank of test_collectives.py: collective calls of a step by engine, and what is predicted.

usage: collective_ranks.py ENGINE,... [RANKS]. With RANKS this one process pretends all of them.
Prints a line of JSON per engine: [calls, bytes] by kind, traced and predicted.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from tests_support import TINY_MODEL

from evaluation.benchmarks.planning.collectives import (
    CollectiveTrace,
    all_blocks,
    engine_collectives,
)
from evaluation.benchmarks.planning.fake_step import Watched, meta_task, pretended_ranks
from evaluation.benchmarks.planning.plan import with_training
from evaluation.benchmarks.pretrain_step import random_batch
from vlp import distributed
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.deepspeed import DeepSpeedEngine
from vlp.training.engines.environment import prepare_environment, start_deepspeed

ROWS, TRACED = 4, 2  # engines are in their usual course from the second step on
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (DdpEngine, {"engine": "ddp"}),
    "ddp-bf16": (
        DdpEngine,
        {"engine": "ddp", "gradient_reduction": "bf16"},
    ),
    "zero0": (DeepSpeedEngine, {"engine": "deepspeed", "deepspeed": "zero0"}),
    "zero1": (DeepSpeedEngine, {"engine": "deepspeed", "deepspeed": "zero1"}),
    "zero3": (DeepSpeedEngine, {"engine": "deepspeed", "deepspeed": "zero3"}),
}


def main(name: str, ranks: int) -> None:
    kind, changes = ENGINES[name]
    config = PretrainConfig.model_validate(
        {
            "model": TINY_MODEL | {"cross": TINY_MODEL["cross"] | {"layers": 3}},
            "data": {"sources": ["none"], "canonical_streams": ranks},
            "objectives": {
                "contrastive": {"token": {"group": ROWS}},
                "itm": {"group": ROWS},
                "teacher": {"queue": 8},
            },
            "training": {"batch": ROWS * ranks, "precision": "float32"},
        }
    )
    config = with_training(config, **changes)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", log_every=10**6)
    uses = [0] * len(all_blocks(task))

    def use(number: int, *_: Any) -> None:
        uses[number] += 1

    for number, block in enumerate(all_blocks(task)):
        block.register_forward_pre_hook(partial(use, number))
    engine = kind(task, config.training)
    batch = random_batch(config.inputs, ROWS, 6)
    trace = CollectiveTrace()
    for step in range(1, TRACED + 1):
        uses[:] = [0] * len(uses)
        with Watched([trace] if step == TRACED else []):
            output = engine.forward(batch, step)
            engine.backward(output.loss)
            engine.step(1e-4)
            task.after_step(engine.parameters)
    traced = {one: trace.total(one)[::-1] for one in ("all_reduce", "all_gather", "reduce_scatter")}
    if distributed.rank():
        return
    predicted: dict[str, list[float]] = {one: [0, 0] for one in traced}
    for one in engine_collectives(meta_task(config), config.training, ranks, uses):
        predicted[one.kind][0] += one.calls
        predicted[one.kind][1] += one.bytes
    print(json.dumps({"engine": name, "traced": traced, "engines": predicted, "uses": uses}))


names = sys.argv[1].split(",")
prepare_environment()
if len(sys.argv) > 2:
    with pretended_ranks(int(sys.argv[2])):
        for name in names:
            main(name, int(sys.argv[2]))
else:
    distributed.start(join=start_deepspeed if any(n.startswith("zero") for n in names) else None)
    for name in names:
        main(name, distributed.world_size())
    distributed.end()
