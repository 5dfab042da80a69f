"""A tiny generated corpus, a tiny untrained model on it, and a tiny ablation."""

from pathlib import Path

import pytest
import torch
import yaml
from pair_shards import tiny_folder
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from tests_support import dark_and_light

from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.config import AnchorConfig, CrossConfig, ImageConfig, ModelConfig, TextConfig
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import distinct_scenes
from vlp.tasks.caption import task as caption
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification.task import Nlvr2Config, PairClassification, SnliVeConfig
from vlp.tasks.vqa import task as vqa

SCENES = 21
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def scene_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    with ShardWriter(folder, samples_per_shard=8) as writer:
        for number, scene in enumerate(distinct_scenes(0, SCENES)):
            writer.write(f"{number:05d}", encode_png(render(scene)), "png", annotation(scene))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, scene_shards):
    """An untrained VLPModel of width 16 with its tokenizer and preprocessing."""
    texts = [text for scene in distinct_scenes(0, SCENES) for text in annotation(scene).captions]
    text = TextProcessor(train_wordpiece(texts, 200), 24)
    config = ModelConfig(
        text=TextConfig(
            vocab_size=text.vocab_size, width=16, layers=1, heads=2, intermediate=16, max_tokens=24
        ),
        image=ImageConfig(
            image_size=32, patch_size=8, width=16, layers=1, heads=2, intermediate=16
        ),
        cross=CrossConfig(layers=1, heads=2, intermediate=16, anchor=AnchorConfig(groups=2)),
        embed_dim=8,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model, head = VLPModel(config), MLMHead(16, text.vocab_size)
    model.match_head.bias.data.fill_(0.1)  # as if it were trained; odds stay
    heads = {f"mlm_head.{name}": value for name, value in head.state_dict().items()}
    save_pretrained(folder, config, model.state_dict(), text, Preprocessing(32), heads)
    return folder


@pytest.fixture(scope="session")
def task_folders(tmp_path_factory):
    """Untrained folders: `plain`, and by kind of task; `shards` of images of one colour."""
    root = tmp_path_factory.mktemp("tasks")
    made = {"plain": tiny_folder(root / "plain"), "shards": root / "shards"}
    write_shards(made["shards"], coloured(12))
    tasks = {}
    for kind, config in (("snli_ve", SnliVeConfig), ("nlvr2", Nlvr2Config)):
        parts, _ = start_parts(str(made["plain"]), {})
        own = config.model_validate({"data": {"train": ["unused"]}})
        tasks[kind] = PairClassification(own, parts)
    data = {"train": [str(made["shards"])], "canonical_streams": 1, "augment": AUGMENT}
    asked = {"data": {**data, "max_answer": 6}, "decoder": {"layers": 1}}
    config = vqa.VqaConfig.model_validate(asked)
    tasks["vqa"], _ = vqa.build(config, toy_parts(seed=3), 4, 0, "float32")
    written = {"data": {**data, "max_caption": 6}, "decoder": {"layers": 1}, "java": False}
    config = caption.CaptionConfig.model_validate(written)
    tasks["caption"], _ = caption.build(config, toy_parts(seed=1), 2, 0, "float32")
    for kind, task in tasks.items():
        made[kind] = root / kind
        task.save_model(made[kind], task.state_dict())
    return made


@pytest.fixture
def tiny_ablation(tmp_path):
    """Write the smallest ablation that trains: two variants of a vision model on sixteen images."""
    dark_and_light(tmp_path / "images", 8)
    tiny = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    overrides = {
        "task.model.options": tiny,
        "task.data.train": str(tmp_path / "images"),
        "task.data.test": str(tmp_path / "images"),
        "task.data.image_size": 16,
        "training.batch": 8,
        "training.steps": 2,
        "training.optimiser.warmup_steps": 0,
    }
    plain = {
        "output": str(tmp_path / "out"),
        "seeds": [0, 1],
        "training": {
            "config": str(ROOT / "configs/vision/cifar10_vit_tiny.yaml"),
            "overrides": overrides,
        },
        "variants": {"none": {"overrides": {"task.model.positions": []}}, "ape": {}},
        "tables": [
            {
                "title": "Table 1",
                "figures": {"top-1": "top1", "loss": "loss"},
                "reference": "none",
                "rows": [{"label": "None", "variant": "none"}, {"label": "APE", "variant": "ape"}],
            }
        ],
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(plain))
    return file
