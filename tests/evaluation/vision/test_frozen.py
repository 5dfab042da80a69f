import json

import pytest
import torch
import yaml

from evaluation.ablations.config import AblationConfig
from evaluation.ablations.grid import run_ablation
from evaluation.ablations.tables import report, to_frame
from evaluation.vision.frozen import FrozenConfig, Tail, fit, load_tokens
from vlp.config import ConfigError, load_config
from vlp.data.labelled_images import open_labelled
from vlp.models.vision.backbone import create_backbone
from vlp.training.config import VisionConfig

TOKENS = "tokens.safetensors"
FROZEN = FrozenConfig(blocks=1, sizes=(8, 16, 24), encoding_rate=10)
POSITIONS = {
    "none": [],
    "irpe": [{"name": "irpe-product", "roles": "qkv"}],
    "learned": [{"name": "learned-2d", "options": {"deviation": 0.0}}],
    "spread": [{"name": "rope-axial", "options": {"rescale": True}}],
}


@pytest.fixture
def file(tiny_ablation):
    plain = yaml.safe_load(tiny_ablation.read_text())
    overrides = plain["training"]["overrides"]
    overrides["task.model.options"] |= {"depth": 2, "dynamic_img_size": False}
    overrides["task.model.absolute"] = "keep"
    plain["frozen"] = FROZEN.model_dump(mode="json")
    plain["limit"] = 6
    plain["variants"] = {
        name: {"overrides": {"task.model.positions": positions}}
        for name, positions in POSITIONS.items()
    }
    table = plain["tables"][0]
    table["figures"] = {"16": "top1@16", "24": "top1@24", "macs": "macs"}
    table["rows"] = [{"label": name, "variant": name} for name in POSITIONS]
    table["paper"] = []
    tiny_ablation.write_text(yaml.safe_dump(plain))
    return tiny_ablation


def training(file, name, seed=0):
    config = load_config(file, AblationConfig, [])
    settings = {**config.training.overrides, "task.model.positions": POSITIONS[name]}
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    source = file.parent / config.training.config
    return load_config(source, VisionConfig, [*changes, f"training.seed={seed}"])


def test_stored_outputs_and_trained_blocks_are_the_whole_model(file, tmp_path):
    config = training(file, "none")
    # The frozen blocks are pretrained; here every model begins with the same random weights.
    torch.manual_seed(0)
    tokens = load_tokens(tmp_path / TOKENS, config, FROZEN, 6)
    assert {part: tuple(each.shape) for part, each in tokens.by_part.items()} == {
        "train": (16, 17, 16), "8": (6, 5, 16), "16": (6, 17, 16), "24": (6, 37, 16)
    }  # fmt: skip
    assert tokens.labels["test"].tolist() == [0, 0, 0, 1, 1, 1]
    torch.manual_seed(0)
    tail = Tail(config.task, 1, 2).eval()
    torch.manual_seed(0)
    whole = create_backbone(config.task.model, num_classes=2, img_size=16).eval()
    images = open_labelled(config.task.data.train)
    pixels = torch.stack([config.task.data.preprocessing(images.read(n).image) for n in range(16)])
    with torch.no_grad():
        expected = whole.forward_features(pixels)
        found = tail.features(tokens.by_part["train"])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    written = (tmp_path / TOKENS).stat().st_mtime_ns
    load_tokens(tmp_path / TOKENS, config, FROZEN, 6)
    assert (tmp_path / TOKENS).stat().st_mtime_ns == written
    load_tokens(tmp_path / TOKENS, config, FROZEN, 5)
    assert (tmp_path / TOKENS).stat().st_mtime_ns != written


def test_runs_of_a_seed_differ_by_the_encoding_alone(file, tmp_path):
    tokens = load_tokens(tmp_path / TOKENS, training(file, "none"), FROZEN, 6)
    tails = {}
    for name in ("none", "irpe"):
        torch.manual_seed(3)
        tails[name] = Tail(training(file, name).task, 1, 2).state_dict()
    for name, value in tails["none"].items():
        assert torch.equal(value, tails["irpe"][name])
    figures = fit(training(file, "irpe"), FROZEN, tokens)
    assert figures["changed"] < 1e-3
    assert figures["parameters"] == 3 * 50 * 8 / 1e3
    plain = fit(training(file, "none"), FROZEN, tokens)
    width, length = 16, 17
    # Projections of attention, an MLP of twice the width, queries by keys and weights by values.
    products = length * width * (4 * width + 2 * 2 * width) + 2 * length * length * width
    assert plain["macs"] == pytest.approx((products + 2 * width) / 1e6)
    assert figures["macs"] > plain["macs"]
    assert figures["training/steps"] == 2
    assert {"top1@8", "top1@16", "top1@24", "loss@24", "ms", "macs"} <= figures.keys()
    same = fit(training(file, "irpe"), FROZEN, tokens)
    times = {"ms": 0, "training/minutes": 0}
    assert {**same, **times} == {**figures, **times}


def test_tables_are_carried_over_to_other_grids(file):
    tail = Tail(training(file, "learned").task, 1, 2)
    table = tail.model.positions[0].table_rows
    torch.nn.init.normal_(table)
    larger = tail.for_grid((6, 6))
    assert larger.model.positions[0].table_rows.shape == (6, 8)
    assert larger(torch.randn(2, 37, 16)).shape == (2, 2)
    assert tail(torch.randn(2, 17, 16)).shape == (2, 2)
    with pytest.raises(ValueError, match="does not carry over to 6 x 6"):
        Tail(training(file, "spread").task, 1, 2).for_grid((6, 6))
    with pytest.raises(ConfigError, match=r"frozen.blocks 2: .* leave at least one to train"):
        Tail(training(file, "none").task, 2, 2)


def test_an_ablation_trains_the_last_blocks(file, capsys):
    config = load_config(file, AblationConfig, [])
    found = run_ablation(config, file)
    assert capsys.readouterr().out.startswith("8 runs, 0 of them done\n")
    assert len(found) == 8
    assert "top1@24" not in found["spread", 0]
    assert "none" in report(config, to_frame(found))
    assert run_ablation(config, file) == found
    assert capsys.readouterr().out == "8 runs, 8 of them done\n"
    with pytest.raises(ValueError, match="measured and frozen are"):
        load_config(file, AblationConfig, ["measured={shards: [x]}"])
