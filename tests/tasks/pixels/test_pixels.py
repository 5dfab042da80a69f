import math

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import train

from evaluation.options import EvalOptions
from evaluation.vision.pixels import evaluate
from vlp.tasks.pixels.data import PixelBatch, pixel_values
from vlp.tasks.pixels.task import Pixels, PixelsConfig, build

MODEL = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


def config(folder="unused", name="fourier", **data):
    plain = {"train": str(folder), "test": str(folder), "image_size": 4, "canonical_streams": 2}
    model = MODEL | {"positions": [{"name": name}]}
    return PixelsConfig.model_validate({"model": model, "data": plain | data})


@pytest.fixture
def folder(tmp_path):
    """Ten images of 8 x 8 pixels; image n has red 20 n in its left half, 10 in its right."""
    (tmp_path / "all").mkdir()
    for number in range(10):
        pixels = np.full((8, 8, 3), 10, dtype=np.uint8)
        pixels[:, :4, 0] = 20 * number
        Image.fromarray(pixels).save(tmp_path / "all" / f"{number}.png")
    return tmp_path


def batches(folder, count, **options):
    _, data = build(config(folder, **options), 4, 0, "float32")
    return [found for found, _ in data.batches(stop_after=count)]


def test_larger_images_become_means_of_their_middle_square():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    whole = pixel_values(Image.fromarray(pixels[:, :4]), 4, "here")
    assert whole.flatten()[:6].tolist() == [*pixels[0, 0], *pixels[0, 1]]  # raster scan
    values = pixel_values(Image.fromarray(pixels), 2, "here")
    blocks = pixels[:, 2:6].reshape(2, 2, 2, 2, 3).astype(float).mean((1, 3))
    assert np.abs(values.numpy() - blocks).max() <= 1  # Pillow rounds rows, then columns


def test_mirroring_is_drawn_and_repeatable(folder):
    plain, flipped = batches(folder, 2), batches(folder, 2, hflip=True)
    again = batches(folder, 2, hflip=True)
    turned = 0
    for before, after, same in zip(plain, flipped, again):
        assert torch.equal(after.values, same.values)
        for left, right in zip(before.values, after.values):
            assert torch.equal(left, right) or torch.equal(left.flip(1), right)
            turned += not torch.equal(left, right)
    assert 0 < turned < 8


def test_bad_images_are_counted_and_left_out(folder):
    Image.new("RGB", (3, 3)).save(folder / "all" / "a_small_one.png")
    (folder / "all" / "b_broken.png").write_bytes(b"no image")
    found = batches(folder, 3)
    assert sum(int(batch.valid.sum()) for batch in found) == 10
    assert sum(len(batch.values) for batch in found) == 10
    kinds = sorted(skip.kind for batch in found for skip in batch.skipped)
    assert kinds == ["image too small", "unreadable image"]


@pytest.fixture
def planes(tmp_path):
    """Images whose upper half is one of two colours, and whose lower half is the other."""
    (tmp_path / "all").mkdir()
    colours = np.array([[250, 20, 90], [10, 130, 240]], dtype=np.uint8)
    for number in range(32):
        pixels = np.empty((4, 4, 3), dtype=np.uint8)
        pixels[:2], pixels[2:] = colours[number % 2], colours[1 - number % 2]
        Image.fromarray(pixels).save(tmp_path / "all" / f"{number}.png")
    return tmp_path


def batch(rows=3):
    return PixelBatch(torch.randint(256, (rows, 4, 4, 3)), torch.ones(rows, dtype=torch.bool))


def test_the_loss_is_the_mean_of_nats_and_its_bits_are_told():
    task, given = Pixels(config()), batch()
    out = task(given, 0)
    nats = task.model.nats(given.values)
    torch.testing.assert_close(out.loss, nats.mean())
    assert float(out.statistics["bits_per_dim"]) == pytest.approx(float(nats.mean()) / math.log(2))


@pytest.mark.parametrize("name", ["learned-2d", "fourier"])
def test_training_learns_images(planes, name):
    task, data = build(config(planes, name), batch=16, seed=0, precision="float32")
    before = evaluate(task, EvalOptions())
    assert before["bits_per_dim"] == pytest.approx(8, abs=0.05)
    train(task, data, 60, 5e-3)
    after = evaluate(task, EvalOptions())
    # One bit tells both images apart: 1 / 48 bits a dimension is all there is.
    assert after["bits_per_dim"] < 0.5
    assert after["bits_red"] > after["bits_blue"]  # the first channel is the open question
