"""Configuration files: inheritance, overrides, and errors that help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from vlp.config import Config, ConfigError, load_config, save_config
from vlp.training.config import PretrainConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "pretrain"
BASE = "data:\n  sources: [{path: a}]\n  canonical_streams: 4\ntraining: {batch: 8}\n"


def write(folder, text, name="run.yaml"):
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_configuration_loads(file):
    load_config(file, PretrainConfig)
    assert file.read_text().startswith("# "), "opens with what it is and the command that runs it"
    assert "launch/pretrain.py --config" in file.read_text()


def test_base_is_the_papers():
    config = load_config(CONFIGS / "base.yaml", PretrainConfig)
    assert (config.training.batch, config.training.epochs) == (512, 30)
    optimiser = config.training.optimiser
    assert (optimiser.learning_rate, optimiser.final_learning_rate) == (1e-4, 1e-6)
    assert optimiser.weight_decay == 0.02
    teacher = config.objectives.teacher
    assert (teacher.momentum, teacher.queue) == (0.995, 65536)
    anchor = config.model.cross.anchor
    assert (anchor.groups, anchor.text_window, anchor.patch_window) == (8, 5, 9)
    assert config.model.image.image_size == 256


def test_children_override_their_parent_key_by_key(tmp_path):
    write(tmp_path, BASE + "output: parent\n", "parent.yaml")
    child = write(tmp_path, "inherit: parent.yaml\ntraining: {seed: 3}\n")
    config = load_config(child, PretrainConfig, ["training.batch=16", "objectives.teacher=null"])
    assert (config.output, config.training.seed, config.training.batch) == ("parent", 3, 16)
    assert config.objectives.teacher is None


def test_a_saved_configuration_reads_back_unchanged(tmp_path):
    config = load_config(write(tmp_path, BASE), PretrainConfig)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", PretrainConfig) == config


def test_numbers_without_a_dot_are_numbers(tmp_path):
    file = write(tmp_path, BASE)
    for text in ("1e-3", "1E-3", "0.001"):
        config = load_config(file, PretrainConfig, [f"training.optimiser.learning_rate={text}"])
        assert config.training.optimiser.learning_rate == 0.001


@pytest.mark.parametrize(
    ("extra", "overrides", "parts"),
    [
        ("model: {text: {widht: 3}}\n", [], ["run.yaml", "model.text.widht", "model.text.width"]),
        ("", ["training.bacth=4"], ["command line", "training.bacth", "training.batch"]),
        ("", ["training.optimizer.clip=4"], ["command line", "training.optimiser"]),
        ("momentum: 0.9\n", [], ["unknown key 'momentum'", "objectives.teacher.momentum"]),
        ("", ["training.seed=abc"], ["command line", "training.seed", "valid integer", "abc"]),
        ("", ["data.canonical_streams=3"], ["batch 8 is not a multiple", "canonical_streams 3"]),
        (
            "model: {cross: {layout: text}}\n",
            ["objectives.mim.output=cross"],
            ["objectives.mim.output is cross", "layout text"],
        ),
        ("", ["training"], ["write key.sub=value"]),
        ("inherit: run.yaml\n", [], ["inherits from itself"]),
        ("inherit: missing.yaml\n", [], ["missing.yaml", "cannot read"]),
        ("output: a\noutput: b\n", [], ["run.yaml", "'output' is given twice"]),
        ("output: [\n", [], ["run.yaml", "not valid YAML"]),
    ],
)
def test_errors_name_key_file_and_nearest_valid_key(tmp_path, extra, overrides, parts):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, BASE + extra), PretrainConfig, overrides)
    for part in parts:
        assert part in str(error.value)


def test_a_merge_brings_defaults_and_keys_of_ones_own_replace_them(tmp_path):
    shared = "model:\n  text: &shared {width: 48, heads: 4}\n  image: {<<: *shared, heads: 2}\n"
    config = load_config(write(tmp_path, BASE + shared), PretrainConfig)
    assert (config.model.image.width, config.model.image.heads) == (48, 2)
    assert config.model.text.heads == 4
    twice = shared.replace("heads: 2", "heads: 2, heads: 1")
    with pytest.raises(ConfigError, match="'heads' is given twice"):
        load_config(write(tmp_path, BASE + twice), PretrainConfig)


def test_a_required_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: the key 'data' is required"):
        load_config(write(tmp_path, "output: a\n"), PretrainConfig)


def test_no_such_file():
    with pytest.raises(ConfigError, match="cannot read this configuration"):
        load_config("/nowhere.yaml", PretrainConfig)


class Circle(Config):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(Config):
    kind: Literal["square"] = "square"
    side: float = 1.0


class Drawing(Config):
    shape: Annotated[Circle | Square, Field(discriminator="kind")]


def test_a_choice_by_kind_is_named_as_it_is_written(tmp_path):
    file = tmp_path / "drawing.yaml"
    file.write_text("shape: {kind: circle, radius: 2}\n")
    assert load_config(file, Drawing).shape == Circle(radius=2)
    with pytest.raises(ConfigError, match=r"unknown key 'shape\.radios'; did you mean 'shape.rad"):
        load_config(file, Drawing, ["shape.radios=3"])
    with pytest.raises(ConfigError, match=r"the command line: 'shape\.radius': Input should be"):
        load_config(file, Drawing, ["shape.radius=wide"])
    with pytest.raises(ConfigError, match="expected tags: 'circle', 'square'"):
        load_config(file, Drawing, ["shape.kind=triangle"])
