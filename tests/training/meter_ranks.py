"""One rank of test_loop.py: the last rank has a share without samples."""

import json

import torch

from vlp import distributed
from vlp.tasks.task import StepOutput
from vlp.training.engines.engine import Update
from vlp.training.progress import Meter, Progress

distributed.start()
empty = distributed.rank() == distributed.world_size() - 1
meter = Meter(Progress())
loss, shown = torch.tensor(2.0), {} if empty else {"bits": torch.tensor(3.0)}
output = StepOutput(loss, {"words": loss * (1 + distributed.rank())}, shown)
meter.add_step([output], Update(True, 1.0))
record = meter.flush()
if distributed.rank() == 0:
    print(json.dumps({name: record[name] for name in record if "/" in name}))
distributed.end()
