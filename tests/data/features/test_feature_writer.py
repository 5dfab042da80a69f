"""Stored features are the tower's own, whoever writes them and however often he is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_work_sharding import launch

from data_tools.__main__ import main
from vlp.data.config import AugmentConfig
from vlp.data.features.store import BAD, FLIPPED, HEADER_NAME, PLAIN, FeatureHeader
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.data.stream.rng import make_rng

ROOT = Path(__file__).resolve().parents[3]


def arrays(folder):
    """Both arrays of every shard of the first source."""
    names = sorted(path.stem for path in (folder / "0").glob("*.npy") if "views" not in path.name)
    return [(np.load(folder / "0" / f"{n}.npy"), np.load(folder / "0" / f"{n}.views.npy"))
            for n in names]  # fmt: skip


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize(("dtype", "bits"), [("float16", np.float16), ("bfloat16", np.uint16)])
def test_features_are_the_towers_own_but_for_rounding(
    make_shards, configuration, make_features, tower_of, tmp_path, dtype, bits
):
    folder = make_shards(count=13)
    config = configuration(folder)
    out = make_features(config, tmp_path / "out", "--views", 3, "--dtype", dtype)
    tower, index, prepare = tower_of(config), ShardIndex.open(folder), Preprocessing(16)
    transform = TrainTransform(AugmentConfig(randaugment=False), prepare)
    header = FeatureHeader.read(out)
    assert (header.views, header.tokens, header.width, header.seed) == (3, 17, 16, 0)
    for shard, (features, codes) in enumerate(arrays(out)):
        count = index.shards[shard].samples
        assert features.shape == (count, 3, 17, 16)
        assert features.dtype == bits
        views = torch.empty(count, 3, 3, 16, 16)
        for sample in range(count):
            raw = index.read(shard, sample)
            image = decode_image(raw.image, "")
            views[sample, 0] = prepare(image)
            for view in (1, 2):
                name = f"{header.sources[0].index}:{index.shards[shard].name}:{sample}"
                rng = make_rng(0, view, name, "features")
                levels, flipped = transform.view(image, rng, may_flip=True)
                views[sample, view] = prepare.normalise(levels)
                assert codes[sample, view] == (FLIPPED if flipped else PLAIN)
        for start in range(0, count, 2):  # 6 views of a pass
            with torch.no_grad():
                wanted = tower(views[start : start + 2].flatten(0, 1))
            stored = torch.from_numpy(features[start : start + 2].view(np.int16))
            stored = stored.view(getattr(torch, dtype)).flatten(0, 1)
            assert torch.equal(stored, wanted.to(stored.dtype))
    assert (np.concatenate([codes for _, codes in arrays(out)])[:, 0] == PLAIN).all()
    assert {0, 1} == set(np.concatenate([codes[:, 1] for _, codes in arrays(out)]))


def test_the_first_view_is_averaged_with_its_flip(
    make_shards, configuration, make_features, tower_of, tmp_path
):
    folder = make_shards(count=5)
    config = configuration(folder)
    options = ("--views", 2, "model.image.average_hflip=true")
    [(averaged, _), *_] = arrays(make_features(config, tmp_path / "averaged", *options))
    [(plain, _), *_] = arrays(make_features(config, tmp_path / "plain", *options[:2]))
    assert np.allclose(averaged[:, 1], plain[:, 1], atol=1e-3)
    tower, index = tower_of(config), ShardIndex.open(folder)
    image = Preprocessing(16)(decode_image(index.read(0, 0).image, ""))
    with torch.no_grad():
        straight, flipped = tower(torch.stack([image, image.flip(-1)]))
    back = flipped[1:].unflatten(0, (4, 4)).flip(1).flatten(0, 1)
    wanted = (straight + torch.cat([flipped[:1], back])) / 2
    assert np.allclose(averaged[0, 0], wanted.numpy(), atol=5e-3)
    assert not np.allclose(averaged[0, 0], plain[0, 0], atol=5e-3)


@pytest.mark.nightly
def test_workers_and_ranks_change_nothing(make_shards, configuration, make_features, tmp_path):
    config = configuration(make_shards(count=23))
    alone = contents(make_features(config, tmp_path / "alone", "--views", 2))
    workers = make_features(config, tmp_path / "workers", "--views", 2, "data.workers=2")
    assert contents(workers) == alone
    command = ["-m", "data_tools", "features", "--config", config, "--batch", 6, "--views", 2]
    ranks = launch(2, [*map(str, command), "--out", str(tmp_path / "ranks")])
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert contents(tmp_path / "ranks") == alone
    said = [line for line in ranks[0].stdout.splitlines() if "images" in line]
    assert len(said) == 1
    assert "23 images x 2 views of 17 x 16 written" in said[0]
    assert "images" not in ranks[1].stdout


@pytest.mark.nightly
def test_a_killed_command_goes_on_with_the_shards_that_are_missing(
    make_shards, configuration, make_features, tmp_path
):
    config = configuration(make_shards(count=300, per_shard=10))
    whole = contents(make_features(config, tmp_path / "whole", "--views", 4))
    out = tmp_path / "out"
    command = ["features", "--config", config, "--out", out, "--batch", 6, "--views", 4]
    running = subprocess.Popen(
        [sys.executable, "-m", "data_tools", *map(str, command)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while running.poll() is None and len(list(out.glob("0/*.npy"))) < 8:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = {path: path.stat().st_mtime_ns for path in out.glob("0/shard-*[0-9].npy")}
    assert 0 < len(done) < 30
    make_features(config, out, "--views", 4)
    assert contents(out) == whole
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())


@pytest.mark.nightly
def test_a_second_command_is_refused_by_all_ranks(make_shards, configuration, tmp_path):
    """The first one is stopped in its work; the second one is two ranks."""
    config, out = configuration(make_shards(count=300, per_shard=10)), tmp_path / "out"
    command = ["features", "--config", str(config), "--out", str(out), "--batch", "6"]
    first = subprocess.Popen([sys.executable, "-m", "data_tools", *command], cwd=ROOT)
    while first.poll() is None and not list(out.glob("0/*.npy")):
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)
    try:
        before = contents(out)
        second = launch(2, ["-m", "data_tools", *command])
        after = contents(out)
    finally:
        first.send_signal(signal.SIGCONT)
    refused = f"data_tools features: {out}: is being written by process {first.pid} on "
    assert [rank.returncode for rank in second] == [2, 2]
    assert all(refused in rank.stderr for rank in second)
    assert after == before
    assert first.wait() == 0
    assert not list(out.glob(".lock*"))


def test_another_command_does_not_go_on(
    make_shards, configuration, make_features, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    config = configuration(make_shards(count=5))
    out = make_features(config, tmp_path / "out")
    before = contents(out)
    options = ["features", "--config", str(config), "--out", str(out)]
    for change, said in (
        (["--views", "2"], "augment is None there, {'randaugment'"),
        (["--precision", "bf16"], "precision is 'float32' there, 'bf16' here"),
        (["training.seed=1"], "weights is '"),
        (["model.image.layers=2"], "tower.layers is 1 there, 2 here"),
    ):
        assert main([*options, *change]) == 2
        message = capsys.readouterr().err
        assert said in message
        assert message.count("\n") == 1
    assert contents(out) == before
    (out / HEADER_NAME).unlink()
    assert main(options) == 2
    assert "holds something else; name another folder" in capsys.readouterr().err


def test_bad_samples_have_no_features(configuration, make_features, tmp_path, capsys):
    folder = tmp_path / "shards"
    with ShardWriter(folder, 4) as writer:
        for number in range(6):
            image = os.urandom(99) if number in (1, 4) else encoded(number)
            writer.write(f"k{number}", image, "png", Annotation(captions=["a dog"]))
    out = make_features(configuration(folder), tmp_path / "out", "--views", 2)
    assert "2 images cannot be read" in capsys.readouterr().out
    kinds = FeatureHeader.read(out).kinds
    (features, codes), (_, last) = arrays(out)
    assert codes[:, 0].tolist() == [PLAIN, BAD + kinds.index("unreadable image"), PLAIN, PLAIN]
    assert last[:, 0].tolist() == [BAD + kinds.index("unreadable image"), PLAIN]
    assert (features[1] == 0).all()
    assert (features[[0, 2, 3]] != 0).any((1, 2, 3)).all()


def encoded(number):
    from io import BytesIO

    from PIL import Image

    stream = BytesIO()
    levels = np.random.default_rng(number).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    Image.fromarray(levels).save(stream, "png")
    return stream.getvalue()


def test_what_float16_cannot_hold_is_refused(
    make_shards, configuration, make_features, tmp_path, capsys, monkeypatch
):
    from vlp.models.image_encoder import ImageEncoder

    tower = ImageEncoder.tower
    monkeypatch.setattr(ImageEncoder, "tower", lambda *arguments: 1e5 * tower(*arguments))
    config = configuration(make_shards(count=5))
    assert main(["features", "--config", str(config), "--out", str(tmp_path / "out")]) == 2
    assert "which float16 cannot hold; use --dtype bfloat16" in capsys.readouterr().err
    make_features(config, tmp_path / "wide", "--dtype", "bfloat16")
