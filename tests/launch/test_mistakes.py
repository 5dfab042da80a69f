import os
import shlex
import shutil

import pytest
import yaml
from PIL import Image

from launch.cli.main import main
from vlp.config import load_config
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig

TRAIN = "train --config own.yaml output=new "
FINETUNE = "finetune retrieval --config tuned.yaml output=new "
RECALL = "evaluate retrieval --model model --shards scenes/train "
MISTAKES = [
    ("train --config broken.yaml", "broken.yaml"),
    ("train --confg own.yaml", "--config"),
    ("trian --config own.yaml", "train"),
    ("train --config tuned.yaml", "vlp finetune retrieval --config tuned.yaml"),
    ("app --model model --port 99999", "65535"),
    (TRAIN + "lr=1e-4", "training.optimiser.learning_rate"),
    (TRAIN + "training.precision=fp32", "float32"),
    (TRAIN + "training.epochs=null training.steps=null", "epochs"),
    (TRAIN + "'training.batch 7'", "KEY=VALUE"),
    (TRAIN + "training.evaluate_every=5", "evaluate_every"),
    (
        TRAIN + "validation.shards=[scenes/val] validation.rerank=8 objectives.itm=null",
        "validation.rerank",
    ),
    (TRAIN + "validation.shards=[nowhere]", "nowhere"),
    (TRAIN + "'validation={shards: [scenes/train], features: nowhere}'", "nowhere/features.json"),
    (TRAIN + "data.sources=nowhere", "nowhere"),
    (TRAIN + "data.sources=scenes", "*.tar"),
    (TRAIN + "data.sources=tars", "index.npz"),
    (TRAIN + "data.vocabulary=./nowhere", "vlp data vocabulary"),
    (TRAIN + "data.features=nowhere objectives.mim=null", "vlp data features"),
    (TRAIN + "init_from=run", "run/model"),
    (TRAIN + "output=~/new", "~ is not replaced here"),
    ("data scenes --out ~/new --train 3", "the shell has not replaced ~"),
    ("train --config own.yaml output=note.txt", "note.txt"),
    ("train --config own.yaml output=run", "--resume"),
    (TRAIN + "objectives.itm.group=3", "objectives.itm.group=2"),
    (TRAIN + "'model.cross.position=[ancor]'", "anchor"),
    (TRAIN + "'model.cross.position=[anchor, uniform]'", "uniform"),
    (TRAIN + "model.cross.anchor.groups=5", "cross.anchor.groups"),
    (TRAIN + "model.text.vocab_size=64", "model.text.vocab_size"),
    (TRAIN + "model.image.architecture=resnet18", "image.architecture"),
    (TRAIN + "training.engine=zero7", "zero0"),
    (TRAIN + "training.trackers=wandb", "[wandb]"),
    (TRAIN + "training.trackers=[mlflow]", "training.trackers"),
    (TRAIN + "--ranks 0", "0"),
    ("retrieval", "evaluate retrieval"),
    ("finetune vqaa --config tuned.yaml", "vqa"),
    ("finetune vqa --config tuned.yaml --from model", "is not what this command trains (vqa)"),
    ("finetune retrieval --config tuned.yaml", "init_from"),
    (FINETUNE + "--from model task.kind=retreival", "retreival"),
    ("evaluate retreival --model model --shards scenes/train", "retrieval"),
    ("evaluate retrieval --model run --shards scenes/train", "run/model"),
    ("evaluate retrieval --model damaged --shards scenes/train", "damaged/"),
    ("evaluate retrieval --model model --shards scenes", "train"),
    (RECALL + "--rerank -1", "-1"),
    (RECALL + "--device cuda:9", "cuda:9"),
    (RECALL + "--features nowhere", "vlp data features"),
    ("evaluate vqa --model model --shards scenes/train", "not fine-tuned"),
    ("evaluate zeroshot --model model --shards scenes/train", "--classes"),
    ("anchors --model model --out a.png --image nowhere.jpg --text dog", "nowhere.jpg"),
    ("anchors --model model --out a.png --image note.txt --text dog", "note.txt"),
    ("export --model run/modle --out x", "did you mean run/model"),
    ("info nowhere", "nowhere: there is no such folder"),
    ("app --model nowhere", "nowhere|Gradio"),
    ("reproduce nowhere", "nowhere"),
    ("data indx scenes/train", "index"),
    ("data index nowhere", "nowhere"),
    ("data import nowhere --out s", "nowhere: there is no such file or folder"),
    ("data import pictures --out s", "NAME.txt"),
    ("data vocabulary --shards scenes/train --size 5 --out v", "5"),
    ("data flickr8k --annotations cut.json --images pictures --out s", "cut.json"),
    ("data reshard scenes/train --out scenes/train --samples-per-shard 5", "--out"),
    ("data scenes --out note.txt --train 3", "note.txt"),
]


@pytest.fixture(scope="module")
def place(lab, tmp_path_factory):
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
    for name in ("tars", "pictures"):
        (folder / name).mkdir()
    shutil.copy(next((folder / "scenes" / "train").glob("*.tar")), folder / "tars")
    for number in range(6):
        Image.new("RGB", (40, 40), (9 * number, 3, 7)).save(folder / "pictures" / f"{number}.jpg")
    (folder / "broken.yaml").write_text("training: {batch: 8\ndata: [")
    (folder / "note.txt").write_text("x")
    (folder / "cut.json").write_text("[1, 2")
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered(line, expected, capsys, place):
    code = _run(line)
    captured = capsys.readouterr()
    output = captured.err.rpartition("\r")[2] or captured.out
    assert code == 2, output
    assert any(part in output for part in expected.split("|")), output
    assert "Traceback" not in output
    assert not (place / "new").exists()


def _run(line):
    try:
        return main(shlex.split(line))
    except SystemExit as error:
        return error.code
