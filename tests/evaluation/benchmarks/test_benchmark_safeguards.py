"""The benchmark of safeguards: its side without them lacks them, and its figures are printed."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from PIL import Image

from evaluation.benchmarks.loader.safeguards import main, unchecked
from vlp.data.image.decode import decode_image
from vlp.data.limits import VARIABLE
from vlp.data.shards.sample_files import BadSample


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_unchecked_images_pass_the_limits(kind, monkeypatch):
    stream = BytesIO()
    Image.new("RGB", (24, 16)).save(stream, kind)
    data = stream.getvalue()
    monkeypatch.setenv(VARIABLE, "{pixels: 10}")
    with unchecked():
        assert decode_image(data, "a").size == (24, 16)
    with pytest.raises(BadSample, match=r"more than limits\.pixels 10"):
        decode_image(data, "a")


@pytest.mark.integration
def test_figures_of_loader_and_step(capsys):
    assert main(["--samples", "256", "--rounds", "2", "--rows", "2"]) == 0
    loader, low, high, step = (
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"
    )
    assert loader["name"] == "safeguards/loader"
    assert step["name"] == "safeguards/step"
    assert low["value"] <= loader["value"] <= high["value"]
    assert loader["target"] == step["target"] == 1.0
    assert abs(loader["value"]) < 100
