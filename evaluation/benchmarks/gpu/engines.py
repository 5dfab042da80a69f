"""Saving and resuming under every engine, on one GPU (part B) and on all of them (part D)."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import random_batch
from vlp import distributed
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import TrainingConfig
from vlp.training.engines.engine import Engine, write_snapshot
from vlp.training.engines.environment import free_port, prepare_environment, start_deepspeed

KINDS = ("ddp", "0", "1", "2", "3")
ROWS, STEPS, TIMED = 4, 4, 8


def resuming(setting: Setting) -> Iterator[CheckedFigure]:
    """Save and resume under every engine on one device."""
    yield from _on_ranks(setting, 1, KINDS[:1] if setting.dry else KINDS)


def several(setting: Setting) -> Iterator[CheckedFigure]:
    """Do the same on all devices, and time steps of DDP on them."""
    ranks = 2 if setting.dry else torch.cuda.device_count()
    yield from _on_ranks(setting, ranks, KINDS[1:2] if setting.dry else KINDS)


def _on_ranks(setting: Setting, ranks: int, kinds: tuple[str, ...]) -> Iterator[CheckedFigure]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), free_port()
        processes = [
            multiprocessing.get_context("forkserver").Process(
                target=_rank, args=(setting, rank, ranks, port, kinds, folder)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if failed := [process.exitcode for process in processes if process.exitcode]:
            raise RuntimeError(f"{len(failed)} of {ranks} ranks failed")
        for line in (folder / "figures.jsonl").read_text(encoding="utf-8").splitlines():
            yield CheckedFigure(**json.loads(line))


def _rank(
    setting: Setting, rank: int, ranks: int, port: int, kinds: tuple[str, ...], folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if setting.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    prepare_environment()
    distributed.start(join=None if kinds == ("ddp",) else start_deepspeed)
    figures = []
    for kind in kinds:
        figures += _resumed(setting, kind, folder, timed=ranks > 1 and kind == kinds[0])
    if rank == 0:
        lines = (json.dumps(figure._asdict()) for figure in figures)
        (folder / "figures.jsonl").write_text("\n".join(lines), encoding="utf-8")
    distributed.barrier()
    distributed.end()


def _resumed(setting: Setting, kind: str, folder: Path, timed: bool) -> list[CheckedFigure]:
    engine = _engine(setting, kind, folder)
    home = folder / kind
    home.mkdir(exist_ok=True)
    _train(setting, engine, 0, STEPS // 2)
    write_snapshot(engine, home)
    expected = _train(setting, engine, STEPS // 2, STEPS)
    again = _engine(setting, kind, folder)
    again.load(home if again.rank == 0 else None)
    found = _train(setting, again, STEPS // 2, STEPS)
    error = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    name = f"{'DDP' if kind == 'ddp' else f'ZeRO-{kind}'}, ranks: {engine.world_size}"
    figures = [CheckedFigure(f"{name}: weights after a resume", error, "", None, 1e-5, True)]
    if timed:
        steps = TIMED // 4 if setting.dry else TIMED
        seconds = harness.seconds(
            lambda: _train(setting, again, STEPS, STEPS + steps), setting.device
        )
        pairs = ROWS * engine.world_size * steps / seconds
        figures.append(CheckedFigure(f"{name}: small steps", pairs, "pairs/s"))
    return figures


def _engine(setting: Setting, kind: str, folder: Path) -> Engine:
    torch.manual_seed(0)
    settings = setting.config
    task = Pretraining(settings.model, settings.objectives, "", "float32", log_every=10**6)
    values = {"batch": ROWS * distributed.world_size(), "precision": "float32"}
    if kind == "ddp":
        from vlp.training.engines.ddp import DdpEngine

        return DdpEngine(task, TrainingConfig.model_validate(values))
    from vlp.training.engines.deepspeed import DeepSpeedEngine

    path = folder / f"{kind}_{distributed.rank()}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": int(kind)}}), encoding="utf-8")
    return DeepSpeedEngine(task, TrainingConfig.model_validate(values | {"deepspeed": str(path)}))


def _train(setting: Setting, engine: Engine, first: int, last: int) -> dict[str, Tensor]:
    """Train on batches of their own; returns the weights."""
    for step in range(first, last):
        batch = random_batch(setting.config.inputs, ROWS, 3, seed=100 * engine.rank + step)
        engine.backward(engine.forward(batch.to(engine.device), step).loss)
        engine.step(1e-3)
    return {name: value.cpu().clone() for name, value in engine.parameters().items()}
