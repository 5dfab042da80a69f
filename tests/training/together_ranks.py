"""One rank of test_stop.py: 60 steps of a toy; rank 1 is told to stop while it trains.

Prints the collective calls of each step as the flight recorder has them, and where the run ended.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from training_toy import ToyData, ToyTask, toy_config

from vlp import distributed
from vlp.training.engines.ddp import DdpEngine
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder

STEPS, SIGNAL = 60, 20

distributed.start()
seen = []
calls = []


def before(number):
    new = [json.loads(line) for line in distributed.last_calls(512)][len(seen) :]
    seen.extend(new)
    calls.append(Counter(f"{call['profiling_name']} {call['pg_id']}" for call in new))
    if distributed.rank() == 1 and number == SIGNAL:
        os.kill(os.getpid(), signal.SIGTERM)


folder = Path(sys.argv[1])
config = toy_config(folder, engine="ddp", steps=STEPS, log_every=STEPS, checkpoint_every=STEPS)
engine = DdpEngine(ToyTask(), config.training)
folder = RunFolder(folder, distributed.rank() > 0)
report = train(config, engine.module, ToyData(before=before), engine, folder)
print(json.dumps({"ended": report["ended"], "step": report["step"], "calls": calls}))
distributed.end()
