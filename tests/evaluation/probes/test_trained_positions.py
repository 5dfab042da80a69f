"""Maps of trained encodings, held against loops over pairs of patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.__main__ import main
from evaluation.probes.trained_positions import (
    PatchMaps,
    WeightChange,
    attention_maps,
    correlation,
    place_products,
    place_weights,
    trained_panels,
)
from evaluation.samples import EvaluationError
from vlp.positions import alibi2d, create_position
from vlp.positions.buckets import bucket_ids
from vlp.tasks.classification.task import Classification, ClassificationConfig

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


def classifier(positions, seed=0, data="unused"):
    """A ViT on 16 px: 4 x 4 patches and [CLS]."""
    torch.manual_seed(seed)
    model = {"name": "vit_small_patch16_224", "options": SMALL, "positions": positions}
    plain = {"model": model, "data": {"train": str(data), "test": str(data), "image_size": 16}}
    return Classification(ClassificationConfig.model_validate(plain), ["a", "b"]).eval()


@pytest.fixture
def run(tmp_path):
    """A function that leaves a trained run's folder: tables have moved from their start."""

    def make(positions, configured=True):
        for name in ("a", "b"):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), "red").save(tmp_path / "data" / name / "0.png")
        task = classifier(positions, 5, tmp_path / "data")
        with torch.no_grad():
            for name, parameter in task.named_parameters():
                if ".positions." in name:
                    parameter += torch.randn_like(parameter) / 2
        task.save_model(tmp_path / "model", task.state_dict())
        if configured:
            (tmp_path / "config.yaml").write_text("training: {seed: 5}\n")
        return tmp_path / "model"

    return make


def test_what_contextual_irpe_adds_is_that_of_a_loop_over_pairs():
    task = classifier([{"name": "irpe-product", "roles": "k", "options": {"ratio": 0.6}}])
    attention = task.model.blocks[0].attn
    table = attention.positions[0].tables["key"]
    torch.nn.init.normal_(table)
    pixels, seen = torch.randn(3, 3, 16, 16), []
    attention.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = attention_maps(task.model, pixels)
    assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
    query = attention.qkv(seen[0])[..., :16].unflatten(-1, (2, 8))  # (images, tokens, heads, 8)
    ids, _ = bucket_ids("product", 4, 4, 0.6)
    expected = np.zeros((16, 16))
    for i in range(16):
        for j in range(16):
            each = (query[:, 1 + i] * table[0, ids[i, j]]).sum(-1) / 8**0.5
            expected[i, j] = each.mean().item()
    assert found["blocks.0.attn"].shape == (3, 4, 4, 4, 4)
    np.testing.assert_allclose(found["blocks.0.attn"].mean(0).reshape(16, 16), expected, atol=1e-6)
    assert not found["blocks.1.attn"].any()  # its table is still zero


def test_rotations_add_nothing_to_a_patch_itself_and_are_added_to_biases():
    rope = attention_maps(classifier([{"name": "rope-axial"}]).model, torch.ones(1, 3, 16, 16))
    values = rope["blocks.0.attn"].reshape(16, 16)
    np.testing.assert_allclose(np.diagonal(values), 0, atol=1e-6)
    assert np.abs(values).max() > 1e-4
    both = classifier([{"name": "rope-axial"}, {"name": "alibi-2d"}])
    added = attention_maps(both.model, torch.ones(1, 3, 16, 16))["blocks.0.attn"]
    expected = alibi2d.bias(4, 4, 2).mean(0).numpy()
    np.testing.assert_allclose(added.reshape(16, 16) - values, expected, atol=1e-5)


@pytest.mark.parametrize(("dimensions", "groups"), [(2, 1), (4, 2), (4, 4)])
def test_products_of_fourier_places_know_the_offset_alone_whatever_the_mlp(dimensions, groups):
    torch.manual_seed(0)
    made = {"width": 16, "dimensions": dimensions, "groups": groups, "grid": (3, 5), "extent": 2.0}
    encoding = create_position("fourier", **made)
    values = place_products(encoding)
    assert values.shape == (3, 5, 3, 5)
    np.testing.assert_allclose(values[1, 2, 1, 2], groups / 2, atol=1e-5)
    np.testing.assert_allclose(values[0, 0, 1, 2], values[1, 1, 2, 3], atol=1e-5)
    for weight in encoding.modulator.parameters():
        torch.nn.init.zeros_(weight)
    np.testing.assert_array_equal(place_products(encoding), values)
    assert len(place_weights(encoding)) == encoding.frequencies.numel()


def test_products_of_a_grids_rows_and_columns_are_a_cross():
    encoding = create_position("learned-2d", width=4, grid=(3, 2))
    rows, columns = encoding.table_rows.detach(), encoding.table_columns.detach()
    expected = (rows[0] @ rows[2] + columns[1] @ columns[0]).item()
    assert place_products(encoding)[0, 1, 2, 0] == pytest.approx(expected)


def test_a_mosaic_lays_maps_out_as_their_patches_lie():
    values = np.arange(4 * 6 * 4 * 6, dtype=float).reshape(4, 6, 4, 6)
    image, marks = PatchMaps("", values).mosaic(2)
    assert image.shape == (9, 13)
    assert marks == [(1, 1), (1, 11), (8, 1), (8, 11)]
    np.testing.assert_array_equal(image[5:, 7:], values[3, 4])
    assert np.isnan(image[4]).all()
    assert np.isnan(image[:, 6]).all()
    assert PatchMaps("", values).mosaic(9)[0].shape == (4 * 5 - 1, 6 * 7 - 1)


def test_correlations_are_of_pairs_of_two_patches():
    near = np.array([[0.0, -1, -2], [-1, 0, -1], [-2, -1, 0]])
    values = (2 * near + 5 + 9 * np.eye(3)).reshape(1, 3, 1, 3)
    assert correlation(values, near) == pytest.approx(1)
    assert correlation(values, -near) == pytest.approx(-1)
    assert np.isnan(correlation(values, np.ones((3, 3))))


def test_panels_are_of_before_and_after_training(run):
    folder = run([{"name": "fourier"}, {"name": "irpe-product", "roles": "k"}])
    panels = trained_panels(folder, layers=(0, 1, -1))
    titles = [panel.title.partition("\n")[0] for panel in panels[:-1]]
    assert titles[:2] == ["fourier, before: dot products", "fourier, after: dot products"]
    shown = [f"blocks.{x}.attn, after: added to logits" for x in (0, 1)]
    assert titles[2:] == shown
    assert all("\nr with nearness " in panel.title for panel in panels[:-1])
    first = classifier([{"name": "fourier"}, {"name": "irpe-product", "roles": "k"}], 5)
    np.testing.assert_array_equal(panels[0].values, place_products(first.model.positions[0]))
    np.testing.assert_array_equal(panels[-1].before, place_weights(first))
    assert panels[-1].after.std() > panels[-1].before.std()


def test_without_the_runs_configuration_only_after_is_shown(run):
    panels = trained_panels(run([{"name": "learned-2d"}], configured=False))
    assert [type(panel) for panel in panels] == [PatchMaps, WeightChange]
    assert panels[1].before is None


def test_the_command_draws_a_row_for_each_image(run, tmp_path, capsys):
    folder = run([{"name": "sape", "roles": "k"}])
    files = []
    for colour in ("red", "blue"):
        files.append(str(tmp_path / f"{colour}.png"))
        Image.new("RGB", (20, 20), colour).save(files[-1])
    out = tmp_path / "maps.png"
    options = ["--model", str(folder), "--out", str(out)]
    assert main(["encodings", *options, "--image", *files, "--references", "4"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    with Image.open(out) as two:
        height = two.height
    assert main(["encodings", *options]) == 0
    with Image.open(out) as one:
        assert height == 2 * one.height


def test_wrong_input_is_one_line(run, tmp_path, capsys):
    folder, out = str(run([{"name": "sape", "roles": "k"}])), str(tmp_path / "x.png")
    for options, message in (
        (["--image", "x.png"], "--image is for trained models"),
        (["--model", folder, "--layers", "0,x"], "--layers 0,x: numbers with commas"),
        (["--model", folder, "--image", "./nowhere.png"], "./nowhere.png: cannot be read"),
        (["--model", folder, "--layers", "2"], "are not all among the 2 whose attention"),
    ):
        assert main(["encodings", "--out", out, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    (tmp_path / "data" / "a" / "0.png").write_bytes(b"broken")
    with pytest.raises(EvaluationError, match=r"0\.png"):
        trained_panels(folder)
    with pytest.raises(EvaluationError, match="no position encoding that can be shown"):
        trained_panels(run([]))
