from typing import NamedTuple

import pytest
import torch

from vlp.data.shards.sample_files import DataError, SkippedSample
from vlp.data.stream import loader
from vlp.data.stream.loader import SkippedShareWatch
from vlp.data.stream.sampler import Pool, TrainingSampler


class Share(NamedTuple):
    valid: torch.Tensor
    skipped: tuple[SkippedSample, ...]

    def to(self, device):
        return self


def share(good, bad):
    valid = torch.tensor([True] * good + [False] * bad)
    return Share(
        valid, tuple(SkippedSample("unreadable image", f"a.tar, k{n}") for n in range(bad))
    )


def watch(samples, most):
    return SkippedShareWatch(
        TrainingSampler([Pool([samples])], 2, 4, 0), most, rank=1, world_size=2
    )


def test_a_share_of_the_epoch_may_be_bad_and_no_more():
    one = watch(40, 0.25)  # this rank has 20 samples of each epoch
    for epoch in range(3):
        one.see(epoch, share(2, 3))
        one.see(epoch, share(3, 2))
    with pytest.raises(DataError, match=r"6 of 20 samples of epoch 2 .* unreadable.*a\.tar, k0"):
        one.see(2, share(7, 1))


def test_only_a_whole_epoch_without_a_good_sample_ends_a_run():
    resumed = watch(40, 1.0)
    resumed.see(0, share(0, 1))  # the last of the 20 of epoch 0
    resumed.see(1, share(0, 20))
    with pytest.raises(DataError, match="nothing is left of epoch 1: all of its 20 samples"):
        resumed.see(2, share(1, 0))


def test_nothing_good_for_long_ends_a_run_whose_epochs_are_longer(monkeypatch):
    monkeypatch.setattr(loader, "_MOST_IN_A_ROW", 100)
    one = watch(10**9, 0.5)
    for _ in range(12):
        one.see(0, share(0, 8))
    one.see(0, share(1, 7))  # one good sample, and the count starts anew
    for _ in range(12):
        one.see(0, share(0, 8))
    with pytest.raises(DataError, match=r"104 samples in a row are bad, none good; the last one"):
        one.see(0, share(0, 8))
