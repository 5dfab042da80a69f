"""The page at the size of `configs/pretrain/base.yaml`: a picture of 12 megapixels within 3 s.

Random weights, on the cores of this machine; two that do nothing else are enough.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from question_shards import AUGMENT, coloured, write_shards
from tests_support import tiny_text

from evaluation.page.gradio_page import serve
from evaluation.page.session import TryIt
from vlp.config import load_config
from vlp.data.image.transforms import Preprocessing
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.tasks.downstream.init_from import start_parts
from vlp.tasks.vqa.task import VqaConfig, build
from vlp.training.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[3]
TEXT = "a red circle left of a blue square"
ACTIONS = {"match": TEXT, "answer": "what colour is it?", "ground": "a circle", "anchors": TEXT}

pytest.importorskip("gradio")
client = pytest.importorskip("gradio_client")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model for questions, of base size but for its vocabulary."""
    root = tmp_path_factory.mktemp("base")
    config = load_config(ROOT / "configs/pretrain/base.yaml", PretrainConfig).model
    config = config.model_copy(update={"text": config.text.model_copy(update={"vocab_size": 64})})
    torch.manual_seed(0)
    text, images = tiny_text(config.text.max_tokens), Preprocessing(config.image.image_size)
    save_pretrained(root / "start", config, VLPModel(config).state_dict(), text, images)
    shards = write_shards(root / "shards", coloured(8))
    data = {"train": [str(shards)], "augment": AUGMENT, "max_answer": 6}
    parts, _ = start_parts(str(root / "start"), {})
    task, _ = build(VqaConfig.model_validate({"data": data}), parts, 8, 0, "float32")
    task.save_model(root / "model", task.state_dict())
    return root


@pytest.fixture(scope="module")
def page(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tried = TryIt(folder / "model", [folder / "shards"], device="cpu")
    blocks = serve(tried, port=port, block=False)
    yield client.Client(f"http://127.0.0.1:{port}", verbose=False, analytics_enabled=False)
    blocks.close()


def seconds(call) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.parametrize("action", [*ACTIONS, "search"])
def test_a_picture_of_12_megapixels_is_answered_within_3_seconds(page, tmp_path, action, capsys):
    rough = np.random.default_rng(0).integers(0, 255, (750, 1000, 3), dtype=np.uint8)
    photo = Image.fromarray(rough).resize((4000, 3000), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "photo.jpg", quality=92)
    data, took = (tmp_path / "photo.jpg").read_bytes(), []
    for number in range(5):
        # Other bytes behind the end: an upload that the page has not seen.
        file = tmp_path / f"{number}.jpg"
        file.write_bytes(data + action.encode() + bytes([number]))
        given = (client.handle_file(str(file)), ACTIONS[action]) if action in ACTIONS else (TEXT,)
        took.append(seconds(lambda given=given: page.predict(*given, api_name=f"/{action}")))
    median = statistics.median(took)
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{action}: median {median:.2f} s, most {max(took):.2f} s, load {load:.1f}")
    assert median < 3
