"""`launch/train_vision.py`: every kind of task through the real loop, on two ranks as on one."""

import json

import numpy as np
import pytest
import ranks
from PIL import Image

from vlp.config import load_config
from vlp.tasks.detection.data import CocoSource
from vlp.tasks.vision_only import KINDS, load_task
from vlp.training.config import VisionConfig

COMMAND = ranks.ROOT / "launch" / "train_vision.py"
CONFIGS = ranks.ROOT / "configs" / "vision"
TINY = {
    "classification": "cifar10_vit_tiny",
    "detection": "scenes_detr_tiny",
    "grids": "grids_arc_tiny",
    "pixels": "pixels_cifar10_tiny",
    "widgets": "widgets_tiny",
}


def data(kind, shared):
    cifar = shared / "data_tasks" / "cifar10" / "test.tar.xz"
    if kind in ("classification", "pixels"):
        return [f"task.data.train={cifar}", f"task.data.test={cifar}"]
    if kind == "grids":
        return [f"task.data.path={shared / 'data_tasks' / 'arc_agi1' / 'arc_agi1.tar.gz'}"]
    if kind == "detection":
        return ["task.data.train={format: scenes, count: 64}"]
    return ["task.data.screens={kind: generated, train: 40, test: 10}"]


def run(arguments, world_size=1):
    results = ranks.finish(ranks.start([COMMAND, *arguments], world_size), timeout=300)
    said = "".join(output for _, output in results)
    assert {code for code, _ in results} == {0}, said
    return said


def test_own_objects_take_the_place_of_scenes():
    own = "{format: coco, annotations: a.json, images: photos}"
    changes = [f"task.data.{part}={own}" for part in ("train", "test")]
    data = load_config(CONFIGS / "scenes_detr_tiny.yaml", VisionConfig, changes).task.data
    assert (
        data.train == data.test == CocoSource(format="coco", annotations="a.json", images="photos")
    )
    parts = ["task.data.test.format=coco", "task.data.test.annotations=a.json"]
    changes = [changes[0], *parts, "task.data.test.images=photos", "task.data.train.images=others"]
    data = load_config(CONFIGS / "scenes_detr_tiny.yaml", VisionConfig, changes).task.data
    assert data.train.annotations == data.test.annotations
    assert data.train.images == "others"


@pytest.mark.commands
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_leaves_a_checkpoint_and_a_folder(kind, shared, tmp_path):
    length = ["training.steps=2", "training.batch=8", "training.log_every=1"]
    arguments = ["--config", str(CONFIGS / f"{TINY[kind]}.yaml"), f"output={tmp_path / 'run'}"]
    run([*arguments, *length, *data(kind, shared)])
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2]
    assert all(np.isfinite(line["loss/total"]) for line in log)
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()
    assert load_task(tmp_path / "run" / "model").config.kind == kind


def dark_and_light(folder):
    """Twelve noisy images of 16 px of either class, in class folders."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(level - 40, level + 40, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deit_tiny", "{embed_dim: 16, depth: 2, num_heads: 2}"),
        ("deit_base", "{embed_dim: 16, depth: 2, num_heads: 2}"),
        ("swin_tiny", "{embed_dim: 16, depths: [2, 2], num_heads: [2, 2], window_size: 4}"),
    ],
)
def test_irpes_models_of_imagenet_train_at_tiny_size(model, options, tmp_path):
    images = dark_and_light(tmp_path / "images")
    run([
        *("--config", str(CONFIGS / f"imagenet_{model}.yaml"), f"output={tmp_path / 'run'}"),
        *(f"task.model.options={options}", "task.data.image_size=32", "task.data.workers=0"),
        *(f"task.data.{part}={images}" for part in ("train", "test")),
        *("training.batch=8", "training.steps=2", "training.log_every=1"),
    ])  # fmt: skip
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss/total"]) for line in log)
    saved = load_task(tmp_path / "run" / "model").model
    tables = [name for name, _ in saved.named_parameters() if "positions.0.tables" in name]
    assert len(tables) == (12 if model == "swin_tiny" else 2)


@pytest.mark.nightly
def test_two_ranks_train_what_one_does_and_go_on_from_its_checkpoint(tmp_path):
    images = dark_and_light(tmp_path / "images")
    (images / "dark" / "0.png").write_bytes(b"broken")
    arguments = [
        *("--config", str(CONFIGS / "cifar10_vit_tiny.yaml")),
        "task.model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
        *("task.data.image_size=16", "task.data.augment={shift: 2}"),
        *(f"task.data.{part}={images}" for part in ("train", "test")),
        *("training.batch=8", "training.log_every=1", "training.precision=float32"),
        *("training.optimiser.warmup_steps=0", "training.checkpoint_every=3"),
    ]

    def losses(name):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss/total"] for line in lines]

    run([*arguments, f"output={tmp_path / 'one'}", "training.steps=6"])
    run([*arguments, f"output={tmp_path / 'two'}", "training.steps=6"], world_size=2)
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    # Without its second half, the run is continued on another number of ranks.
    folder = tmp_path / "two"
    for step in (folder / "checkpoints" / "step_6" / "state.json",):
        step.write_text("damaged")
    run([*arguments, f"output={folder}", "training.steps=6", "--resume"])
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    report = json.loads((folder / "report.json").read_text())
    assert report["resumed_at_steps"] == [3]
    assert report["skipped_samples"] == {"unreadable image": 2}
