"""Worker processes and ranks change no digit of an evaluation, bad samples among them."""

from __future__ import annotations

from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from question_shards import photo, write_shards

import vlp
from evaluation.embed import embed
from evaluation.options import EvalOptions
from launch import pretrain as validation
from launch.pretrain import HeldOutLosses
from vlp.data.schema import Annotation
from vlp.scenes.annotation import annotation
from vlp.scenes.sample import sample_scene
from vlp.tasks.pretraining import Pretraining

WORKERS = (0, 2)


@pytest.fixture(scope="module")
def bad_shards(tmp_path_factory) -> Path:
    """Two images that cannot be decoded, two without text, and one that is whole."""
    scene = annotation(sample_scene(0, 50))
    samples = [(b"", scene), (photo(), Annotation()), (photo(side=20), scene)]
    return write_shards(tmp_path_factory.mktemp("bad"), [*samples, *samples[:2]], per_shard=2)


@pytest.fixture(scope="module")
def loaded(model_folder):
    return vlp.load(model_folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_features_are_the_same_files(loaded, scene_shards, bad_shards, tmp_path) -> None:
    shards = [bad_shards, scene_shards]
    for workers in WORKERS:
        found = embed(
            loaded, shards, tmp_path / f"{workers}", options=EvalOptions(batch=4, workers=workers)
        )
        assert found.skipped == {"unreadable image": 2}
    assert files(tmp_path / "0") == files(tmp_path / "2")


def test_held_out_losses_are_the_same(
    validated_pretraining, model_folder, scene_shards, bad_shards, monkeypatch
) -> None:
    held_out = {"shards": [str(bad_shards), str(scene_shards)]}
    objectives = {"contrastive": {}, "itm": {}}
    config = validated_pretraining(objectives, 4, held_out)
    assert config.validation is not None
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, str(model_folder), log_every=1)
    found = []
    for workers in WORKERS:
        monkeypatch.setattr(validation, "workers_for", lambda *_, workers=workers: workers)
        losses = HeldOutLosses(config, config.validation, task)
        losses._data.max_skipped_share = 0.9
        found.append(losses(3))
        assert active_children() == []
    assert found[0] == found[1]
    assert found[0].keys() >= {"loss/total", "loss/itm"}
    assert losses(0) == {}


def test_a_pair_of_a_short_batch_weighs_like_any_other(
    validated_pretraining, model_folder, scene_shards
):
    """A loss that compares no pairs does not depend on the batch: 16 and 5 pairs, or 21."""
    found = {}
    objectives = {"itm": None, "mlm": None, "mim": {}, "teacher": None}
    for batch in (16, 32):
        config = validated_pretraining(objectives, batch, {"shards": [str(scene_shards)]})
        torch.manual_seed(0)
        task = Pretraining(config.model, config.objectives, str(model_folder))
        found[batch] = HeldOutLosses(config, config.validation, task)(4)
    assert found[16]["loss/mim"] == pytest.approx(found[32]["loss/mim"], rel=1e-6)
