"""A saved model folder gives the same model back and says what is wrong with a damaged one."""

from __future__ import annotations

import pytest
import torch
from tests_support import TINY_MODEL, tiny_text

import vlp
from vlp.data.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained, start_from
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


def other_cross(folder, **cross):
    config = ModelConfig.model_validate(TINY_MODEL | {"cross": TINY_MODEL["cross"] | cross})
    torch.manual_seed(1)
    return VLPModel(config).eval()


def test_a_start_keeps_what_the_folder_lacks(saved):
    folder, model = saved
    plain = other_cross(folder, position=())
    report = start_from(plain, folder)
    tables = [name for name in model.state_dict() if ".positions." in name]
    assert tables
    assert sorted(report.unused) == sorted(tables)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name

    save_pretrained(folder, plain.config, plain.state_dict(), tiny_text(), Preprocessing(16))
    with_tables = other_cross(folder)
    report = start_from(with_tables, folder)
    assert report.missing == ["cross_encoder.layers.*.cross_attention.positions"]
    assert all(with_tables.state_dict()[name].eq(0).all() for name in tables)
    pixels, tokens = torch.randn(1, 3, 16, 16), tiny_text()(["a red circle"])
    with torch.no_grad():
        odds = [
            m.match(m.encode_image(pixels), m.encode_text(*tokens)) for m in (plain, with_tables)
        ]
    assert torch.equal(*odds)


def test_a_start_resamples_positions(saved):
    folder, model = saved
    config = ModelConfig.model_validate(
        TINY_MODEL | {"image": TINY_MODEL["image"] | {"image_size": 24}}
    )
    larger = VLPModel(config)
    report = start_from(larger, folder)
    assert report.resized == ["image_encoder.vit.pos_embed"]
    table = larger.image_encoder.vit.pos_embed
    assert torch.equal(table[:, 0], model.image_encoder.vit.pos_embed[:, 0])


def test_a_start_that_does_not_fit_is_an_error(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="missing"):
        start_from(other_cross(folder, layers=3), folder)
    with pytest.raises(FileNotFoundError, match="no model folder"):
        start_from(other_cross(folder), "./nowhere")
