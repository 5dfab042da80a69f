import json
import resource
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests_support import tiny_config, tiny_text

import vlp
from vlp.config import ConfigError, merge
from vlp.data.image.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import read_model, save_model, save_pretrained, start_from
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding
from vlp.serving.model_card import model_card
from vlp.tasks.downstream.task import start_parts


@pytest.fixture
def saved(tmp_path):
    config = tiny_config()
    model = VLPModel(config).eval()
    model.anchor_threshold.fill_(0.37)
    save_pretrained(tmp_path / "model", config, model.state_dict(), tiny_text(), Preprocessing(16))
    return tmp_path / "model", model


def changed(**parts):
    torch.manual_seed(1)
    return VLPModel(tiny_config(**parts)).eval()


def odds_of(model, pixels, texts):
    with torch.no_grad():
        return model.match(model.encode_image(pixels), model.encode_text(*tiny_text()(texts)))


def test_round_trip_is_exact(saved):
    folder, model = saved
    loaded = vlp.load(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert float(loaded.model.anchor_threshold) == pytest.approx(0.37)
    pixels, texts = torch.randn(1, 3, 16, 16), ["a red circle"]
    with pytest.warns(UserWarning, match="never trained"):
        odds = odds_of(loaded.model, pixels, texts)
    assert torch.equal(odds, odds_of(model, pixels, texts))


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


def test_a_start_keeps_what_the_folder_lacks(saved):
    folder, model = saved
    plain = changed(cross={"position": ()})
    report = start_from(plain, folder)
    tables = [name for name in model.state_dict() if ".positions." in name]
    assert tables
    assert sorted(report.unused) == sorted(tables)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name

    save_pretrained(folder, plain.config, plain.state_dict(), tiny_text(), Preprocessing(16))
    with_tables = changed()
    report = start_from(with_tables, folder)
    assert report.missing == ["cross_encoder.layers.*.cross_attention.positions"]
    assert all(with_tables.state_dict()[name].eq(0).all() for name in tables)
    pixels, texts = torch.randn(1, 3, 16, 16), ["a red circle"]
    assert torch.equal(odds_of(plain, pixels, texts), odds_of(with_tables, pixels, texts))


def test_a_start_with_other_groups_keeps_its_own_tables(saved):
    folder, model = saved
    groups = model.config.cross.anchor.groups // 2
    other = changed(cross={"anchor": {"groups": groups}})
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
    fixed = changed(cross={"options": {"anchor": {"threshold": 0.05}}})
    report = start_from(fixed, folder)
    assert float(fixed.anchor_threshold) == pytest.approx(0.05)
    assert report.missing == report.unused == ["anchor_threshold"]
    assert "anchor_threshold" not in report.matched

    running = changed()
    report = start_from(running, folder)
    assert float(running.anchor_threshold) == pytest.approx(0.37)
    assert "anchor_threshold" in report.matched
    assert not report.missing
    assert not report.unused


def test_a_folder_is_read_with_another_threshold(saved):
    assert float(read_model(saved[0]).anchor_threshold) == pytest.approx(0.37)
    config = tiny_config(cross={"options": {"anchor": {"threshold": 0.05}}})
    assert float(read_model(saved[0], config).anchor_threshold) == pytest.approx(0.05)


def trained_folder(folder, config):
    torch.manual_seed(0)
    model = VLPModel(config).eval()
    for name, parameter in model.named_parameters():
        if "cross_encoder." in name or ".positions." in name:
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
    model = trained_folder(tmp_path, tiny_config(cross={"position": (name,)}))
    larger = changed(image={"image_size": 24}, cross={"position": (name,)})
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
    pixels, texts = torch.randn(2, 3, 24, 24), ["a red circle", "a blue square"]
    odds = odds_of(larger, pixels, texts)
    assert odds.isfinite().all()
    if name in ("ape", "learned-1d", "learned-2d"):
        return
    # The trained cross-modal encoder on the larger grid.
    model.image_encoder, model.config = larger.image_encoder, larger.config
    model.cross_encoder.grid = larger.cross_encoder.grid
    torch.testing.assert_close(odds, odds_of(model, pixels, texts), rtol=1e-5, atol=1e-5)


def test_encodings_are_found_by_their_names_and_not_by_their_numbers(tmp_path):
    trained = ("shaw", "rpe", "anchor", "learned-1d", "ape")
    model = trained_folder(tmp_path, tiny_config(cross={"position": trained}))
    other = changed(cross={"position": ("irpe-product", "rpe", "uniform", "ape")})
    report = start_from(other, tmp_path)
    there, here = model.state_dict(), other.state_dict()
    layer = "cross_encoder.layers.0"
    for path, before in (
        (f"{layer}.attention.positions.1.", f"{layer}.attention.positions.1."),
        ("cross_encoder.positions.0.", "cross_encoder.positions.1."),
    ):
        names = [name for name in here if name.startswith(path)]
        assert names
        assert all(torch.equal(here[n], there[n.replace(path, before)]) for n in names)
    # As many rows as Shaw's table, and ACE-RPE's, and yet not theirs.
    assert not here[f"{layer}.attention.positions.0.image.tables.key"].any()
    assert not here[f"{layer}.cross_attention.positions.0.tables.key"].any()
    assert report.missing == [
        "cross_encoder.layers.*.attention.positions",
        "cross_encoder.layers.*.cross_attention.positions",
    ]
    lost = {name.split(".positions.")[0] for name in report.unused}
    assert len(lost) == 5  # of both layers' two attentions, and of the tokens


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
    file.write_text(json.dumps(merge(json.loads(file.read_text()), change)))
    with pytest.raises(ConfigError) as raised:
        vlp.load(folder)
    text = str(raised.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("kind", ["vlp-vision", "bert"])
def test_a_model_of_another_kind_is_named(saved, kind):
    folder, _ = saved
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    for read in (vlp.load, lambda folder: start_parts(str(folder), {}), model_card):
        with pytest.raises(ConfigError, match=rf"config\.json: .* type '{kind}', not "):
            read(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_what_is_no_configuration_is_named(saved, content):
    folder, _ = saved
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        vlp.load(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls+mean"])
def test_a_match_head_of_other_states_keeps_its_own_start(saved, pooling):
    model = changed(cross={"pooling": pooling})
    own = model.match_head.weight.clone()
    report = start_from(model, saved[0])
    assert torch.equal(model.match_head.weight, own)
    assert report.missing == ["match_head"]
    assert report.unused == ["match_head.bias", "match_head.weight"]


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("image", {"pooling": "mean"}, r"was trained with image\.pooling cls, not mean"),
        *((part, {"heads": 4}, rf"was trained with {part}\.heads 2, not 4: set")
          for part in ("text", "image", "cross")),
        ("image", {"normalisation": [[0.4, 0.5, 0.5], [0.5, 0.5, 0.5]]},
         r"set image\.normalisation=\[\[0\.5,0\.5,0\.5\]"),
    ],
)  # fmt: skip
def test_other_inputs_of_equal_shapes_are_refused(saved, part, changes, message):
    with pytest.raises(ValueError, match=message):
        start_from(changed(**{part: changes}), saved[0])


VIT = {"name": "vit_base_patch16_224", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "there", "here"),
    [
        ("image", VIT, VIT | {"num_heads": 4}),
        ("image", VIT, VIT | {"act_layer": "relu"}),
        ("image", VIT | {"act_layer": "relu"}, None),
        ("image", None, VIT | {"num_heads": 4}),
        ("text", BERT, BERT | {"num_attention_heads": 4}),
        ("text", BERT, BERT | {"hidden_act": "relu"}),
    ],
)
def test_towers_of_other_settings_are_refused(part, there, here, tmp_path):
    sizes = {"layers": 1, "intermediate": 64} if part == "image" else {}
    configs = [
        tiny_config(**{part: sizes | {"architecture": settings}, "cross": {"position": []}})
        for settings in (there, here)
    ]
    save_model(tmp_path, configs[0], VLPModel(configs[0]).state_dict())
    start_from(VLPModel(configs[0]), tmp_path)
    with pytest.raises(ConfigError, match=r"does not fit: .* there and "):
        start_from(VLPModel(configs[1]), tmp_path)


def test_pixels_of_public_weights_are_those_of_the_folders_processor(tmp_path):
    config = tiny_config(image={"weights": "deit_tiny_patch16_224"})
    save_model(tmp_path, config, VLPModel(config).state_dict())
    Preprocessing(16, *config.image.statistics).save(tmp_path)
    vlp.VlpModel.from_pretrained(tmp_path, config=vlp.VlpConfig.from_pretrained(tmp_path))


def test_weights_that_timm_knows_say_how_pixels_are_normalised():
    own = ModelConfig().image.statistics
    deit = ModelConfig.model_validate({"image": {"weights": "deit_base_patch16_224"}})
    tower = ModelConfig.model_validate({"image": {"architecture": "deit_base_patch16_224"}})
    assert deit.image.statistics == tower.image.statistics != own
    for weights in ("somewhere/deit.pth", "unknown_model", None):
        assert ModelConfig.model_validate({"image": {"weights": weights}}).image.statistics == own


def test_a_start_with_other_options_says_so_and_scales_the_token_score(tmp_path):
    trained = changed(cross={"token_score": 8})
    trained.token_score.factor.data.fill_(3)
    save_model(tmp_path, trained.config, trained.state_dict())
    model = changed(cross={"token_score": 2, "options": {"anchor": {"scale": 0.5}}})
    report = start_from(model, tmp_path)
    assert model.token_score.factor == 8 * 3 / 2
    assert report.notes == ("cross.options.anchor was {}, not {'scale': 0.5}",)


def test_a_start_that_does_not_fit_is_an_error(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="missing"):
        start_from(changed(cross={"layers": 3}), folder)
    with pytest.raises(FileNotFoundError, match="no model folder"):
        start_from(changed(), "./nowhere")
    with pytest.raises(ValueError, match=r"no such weights: image_encoder\.vit\.pos_embed"):
        start_from(changed(image={"position": "none"}), folder)


OUTSIDE = {"name": "vit_tiny_patch16_224", "checkpoint_path": "/etc/passwd"}


def kernel(key):
    return {"text": {"architecture": BERT | {key: "someone/kernel"}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": {"layers": 10**7}}, "text.layers is 10000000, more than the weights"),
        ({"image": {"image_size": 16 * 8192}}, "makes more than 65,536 tokens"),
        ({"image": {"image_size": 16 * 32}}, "does not fit"),
        ({"embed_dim": 10**9}, "does not fit"),
        ({"text": {"vocab_size": 2**31}}, "does not fit"),
        ({"text": {"architecture": BERT | {"num_hidden_layers": 10**6}}}, "num_hidden_layers is"),
        ({"text": {"architecture": BERT | {"hidden_size": 10**5}}}, "does not fit|match"),
        (kernel("attn_implementation"), "attn_implementation 'someone/kernel' may run code from"),
        (kernel("_attn_implementation"), "may run code from"),
        ({"image": {"architecture": OUTSIDE}}, "architecture.checkpoint_path"),
    ],
)
def test_a_strangers_configuration_takes_no_memory_and_runs_no_code(saved, changes, message):
    folder, _ = saved
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(merge(plain, changes)))
    used, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ConfigError, match=message):
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


LAYER = "image_encoder.vit.blocks.0.attn.positions"
TOKENS = "image_encoder.vit.positions"


def tower(image_size, *positions, **image):
    by_name = dict((item, {}) if isinstance(item, str) else item for item in positions)
    sizes = {"image_size": image_size, "layers": 2, "positions": by_name} | image
    return tiny_config(image=sizes, cross={"position": ()})


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
        ("shaw", {"reach": None}),
        ("irpe-quantization", {"universe": "global"}),
    ],
    ids=str,
)
def test_a_tower_carries_every_encoding_to_another_image_size(tmp_path, position):
    model = trained_folder(tmp_path, tower(16, position))
    larger = VLPModel(tower(24, position)).eval()
    report = start_from(larger, tmp_path)
    assert not report.unused
    assert not report.missing
    assert sorted(report.matched + report.resized) == sorted(larger.state_dict())
    name = position if isinstance(position, str) else position[0]
    resized = {"learned-1d", "learned-2d", "cope", "sape", "sasa"}
    assert (len(report.resized) > 1) == (name in resized or name == "shaw")
    states = larger.encode_image(pixels := torch.randn(2, 3, 24, 24)).states
    assert states.isfinite().all()
    if name in ("learned-1d", "learned-2d"):
        return
    # The trained encodings themselves on the larger grid.
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
        ("irpe-quantization", {}),
        *((name, {"rescale": True}) for name in ("rope-axial", "rope-mixed")),
        ("transformer-xl", {"reach": None}),
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
