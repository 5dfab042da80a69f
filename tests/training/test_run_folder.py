"""What `run.json` remembers of the starts of a run."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

from vlp.training.run_folder import RunFolder, read_record, record_start


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_starts_with_commit_changes_and_no_secret(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    git(own, "init", "-q")
    (own / "data.txt").write_text("nothing\n")
    git(own, "add", ".")
    git(own, "commit", "-qm", "first")
    monkeypatch.chdir(own)
    monkeypatch.setattr("sys.orig_argv", ["vlp", "train", "path=https://user:secret@host/x"])
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.path.mkdir()
    devices = [("node", "GPU"), ("node", "GPU"), ("other", "GPU")]
    record_start(folder, 0, 9, 7, devices, {"source 0": "ab"})
    (own / "data.txt").write_text(
        "https://host/shards?token=secret\n"
        'API_KEY = "0123456789abcdef"\nlogin(hf_abcdefghijklmnopqrst)\ntokens = "12 of 30"\n'
    )
    record_start(folder, 5, 9, 7, devices, {})
    first, second = read_record(folder.path)["starts"]
    commits = {one["repository"]: one for one in second["git"]}
    assert commits["own"] == {
        "repository": "own",
        "commit": git(own, "rev-parse", "HEAD"),
        "changed": True,
    }
    assert {one["repository"]: one["changed"] for one in first["git"]}["own"] is False
    assert first["devices"] == [
        {"host": "node", "device": "GPU", "ranks": 2},
        {"host": "other", "device": "GPU", "ranks": 1},
    ]
    assert (first["step"], second["step"], first["seed"]) == (0, 5, 7)
    assert first["data"] == {"source 0": "ab"}
    assert first["versions"]["torch"] == metadata.version("torch")
    changes = (folder.path / "git" / "step_5.diff").read_text()
    changes = changes[changes.rindex("diff --git a/data.txt") :]  # after those of this package
    assert "+https://host/shards?***" in changes
    assert "token=secret" not in changes
    assert '+API_KEY = "***"\n+login(***)\n+tokens = "12 of 30"\n' in changes
    assert "user:secret" not in (folder.path / "run.json").read_text()


def test_a_folder_without_git_and_a_damaged_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.path.mkdir()
    (folder.path / "run.json").write_text("{")
    record_start(folder, 0, 1, 0, [], {})
    [start] = read_record(folder.path)["starts"]
    assert start["git"] == []
    assert not (folder.path / "git").exists()
