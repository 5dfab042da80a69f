from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
from pydantic import ConfigDict, Field
from training_toy import toy_config

from vlp import distributed
from vlp.config import Config, ConfigError
from vlp.training.config import FinetuneConfig
from vlp.training.run_folder import _leaves, compare, require_same_on_all_ranks, resume_rule

CONFIG = toy_config()
SAVED = CONFIG.model_dump(mode="json")


def changed(key: str, value: Any, saved: dict[str, Any] = SAVED) -> dict[str, Any]:
    result = deepcopy(saved)
    *parents, leaf = key.split(".")
    node: Any = result
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node[parent]
    node[int(leaf) if isinstance(node, list) else leaf] = value
    return result


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.text.layers", 3),
        ("model.cross.anchor.groups", 4),
        ("objectives.mlm", None),
        ("objectives.itm.group", 8),
        ("data.canonical_streams", 4),
        ("data.captions", "all"),
        ("data.sources.0.weight", 2.0),
        ("data.augment.hflip", False),
        ("training.seed", 1),
    ],
)
def test_what_is_trained_may_not_change(key, value):
    fatal, tolerated = compare(SAVED, changed(key, value), CONFIG)
    assert tolerated == []
    assert fatal
    assert all(line.startswith(key) for line in fatal)


@pytest.mark.parametrize("key", ["text", "image", "cross"])
def test_public_weights_may_be_gone_as_the_checkpoint_has_its_own(key):
    saved = changed(f"model.{key}.weights", "gone")
    said = [f"model.{key}.weights: saved 'gone', now None"]
    assert compare(saved, SAVED, CONFIG) == ([], said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.steps", 99),
        ("training.batch", 16),
        ("training.engine", "zero3"),
        ("training.optimiser.learning_rate", 1.0),
        ("data.sources.0.path", "moved"),
        ("data.vocabulary", "moved"),
    ],
)
def test_how_a_run_goes_on_may_change_with_a_warning(key, value):
    fatal, tolerated = compare(SAVED, changed(key, value), CONFIG)
    assert fatal == []
    assert [line.split(":")[0] for line in tolerated] == [key]


@pytest.mark.parametrize(
    ("key", "value"), [("output", "moved"), ("data.workers", 7), ("training.keep_last", 9)]
)
def test_convenience_is_free(key, value):
    assert compare(SAVED, changed(key, value), CONFIG) == ([], [])


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


class Parts(Config):
    """A part of a configuration from outside."""

    model_config = ConfigDict(json_schema_extra={"resume": "tolerated"})

    speed: int = 1
    place: str = Field("here", json_schema_extra={"resume": "path"})


class Outside(Config):
    """A configuration from outside, which says itself what may differ."""

    size: int = 1
    parts: tuple[Parts, ...] = ()
    part: Parts = Parts()
    cache: dict[str, int] = Field({}, json_schema_extra={"resume": "free"})


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("size", "fixed"),
        ("unknown", "fixed"),
        ("part.speed", "tolerated"),
        ("part.place", "path"),
        ("parts.0.speed", "tolerated"),
        ("parts.0.place", "path"),
        ("parts.1.place", "fixed"),
        ("cache.x.y", "free"),
    ],
)
def test_fields_say_what_may_differ(key, rule):
    assert resume_rule(Outside(parts=(Parts(),)), key) == rule


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
        (CONFIG, "training.log_every", 7, True),
        (CONFIG, "training.steps", 7, True),
        (CONFIG, "validation", {"shards": ["val"], "rerank": 0}, True),
        (CONFIG, "model.text.layers", 7, True),
        (FINE_TUNING, "task.data.train.0", "/scratch/train", False),
        (FINE_TUNING, "task.data.validation.0", "/scratch/val", False),
        (FINE_TUNING, "task.data.workers", 3, False),
        (FINE_TUNING, "model.text.max_tokens", 9, True),
        (FINE_TUNING, "task.label_smoothing", 0.5, True),
    ],
)
def test_a_node_may_have_its_own_places_alone(monkeypatch, config, key, value, refused):
    values = changed(key, value, config.model_dump(mode="json"))
    other = dict(_leaves(values)), {"source 0": "a"}
    monkeypatch.setattr(distributed, "from_rank_0", lambda value: other)
    with pytest.raises(ConfigError, match=key) if refused else nullcontext():
        require_same_on_all_ranks(config, {"source 0": "a"})
    with pytest.raises(ConfigError, match="source 0 of the data is not that of rank 0"):
        require_same_on_all_ranks(config, {"source 0": "b"})
