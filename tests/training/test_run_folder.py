import subprocess
from contextlib import nullcontext
from copy import deepcopy
from importlib import metadata

import pytest
from training_toy import toy_config

from vlp import distributed
from vlp.config import ConfigError
from vlp.training.config import FinetuneConfig
from vlp.training.run_folder import (
    RunFolder,
    _leaves,
    compare,
    read_starts,
    record_start,
    require_same_on_all_ranks,
)

CONFIG = toy_config()
SAVED = CONFIG.model_dump(mode="json")


def changed(key, value, saved=SAVED):
    result = deepcopy(saved)
    *parents, leaf = key.split(".")
    node = result
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node[parent]
    node[int(leaf) if isinstance(node, list) else leaf] = value
    return result


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model.text.layers", 3, "fatal"),
        ("data.canonical_streams", 4, "fatal"),
        ("data.sources.0.weight", 2.0, "fatal"),
        ("training.seed", 1, "fatal"),
        ("model.text.weights", "gone", "tolerated"),
        ("training.steps", 99, "tolerated"),
        ("training.engine", "zero3", "tolerated"),
        ("training.optimiser.learning_rate", 1.0, "tolerated"),
        ("data.sources.0.path", "moved", "tolerated"),
        ("data.vocabulary", "moved", "tolerated"),
        ("output", "moved", "free"),
        ("data.workers", 7, "free"),
        ("training.keep_last", 9, "free"),
    ],
)
def test_keys_forbid_a_resume_or_warn_or_are_free(key, value, rule):
    for saved, now in ((SAVED, changed(key, value)), (changed(key, value), SAVED)):
        fatal, tolerated = compare(saved, now, CONFIG)
        assert bool(fatal) == (rule == "fatal")
        assert bool(tolerated) == (rule == "tolerated")
        assert all(line.startswith(key) for line in fatal + tolerated)


def test_tasks_may_be_moved_and_judged_otherwise_too():
    data = {"train": ["a", "b"], "workers": 1, "max_skipped_share": 0.5, "validation": ["v"]}
    saved = {"init_from": "model", "task": {"kind": "vqa", "data": data}}
    now = {"init_from": "moved", "task": {"kind": "vqa", "data": data | {"train": ["a", "c"]}}}
    now["task"]["data"] |= {"workers": 2, "max_skipped_share": 0.9, "validation": ["v", "w"]}
    config = FinetuneConfig.model_validate(saved)
    fatal, tolerated = compare(saved, now, config)
    assert fatal == []
    assert [line.split(":")[0] for line in tolerated] == [
        "init_from", "task.data.train.1", "task.data.validation.1"
    ]  # fmt: skip
    now["task"]["data"]["train"] = ["a", "b", "c"]
    assert compare(saved, now, config).fatal == ["task.data.train.2: saved 'absent', now 'c'"]
    screens = [{"task": {"data": {"train": number}}} for number in (2000, 300)]
    assert compare(screens[0], screens[1], config).fatal == ["task.data.train: saved 2000, now 300"]


def test_an_added_or_removed_key_is_a_difference():
    older = deepcopy(SAVED)
    del older["model"]["embed_dim"]
    now = changed("model.embed_dim", 128)
    assert compare(older, now, CONFIG).fatal == ["model.embed_dim: saved 'absent', now 128"]
    assert compare(now, older, CONFIG).fatal == ["model.embed_dim: saved 128, now 'absent'"]
    # What one of them does not tell has its default.
    assert compare(SAVED, older, CONFIG) == compare(older, SAVED, CONFIG) == ([], [])


FINE_TUNING = FinetuneConfig.model_validate(
    {
        "init_from": "model",
        "task": {"kind": "snli_ve", "data": {"train": ["train"], "validation": ["val"]}},
        "model": {"text": {"max_tokens": 8}},
        "training": {"batch": 8},
    }
)


@pytest.mark.parametrize(
    ("config", "key", "value", "refused"),
    [
        (CONFIG, "output", "/scratch/run", False),
        (CONFIG, "data.sources.0.path", "/scratch/shards", False),
        (CONFIG, "data.workers", 7, False),
        (CONFIG, "data.cache", {"folder": "/scratch/cache", "limit": 5}, False),
        (CONFIG, "data.sources.0.weight", 2.0, True),
        (CONFIG, "model.text.layers", 7, True),
        (FINE_TUNING, "task.data.train.0", "/scratch/train", False),
        (FINE_TUNING, "task.data.validation.0", "/scratch/val", False),
        (FINE_TUNING, "task.data.workers", 3, False),
        (FINE_TUNING, "task.label_smoothing", 0.5, True),
    ],
)
def test_a_node_may_have_its_own_places_alone(monkeypatch, config, key, value, refused):
    values = changed(key, value, config.model_dump(mode="json"))
    other = dict(_leaves(values)), {"source 0": "a"}
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: other)
    with pytest.raises(ConfigError, match=key) if refused else nullcontext():
        require_same_on_all_ranks(config, {"source 0": "a"})
    with pytest.raises(ConfigError, match="source 0 of the data is not that of rank 0"):
        require_same_on_all_ranks(config, {"source 0": "b"})


def git(folder, *arguments):
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
    first, second = read_starts(folder.path)["starts"]
    commit = git(own, "rev-parse", "HEAD")
    assert {"repository": "own", "commit": commit, "changed": True} in second["git"]
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
    [start] = read_starts(folder.path)["starts"]
    assert start["git"] == []
    assert not (folder.path / "git").exists()
