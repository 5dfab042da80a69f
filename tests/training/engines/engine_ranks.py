"""One rank of test_engines.py: every ZeRO stage and DDP against plain PyTorch.

usage: engine_ranks.py FOLDER (train | load). The folder keeps checkpoints from one number of ranks
to the next.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from training_toy import TOKENS, PlainEngine, ToyTask, toy_batch, toy_config

from vlp import distributed
from vlp.io import write_tensors
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.deepspeed import DeepSpeedEngine
from vlp.training.engines.environment import prepare_environment, start_deepspeed

FOLDER = Path(sys.argv[1])


def write_snapshot(engine, folder):
    for file, tensors in engine.snapshot().items():
        if engine.rank == 0:
            write_tensors(folder / file, tensors)


SAVED_AFTER, POISONED, STEPS = 3, 4, 8
# Stage 3 twice: with every parameter cut up between uses, and with small ones kept whole.
KINDS = {"0": 0, "1": 1, "2": 2, "3": 3, "3-whole": 3}
DDP = "ddp"


def make(task, kind, **settings):
    if kind == DDP:
        return DdpEngine(task, toy_config(**settings).training)
    zero = {"stage": KINDS[kind]}
    if KINDS[kind] == 3:
        zero["stage3_param_persistence_threshold"] = 0 if kind == "3" else 100_000
    path = FOLDER / f"{kind}_{distributed.world_size()}_{distributed.rank()}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return DeepSpeedEngine(task, toy_config(engine=str(path), **settings).training)


def steps(engine, first, last):
    """Optimiser steps on fixed global batches; one rank alone poisons step `POISONED`."""
    updates = []
    gradient_accumulation_steps = (
        engine.config.gradient_accumulation_steps
        if isinstance(engine, PlainEngine)
        else ACCUMULATION
    )
    for step in range(first, last):
        for micro in range(gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + micro)
            ids = torch.randint(TOKENS, (8, 5), generator=generator)
            share = len(ids) // engine.world_size
            own = ids[engine.rank * share : (engine.rank + 1) * share]
            loss = engine.forward(toy_batch(own), step).loss
            if step == POISONED and engine.rank == engine.world_size - 1:
                loss = loss * float("nan")
            engine.backward(loss)
        updates.append(engine.step(1e-2))
    return updates


ACCUMULATION = 1


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def distance(first, second):
    """Of what is trained: ZeRO lets weight decay shrink what no loss uses, DDP does not."""
    assert first.keys() == second.keys()
    used = [name for name in first if not name.startswith("unused.")]
    return max(float((first[name] - second[name]).abs().max()) for name in used)


def plain(gradient_accumulation_steps=1):
    torch.manual_seed(0)
    engine = PlainEngine(
        ToyTask(), toy_config(gradient_accumulation_steps=gradient_accumulation_steps).training
    )
    updates = steps(engine, 0, STEPS)
    return copied(engine.parameters()), updates


def check(kind):
    expected, expected_updates = plain()
    # Ranks start with different weights; rank 0's count.
    torch.manual_seed(distributed.rank())
    task = ToyTask()
    engine = make(task, kind)
    home = FOLDER / f"state_{kind}_{engine.world_size}"
    home.mkdir(exist_ok=True)
    updates = steps(engine, 0, SAVED_AFTER)
    write_snapshot(engine, home)
    updates += steps(engine, SAVED_AFTER, POISONED)
    before = copied(engine.parameters())
    updates += steps(engine, POISONED, POISONED + 1)
    assert distance(before, engine.parameters()) == 0, "a skipped step moved weights"
    updates += steps(engine, POISONED + 1, STEPS)
    final = copied(engine.parameters())
    assert final["log_temperature"].shape == ()
    assert distance(final, expected) < 2e-6, distance(final, expected)
    for mine, other in zip(updates, expected_updates, strict=True):
        assert mine.applied == other.applied
        assert mine.applied == (abs(mine.gradient_norm - other.gradient_norm) < 1e-5)
    assert [update.applied for update in updates].count(False) == 1
    state = engine.state_dict()
    assert (state.keys() == task.state_dict().keys()) == (engine.rank == 0)
    if engine.rank == 0:
        assert distance({name: state[name] for name in final}, final) == 0

    assert distance(resumed(kind, home), final) == 0, "resuming is not exact"

    mixed = ToyTask(precision="bf16")
    steps(make(mixed, kind), 0, 1)
    assert mixed.dtypes == {torch.bfloat16}, "the task's autocast is not respected"
    assert {parameter.dtype for parameter in mixed.parameters()} == {torch.float32}


def check_float16(kind):
    """The poisoned step halves the scale; a run resumed after it goes on with that, bit for bit."""
    torch.manual_seed(0)
    engine = make(ToyTask(precision="fp16"), kind, precision="fp16")
    updates = steps(engine, 0, POISONED + 2)
    home = FOLDER / f"half_{kind}_{engine.world_size}"
    home.mkdir(exist_ok=True)
    write_snapshot(engine, home)
    updates += steps(engine, POISONED + 2, STEPS)
    assert [update.applied for update in updates[POISONED:]] == [False, True, True, True]
    for before, after in pairwise(updates):  # the first gradients may overflow
        assert after.loss_scale == before.loss_scale / (1 if before.applied else 2)
    assert max(u.gradient_norm for u in updates if u.applied) < 100, "the norm is unscaled"
    assert engine.module.dtypes == {torch.float16}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}

    torch.manual_seed(7)
    again = make(ToyTask(precision="fp16"), kind, precision="fp16")
    again.load(home if engine.rank == 0 else None)
    assert steps(again, POISONED + 2, STEPS) == updates[POISONED + 2 :]
    assert distance(again.parameters(), engine.parameters()) == 0, "resuming is not exact"


def resumed(kind, home):
    torch.manual_seed(7)
    engine = make(ToyTask(), kind)
    steps(engine, 0, 1)  # what it has learned and gathered so far must not shine through
    engine.load(home if engine.rank == 0 else None)
    assert float(engine.module.encoder.seen) > 0, "buffers are part of the state"
    steps(engine, SAVED_AFTER, STEPS)
    return copied(engine.parameters())


def check_loading(kind):
    """From the other number of ranks, of the same and of other stages."""
    expected, _ = plain()
    for source in sorted({kind, "0", "3", DDP}):
        home = FOLDER / f"state_{source}_{3 - distributed.world_size()}"
        assert distance(resumed(kind, home), expected) < 2e-6, home


def check_accumulation(kind):
    global ACCUMULATION
    expected, _ = plain(gradient_accumulation_steps=3)
    torch.manual_seed(0)
    engine = make(ToyTask(), kind, gradient_accumulation_steps=3)
    ACCUMULATION = 3
    updates = steps(engine, 0, STEPS)
    ACCUMULATION = 1
    assert [update.applied for update in updates].count(False) == 1
    assert distance(engine.parameters(), expected) < 2e-6


prepare_environment()
distributed.start(start_group=start_deepspeed)
for each in (*KINDS, DDP):
    if sys.argv[2] == "train":
        check(each)
        check_accumulation(each)
        check_float16(each)
    else:
        check_loading(each)
    if distributed.rank() == 0:
        print(f"{each} holds on {distributed.world_size()} ranks")
distributed.end()
