"""A model folder as the start of fine-tuning."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from pair_shards import tiny_folder
from safetensors.torch import load_file, save_file

from vlp.config import PLUGINS, ConfigError, load_plugins
from vlp.models.folder import WEIGHTS
from vlp.models.pretrained.local_copy import CONFIG
from vlp.positions import registry
from vlp.tasks.downstream.task import DELTA, start_parts

SOURCE = """
from torch import nn
from vlp.positions import PositionEncoding, register_position


@register_position("own-start")
class OwnStart(PositionEncoding):
    def bias(self, query, key, context):
        return query.new_zeros(query.shape[-2], key.shape[-2])
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file that registers an encoding; what it does ends with the test."""
    monkeypatch.setattr(registry, "_ENCODINGS", dict(registry._ENCODINGS))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "own_start.py"
    file.write_text(SOURCE)
    yield str(file)
    sys.modules.pop("own_start", None)


def test_a_folder_with_an_encoding_of_ones_own_is_a_start(plugin, tmp_path, monkeypatch):
    load_plugins([plugin])
    folder = tiny_folder(tmp_path / "model", position=["own-start"])
    assert json.loads((folder / CONFIG).read_text())["plugins"] == {"own-start": "own_start"}
    parts, _ = start_parts(str(folder), {})
    assert parts.model.config.cross.position == ("own-start",)
    monkeypatch.delitem(registry._ENCODINGS, "own-start")
    with pytest.raises(ConfigError, match="'own-start' comes from the plugin own_start"):
        start_parts(str(folder), {})


@pytest.mark.parametrize(
    ("position", "threshold", "found"),
    [(["anchor"], None, DELTA), (["anchor"], 0.3, 0.3), ([], None, 0)],
)
def test_a_folder_without_anchors_gives_the_papers_threshold(tmp_path, position, threshold, found):
    folder = tiny_folder(tmp_path / "model", position=[])
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"anchor_threshold": torch.zeros(())}, folder / WEIGHTS)
    changes = {"cross": {"position": position, "options": {"anchor": {"threshold": threshold}}}}
    parts, _ = start_parts(str(folder), changes)
    assert parts.model.anchor_threshold == pytest.approx(found)
