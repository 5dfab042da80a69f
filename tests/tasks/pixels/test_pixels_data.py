"""Images as pixel values: order, size, and what cannot be used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vlp.config import ConfigError
from vlp.data.labelled_images import open_labelled
from vlp.tasks.pixels.data import PixelDataConfig, pixel_data, pixel_values


def config(folder, **options):
    plain = {"train": str(folder), "test": str(folder), "image_size": 4, "canonical_streams": 2}
    return PixelDataConfig.model_validate(plain | options)


@pytest.fixture
def folder(tmp_path):
    """Ten images of 8 x 8 pixels; image n has red 20 n in its left half, 10 in its right."""
    (tmp_path / "all").mkdir()
    for number in range(10):
        pixels = np.full((8, 8, 3), 10, dtype=np.uint8)
        pixels[:, :4, 0] = 20 * number
        Image.fromarray(pixels).save(tmp_path / "all" / f"{number}.png")
    return tmp_path


def batches(folder, count, batch=4, seed=0, **options):
    data = pixel_data(open_labelled(str(folder)), config(folder, **options), batch, seed)
    return [found for found, _ in data.batches(stop_after=count)]


def test_images_of_the_right_size_are_left_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    values = pixel_values(Image.fromarray(pixels), 5, "here")
    assert values.dtype == torch.uint8
    assert values.tolist() == pixels.tolist()
    # Flattened: raster scan, red, green and blue of each pixel.
    assert values.flatten()[:6].tolist() == [*pixels[0, 0], *pixels[0, 1]]


def test_larger_images_become_means_of_their_middle_square():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    values = pixel_values(Image.fromarray(pixels), 2, "here")
    blocks = pixels[:, 2:6].reshape(2, 2, 2, 2, 3).astype(float).mean((1, 3))
    assert np.abs(values.numpy() - blocks).max() <= 1  # Pillow rounds rows, then columns


def test_an_epoch_has_every_image_once(folder):
    found = torch.cat([batch.values for batch in batches(folder, 3)])
    assert found.shape == (10, 4, 4, 3)
    assert found.dtype == torch.int64
    assert sorted(found[:, 0, 0, 0].tolist()) == [20 * number for number in range(10)]
    assert (found[..., 1:] == 10).all()


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


def test_limit_takes_the_same_few_for_every_seed(folder):
    chosen = [
        {
            int(one)
            for batch in batches(folder, 1, seed=seed, limit=4)
            for one in batch.values[:, 0, 0, 0]
        }
        for seed in (0, 1)
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 4
    with pytest.raises(ConfigError, match="limit 11 is more than the 10 images"):
        batches(folder, 1, limit=11)


def test_bad_images_are_counted_and_left_out(folder):
    Image.new("RGB", (3, 3)).save(folder / "all" / "a_small_one.png")
    (folder / "all" / "b_broken.png").write_bytes(b"no image")
    found = batches(folder, 3)
    assert sum(int(batch.valid.sum()) for batch in found) == 10
    assert sum(len(batch.values) for batch in found) == 10
    kinds = sorted(skip.kind for batch in found for skip in batch.skipped)
    assert kinds == ["image too small", "unreadable image"]
