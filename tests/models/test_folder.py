"""A saved model folder gives the same model back and says what is wrong with a damaged one."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests_support import TINY_MODEL, tiny_text

import vlp
from vlp.config import ConfigError, merged
from vlp.data.image.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import read_model, save_pretrained, start_from
from vlp.models.vlp import VLPModel
from vlp.serving.model_card import model_card
from vlp.tasks.downstream.task import start_parts


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
        with pytest.warns(UserWarning, match="never trained"):
            odds = loaded.model.match(
                loaded.model.encode_image(pixels), loaded.model.encode_text(tokens)
            )
        assert torch.equal(
            odds, model.match(model.encode_image(pixels), model.encode_text(*tokens))
        )


def test_the_readmes_lines_run(saved):
    folder, _ = saved
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    Image.new("L", (20, 10)).save(folder / "photo.jpg")
    names = {}
    for part in readme.split("```python\n"):
        if "runs/demo/run/model" in (code := part.partition("```")[0]):
            code = code.replace("runs/demo/run/model", str(folder))
            exec(code.replace("photo.jpg", str(folder / "photo.jpg")), names)
    assert names["out"].itm_logits.shape == (2, 2)
    assert names["similarity"].shape == (1, 1)
    assert names["log_odds"].shape == (1,)


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


def test_weights_that_are_not_finite_are_an_error(saved):
    folder, _ = saved
    state = load_file(folder / "model.safetensors")
    state["text_encoder.projection.weight"][0, 0] = torch.nan
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"not finite: text_encoder\.projection\.weight"):
        vlp.load(folder)


def test_weights_of_another_size_are_an_error(saved):
    folder, _ = saved
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"embed_dim": 8', '"embed_dim": 16'))
    with pytest.raises(ValueError, match="does not fit"):
        vlp.load(folder)


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


def test_a_start_with_other_groups_keeps_its_own_tables(saved):
    folder, model = saved
    groups = model.config.cross.anchor.groups // 2
    other = other_cross(folder, anchor={**TINY_MODEL["cross"].get("anchor", {}), "groups": groups})
    report = start_from(other, folder)
    tables = [name for name in model.state_dict() if ".cross_attention.positions." in name]
    assert tables
    assert sorted(report.unused) == sorted(tables)
    for name, tensor in other.state_dict().items():
        if name in tables:
            assert len(tensor) == groups
            assert tensor.eq(0).all()
        else:
            assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_configured_threshold_stays_and_a_running_one_is_the_folders(saved):
    folder, _ = saved
    fixed = other_cross(folder, options={"anchor": {"threshold": 0.05}})
    report = start_from(fixed, folder)
    assert float(fixed.anchor_threshold) == pytest.approx(0.05)
    assert report.missing == report.unused == ["anchor_threshold"]
    assert "anchor_threshold" not in report.matched

    running = other_cross(folder)
    report = start_from(running, folder)
    assert float(running.anchor_threshold) == pytest.approx(0.37)
    assert "anchor_threshold" in report.matched
    assert not report.missing
    assert not report.unused


def test_a_folder_is_read_with_another_threshold(saved):
    folder, model = saved
    assert float(read_model(folder).anchor_threshold) == pytest.approx(0.37)
    config = model.config.model_dump()
    config["cross"]["options"] = {"anchor": {"threshold": 0.05}}
    changed = read_model(folder, ModelConfig.model_validate(config))
    assert float(changed.anchor_threshold) == pytest.approx(0.05)


def sized(image_size, *position, layout="ace", **cross):
    changes = {"position": position, "layout": layout} | cross
    return ModelConfig.model_validate(
        TINY_MODEL
        | {"image": TINY_MODEL["image"] | {"image_size": image_size}}
        | {"cross": TINY_MODEL["cross"] | changes}
    )


def trained_folder(folder, config):
    """A model whose every encoding has learned something."""
    torch.manual_seed(0)
    model = VLPModel(config).eval()
    for parameter in model.cross_encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    size = config.image.image_size
    save_pretrained(folder, config, model.state_dict(), tiny_text(), Preprocessing(size))
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("ape", "rpe", "learned-1d", "learned-2d", "learned-4d", "cope", "sape", "sasa", "shaw"),
        *("irpe-product", "irpe-quantization", "fourier", "rope-mixed", "anchor"),
    ],
)
def test_a_start_carries_every_encoding_to_another_image_size(tmp_path, name):
    """A start at 24 px from a folder of 16 px, patches of 4, or the encoding's name and sizes."""
    model = trained_folder(tmp_path, sized(16, name))
    larger = VLPModel(sized(24, name)).eval()
    if name == "irpe-quantization":
        with pytest.raises(ValueError, match=f"{tmp_path}: {name} of the image .*4 x 4 .*6 x 6"):
            start_from(larger, tmp_path)
        return
    report = start_from(larger, tmp_path)
    assert not report.unused
    assert not report.missing
    assert sorted(report.matched + report.resized) == sorted(larger.state_dict())
    assert {part.rpartition("image.")[2] for part in report.resized[1:]} == {
        "ape": {"table"}, "learned-1d": {"table"}, "cope": {"table"},
        "learned-2d": {"table_rows", "table_columns"}, "sasa": {"table_x", "table_y"},
        "sape": {"tables_x.key", "tables_y.key"},
    }.get(name, set())  # fmt: skip
    pixels, tokens = torch.randn(2, 3, 24, 24), tiny_text()(["a red circle", "a blue square"])
    with torch.no_grad():
        odds = larger.match(larger.encode_image(pixels), larger.encode_text(*tokens))
        assert odds.isfinite().all()
        if name in ("ape", "learned-1d", "learned-2d"):
            return
        # The trained cross-modal encoder on the larger grid, were it ever shown one.
        model.image_encoder, model.config = larger.image_encoder, larger.config
        model.cross_encoder.grid = larger.cross_encoder.grid
        expected = model.match(model.encode_image(pixels), model.encode_text(*tokens))
    torch.testing.assert_close(odds, expected, rtol=1e-5, atol=1e-5)


def test_encodings_are_found_by_their_names_and_not_by_their_numbers(tmp_path):
    trained = ("shaw", "rpe", "anchor", "learned-1d", "ape")
    model = trained_folder(tmp_path, sized(16, *trained))
    other = VLPModel(sized(16, "irpe-product", "rpe", "uniform", "ape"))
    report = start_from(other, tmp_path)
    there, here = model.state_dict(), other.state_dict()
    for kept, before in (
        ("attention.positions.1", "attention.positions.1"),
        ("positions.0", "positions.1"),
    ):
        lead = "cross_encoder." if kept == "positions.0" else "cross_encoder.layers.0."
        mine = {n: t for n, t in here.items() if n.startswith(f"{lead}{kept}.")}
        assert mine
        for name, tensor in mine.items():
            assert torch.equal(tensor, there[name.replace(f"{lead}{kept}", f"{lead}{before}")]), (
                name
            )
    # As many rows as Shaw's table, and ACE-RPE's, and yet not theirs.
    for name in (
        "attention.positions.0.image.tables.key",
        "cross_attention.positions.0.tables.key",
    ):
        assert not here[f"cross_encoder.layers.0.{name}"].any()
    assert report.missing == [
        "cross_encoder.layers.*.attention.positions",
        "cross_encoder.layers.*.cross_attention.positions",
    ]
    lost = {name.split(".positions.")[0] for name in report.unused}
    assert len(lost) == 5  # of both layers' two attentions, and of the tokens


@pytest.mark.parametrize("layout", ["text", "albef"])
def test_positions_of_tokens_are_carried_in_every_layout(tmp_path, layout):
    trained_folder(tmp_path, sized(16, "learned-2d", "anchor", layout=layout))
    larger = VLPModel(sized(24, "learned-2d", "anchor", layout=layout))
    report = start_from(larger, tmp_path)
    assert len(report.resized) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cross": {"position": "anchor"}}, "'cross.position': should be a list"),
        ({"cross": {"positions": ["anchor"]}}, "did you mean 'cross.position'"),
        ({"cross": {"position": ["anchors"]}}, "'anchors' is unknown"),
        ({"text": {"vocab_size": "many"}}, "'text.vocab_size': Input should be a valid integer"),
    ],
)
def test_a_configuration_of_another_version_is_one_line_with_file_and_key(saved, change, message):
    folder, _ = saved
    file = folder / "config.json"
    file.write_text(json.dumps(merged(json.loads(file.read_text()), change)))
    with pytest.raises(ConfigError) as raised:
        vlp.load(folder)
    said = str(raised.value)
    assert said.startswith(f"{file}: ")
    assert message in said
    assert len(said.splitlines()) == 1
    assert "http" not in said


@pytest.mark.parametrize("kind", ["vlp-vision", "bert"])
def test_a_model_of_another_kind_is_named(saved, kind):
    folder, _ = saved
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    for read in (vlp.load, lambda folder: start_parts(str(folder), {}), model_card):
        with pytest.raises(ConfigError, match=rf"config\.json: .* kind '{kind}', not "):
            read(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_what_is_no_configuration_is_named(saved, content):
    folder, _ = saved
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        vlp.load(folder)


def changed(part, **changes):
    return VLPModel(
        ModelConfig.model_validate(TINY_MODEL | {part: TINY_MODEL[part] | changes})
    ).eval()


@pytest.mark.parametrize("pooling", ["mean", "cls+mean"])
def test_a_match_head_of_other_states_keeps_its_own_start(saved, pooling):
    model = changed("cross", pooling=pooling)
    own = model.match_head.weight.clone()
    report = start_from(model, saved[0])
    assert torch.equal(model.match_head.weight, own)
    assert report.missing == ["match_head"]
    assert report.unused == ["match_head.bias", "match_head.weight"]


def test_projections_of_other_states_are_refused(saved):
    with pytest.raises(ValueError, match=r"was trained with image\.pooling cls, not mean"):
        start_from(changed("image", pooling="mean"), saved[0])


@pytest.mark.parametrize("part", ["text", "image", "cross"])
def test_other_heads_of_equal_shapes_are_refused(saved, part):
    assert TINY_MODEL[part]["heads"] == 2
    with pytest.raises(ValueError, match=rf"was trained with {part}\.heads 2, not 4: set"):
        start_from(changed(part, heads=4), saved[0])


def test_pixels_normalised_otherwise_are_refused(saved):
    with pytest.raises(ValueError, match=r"set image\.normalisation=\[\[0\.5,0\.5,0\.5\]"):
        start_from(changed("image", normalisation=[[0.4, 0.5, 0.5], [0.5, 0.5, 0.5]]), saved[0])


def test_weights_that_timm_knows_say_how_pixels_are_normalised():
    own = ModelConfig().image.statistics
    deit = ModelConfig.model_validate({"image": {"weights": "deit_base_patch16_224"}})
    tower = ModelConfig.model_validate({"image": {"architecture": "deit_base_patch16_224"}})
    assert deit.image.statistics == tower.image.statistics != own
    for weights in ("somewhere/deit.pth", "unknown_model", None):
        assert ModelConfig.model_validate({"image": {"weights": weights}}).image.statistics == own


def test_a_start_that_does_not_fit_is_an_error(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="missing"):
        start_from(other_cross(folder, layers=3), folder)
    with pytest.raises(FileNotFoundError, match="no model folder"):
        start_from(other_cross(folder), "./nowhere")


TOWER = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": {"layers": 10**7}}, "text.layers is more than the weights"),
        ({"image": {"image_size": 16 * 8192}}, "image.image_size makes more than 65,536 tokens"),
        ({"image": {"image_size": 16 * 32}}, "does not fit"),
        ({"embed_dim": 10**9}, "does not fit"),
        ({"text": {"vocab_size": 2**31}}, "does not fit"),
        ({"text": {"architecture": TOWER | {"num_hidden_layers": 10**6}}}, "num_hidden_layers is"),
        ({"text": {"architecture": TOWER | {"hidden_size": 10**5}}}, "does not fit|match"),
        (
            {"text": {"architecture": TOWER | {"attn_implementation": "someone/kernel"}}},
            "attn_implementation 'someone/kernel' may name code of others",
        ),
        (
            {"text": {"architecture": TOWER | {"_attn_implementation": "someone/kernel"}}},
            "may name code of others",
        ),
        (
            {
                "image": {
                    "architecture": {
                        "name": "vit_tiny_patch16_224",
                        "checkpoint_path": "/etc/passwd",
                    }
                }
            },
            "architecture.checkpoint_path",
        ),
    ],
)
def test_a_strangers_configuration_takes_no_memory_and_runs_no_code(saved, changes, said):
    folder, _ = saved
    plain = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        plain[key] = plain[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(plain))
    used, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ConfigError, match=said):
        vlp.load(folder)
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 500_000  # KiB


def test_a_strangers_files_beside_the_weights_take_no_memory(saved):
    folder, _ = saved
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["zzzz"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="a token of id 4000000000, more than"):
        vlp.load(folder)
    del vocabulary["zzzz"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    Preprocessing(100_000).save(folder)
    with pytest.raises(ConfigError, match="prepares images of 100000 px for a model of 16 px"):
        vlp.load(folder)
