"""The Python lines of the page on using a model run, in their order, with tiny model folders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from tests_support import TINY_MODEL, tiny_text

import vlp
from launch.cli.main import commands, main
from vlp.config import load_config
from vlp.data.image.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.tasks.vqa.task import VqaConfig, build
from vlp.training.config import PretrainConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "get-started" / "use-a-model.md"
COMPARED = ROOT / "docs" / "explanation" / "compared.md"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working folder with the model folders, photo and exports that the page names."""
    monkeypatch.chdir(tmp_path)
    config = ModelConfig.model_validate(TINY_MODEL | {"cross": TINY_MODEL["cross"] | {"layers": 1}})
    save_pretrained(
        "runs/demo/run/model", config, VLPModel(config).state_dict(), tiny_text(), Preprocessing(16)
    )
    shards = write_shards(tmp_path / "shards", coloured(6))
    data = {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT, "max_answer": 6}
    tuned = VqaConfig.model_validate({"data": data, "decoder": {"layers": 1}})
    task, _ = build(tuned, toy_parts(), 2, 0, "float32")
    task.save_model(Path("runs/scenes_vqa/model"), task.state_dict())
    levels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(levels).save("photo.jpg")


@pytest.mark.commands
def test_the_pages_lines_run(folders, capsys):
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "bash"}
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python" and "onnxruntime" in block:
            pytest.importorskip("onnxruntime")
        if kind == "python":
            exec(block, names)
        else:
            exports = [line.partition("#")[0].split() for line in block.splitlines()]
            assert all(line[:2] == ["vlp", "export"] for line in exports)
            assert main(exports[0][1:]) == 0
    assert names["similarity"].shape == (1, 3)
    assert names["gallery"].shape == (2, 8)
    assert names["matched"].shape == (3,)
    assert {one["label"] for one in names["labels"]} == {"red circle", "blue square"}
    assert names["best"] in names["texts"]
    assert names["answer"]["caption"] in names["texts"]
    assert "there is no image file" in names["service"]("nowhere.jpg")["error"]
    again, model = names["again"].model, vlp.load("runs/demo/run/model").model
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), model.parameters()))
    processor, model = names["processor"], names["model"]
    pair = processor(images="photo.jpg", text="a red circle")
    with torch.no_grad():
        np.testing.assert_allclose(names["log_odds"], model.match(**pair), atol=1e-4)
        out = model(**pair)
    cosine = (out.image_embeds * out.text_embeds).sum()
    np.testing.assert_allclose(names["cosine"], cosine, atol=1e-4)


@pytest.mark.nightly
def test_what_is_compared_is_there():
    """Commands, their options, configurations and names of `vlp` in the table of features."""
    page = COMPARED.read_text(encoding="utf-8")
    rows = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ")]
    assert len(rows) > 35
    told = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    for row in rows:
        assert row.strip() == "in `vlp`" or re.search(
            r"`(vlp[ .]|deepspeed |pipeline|model\.)", row
        ), row
    for file in re.findall(r"configs/\S+\.yaml", " ".join(told)):
        assert (ROOT / file).is_file(), file
    for name in re.findall(r"vlp\.(\w+)", " ".join(told)):
        assert hasattr(vlp, name) or name == "positions", name
    lines = [code.split() for code in told if code.startswith("vlp ")]
    assert len(lines) > 20
    runs = [line for line in map(shlex.split, told) if line[:2] == ["vlp", "train"]]
    overridden = [line for line in runs if "FILE" not in line and any("=" in word for word in line)]
    assert len(overridden) > 8
    for _, _, _, file, *changes in overridden:
        load_config(ROOT / file, PretrainConfig, changes)
    for _, *words in lines:
        group = commands()
        while words and words[0] in getattr(group, "commands", {}):
            group = group.commands[words.pop(0)]
        assert not hasattr(group, "commands"), words
        known = {option for param in group.params for option in param.opts}
        wanted = {word for word in words if word.startswith("--")} - {"--help"}
        assert wanted <= known or not known, (words, known)
