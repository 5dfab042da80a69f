"""The loaders' benchmark: turns, what it refuses, and the whole command beside open_clip."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.__main__ import main
from benchmarks.loader import (
    OPEN_CLIP,
    OURS,
    TOKENS,
    TRANSFORMS,
    LoaderTurns,
    Prepare,
    Settings,
    Turn,
    check_shards,
    make_shards,
    our_batches,
    ratios,
    samples_of,
    save_vocabulary,
    take_turns,
)
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig


class Busy(Dataset[int]):
    """Samples that cost some CPU time each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, number: int) -> int:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return number


def batches(seconds: float, workers: int) -> Iterator[torch.Tensor]:
    yield from DataLoader(Busy(seconds), batch_size=4, num_workers=workers)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, 40, images=2, per_shard=20)
    return folder


def test_a_side_of_twice_the_work_takes_twice_the_time() -> None:
    sides = {
        OPEN_CLIP: lambda: batches(0.008, 1),
        OURS: lambda: batches(0.004, 1),
    }
    found = take_turns(sides, batches=12, samples=48, rounds=3, cores=1)
    assert list(found) == [OPEN_CLIP, OURS]
    assert all(len(side.turns) == 3 for side in found.values())
    assert all(1.4 < ratio < 2.6 for ratio in ratios(found, OURS, OPEN_CLIP))


def test_workers_of_a_side_rest_while_another_has_its_turn() -> None:
    # With four batches made ahead, a side at work all the time would find its turn's ready.
    sides = {
        "first": lambda: batches(0.004, 1),
        "second": lambda: batches(0.004, 1),
    }
    found = take_turns(sides, batches=20, samples=80, rounds=2, cores=1)
    for side in found.values():
        for turn in side.turns:
            assert turn.cpu > 0.6 * 80 * 0.004


def test_ratios_are_of_cpu_time_by_rounds() -> None:
    found = {
        OPEN_CLIP: LoaderTurns(10, [Turn(1, 4), Turn(9, 6)]),
        OURS: LoaderTurns(10, [Turn(5, 2), Turn(1, 2)]),
    }
    assert ratios(found, OURS, OPEN_CLIP) == [2, 3]
    assert ratios(found, OPEN_CLIP, OURS) == [0.5, 1 / 3]


def test_our_side_gives_levels_or_what_they_are_normalised(shards: Path, tmp_path: Path) -> None:
    save_vocabulary(shards, tmp_path, 32)
    settings = Settings(shards, tmp_path, 32, 8, 0)
    plain = AugmentConfig(randaugment=False, hflip=False, crop_scale=(0.9, 1.0))
    levels, pixels = (
        next(our_batches(settings, plain, normalised)).pixels for normalised in (False, True)
    )
    assert levels.shape == pixels.shape == (8, 3, 32, 32)
    torch.testing.assert_close(pixels, levels / 127.5 - 1)


def test_shards_that_a_loader_would_wait_for_are_refused(shards: Path, tmp_path: Path) -> None:
    check_shards(shards, 8, 2)
    with pytest.raises(ConfigError, match="3 workers need as many shards"):
        check_shards(shards, 8, 3)
    with pytest.raises(ConfigError, match="40 samples are too few for batches of 32"):
        check_shards(shards, 32, 1)


@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_peers_get_the_same_samples(shards: Path, tmp_path: Path, transforms: str) -> None:
    save_vocabulary(shards, tmp_path, TOKENS)
    samples = list(samples_of(shards))
    assert len(samples) == 40
    prepare = Prepare(Settings(shards, tmp_path, 32, 2, 0), transforms)
    image, ids, mask = prepare(samples[0])
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
    assert ids.shape == mask.shape == (TOKENS,)
    assert torch.equal(ids, prepare.text(samples[0]["txt"])[0])


@pytest.mark.parametrize("row", ["equal", "best"])
def test_beside_open_clip(shards: Path, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("open_clip_train", reason="open_clip_torch is not installed")
    arguments = ["--size", "64", "--batch", "8", "--rounds", "1", "--row", row]
    assert main(["loader", "--shards", str(shards), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    ratio = [one["value"] for one in found if one["name"].endswith("/ratio")]
    assert len(ratio) == (2 if row == "equal" else 3)
    assert all(value > 0.3 for value in ratio)
