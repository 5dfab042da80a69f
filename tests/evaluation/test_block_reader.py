from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import active_children
from typing import NamedTuple

import psutil
import pytest
import torch
from question_shards import photo, write_shards
from torch.testing import assert_close

import vlp
from evaluation import samples as block_reader
from evaluation.embed import embed
from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, EvaluationError, workers_for
from launch import pretrain as validation
from launch.pretrain import ValidationLosses
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.scenes.annotation import annotation
from vlp.scenes.sample import sample_scene
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig

CPU = torch.device("cpu")


class Read(NamedTuple):
    rows: list[tuple[torch.Tensor, torch.Tensor]]
    scalar: torch.Tensor
    empty: torch.Tensor
    text: str
    process: int


def read(block):
    draw = torch.Generator().manual_seed(block)
    rows = [
        (torch.rand(3, 5, generator=draw).T, torch.randint(9, (7,), generator=draw) > 4)
        for _ in range(4)
    ]
    scalar = torch.tensor(block / 3).bfloat16()
    return Read(rows, scalar, torch.empty(0, 2), f"{block}", os.getpid())


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [1, 2, 5, 6, 2, 3], [0, 3, 9, 4]])
def test_values_are_the_same_in_any_order(order):
    reader = BlockReader(read, CPU, workers=2)
    before = torch.get_rng_state()
    with reader.prefetch(range(1, 7)):
        found = {block: reader[block] for block in order}
    for block, value in found.items():
        assert_close(value[:3], read(block)[:3], rtol=0, atol=0)
        assert value.text == f"{block}"
    here = {block for block in order if found[block].process == os.getpid()}
    assert here == set(order) - set(range(1, 7))
    assert torch.equal(torch.get_rng_state(), before)
    assert active_children() == []
    assert_close(reader[2][:3], read(2)[:3], rtol=0, atol=0)
    assert active_children() == []


def failing(error, block):
    if block == 1:
        raise error
    return block


class Local(Exception):
    """Cannot be sent to another process."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    "error",
    [
        BadSample("no text", "shards/a.tar, 7"),
        EvaluationError("these shards hold something else"),
        FileNotFoundError(2, "No such file", "a.tar"),
    ],
)
def test_an_error_comes_as_it_is(error):
    reader = BlockReader(partial(failing, error), CPU, workers=2)
    with reader.prefetch(range(4)):
        assert reader[0] == 0
        with pytest.raises(type(error)) as caught:
            reader[1]
        assert str(caught.value) == str(error)
        assert "test_block_reader.py" in "".join(caught.value.__notes__)
        assert reader[2] == 2
    assert active_children() == []


def test_an_error_that_cannot_be_sent_keeps_its_words():
    reader = BlockReader(partial(failing, Local(3, 4)), CPU, workers=1)
    with pytest.raises(Exception, match="3 and 4"), reader.prefetch(range(4)):
        reader[1]
    assert active_children() == []


def test_no_process_outlives_an_exception_of_the_caller():
    reader = BlockReader(read, CPU, workers=2)

    def interrupted():
        with reader.prefetch(range(9)):
            reader[0]
            assert len(active_children()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active_children() == []


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_command(number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # pytest's own paths, of the modules in tests/support, reach no other process.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
    assert process.stdout.readline() == "started\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    _, said = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert said.rstrip().endswith("KeyboardInterrupt")
    _, orphans = psutil.wait_procs(family, timeout=10)
    assert orphans == []


def test_a_gpu_has_workers_and_a_cpu_none(monkeypatch):
    gpu = torch.device("cuda")
    for cores, expected in ((1, 1), (6, 6), (64, 8)):
        monkeypatch.setattr(block_reader, "cores_of_rank", lambda cores=cores: cores)
        assert workers_for(gpu, None) == expected
        assert workers_for(CPU, None) == 0
    assert (workers_for(CPU, 3), workers_for(gpu, 0)) == (3, 0)


if __name__ == "__main__":
    slow = BlockReader(read, CPU, workers=2)
    with slow.prefetch(range(100)):
        slow[0]
        print("started", flush=True)
        time.sleep(60)


@pytest.fixture(scope="module")
def bad_shards(tmp_path_factory):
    scene = annotation(sample_scene(0, 50))
    samples = [(b"", scene), (photo(), Annotation()), (photo(side=20), scene)]
    return write_shards(tmp_path_factory.mktemp("bad"), [*samples, *samples[:2]], per_shard=2)


def test_features_are_the_same_files(model_folder, scene_shards, bad_shards, tmp_path):
    loaded, shards = vlp.load(model_folder), [bad_shards, scene_shards]
    for workers in (0, 2):
        options = EvalOptions(batch=4, workers=workers)
        found = embed(loaded, shards, tmp_path / f"{workers}", options)
        assert found.skipped == {"unreadable image": 2}
    for file in (tmp_path / "0").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def pretraining(model_folder, objectives, batch, *shards):
    data = {"sources": ["unused"], "canonical_streams": 1, "vocabulary": str(model_folder)}
    return PretrainConfig.model_validate(
        {
            "model": vlp.load(model_folder).model.config.model_dump(),
            "data": data,
            "objectives": objectives,
            "training": {"batch": batch, "precision": "float32"},
            "validation": {"shards": list(map(str, shards))},
        }
    )


def test_held_out_losses_are_the_same(model_folder, scene_shards, bad_shards, monkeypatch):
    objectives = {"contrastive": {}, "itm": {}}
    config = pretraining(model_folder, objectives, 4, bad_shards, scene_shards)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, str(model_folder), log_every=1)
    found = []
    for workers in (0, 2):
        monkeypatch.setattr(validation, "workers_for", lambda *_, workers=workers: workers)
        losses = ValidationLosses(config, config.validation, task)
        losses._data.max_skipped_share = 0.9
        found.append(losses(3))
        assert active_children() == []
    assert found[0] == found[1]
    assert found[0].keys() >= {"loss/total", "loss/itm"}
    assert losses(0) == {}


def test_a_pair_of_a_short_batch_weighs_like_any_other(model_folder, scene_shards):
    """A loss that compares no pairs does not depend on the batch: 16 and 5 pairs, or 21."""
    found = {}
    objectives = {"itm": None, "mlm": None, "mim": {}, "teacher": None}
    for batch in (16, 32):
        config = pretraining(model_folder, objectives, batch, scene_shards)
        torch.manual_seed(0)
        task = Pretraining(config.model, config.objectives, str(model_folder))
        found[batch] = ValidationLosses(config, config.validation, task)(4)
    assert found[16]["loss/mim"] == pytest.approx(found[32]["loss/mim"], rel=1e-6)
