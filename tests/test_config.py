from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from evaluation.suite.suite import SuiteConfig
from vlp.config import Config, ConfigError, load_config, save_config
from vlp.training.config import FinetuneConfig, PretrainConfig, VisionConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SCHEMAS = {
    "evaluation": SuiteConfig,
    "finetune": FinetuneConfig,
    "pretrain": PretrainConfig,
    "vision": VisionConfig,
}
BASE = "data:\n  sources: [{path: a}]\n  canonical_streams: 4\ntraining: {batch: 8}\n"


def write(folder, text, name="run.yaml"):
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "file",
    [file for name in SCHEMAS for file in sorted((CONFIGS / name).glob("*.yaml"))],
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_every_shipped_configuration_loads(file):
    load_config(file, SCHEMAS[file.parent.name])


def test_children_override_their_parent_key_by_key(tmp_path):
    write(tmp_path, BASE + "output: parent\n", "parent.yaml")
    child = write(tmp_path, "inherit: parent.yaml\ntraining: {seed: 3}\n")
    config = load_config(child, PretrainConfig, ["training.batch=16", "objectives.teacher=null"])
    assert (config.output, config.training.seed, config.training.batch) == ("parent", 3, 16)
    assert config.objectives.teacher is None


class Tasks(Config):
    tasks: tuple[str, ...] = ()
    rate: float = 1.0


TEXTS = (
    *("5117e062", "1e-4", "-2E3", "1.5e3", ".5e1", "1e", "e5", "1e5 ", "0x1", "1_0", "null"),
    *("010", "0o17", "1:30", "-.inf", ".nan"),
)


def test_quoted_text_stays_text_whatever_it_looks_like(tmp_path):
    quoted = ", ".join(f'"{text}"' for text in TEXTS)
    config = load_config(write(tmp_path, f"tasks: [{quoted}]\n"), Tasks)
    assert config.tasks == TEXTS
    assert load_config(write(tmp_path, ""), Tasks, [f"tasks=[{quoted}]"]) == config
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", Tasks) == config


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1e-4", 1e-4), ("1E5", 1e5), ("-2e3", -2e3), ("+1.5e3", 1.5e3), (".5e1", 5.0)),
        *(("3.e0", 3.0), ("010", 10), ("-007", -7), ("08", 8), ("0o17", 15), ("0x1F", 31)),
        ("1.5", 1.5),
    ],
)
def test_plain_numbers_of_yaml_1_2_are_numbers(tmp_path, text, number):
    config = load_config(write(tmp_path, f"rate: {text}\n"), Tasks)
    assert config.rate == number
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", Tasks) == config
    with pytest.raises(ConfigError, match=r"'tasks\.0': Input should be a valid string"):
        load_config(write(tmp_path, f"tasks: [{text}]\n"), Tasks)


@pytest.mark.parametrize("text", ["1:30", "12:30:45", "1:30.5", "0b11", "1_000"])
def test_numbers_of_yaml_1_1_alone_are_text(tmp_path, text):
    config = load_config(write(tmp_path, f"tasks: [{text}]\n"), Tasks)
    assert config.tasks == (text,)
    assert load_config(write(tmp_path, ""), Tasks, [f"tasks=[{text}]"]) == config
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", Tasks) == config


@pytest.mark.parametrize(
    ("extra", "overrides", "parts"),
    [
        ("model: {text: {widht: 3}}\n", [], ["run.yaml", "model.text.widht", "model.text.width"]),
        ("", ["training.optimizer.clip=4"], ["command line", "training.optimiser"]),
        ("momentum: 0.9\n", [], ["unknown key 'momentum'", "objectives.teacher.momentum"]),
        ("", ["training.seed=abc"], ["command line", "training.seed", "valid integer", "abc"]),
        (
            "model: {cross: {layout: text}}\n",
            ["objectives.mim.output=cross"],
            ["objectives.mim.output=cross needs model.cross.layout=ace"],
        ),
        ("", ["training.optimiser.betas=[0.9, 1]"], ["optimiser.betas.1'", "less than 1", "1)"]),
        ("", ["data.augment.crop_scale=[0.8, 0.5]"], ["[0.8, 0.5] is not 0 < low <= high <= 1"]),
        ("", ["data.augment.crop_scale=[.nan, 1]"], ["crop_scale.0'", "(given: nan)"]),
        ("", ["training.optimiser.learning_rate=.inf"], ["learning_rate'", "finite"]),
        ("inherit: run.yaml\n", [], ["inherits from itself"]),
        ("inherit: missing.yaml\n", [], ["missing.yaml", "cannot read"]),
        ("inherit: [a, b]\n", [], ["run.yaml", "name one file as 'inherit', not ['a', 'b']"]),
        (
            "",
            ["data.sources=[{pth: x}]"],
            ["command line", "'data.sources.0.pth'", "did you mean 'data.sources.path'?"],
        ),
        ("", ["data.sources=[{path: x, weight: no}]"], ["command line: 'data.sources.0.weight'"]),
        ("output: a\noutput: b\n", [], ["run.yaml", "'output' is given twice"]),
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


class Circle(Config):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(Config):
    kind: Literal["square"] = "square"
    side: float = 1.0


Shape = Annotated[Circle | Square, Field(discriminator="kind")]


class Drawing(Config):
    shape: Shape
    more: tuple[Shape, ...] = ()
    named: dict[str, Circle] = Field({})


def test_a_choice_by_kind_is_named_as_it_is_written(tmp_path):
    file = tmp_path / "drawing.yaml"
    file.write_text("shape: {kind: circle, radius: 2}\n")
    assert load_config(file, Drawing).shape == Circle(radius=2)
    with pytest.raises(ConfigError, match=r"unknown key 'shape\.radios'; did you mean 'shape.rad"):
        load_config(file, Drawing, ["shape.radios=3"])
    with pytest.raises(ConfigError, match=r"the command line: 'shape\.radius': Input should be"):
        load_config(file, Drawing, ["shape.radius=wide"])
    with pytest.raises(ConfigError, match=r"'more\.0\.radios'; did you mean 'more\.radius'\?"):
        load_config(file, Drawing, ["more=[{kind: circle, radios: 2}]"])
    with pytest.raises(ConfigError, match=r"'named\.a\.radios'; did you mean 'named\.radius'\?"):
        load_config(file, Drawing, ["named.a.radios=3"])
    with pytest.raises(ConfigError, match="expected tags: 'circle', 'square'"):
        load_config(file, Drawing, ["shape.kind=triangle"])
