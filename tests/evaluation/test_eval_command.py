from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
    for name in ("tiny", "tiny"):
        assert main(["retrieval", "--model", f"me/{name}", *command]) == 0
        place = Path("evaluation") / f"me--{name}"
        assert f"written to {place}" in capsys.readouterr().out
        assert (place / "retrieval.json").is_file()
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


ZEROSHOT = ["zeroshot", "--classes", "c"]


@pytest.mark.parametrize(
    "command",
    [["retrieval"], ["pointing"], ["vqa"], ["grounding"], ZEROSHOT, ["embed"], ["predict"]],
)
@pytest.mark.parametrize("option", ["--batch", "--limit"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_numbers_below_one_are_refused_at_once(command, option, value, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--model", "m", "--shards", "s", f"{option}={value}"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert f"{option}: {value!r} is no whole number of at least 1" in error


@pytest.mark.parametrize("command", [["retrieval", "--shards", "s"], ["vision"]])
def test_a_device_that_is_not_here_is_refused_at_once(command, capsys):
    name = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--model", "m", "--device", name])
    assert leaving.value.code == 2
    assert f"{name!r} cannot be used here: " in capsys.readouterr().err


@pytest.mark.nightly
def test_a_rank_whose_peer_goes_while_they_meet_says_so():
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    alone = os.environ | {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    command = [sys.executable, "-m", "evaluation", "retrieval", "--model", "a", "--shards", "b"]
    rank = subprocess.Popen(command, cwd=ROOT, env=alone, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while store.num_keys() < 2 and time.monotonic() < end:  # it waits for rank 0 with the second
        time.sleep(0.05)
    del store  # as when rank 0 is killed, which keeps it
    said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    assert said.splitlines()[-1] == (
        "error on rank 1: lost another rank; that one's message says why"
    )
    assert "Traceback" not in said
