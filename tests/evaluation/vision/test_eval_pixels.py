import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.options import EvalOptions
from evaluation.vision import pixels as evaluation_pixels
from evaluation.vision.pixels import evaluate
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.pixels.task import Pixels, PixelsConfig


def task(test, size=4):
    return Pixels(
        PixelsConfig.model_validate(
            {
                "model": {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16,
                          "positions": [{"name": "learned-2d"}]},
                "data": {"train": "unused", "test": str(test), "image_size": size},
            }
        )
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "all").mkdir()
    rng = np.random.default_rng(0)
    for number in range(7):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "all" / f"{number}.png")
    return tmp_path


def by_hand(model, folder, numbers):
    bits = torch.zeros(4, 4, 3, dtype=torch.float64)
    for number in numbers:
        values = torch.from_numpy(np.array(Image.open(folder / "all" / f"{number}.png"))).long()
        shares = model(values[None])[0].double().softmax(-1)
        bits -= shares.gather(-1, values[..., None])[..., 0].log2()
    return float(bits.mean()) / len(numbers), float(bits[..., 0].mean()) / len(numbers)


def test_bits_are_those_of_every_image_in_batches_of_any_size(folder, monkeypatch):
    made = task(folder)
    for parameter in made.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        whole, red = by_hand(made.model, folder, range(7))
        few, _ = by_hand(made.model, folder, [0, 3, 6])
    for tokens in (1, 3 * 48, 2**14):
        monkeypatch.setattr(evaluation_pixels, "TOKENS", tokens)
        figures = evaluate(made, EvalOptions())
        assert figures["bits_per_dim"] == pytest.approx(whole, rel=1e-5)
        assert figures["bits_red"] == pytest.approx(red, rel=1e-5)
    monkeypatch.setattr(evaluation_pixels, "TOKENS", 3 * 48)
    assert evaluate(made, EvalOptions(workers=2)) == evaluate(made, EvalOptions())
    colours = [figures[f"bits_{colour}"] for colour in ("red", "green", "blue")]
    assert sum(colours) / 3 == pytest.approx(whole, rel=1e-5)
    assert evaluate(made, EvalOptions(limit=3))["bits_per_dim"] == pytest.approx(few, rel=1e-5)


def test_a_test_image_that_is_too_small_is_named(folder):
    with pytest.raises(BadSample, match=r"0.png \(4 x 4\)"):
        evaluate(task(folder, size=5), EvalOptions())
