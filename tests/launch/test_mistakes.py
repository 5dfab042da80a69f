"""A hundred mistakes of users: each is answered at once, in a sentence or two."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launch_lab import Lab
from PIL import Image

import vlp
from launch.__main__ import main
from vlp.config import load_config
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.positions import attach, create_position
from vlp.training.config import PretrainConfig

TRAIN = "train --config own.yaml output=new "
FINETUNE = "finetune retrieval --config tuned.yaml output=new "
RECALL = "evaluate retrieval --model model --shards scenes/train "
MISTAKES = [
    # Configurations.
    ("train --config nowhere.yaml", "nowhere.yaml: cannot read this configuration"),
    ("train --config empty", "cannot read this configuration (Is a directory)"),
    ("train --config broken.yaml", "broken.yaml: not valid YAML: line 2, column 5: expected"),
    ("train --config note.txt", "a configuration is a mapping of keys, not 'x'"),
    ("train --confg own.yaml", "--config"),
    ("train", "Missing option '--config'"),
    ("trian --config own.yaml", "unknown command 'trian'; did you mean train?"),
    (TRAIN + "trainig.steps=3", "unknown key 'trainig'; did you mean 'training'?"),
    (TRAIN + "training.step=3", "did you mean 'training.steps'?"),
    (TRAIN + "lr=1e-4", "did you mean 'training.optimiser.learning_rate'?"),
    (TRAIN + "batch_size=8", "did you mean 'training.batch'?"),
    (TRAIN + "num_workers=4", "did you mean 'data.workers'?"),
    (TRAIN + "learning_rate=1e-4", "did you mean 'training.optimiser.learning_rate'?"),
    (TRAIN + "training.batch=7", "batch 7 is not a multiple of data.canonical_streams 2"),
    (TRAIN + "training.batch=abc", "'training.batch': Input should be a valid integer"),
    (TRAIN + "training.precision=fp32", "should be 'float32', 'bf16' or 'fp16' (given: 'fp32')"),
    (TRAIN + "training.optimiser.learning_rate=-1", "should be greater than 0 (given: -1)"),
    (TRAIN + "training.optimiser.betas=0.9", "should be a list, as in training.optimiser.betas="),
    (
        TRAIN + "training.epochs=null training.steps=null",
        "one of epochs and steps must be a number",
    ),
    (TRAIN + "'training.batch 7'", "is not an override; write key.sub=value"),
    (TRAIN + "--training.batch=7", "No such option: --training.batch"),
    (TRAIN + "model.temperature=0.005", "should be greater than or equal to 0.01 (given: 0.005)"),
    (TRAIN + "objectives.contrastive.token.scale=200", "should be less than or equal to 100"),
    (TRAIN + "training.evaluate_every=5", "evaluate_every needs the held-out pairs of"),
    (
        TRAIN + "validation.shards=[scenes/val] validation.rerank=8 objectives.itm=null",
        "validation.rerank needs a match score",
    ),
    (TRAIN + "data.sources=nowhere", "nowhere: there is no such folder of shards"),
    (TRAIN + "data.sources=scenes", "holds no shards (*.tar); name one of its subfolders"),
    (TRAIN + "data.sources=empty", "empty: holds no shards (*.tar)"),
    (TRAIN + "data.sources=tars", "tars: the shards have no index.npz; make one with"),
    (TRAIN + "data.workers=-1", "'data.workers': Input should be greater than or equal to 0"),
    (TRAIN + "data.canonical_streams=3", "is not a multiple of data.canonical_streams 3"),
    (TRAIN + "data.vocabulary=./nowhere", "is neither a folder with tokenizer.json"),
    (TRAIN + "data.features=nowhere objectives.mim=null", "vlp data features"),
    (TRAIN + "data.features=nowhere", "set objectives.mim=null or data.features=null"),
    (TRAIN + "init_from=run", "run is a run folder; its model is in run/model"),
    (TRAIN + "init_from=runs/nowhere", "there is no model folder runs/nowhere"),
    (TRAIN + "init_from=empty", "empty is not a model folder: config.json is missing"),
    ("train --config own.yaml output=note.txt", "note.txt: cannot be written"),
    ("train --config own.yaml output=run", "run is not empty; continue its run with --resume"),
    (TRAIN + "objectives.itm.group=3", "group 3 does not divide a rank's 8 samples"),
    (TRAIN + "'model.cross.position=[ancor]'", "'ancor' is unknown (did you mean 'anchor'?)"),
    (
        TRAIN + "'model.cross.position=[anchor, uniform]'",
        "`anchor` and `uniform` exclude each other",
    ),
    (TRAIN + "model.cross.anchor.groups=5", "cross.anchor.groups 5 does not divide embed_dim 32"),
    (TRAIN + "model.image.image_size=33", "image_size 33 is not a multiple of patch_size 8"),
    (TRAIN + "model.text.heads=5", "text.width 32 is not a multiple of its heads"),
    (TRAIN + "model.text.vocab_size=64", "tokens, but model.text.vocab_size is 64"),
    (TRAIN + "model.image.architecture=vit_smal", "Unknown model (vit_smal)"),
    (TRAIN + "model.image.architecture=resnet18", "image.architecture resnet18"),
    (TRAIN + "training.deepspeed=zero7", "known are zero0, zero1, zero2, zero3"),
    (TRAIN + "training.trackers=wandb", "as in training.trackers='[wandb]'"),
    (TRAIN + "training.trackers=[mlflow]", "training.trackers: mlflow cannot be used (Model"),
    (TRAIN + "training.trackers=[wanb]", "should be 'tensorboard', 'wandb' or 'mlflow'"),
    (TRAIN + "--ranks 0", "--ranks: '0' is no whole number of at least 1"),
    (TRAIN + "--ranks two", "--ranks: 'two' is no whole number of at least 1"),
    (TRAIN + "validation.every=5", "unknown key 'validation.every'"),
    (TRAIN + "'validation={shards: [nowhere]}'", "nowhere: there is no such folder of shards"),
    # Fine-tuning.
    ("finetune vqaa --config tuned.yaml", "unknown task 'vqaa'; did you mean vqa?"),
    ("finetune vqa --config nowhere.yaml --from model", "nowhere.yaml: cannot read this"),
    ("finetune vqa --config tuned.yaml --from model", "is not what this command trains (vqa)"),
    ("finetune retrieval --config tuned.yaml", "the key 'init_from' is required"),
    (FINETUNE + "--from run", "run is a run folder; its model is in run/model"),
    (FINETUNE + "--from model task.kind=retreival", "retreival"),
    (FINETUNE + "--from model training.patience=0", "should be greater than or equal to 1"),
    # Evaluation.
    ("evaluate retreival --model model --shards scenes/train", "did you mean retrieval?"),
    ("evaluate retrieval --model model", "Missing option '--shards'"),
    ("evaluate retrieval --shards scenes/train", "Missing option '--model'"),
    ("evaluate retrieval --model run --shards scenes/train", "its model is in run/model"),
    ("evaluate retrieval --model runs/x --shards scenes/train", "no model folder runs/x"),
    ("evaluate retrieval --model empty --shards scenes/train", "config.json is missing"),
    ("evaluate retrieval --model damaged --shards scenes/train", "damaged/"),
    ("evaluate retrieval --model own.yaml --shards scenes/train", "no model folder own.yaml"),
    (
        "evaluate retrieval --model model --shards scenes",
        "name one of its subfolders that do: train",
    ),
    ("evaluate retrieval --model model --shards nowhere", "no such folder of shards"),
    ("evaluate retrieval --model model --shards tars", "have no index.npz; make one with"),
    (RECALL + "--rerank -1", "rerank -1: the number of candidates cannot be negative"),
    (RECALL + "--rerank abc", "--rerank: Input should be a valid integer"),
    (RECALL + "--limit 0", "--limit: '0' is no whole number of at least 1"),
    (RECALL + "--device cuda:9", "--device: 'cuda:9' cannot be used here"),
    (RECALL + "--device gpu", "--device: 'gpu' is no device; cpu or cuda is one"),
    (RECALL + "--precision fp8", "--precision"),
    (RECALL + "--features nowhere", "make the folder with: vlp data features"),
    (RECALL + "--rerank-by itm --rerank 4", "'itm' is not one of 'sum', 'match'"),
    (
        "evaluate vqa --model model --shards scenes/train",
        "was pretrained, not fine-tuned for a task",
    ),
    ("evaluate zeroshot --model model --shards scenes/train", "Missing option '--classes'"),
    ("embed --model run --shards scenes/train --out e", "its model is in run/model"),
    (
        "anchors --model model --out a.png --image nowhere.jpg --text dog",
        "nowhere.jpg: cannot be read",
    ),
    ("anchors --model model --out a.png --image note.txt --text dog", "unreadable image: note.txt"),
    ("export --model nowhere --out x", "there is no model folder nowhere"),
    ("export --model model --out x --format tflite", "'tflite' is not one of"),
    ("card --model nowhere", "nowhere"),
    ("info nowhere", "nowhere: there is no such folder"),
    ("info empty", "empty: nothing to report; looked for"),
    ("report nowhere --markdown r.md", "nowhere: there is no such folder"),
    ("report run", "nothing to write: give --out FILE.html"),
    ("app --model nowhere", "nowhere|Gradio"),
    ("ablate --config nowhere.yaml", "nowhere.yaml: cannot read this configuration"),
    ("reproduce nowhere", "unknown result 'nowhere'; there are"),
    # Data.
    ("data indx scenes/train", "unknown command 'indx'; did you mean index?"),
    ("data index nowhere", "nowhere: there is no such folder of shards"),
    ("data index empty", "empty: holds no shards"),
    ("data import nowhere --out s", "nowhere: there is no such file or folder"),
    ("data import empty --out s", "empty: holds nothing; it should be images with NAME.txt"),
    ("data import pictures --out s", "6 images and not one caption; put a NAME.txt beside"),
    ("data import note.txt --out s", "name them with --image COLUMN --caption COLUMN"),
    ("data vocabulary --shards scenes/train --size 5 --out v", "a vocabulary of 5 is too small"),
    ("data vocabulary --shards nowhere --size 500 --out v", "no such folder of shards"),
    ("data stats scenes --out s.json", "name one of its subfolders that do: train"),
    ("data flickr8k --annotations nowhere.json --images pictures --out s", "cannot be read"),
    ("data flickr8k --annotations cut.json --images pictures --out s", "cut.json: not a JSON file"),
    ("data reshard nowhere --out s --samples-per-shard 5", "no such folder of shards"),
    ("data reshard scenes/train --out s --samples-per-shard 0", "--samples-per-shard is 0"),
    ("data reshard scenes/train --out scenes/train --samples-per-shard 5", "choose another --out"),
    ("data scenes --out s --train -1", "--train is -1, at least 0"),
    ("data scenes --out note.txt --train 3", "note.txt: cannot be written"),
    ("data dedup scenes/train", "the following arguments are required: --out"),
]
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: vlp.load("runs/nowhere"), "there is no model folder runs/nowhere"),
    (lambda: vlp.load("run"), "run is a run folder; its model is in run/model"),
    (lambda: create_position("ancor"), "anchor"),
    (lambda: create_position("irpe-product", nonsense=1), "nonsense"),
    (lambda: attach(torch.nn.Linear(2, 2), "irpe-product"), "Linear"),
]
_SECONDS = 1.0


@pytest.fixture(scope="module")
def place(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with everything that the commands could name."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("scenes", "vocabulary"):
        shutil.copytree(lab.folder / name, folder / name)
    values = yaml.safe_load(lab.config.read_text())
    values["data"] |= {"sources": [{"path": "scenes/train"}], "vocabulary": "vocabulary"}
    (folder / "own.yaml").write_text(yaml.safe_dump(values))
    tuned = {"task": {"kind": "retrieval", "data": {"sources": ["scenes/train"]}}}
    (folder / "tuned.yaml").write_text(yaml.safe_dump(tuned))
    config = load_config(lab.config, PretrainConfig).model
    model, text = VLPModel(config), TextProcessor.load(str(folder / "vocabulary"), 24)
    for name in ("model", "run/model", "damaged"):
        save_pretrained(folder / name, config, model.state_dict(), text, Preprocessing(32))
    (folder / "run" / "report.json").write_text("{}")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for name in ("empty", "tars", "pictures"):
        (folder / name).mkdir()
    shutil.copy(next((folder / "scenes" / "train").glob("*.tar")), folder / "tars")
    for number in range(6):
        Image.new("RGB", (40, 40), (9 * number, 3, 7)).save(folder / "pictures" / f"{number}.jpg")
    (folder / "broken.yaml").write_text("training: {batch: 8\ndata: [")
    (folder / "note.txt").write_text("x")
    (folder / "cut.json").write_text("[1, 2")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")


def test_there_are_a_hundred() -> None:
    assert len({line for line, _ in MISTAKES}) + len(CALLS) >= 100


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    code, seconds = _run(line)
    if seconds > _SECONDS:  # the first one of its kind imports what the command needs
        capsys.readouterr()
        code, seconds = _run(line)
    captured = capsys.readouterr()
    said = captured.err.rpartition("\r")[2] or captured.out
    assert code == 2, said
    assert any(part in said for part in expected.split("|")), said
    assert "Traceback" not in said
    assert len(said) < 500, said
    assert said.rpartition("error: ")[2].strip().count("\n") < 2, said
    assert seconds < _SECONDS
    assert not (place / "new").exists()


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_a_mistake_in_python_is_answered(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError, KeyError)) as caught:
        call()
    said = str(caught.value)
    assert expected in said
    assert len(said) < 500


def _run(line: str) -> tuple[object, float]:
    """Run a command; return its exit code and the seconds it computes."""
    before = time.process_time()
    try:
        code: object = main(shlex.split(line))
    except SystemExit as error:
        code = error.code
    return code, time.process_time() - before
