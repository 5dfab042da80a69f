"""One rank of test_benchmark_scale.py: collective calls of a step by engine.

usage: collective_ranks.py ENGINE,...; prints a line of JSON per engine.
"""

import json
import sys

import torch
from tests_support import tiny_config

from benchmarks.scale import CollectiveTrace
from benchmarks.step import random_batch
from vlp import distributed
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.deepspeed import DeepSpeedEngine
from vlp.training.engines.environment import prepare_environment, start_deepspeed

ROWS = 4


def main(name, ranks):
    config = PretrainConfig.model_validate(
        {
            "model": tiny_config(cross={"layers": 3}),
            "data": {"sources": ["none"], "canonical_streams": ranks},
            "objectives": {
                "contrastive": {"token": {"group": ROWS}},
                "itm": {"group": ROWS},
                "teacher": {"queue": 8},
            },
            "training": {"batch": ROWS * ranks, "precision": "float32", "engine": name},
        }
    )
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", log_every=10**6)
    kind = DdpEngine if name == "ddp" else DeepSpeedEngine
    engine = kind(task, config.training)
    batch = random_batch(config.inputs, ROWS, 6)
    for step in (1, 2):  # engines are in their usual course from the second step on
        with CollectiveTrace() as trace:
            engine.backward(engine.forward(batch, step).loss)
            engine.step(1e-4)
            task.after_step(engine.parameters)
    if not distributed.rank():
        print(json.dumps({"engine": name, "calls": trace.calls}))


names = sys.argv[1].split(",")
prepare_environment()
distributed.start(start_group=start_deepspeed)
for name in names:
    main(name, distributed.world_size())
distributed.end()
