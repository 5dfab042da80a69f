import json
import shutil

import numpy as np
import pytest
import ranks
import torch
from pair_shards import entailment_shards, tiny_folder
from safetensors.torch import load_file
from tests_support import dark_and_light

from vlp.config import load_config
from vlp.tasks.detection.data import CocoSource
from vlp.tasks.downstream.task import load_task
from vlp.tasks.vision_only import KINDS
from vlp.tasks.vision_only import load_task as load_vision_task
from vlp.training.config import VisionConfig

CONFIGS = ranks.ROOT / "configs"
TINY = {"classification": "cifar10_vit_tiny", "detection": "scenes_detr_tiny",
        "grids": "grids_arc_tiny", "pixels": "pixels_cifar10_tiny",
        "widgets": "widgets_tiny"}  # fmt: skip


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
    script, *rest = arguments
    return ranks.run([ranks.ROOT / "launch" / script, *rest], world_size)


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_own_objects_take_the_place_of_scenes():
    own = "{format: coco, annotations: a.json, images: photos}"
    changes = [f"task.data.{part}={own}" for part in ("train", "test")]
    data = load_config(CONFIGS / "vision/scenes_detr_tiny.yaml", VisionConfig, changes).task.data
    assert (
        data.train == data.test == CocoSource(format="coco", annotations="a.json", images="photos")
    )
    parts = ["task.data.test.format=coco", "task.data.test.annotations=a.json"]
    changes = [changes[0], *parts, "task.data.test.images=photos", "task.data.train.images=others"]
    data = load_config(CONFIGS / "vision/scenes_detr_tiny.yaml", VisionConfig, changes).task.data
    assert data.train.annotations == data.test.annotations
    assert data.train.images == "others"


@pytest.mark.commands
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_leaves_a_checkpoint_and_a_folder(kind, shared, tmp_path):
    arguments = ["train_vision.py", "--config", str(CONFIGS / f"vision/{TINY[kind]}.yaml")]
    arguments += ["training.steps=2", "training.batch=8", "training.log_every=1"]
    run([*arguments, f"output={tmp_path / 'run'}", *data(kind, shared)])
    log = log_of(tmp_path / "run")
    assert [line["step"] for line in log] == [1, 2]
    assert all(np.isfinite(line["loss/total"]) for line in log)
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()
    assert load_vision_task(tmp_path / "run" / "model").config.kind == kind


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deit_tiny", "{embed_dim: 16, depth: 2, num_heads: 2}"),
        ("swin_tiny", "{embed_dim: 16, depths: [2, 2], num_heads: [2, 2], window_size: 4}"),
    ],
)
def test_irpes_models_of_imagenet_train_at_tiny_size(model, options, tmp_path):
    images = dark_and_light(tmp_path / "images", 12)
    run([
        *("train_vision.py", "--config", str(CONFIGS / f"vision/imagenet_{model}.yaml")),
        f"output={tmp_path / 'run'}",
        *(f"task.model.options={options}", "task.data.image_size=32", "task.data.workers=0"),
        *(f"task.data.{part}={images}" for part in ("train", "test")),
        *("training.batch=8", "training.steps=2", "training.log_every=1"),
    ])  # fmt: skip
    log = log_of(tmp_path / "run")
    assert all(np.isfinite(line["loss/total"]) for line in log)
    saved = load_vision_task(tmp_path / "run" / "model").model
    tables = [name for name, _ in saved.named_parameters() if "positions.0.tables" in name]
    assert len(tables) == (12 if model == "swin_tiny" else 2)


@pytest.mark.nightly
def test_two_ranks_train_what_one_does_and_go_on_from_its_checkpoint(tmp_path):
    images = dark_and_light(tmp_path / "images", 12)
    (images / "dark" / "0.png").write_bytes(b"broken")
    arguments = [
        *("train_vision.py", "--config", str(CONFIGS / "vision/cifar10_vit_tiny.yaml")),
        "task.model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
        *("task.data.image_size=16", "task.data.augment={shift: 2}"),
        *(f"task.data.{part}={images}" for part in ("train", "test")),
        *("training.batch=8", "training.log_every=1", "training.precision=float32"),
        *("training.optimiser.warmup_steps=0", "training.checkpoint_every=3"),
    ]

    def losses(name):
        return [line["loss/total"] for line in log_of(tmp_path / name)]

    run([*arguments, f"output={tmp_path / 'one'}", "training.steps=6"])
    run([*arguments, f"output={tmp_path / 'two'}", "training.steps=6"], world_size=2)
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    # Without its second half, the run is continued on another number of ranks.
    folder = tmp_path / "two"
    (folder / "checkpoints" / "step_6" / "state.json").write_text("damaged")
    run([*arguments, f"output={folder}", "training.steps=6", "--resume"])
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    report = json.loads((folder / "report.json").read_text())
    assert report["resumed_at_steps"] == [3]
    assert report["skipped_samples"] == {"unreadable image": 2}


SNLI_VE = ("finetune.py", "snli_ve", "--config", str(CONFIGS / "finetune/scenes_snli_ve.yaml"))
PLAIN = "{randaugment: false, crop_scale: [1.0, 1.0], hflip: false}"


@pytest.mark.commands
def test_two_ranks_train_what_one_does_and_a_killed_run_goes_on(tmp_path):
    start = tiny_folder(tmp_path / "start")
    train = entailment_shards(tmp_path / "train", 24)
    validation = entailment_shards(tmp_path / "validation", 10)
    arguments = [
        *(*SNLI_VE, "--from", str(start)),
        f"task.data.train=[{train}]",
        f"task.data.validation=[{validation}]",
        f"task.data.augment={PLAIN}",
        *("task.data.canonical_streams=2", "training.precision=float32", "training.batch=8"),
        *("training.steps=6", "training.gradient_accumulation_steps=2", "training.log_every=1"),
        *("training.checkpoint_every=3", "training.evaluate_every=2", "task.teacher={}"),
    ]
    run([*arguments, f"output={tmp_path / 'one'}"])
    run([*arguments, f"output={tmp_path / 'two'}"], 2)
    logs = [log_of(tmp_path / name) for name in ("one", "two")]
    for mine, other in zip(*logs, strict=True):
        assert mine["step"] == other["step"]
        for name in ("loss/total", "validation/accuracy"):
            assert mine.get(name) == pytest.approx(other.get(name), abs=1e-5)
    looks = [line["step"] for line in logs[0] if "validation/accuracy" in line]
    assert looks == [2, 4, 6]
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert report["best"]["step"] in looks
    best = load_task(tmp_path / "one" / "best")
    assert best.kind == "snli_ve"

    # As if it had been killed between its checkpoints, and goes on with another number of ranks.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_6")
    shutil.rmtree(tmp_path / "two" / "model")
    run([*arguments, f"output={tmp_path / 'two'}", "--resume"])
    one, two = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")
    )
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("teacher", ["null", "{momentum: 0.5}"])
def test_two_runs_of_one_seed_are_equal_to_the_bit_and_so_is_a_resumed_one(teacher, tmp_path):
    start = tiny_folder(tmp_path / "start")
    train = entailment_shards(tmp_path / "train", 16)

    def trained(name, *more):
        run([
            *(*SNLI_VE, f"init_from={start}"),
            *(f"task.data.train=[{train}]", "task.data.validation=[]", "training.batch=8"),
            *("training.steps=3", "training.checkpoint_every=2", f"task.teacher={teacher}"),
            *(f"output={tmp_path / name}", *more),
        ])  # fmt: skip
        assert not (tmp_path / name / "best").exists()
        files = ("model/heads", "model/model", "checkpoints/step_3/extra")
        return [load_file(tmp_path / name / f"{file}.safetensors") for file in files]

    first, second = trained("first"), trained("second")
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step_3")
    shutil.rmtree(tmp_path / "second" / "model")
    resumed = trained("second", "--resume")
    assert bool(first[2]) == (teacher != "null")
    for one, same, again in zip(first, second, resumed):
        assert one.keys() == same.keys() == again.keys()
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert all(torch.equal(one[name], again[name]) for name in one)
