"""The pixel task: its loss, learning, and the folder it leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.options import EvalOptions
from evaluation.vision.pixels import evaluate
from vlp.tasks.pixels.data import PixelBatch
from vlp.tasks.pixels.task import Pixels, PixelsConfig, build
from vlp.tasks.vision_only import read_task

MODEL = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


def config(data="unused", name="fourier", **options):
    plain = {
        "model": MODEL | {"positions": [{"name": name}]},
        "data": {"train": str(data), "test": str(data), "image_size": 4, "canonical_streams": 2},
    }
    return PixelsConfig.model_validate(plain | options)


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
    assert list(out.losses) == ["pixels"]
    assert float(out.statistics["bits_per_dim"]) == pytest.approx(float(nats.mean()) / math.log(2))


@pytest.mark.parametrize("name", ["learned-2d", "fourier"])
def test_training_learns_images_and_the_folder_keeps_what_it_learned(planes, tmp_path, name):
    task, data = build(config(planes, name), batch=16, seed=0, precision="float32")
    before = evaluate(task, EvalOptions())
    assert before["bits_per_dim"] == pytest.approx(8, abs=0.05)
    optimiser = torch.optim.Adam(task.parameters(), lr=5e-3)
    for step, (given, _) in enumerate(data.batches(stop_after=60)):
        out = task(given, step)
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
    after = evaluate(task, EvalOptions())
    # One bit tells both images apart: 1 / 48 bits a dimension is all there is.
    assert after["bits_per_dim"] < 0.5
    assert after["bits_red"] > after["bits_blue"]  # the first channel is the open question

    task.save_model(tmp_path / "model", task.state_dict())
    plain, known, state = read_task(tmp_path / "model")
    again = Pixels.restore(PixelsConfig.model_validate(plain), known)
    again.load_state_dict(state)
    assert evaluate(again.eval(), EvalOptions()) == pytest.approx(after)
