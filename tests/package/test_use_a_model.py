"""The Python lines of the page on using a model run, in their order, with tiny model folders."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pair_shards import tiny_folder
from PIL import Image
from question_shards import AUGMENT, coloured, toy_parts, write_shards

import vlp
from launch.cli.main import main
from vlp.tasks.vqa.task import VqaConfig, build

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "get-started" / "use-a-model.md"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_folder("runs/demo/run/model", layers=1)
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
