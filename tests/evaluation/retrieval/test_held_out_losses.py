"""Losses on held-out pairs are means over pairs, however batches are cut."""

from __future__ import annotations

import pytest
import torch

from launch.validation import HeldOutLosses
from vlp.tasks.pretraining import Pretraining


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
