"""Images with boxes for training: generated scenes, sizes, crops, mirrors and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.detection.data import (
    DetectionDataConfig,
    DetectionSamples,
    ObjectImage,
    SceneImages,
    SceneSource,
    detection_data,
    fit_size,
    open_objects,
)

SCENES = {"format": "scenes", "count": 12}
PLAIN = {"mean": [0, 0, 0], "std": [1, 1, 1], "hflip": False}
GREY, RED = (90, 90, 90), (250, 0, 0)


def config(**options):
    plain = {"train": SCENES, "test": SCENES, "sizes": [64], "canonical_streams": 2}
    return DetectionDataConfig.model_validate(plain | options)


def rng_for(seed):
    return lambda purpose: np.random.default_rng([seed, *purpose.encode()])


class OneObject:
    """A grey image with one red box, and a crowd in the corner."""

    classes = ("red",)

    def __init__(self, size=(60, 40), box=(10, 8, 30, 28), stored=1):
        self.size, self.box, self.stored = size, box, stored

    def __len__(self):
        return 1

    def read(self, number):
        image = Image.new("RGB", self.size, GREY)
        left, top, right, bottom = self.box
        image.paste(RED, (left, top, right, bottom))
        boxes = np.array([self.box, (0, 0, 5, 5)], dtype=float) * self.stored
        wide, high = (side * self.stored for side in self.size)
        return ObjectImage(
            image, wide, high, boxes, np.array([0, 0]), np.array([400.0, 25.0]),
            np.array([False, True]), "one",
        )  # fmt: skip


def red_box(pixels):
    """Where the red is, by pixels: left, top, right, bottom as shares."""
    red = (pixels[0] - pixels[1] > 0.3).nonzero()
    (top, left), (bottom, right) = red.min(0).values.tolist(), (red.max(0).values + 1).tolist()
    rows, columns = pixels.shape[1:]
    return torch.tensor([left / columns, top / rows, right / columns, bottom / rows])


def corners(boxes):
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)


def test_too_many_objects_are_left_out_by_name():
    samples = DetectionSamples(SceneImages(SceneSource(**SCENES), 64), config(), most=1)
    crowded = next(n for n in range(12) if len(samples.images.read(n).labels) > 1)
    with pytest.raises(BadSample, match=r"more objects than queries: train-0-\d+: [23], not 1"):
        samples(crowded, rng_for(0))


# Scenes


def test_scenes_have_their_boxes_at_every_size():
    small, large = (SceneImages(SceneSource(**SCENES), side) for side in (64, 160))
    for number in range(12):
        one, other = small.read(number), large.read(number)
        assert other.image.size == (160, 160)
        assert np.allclose(one.boxes / 64, other.boxes / 160)
        assert one.labels.tolist() == other.labels.tolist()
        assert np.allclose(one.areas, (one.boxes[:, 2:] - one.boxes[:, :2]).prod(-1))
        # Inside a box there is another colour than around all of them.
        pixels = np.asarray(other.image, dtype=int)
        background = pixels[0, 0]
        left, top, right, bottom = np.rint(other.boxes[0]).astype(int)
        assert np.abs(pixels[top:bottom, left:right] - background).max() > 30
    with pytest.raises(ConfigError, match="16 px a side at least, not 8"):
        SceneImages(SceneSource(**SCENES), 8)


# Preparation


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("crop", [0.0, 1.0])
@pytest.mark.parametrize("stored", [1, 3])
def test_boxes_stay_on_their_objects(hflip, crop, stored):
    plain = config(sizes=[160, 240], multiple=8, **PLAIN | {"hflip": hflip, "crop": crop})
    samples = DetectionSamples(OneObject(stored=stored), plain, 100)
    seen = []
    for seed in range(12):
        pixels, boxes, labels = samples(0, rng_for(seed))
        assert labels.tolist() == [0]  # the crowd is no target
        assert torch.allclose(corners(boxes)[0], red_box(pixels), atol=0.03)
        seen.append(boxes)
    seen = torch.cat(seen)
    assert len(seen.unique(dim=0)) == (1 if not (hflip or crop) else 2 if not crop else 12)


def test_an_object_outside_of_the_crop_is_none():
    plain = config(**PLAIN | {"crop": 1.0, "crop_sides": [0.3, 0.3]})
    samples = DetectionSamples(OneObject(), plain, 100)
    counts = set()
    for seed in range(40):
        pixels, boxes, labels = samples(0, rng_for(seed))
        counts.add(len(labels))
        assert len(boxes) == len(labels) == int(((pixels[0] - pixels[1]) > 0.3).any())
    assert counts == {0, 1}


@given(
    st.integers(1, 2000), st.integers(1, 2000), st.integers(32, 800), st.integers(800, 1400),
    st.sampled_from([1, 8, 32]),
)  # fmt: skip
def test_sizes_are_multiples_and_keep_the_shape(width, height, shortest, longest, multiple):
    wide, high = fit_size(width, height, shortest, longest, multiple)
    assert wide % multiple == high % multiple == 0
    assert multiple <= wide <= longest
    assert multiple <= high <= longest
    assert min(wide, high) <= shortest + multiple / 2
    scale = min(shortest / min(width, height), longest / max(width, height))
    for found, side in ((wide, width), (high, height)):
        assert abs(found - max(scale * side, multiple)) <= multiple


def test_detr_sizes():
    assert fit_size(640, 480, 800, 1333, 1) == (1067, 800)
    assert fit_size(640, 240, 800, 1333, 1) == (1333, 500)
    assert fit_size(480, 640, 800, 1333, 32) == (800, 1056)
    assert DetectionDataConfig(train=SCENES, test=SCENES).sizes == (
        480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800,
    )  # fmt: skip


def test_batches_are_the_same_on_any_number_of_ranks():
    plain = config(sizes=[64, 96], crop=0.5)
    data = detection_data(SceneImages(SceneSource(**SCENES), 96), plain, 10, 4, 3)

    def epoch(ranks):
        streams = [data.batches(0, rank, ranks, stop_after=3) for rank in range(ranks)]
        steps = [[batch for batch, _ in step] for step in zip(*streams)]
        return [
            sorted(float(p.double().sum() + b.double().sum()) for b_ in step
                   for p, b in zip(b_.pixels, b_.boxes))
            for step in steps
        ]  # fmt: skip

    assert epoch(1) == epoch(2)
    assert sum(map(len, epoch(1))) == 12


def test_a_batch_moves():
    data = detection_data(SceneImages(SceneSource(**SCENES), 64), config(), 9, 2, 0)
    ((batch, _),) = list(data.batches(stop_after=1))
    moved = batch.to("meta")
    assert {one.device.type for part in moved[:4] for one in part} == {"meta"}


def test_configurations_that_cannot_work_are_refused():
    with pytest.raises(ValidationError, match="size 16 is not between multiple 32 and longest"):
        config(sizes=[16])
    with pytest.raises(ValidationError, match="size 4000 is not between"):
        config(test_sizes=[4000])
    with pytest.raises(ValidationError, match=r"\[1\.0, 0\.5\] is not 0 < low"):
        config(crop_sides=[1.0, 0.5])
    with pytest.raises(ValidationError, match="format"):
        config(train={"format": "voc"})
    with pytest.raises(ConfigError, match="batch 3 is not a multiple of canonical_streams 2"):
        detection_data(SceneImages(SceneSource(**SCENES), 64), config(), 9, 3, 0)
    with pytest.raises(ConfigError, match=r"scenes have the classes circle, .*knows cat"):
        open_objects(SceneSource(**SCENES), 64, ["cat"])


def test_largest_side_is_what_training_can_see():
    assert config(sizes=[64, 96]).largest_side == 96
    assert config(sizes=[64, 96], crop=0.1, longest=200).largest_side == 192
    assert config(sizes=[64], test_sizes=[128]).largest_side == 64
    assert config(test_sizes=[128, 64]).evaluation_sizes == (128, 64)
    assert config(sizes=[64, 96]).evaluation_sizes == (96,)
