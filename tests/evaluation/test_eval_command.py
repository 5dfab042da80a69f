import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from question_shards import photo

from evaluation.__main__ import main
from vlp.models.pretrained.local_copy import local_folder

ROOT = Path(__file__).resolve().parents[2]


def test_overrides_stand_anywhere(tmp_path):
    config = ROOT / "configs" / "ablation" / "cross_position.yaml"
    settings = ["seeds=[0,1]", "--config", str(config), f"output={tmp_path}", "--report", "jobs=1"]
    assert main(["ablate", *settings]) == 0
    assert (tmp_path / "report.md").exists()


def test_a_hub_model_is_evaluated_again_from_the_same_folder(
    model_folder, scene_shards, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(model_folder))
    command = ["--shards", str(scene_shards), "--limit", "3"]
    for _ in range(2):
        assert main(["retrieval", "--model", "me/tiny", *command]) == 0
        assert "written to evaluation/me--tiny" in capsys.readouterr().out
        assert Path("evaluation/me--tiny/retrieval.json").is_file()
    assert not (tmp_path / "me" / "tiny").exists()


def test_a_folder_without_a_model_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", asked.append)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    (tmp_path / "runs" / "base" / "config.yaml").write_text("")
    assert main(["retrieval", "--model", "runs/base", "--shards", "s"]) == 2
    assert "runs/base is not a model folder: config.json is missing" in capsys.readouterr().err
    (tmp_path / "runs" / "base" / "config.yaml").unlink()
    assert local_folder(tmp_path / "runs" / "base").is_dir()
    assert asked == []


@pytest.mark.parametrize("command", [["retrieval"], ["embed"], ["predict"]])
@pytest.mark.parametrize("option", ["--batch", "--limit"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_numbers_below_one_are_refused_at_once(command, option, value, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--model", "m", "--shards", "s", f"{option}={value}"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert f"{option}: {value!r} is not an integer of at least 1" in error


@pytest.mark.parametrize("command", [["retrieval", "--shards", "s"], ["vision"]])
def test_a_device_that_is_not_here_is_refused_at_once(command, capsys):
    name = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--model", "m", "--device", name])
    assert leaving.value.code == 2
    assert f"{name!r} cannot be used here: " in capsys.readouterr().err


def test_a_shard_that_cannot_be_opened_is_one_line(places, tmp_path, capsys):
    shards = shutil.copytree(places["SHARDS"], tmp_path / "shards")
    shard = min(shards.glob("*.tar"))
    shard.unlink()
    shard.mkdir()
    assert main(["retrieval", "--model", places["MODEL"], "--shards", str(shards)]) == 1
    assert f"error on rank 0: missing shard: {shard} (" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_rank_whose_peer_goes_while_they_meet_says_so():
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    alone = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [sys.executable, "-m", "evaluation", "retrieval", "--model", "a", "--shards", "b"]
    rank = subprocess.Popen(command, cwd=ROOT, env=alone, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while store.num_keys() < 2 and time.monotonic() < end:  # it waits for rank 0 with the second
        time.sleep(0.05)
    del store  # as when rank 0 is killed, which keeps it
    said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    assert said.splitlines()[-1].startswith("error on rank 1: lost another rank")
    assert "Traceback" not in said


ANCHORS = "anchors --model MODEL --out out/a.png"
GROUNDING = "grounding --model MODEL --shards SHARDS"
RETRIEVAL = "retrieval --model MODEL --shards SHARDS"
EMBED = "embed --model MODEL"
ZEROSHOT = "zeroshot --model MODEL --shards SHARDS"


@pytest.fixture
def places(tmp_path, monkeypatch, model_folder, scene_shards):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    (tmp_path / "red.png").write_bytes(photo())
    (tmp_path / "broken.png").write_bytes(photo()[:40])
    for name, text in {
        "empty": "", "one": "red", "twice": "red\nred", "two": "red\nblue", "plain": "a photo",
        "template": "a {}",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    return {"MODEL": str(model_folder), "SHARDS": str(scene_shards)}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("retrieval --model ./nowhere --shards SHARDS", "nowhere"),
        (f"{RETRIEVAL} --rerank-by match", "set rerank"),
        (f"{RETRIEVAL} --bank-temperature 0.2", "set bank"),
        (f"{GROUNDING} --by similarity --layer 0", "layer is an option of Grad-CAM"),
        (f"{GROUNDING} --layer 7", "no cross-modal layer 7"),
        (f"{ZEROSHOT} --classes two --match-by match", "set match"),
        (f"{ZEROSHOT} --classes empty --templates template", "empty is empty"),
        (f"{ZEROSHOT} --classes one --templates template", "at least two classes"),
        (f"{ZEROSHOT} --classes twice --templates template", "'red' is listed twice"),
        (f"{ZEROSHOT} --classes two --templates plain", "'a photo' has no {}"),
        (f"{EMBED} --shards SHARDS --out taken", "--out taken"),
        (f"{EMBED} --shards SHARDS --out red.png/a", "red.png is no writable folder"),
        (f"{RETRIEVAL} --out red.png", "red.png is a file; name a folder"),
        (f"{RETRIEVAL} SHARDS", "is named twice"),
        (ANCHORS, "either --image and --text, or --shards"),
        (f"{ANCHORS} --image red.png", "go together"),
        (f"{ANCHORS} --image red.png --text a --count 2", "--count is for --shards"),
        (f"{ANCHORS} --shards SHARDS --count 0", "count 0"),
        (f"{ANCHORS} --shards SHARDS --out a.jpg", "a.jpg"),
        (f"{ANCHORS} --image red.png --text a --layer 1", "layer 1"),
        (f"{ANCHORS} --image gone.png --text a", "gone.png: cannot be read"),
        (f"{ANCHORS} --image broken.png --text a", "unreadable image"),
        (f"{ANCHORS} --image red.png --text ' '", "holds no word"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(places, tmp_path, capsys, command, message):
    before = sorted(tmp_path.rglob("*"))
    assert main([places.get(word, word) for word in shlex.split(command)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before
