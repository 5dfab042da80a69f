import json
import os
import sys
from typing import Literal

import pytest
import timm
import torch
from PIL import Image
from tests_support import TINY_MODEL, tiny_text
from torch import nn

import vlp
from launch.cli.main import main
from vlp.config import PLUGINS, ConfigError, load_config, load_plugins
from vlp.data.image.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    attach,
    create_position,
    describe_options,
    list_positions,
    register_position,
    registry,
)
from vlp.training.config import VisionConfig

SOURCE = """
import torch
from torch import nn
from vlp.positions import PositionEncoding, register_position


@register_position("{name}"{more})
class {kind}(PositionEncoding):
    def __init__(self, heads: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads,), start))

    def bias(self, query, key, context):
        return self.weight[:, None, None] * torch.ones(query.shape[-2], key.shape[-2]).triu()
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODINGS", dict(registry._ENCODINGS))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept, modules = list(CROSS_MODAL), set(sys.modules)
    yield
    CROSS_MODAL[:] = kept
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


def plugin(folder, name="own_bias", kind="OwnBias", more=""):
    file = folder / f"{name}.py"
    file.write_text(SOURCE.format(name=name.replace("_", "-"), kind=kind, more=more))
    return str(file)


def vit():
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes)


def test_a_decorated_class_has_a_name_everywhere():
    @register_position("test-shift")
    class Shift(PositionEncoding):
        def __init__(self, width: int, size: float = 1.0) -> None:
            super().__init__()
            self.vector = nn.Parameter(torch.full((width,), size))

        def tokens(self, x, context):
            return x + self.vector

    assert "test-shift" in list_positions()
    assert isinstance(create_position("test-shift", width=4), Shift)
    assert create_position("test-shift", width=4, size=2).vector.tolist() == [2.0] * 4
    options = [tuple(option) for option in describe_options("test-shift")]
    assert options == [("width", "int", ...), ("size", "float", 1.0)]
    model = attach(vit(), "test-shift", size=0)
    assert isinstance(model.positions[0], Shift)
    assert model(torch.randn(1, 3, 16, 16)).isfinite().all()


def test_an_own_encoding_in_the_cross_modal_encoder(tmp_path):
    cross = plugin(tmp_path, "own_cross", "OwnCross", ", cross_modal=True")
    load_plugins([plugin(tmp_path), cross])
    assert "own-cross" in CROSS_MODAL
    with pytest.raises(ValueError, match="own-cross acts between an image and a text"):
        attach(vit(), "own-cross")
    cross = TINY_MODEL["cross"] | {
        "position": ["own-bias", "own-cross"],
        "options": {"own-cross": {"start": 1}, "own-bias": {"start": 2.0}},
    }
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"cross": cross}))
    model.anchor_threshold.fill_(0.2)
    parts = {type(part).__name__: part for part in model.modules() if hasattr(part, "weight")}
    weights = parts["OwnCross"].weight, parts["OwnBias"].weight
    assert [weight[0] for weight in weights] == [1, 2]
    ids = torch.randint(5, 40, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    crossed = model.cross(
        model.encode_image(torch.randn(2, 3, 16, 16)), model.encode_text(ids, mask, mask)
    )
    model.itm_logits(crossed).sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in weights)


def test_the_environment_names_plugins_for_processes_that_start_later(tmp_path, monkeypatch):
    file = plugin(tmp_path)
    monkeypatch.setenv(PLUGINS, file)
    assert "own-bias" in list_positions()
    load_plugins([plugin(tmp_path, "own_other", "OwnOther")])
    assert os.environ[PLUGINS].split(os.pathsep) == [file, str(tmp_path / "own_other.py")]
    monkeypatch.chdir(tmp_path)
    plugin(tmp_path, "own_module", "OwnModule")
    load_plugins(["own_module"])
    assert create_position("own-module", heads=2).weight.shape == (2,)


def test_a_configuration_names_plugins(tmp_path):
    plugin(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"plugins: [{tmp_path}/own_bias.py]\n"
        "task: {kind: classification, model: {name: vit_tiny_patch16_224, positions: "
        "[{name: own-bias}]}, data: {train: a, test: b}}\n"
    )
    assert load_config(file, VisionConfig).plugins == (f"{tmp_path}/own_bias.py",)
    assert "own-bias" in list_positions()


def own_model(folder, file):
    load_plugins([file])
    cross = TINY_MODEL["cross"] | {"position": ["own-bias"]}
    config = ModelConfig.model_validate(TINY_MODEL | {"cross": cross})
    model = VLPModel(config)
    model.match_head.bias.data.fill_(0.1)  # as if it were trained; odds stay
    save_pretrained(folder, config, model.state_dict(), tiny_text(), Preprocessing(16))
    forget()
    return model


def forget():
    registry._ENCODINGS.pop("own-bias", None)
    os.environ[PLUGINS] = ""
    sys.modules.pop("own_bias", None)


def test_a_model_folder_names_its_plugin_and_runs_none_by_itself(tmp_path, monkeypatch, capsys):
    file, folder = plugin(tmp_path), tmp_path / "model"
    model = own_model(folder, file)
    config = folder / "config.json"
    assert json.loads(config.read_text())["plugins"] == {"own-bias": "own_bias"}
    # As it would be imported: it lies in the working folder and on the path.
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    for read in (vlp.load, vlp.VlpModel.from_pretrained):
        with pytest.raises(ConfigError, match="comes from the plugin own_bias"):
            read(folder)
    assert "own_bias" not in sys.modules
    loaded = vlp.load(folder, plugins=[file]).model
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    vlp.VlpModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["plugins"] == {
        "own-bias": "own_bias"
    }
    forget()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    command = f"evaluate predict --model {folder} --image a.png --text circle".split()
    assert main(command) == 2
    assert "not imported unasked" in capsys.readouterr().err
    assert main(["--plugin", file, *command]) == 0
    assert "matches" in capsys.readouterr().out


@pytest.mark.parametrize(
    "plugins", ["own_bias", ["own_bias"], {"own-bias": "own_bias; import os"}, 3]
)
def test_a_hostile_list_of_plugins_is_refused(tmp_path, plugins):
    folder = tmp_path / "model"
    own_model(folder, plugin(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"plugins": plugins}))
    with pytest.raises(ConfigError, match="plugins name a module for each encoding"):
        vlp.load(folder)
    assert "own_bias" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "plugin .*own_wrong.py: there is no such file"),
        ("\n1 +", r"plugin .*own_wrong.py: SyntaxError: invalid syntax \(own_wrong.py, line 2\)$"),
        ("def f():\n raise ValueError('a\\nb')\nf()", r": ValueError: a b \(.*wrong.py, line 2\)$"),
        ("import json\njson.loads('{')", r": JSONDecodeError: .*\(/.*/own_wrong.py, line 2\)$"),
        ("import own_missing", r"plugin .*own_wrong.py: ModuleNotFoundError.*line 1\)$"),
        ("import sys\nsys.exit(0)", r"plugin .*own_wrong.py: SystemExit: 0 \(.*line 2\)$"),
    ],
)
def test_plugins_that_fail_are_named(tmp_path, source, message):
    file = tmp_path / "own_wrong.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_plugins([str(file)])
    assert os.environ[PLUGINS] == ""
    with pytest.raises(ConfigError, match="plugin own_nowhere: ModuleNotFoundError"):
        load_plugins(["own_nowhere"])
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ConfigError, match="the name 'json' belongs to another module"):
        load_plugins([str(tmp_path / "json.py")])


def test_what_cannot_be_registered_says_why():
    def make(name, base=PositionEncoding, **methods):
        return register_position(name)(type("Own", (base,), methods))

    def hook(self, query, key, context):
        return None

    def untyped(self, heads: int, start=0.0):
        pass

    for name, base, methods, message in (
        ("My Bias", PositionEncoding, {"bias": hook}, "'My Bias' is no name of an encoding"),
        ("own-a", nn.Module, {"bias": hook}, "own-a: Own is no PositionEncoding"),
        ("own-a", PositionEncoding, {}, "own-a: Own has none of the hooks tokens, inputs"),
        ("sape", PositionEncoding, {"bias": hook}, "a position encoding 'sape' is registered"),
        ("own-a", PositionEncoding, {"bias": hook, "__init__": untyped}, "'start' has no type"),
    ):
        with pytest.raises(ValueError, match=message):
            make(name, base, **methods)
    assert make("own-a", bias=hook) is not make("own-a", bias=hook)  # a notebook's cell again


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rope", {}, r"unknown position encoding 'rope' \(did you mean 'rope-1d'\?\); known: al"),
        ("rope-axial", {"thta": 1}, r"no option 'thta' \(did you mean 'theta'\?\); options: width"),
        ("rope-axial", {"theta": "ten"}, "the option 'theta' takes float, not 'ten'"),
        ("rope-axial", {"theta": True}, "the option 'theta' takes float, not True"),
        ("rope-axial", {"layout": "whole"}, "takes 'interleaved' | 'half', not 'whole'"),
        ("irpe-product", {"roles": "key"}, r"the option 'roles' takes Sequence\[str\], not 'key'"),
        ("irpe-product", {"grid": [4]}, r"takes tuple\[int, int\] \| None, not \[4\]"),
        ("test-choice", {"side": "up"}, "the option 'side' takes 'left' | 'right', not 'up'"),
    ],
)
def test_options_are_checked(name, options, message):
    @register_position("test-choice")
    class Chosen(PositionEncoding):
        def __init__(
            self, width: int = 1, heads: int = 1, side: Literal["left", "right"] = "left"
        ) -> None:
            super().__init__()

        def bias(self, query, key, context):
            return None

    with pytest.raises(ValueError, match=message):
        create_position(name, width=8, heads=2, **options)
    rope = create_position("rope-axial", width=8, heads=2, grid=[4, 4], theta=10)
    assert (rope.grid, rope.theta) == ((4, 4), 10.0)
    with pytest.raises(ValueError, match="the option 'heads' is missing; options: width, heads"):
        create_position("rope-axial", width=8)
