"""A saved model folder gives the same model back and says what is wrong with a damaged one."""

from __future__ import annotations

import pytest
import torch
from tests_support import TINY_MODEL, tiny_text

import vlp
from vlp.data.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel


@pytest.fixture
def saved(tmp_path):
    config = ModelConfig.model_validate(TINY_MODEL)
    model = VLPModel(config).eval()
    model.anchor_threshold.fill_(0.37)
    save_pretrained(tmp_path / "model", config, model.state_dict(), tiny_text(), Preprocessing(16))
    return tmp_path / "model", model


def test_round_trip_is_exact(saved):
    folder, model = saved
    loaded = vlp.load(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert float(loaded.model.anchor_threshold) == pytest.approx(0.37)
    tokens = loaded.text(["a red circle"])
    pixels = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        odds = loaded.model.match(
            loaded.model.encode_image(pixels), loaded.model.encode_text(*tokens)
        )
        assert torch.equal(
            odds, model.match(model.encode_image(pixels), model.encode_text(*tokens))
        )


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(saved, file):
    folder, _ = saved
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        vlp.load(folder)


def test_damaged_weights_are_an_error(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged"):
        vlp.load(folder)


def test_weights_of_another_size_are_an_error(saved):
    folder, _ = saved
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"embed_dim": 8', '"embed_dim": 16'))
    with pytest.raises(ValueError, match="does not fit"):
        vlp.load(folder)


def test_no_such_folder():
    with pytest.raises(FileNotFoundError, match=r"there is no model folder \./nowhere"):
        vlp.load("./nowhere")
