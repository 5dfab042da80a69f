"""One rank of test_sharded_checkpoints.py: shards of DDP and FSDP, on any number of ranks.

usage: sharded_ranks.py FOLDER WHAT, the name of a function below. The folder keeps checkpoints from
one number of ranks to the next.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_toy import TOKENS, ToyTask, toy_batch, toy_config

from vlp import distributed
from vlp.config import ConfigError
from vlp.training.checkpoints import checkpoint
from vlp.training.checkpoints.checkpoint import CheckpointError, Checkpoints
from vlp.training.checkpoints.places import LocalPlace
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.environment import prepare_environment
from vlp.training.engines.fsdp import FsdpEngine
from vlp.training.logging.progress import Progress

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
ENGINES = {"ddp": DdpEngine, "fsdp": FsdpEngine}
STEPS = 3
# `local:` is a store like others to this project: nothing there is renamed.
PLACES = {"disk": "{}", "url": "local://{}"}


class Teacher(ToyTask):
    """Its average is cut up as the parameters are, and is loaded at full size."""

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        names = dict(self.named_parameters())
        self.average = {
            name.removeprefix("average."): distributed.sharded_like(
                value, names[name.removeprefix("average.")]
            ).clone()
            for name, value in state.items()
        }


def made(kind: str) -> tuple[Teacher, Any]:
    torch.manual_seed(1)
    task = Teacher()
    return task, ENGINES[kind](task, toy_config(batch=12, precision="fp16").training)


def steps(task: Teacher, engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.randint(TOKENS, (12, 5), generator=torch.Generator().manual_seed(step))
        share = len(ids) // engine.world_size
        own = ids[engine.rank * share : (engine.rank + 1) * share]
        engine.backward(engine.forward(toy_batch(own), step).loss * engine.world_size)
        if engine.step(1e-2).applied:
            task.after_step(engine.parameters)


def home(name: str, place: str = "disk", form: str = "sharded", **settings: Any) -> Checkpoints:
    url = PLACES[place].format(FOLDER / name)
    config = toy_config(checkpoint_format=form, checkpoint_folder=url, engine="ddp", **settings)
    return Checkpoints(FOLDER / f"scratch_{name}", config)


def files(task: Teacher, engine: Any) -> dict[str, dict[str, Tensor]]:
    return engine.snapshot() | {"extra": distributed.on_rank_0(task.extra_state())}


def equal(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    for file in one:
        assert one[file].keys() == two[file].keys()
        for name, value in one[file].items():
            assert torch.equal(value, two[file][name]), (file, name)


def save() -> None:
    """Both forms of the same state, on a disk and in a store; training goes on meanwhile."""
    for kind in ENGINES:
        for place in PLACES:
            task, engine = made(kind)
            steps(task, engine, 0, STEPS)
            home(f"full_{kind}_{place}", place, "full").save(engine, task, Progress(step=STEPS))
            shards = home(f"{kind}_{place}", place)
            shards.save(engine, task, Progress(step=STEPS, samples=7), wait=False)
            steps(task, engine, STEPS, 2 * STEPS)
            shards.save(engine, task, Progress(step=2 * STEPS, samples=9), wait=False)
            after = files(task, engine)
            steps(task, engine, 0, 1)
            shards.wait()
            shards.close()
            task, engine = made(kind)
            assert home(f"{kind}_{place}", place).load(engine, task) == Progress(6, 9)
            equal(files(task, engine), after)


def load() -> None:
    """What another number of ranks saved, by both engines, and in full again."""
    for kind in ENGINES:
        for source in ENGINES:
            for place in PLACES:
                # The newest is gone, so that both forms are of one step.
                task, engine = made(kind)
                steps(task, engine, 0, 1)
                assert home(f"{source}_{place}", place).load(engine, task) == Progress(3, 7)
                other_task, other = made(kind)
                assert home(f"full_{source}_{place}", place).load(other, other_task).step == STEPS
                equal(files(task, engine), files(other_task, other))
                steps(task, engine, STEPS, STEPS + 2)
                steps(other_task, other, STEPS, STEPS + 2)
                equal(files(task, engine), files(other_task, other))


def full_disk() -> None:
    """The system cuts off what the last rank writes; every rank says so, and goes on."""
    task, engine = made("fsdp")
    shards = home("disk")
    shards.save(engine, task, Progress(step=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == engine.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    shards.save(engine, task, Progress(step=2), wait=False)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_2: .*File too large"):
        shards.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (FOLDER / "disk").iterdir()] == ["step_1"]
    shards.save(engine, task, Progress(step=3))
    assert home("disk").load(engine, task).step == 3


def killed() -> None:
    """The last rank is killed in the midst of its write; the others say that it is lost."""
    task, engine = made("fsdp")
    shards = home("disk")
    shards.save(engine, task, Progress(step=1))
    if engine.rank == engine.world_size - 1:

        def watch(frame: Any, event: str, called: Any) -> None:
            if event == "c_call" and called.__name__ == "fsync":
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(watch)
        shards = home("disk")  # with a thread that is watched
    else:
        shards = home("disk")
    shards.save(engine, task, Progress(step=2), wait=False)
    with pytest.raises(RuntimeError) as lost:
        shards.wait()
    assert distributed.lost_peer(lost.value), lost.value
    print("lost the other rank", flush=True)
    os._exit(0)


def goes_on() -> None:
    """On one rank alone, from the checkpoint before."""
    task, engine = made("fsdp")
    assert [path.name for path in (FOLDER / "disk").glob("step_?")] == ["step_1"]
    assert home("disk").load(engine, task).step == 1
    assert [path.name for path in (FOLDER / "disk").iterdir()] == ["step_1"]


def lonely() -> None:
    """A folder that each rank has for itself is named when it is written, and when it is read."""
    task, engine = made("ddp")
    own = FOLDER / f"rank_{engine.rank}"
    config = toy_config(checkpoint_format="sharded", engine="ddp")
    checkpoint.PATIENCE = 0.3
    with pytest.raises(ConfigError, match=r"rank 1 does not see .*all nodes share, or a URL"):
        Checkpoints(own, config)
    assert not own.exists()
    shared = home("shared")
    shared.save(engine, task, Progress(step=1))
    shared._place = LocalPlace(own)
    with pytest.raises(CheckpointError, match="ranks of other nodes write elsewhere"):
        shared.save(engine, task, Progress(step=1))
    assert not list(FOLDER.glob("rank_0/step_1*"))
    if engine.rank == 0:
        shared._place = LocalPlace(FOLDER / "shared")
    with pytest.raises(ConfigError, match=r"rank 1 does not see .*all nodes share, or a URL"):
        shared.load(engine, task)


def moved() -> None:
    """Rank 0 is on another node than before, whose own disk has no checkpoint, or an older one."""
    task, engine = made("ddp")
    config = toy_config(engine="ddp")
    before = Checkpoints(FOLDER / "rank_1", config)
    before.save(engine, task, Progress(step=2))
    own = Checkpoints(FOLDER / f"rank_{engine.rank}", config)
    with pytest.raises(CheckpointError, match=r"no checkpoint, but rank 1 .*rank_1/step_2"):
        own.load(engine, task)
    Checkpoints(FOLDER / "rank_0", config).save(engine, task, Progress(step=1))
    with pytest.raises(CheckpointError, match=r"step_1, but rank 1 .*rank_1/step_2"):
        own.load(engine, task)
    Checkpoints(FOLDER / "rank_0", config).save(engine, task, Progress(step=3))
    assert own.load(engine, task) == Progress(step=3)


prepare_environment()
distributed.start(with_deepspeed=False)
globals()[WHAT]()
print(f"{WHAT} holds on {distributed.world_size()} ranks")
distributed.end()
