"""Loader processes that do not end by themselves, as in an outage of the store."""

import subprocess
import sys
import time
from multiprocessing import active_children, set_start_method
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.utils.data import Dataset, _utils

from vlp.data.stream.loader import OrderedData
from vlp.data.stream.sampler import Source, TrainingSampler
from vlp.lock import FolderLock


class Batch(NamedTuple):
    valid: torch.Tensor
    skipped: tuple[Any, ...] = ()


class Stuck(Dataset[Any]):
    given = 0

    def __getitem__(self, request):
        if self.given == 2:
            time.sleep(600)
        self.given += 1
        return 1


def collate(slots):
    return Batch(torch.ones(len(slots), dtype=torch.bool))


def started():
    sampler = TrainingSampler([Source([100], 1.0)], 2, 10, 0)
    batches = OrderedData(sampler, Stuck(), collate, 2, workers=1).batches()
    next(batches)
    return batches


@pytest.mark.nightly
def test_one_that_is_stuck_is_killed(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    batches = started()
    assert len(active_children()) == 1
    batches.close()
    assert active_children() == []


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_end_with_their_process(tmp_path, method):
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path), method], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "started\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    process.wait()
    process.stdout.close()
    _, orphans = psutil.wait_procs(family, timeout=10)
    assert orphans == []


if __name__ == "__main__":
    held = FolderLock(Path(sys.argv[1]))
    set_start_method(sys.argv[2])
    running = started()
    print("started", flush=True)
    time.sleep(60)
