"""What others' programs pass by mistake is said in one sentence."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from PIL import Image

import vlp
from vlp.serving.image_processor import VlpImageProcessor

WANTED = r"give a tensor \(images, 3, 16, 16\)"


@pytest.fixture(scope="module")
def model(folder):
    return vlp.VlpModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["encode_image", "image_features", "model.encode_image"])
def test_images_that_are_none(model, name):
    encode, encoder = attrgetter(name)(model), model.model.image_encoder
    with pytest.raises(TypeError, match=f"pixels are of type Image; {WANTED}"):
        encode(Image.new("RGB", (16, 16)))
    for shape in ((3, 16, 16), (1, 3, 20, 20), (1, 1, 16, 16)):
        with pytest.raises(ValueError, match=WANTED):
            encode(torch.zeros(shape))
    pixels = torch.zeros(2, 3, 16, 16)
    assert torch.equal(encoder(encoder.tower(pixels)), encoder(pixels))


@pytest.mark.parametrize("kind", [vlp.VlpProcessor, VlpImageProcessor])
def test_options_of_processors(folder, kind):
    with pytest.raises(TypeError, match="no argument 'siez'"):
        kind.from_pretrained(folder, siez={"height": 64, "width": 64})
    kind.from_pretrained(folder, use_fast=True, trust_remote_code=True, local_files_only=True)


def test_a_text_of_half_a_surrogate_pair(folder):
    with pytest.raises(ValueError, match="no valid Unicode at character 2: surrogates"):
        vlp.load(folder).text(["a star", "a \ud800"])
