"""The configurations of question answering and captioning are what their tasks take."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vlp.tasks.caption.task import CaptionConfig
from vlp.tasks.vqa.task import VqaConfig

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "finetune"
FILES = {
    "vqa_v2": VqaConfig,
    "easy_vqa": VqaConfig,
    "scenes_vqa": VqaConfig,
    "coco_caption": CaptionConfig,
    "scenes_caption": CaptionConfig,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_and_says_how_it_is_run(name) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert f"configs/finetune/{name}.yaml" in text.split("\noutput:")[0]
    task = FILES[name].model_validate(yaml.safe_load(text)["task"])
    assert task.kind in text


def test_question_answering_at_the_papers_size() -> None:
    values = yaml.safe_load((FOLDER / "vqa_v2.yaml").read_text())
    task = VqaConfig.model_validate(values["task"])
    assert (task.decoder.layers, task.candidates, task.decoder.start) == (6, 128, "cross")
    assert values["model"]["image"]["image_size"] == 384
    assert (values["training"]["batch"], values["training"]["epochs"]) == (256, 8)
