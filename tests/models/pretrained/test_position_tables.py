"""Encodings of the image tower find their tables by name, at every image size or not at all."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tests_support import TINY_MODEL

from vlp.models.config import ModelConfig
from vlp.models.folder import save_model, start_from
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding

LAYER = "image_encoder.vit.blocks.0.attn.positions"
TOKENS = "image_encoder.vit.positions"


def tower(image_size, *positions, **image):
    named = dict((one, {}) if isinstance(one, str) else one for one in positions)
    sizes = {"image_size": image_size, "layers": 2, "positions": named} | image
    return ModelConfig.model_validate(
        TINY_MODEL
        | {"image": TINY_MODEL["image"] | sizes}
        | {"cross": TINY_MODEL["cross"] | {"position": ()}}
    )


def made(name, **options):
    return name, options


def trained_folder(folder, config):
    """A model whose every encoding of the tower has learned something."""
    torch.manual_seed(0)
    model = VLPModel(config).eval()
    for name, parameter in model.named_parameters():
        if ".positions." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_model(folder, config, model.state_dict())
    return model


def tables(model, place):
    return {
        name.removeprefix(f"{place}."): table
        for name, table in model.state_dict().items()
        if name.startswith(f"{place}.")
    }


@torch.no_grad()
@pytest.mark.parametrize(
    "position",
    [
        *("learned-1d", "learned-2d", "cope", "sape", "sasa", "fourier", "rope-mixed"),
        made("shaw", reach=None),
        made("irpe-quantization", universe="global"),
    ],
    ids=str,
)
def test_a_tower_carries_every_encoding_to_another_image_size(tmp_path, position):
    """A start at 24 px from a folder of 16 px, patches of 4."""
    model = trained_folder(tmp_path, tower(16, position))
    larger = VLPModel(tower(24, position)).eval()
    report = start_from(larger, tmp_path)
    assert not report.unused
    assert not report.missing
    assert sorted(report.matched + report.resized) == sorted(larger.state_dict())
    name = position if isinstance(position, str) else position[0]
    resized = {"learned-1d", "learned-2d", "cope", "sape", "sasa"}
    assert (len(report.resized) > 1) == (name in resized or position == made("shaw", reach=None))
    states = larger.encode_image(pixels := torch.randn(2, 3, 24, 24)).states
    assert states.isfinite().all()
    if name in ("learned-1d", "learned-2d"):
        return
    # The trained encodings themselves on the larger grid, were they ever shown one.
    expected = deepcopy(larger)
    for path, module in larger.image_encoder.vit.named_modules():
        if isinstance(module, PositionEncoding):
            expected.image_encoder.vit.set_submodule(
                path, model.image_encoder.vit.get_submodule(path)
            )
    torch.testing.assert_close(states, expected.encode_image(pixels).states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "position",
    [
        made("irpe-quantization"),
        made("rope-axial", rescale=True),
        made("rope-mixed", rescale=True),
        made("transformer-xl", reach=None),
    ],
    ids=lambda position: position[0],
)
def test_a_tower_encoding_bound_to_its_grid_is_named(tmp_path, position):
    trained_folder(tmp_path, tower(16, position))
    message = f"{position[0]} of the image tower .*4 x 4 .*6 x 6"
    with pytest.raises(ValueError, match=message):
        start_from(VLPModel(tower(24, position)), tmp_path)
    start_from(VLPModel(tower(16, position)), tmp_path)
    start_from(VLPModel(tower(24)), tmp_path)


def test_a_pooled_grid_may_stay_where_the_towers_changes(tmp_path):
    trained_folder(tmp_path, tower(16, "irpe-quantization", "sasa", pool=1))
    with pytest.raises(ValueError, match=r"4 x 4 .*8 x 8"):
        start_from(VLPModel(tower(32, "irpe-quantization", "sasa", pool=2)), tmp_path)


def test_encodings_of_a_tower_are_found_by_their_names(tmp_path):
    model = trained_folder(tmp_path, tower(16, "learned-2d", "shaw", "sasa", "learned-1d"))
    other = VLPModel(tower(24, "irpe-product", "learned-1d", "sasa"))
    smaller = start_from(VLPModel(tower(16, "sasa", "learned-1d")), tmp_path)
    assert not smaller.resized
    report = start_from(other, tmp_path)
    # As many rows as Shaw's table, and yet not Shaw's.
    assert not any(table.any() for table in tables(other, f"{LAYER}.0").values())
    assert report.missing == ["image_encoder.vit.blocks.*.attn.positions"]
    before, after = tables(model, f"{LAYER}.1"), tables(other, f"{LAYER}.1")
    for name, table in after.items():
        assert torch.equal(table[:, 2:9], before[name][:, :7]), name  # offsets of -3 to 3 patches
    assert set(report.resized) >= {f"{LAYER}.1.table_x", f"{TOKENS}.0.table"}
    lost = {name.rpartition(".positions.")[2].partition(".")[0] for name in report.unused}
    assert lost == {"0"}  # learned-2d of the tokens, Shaw of both layers
    assert all(name.startswith("image_encoder.vit.") for name in report.unused)


@torch.no_grad()
def test_encodings_are_added_to_a_tower_and_removed(tmp_path):
    plain = trained_folder(tmp_path, tower(16))
    added = VLPModel(tower(16, "irpe-product")).eval()
    report = start_from(added, tmp_path)
    assert report.missing == ["image_encoder.vit.blocks.*.attn.positions"]
    pixels = torch.randn(1, 3, 16, 16)
    states = added.encode_image(pixels).states
    torch.testing.assert_close(states, plain.encode_image(pixels).states)

    trained = trained_folder(tmp_path, tower(16, "irpe-product", "learned-1d"))
    report = start_from(VLPModel(tower(16)), tmp_path)
    assert not report.missing
    assert sorted(report.unused) == sorted(
        name for name in trained.state_dict() if ".positions." in name
    )
