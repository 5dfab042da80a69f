"""Passes in chunks against the whole batch at once: the same losses and gradients, less memory."""

from __future__ import annotations

import pytest
import torch
from pretraining_batch import batch
from test_pretraining import ALL, task
from tests_support import TINY_MODEL

from vlp.config import ConfigError
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.loss import require_whole_groups
from vlp.tasks.pretraining import grad_cache as module
from vlp.tasks.pretraining import task as task_module

ROWS, GROUP, CHUNK = 12, 4, 8  # the last chunk is shorter
SMALL = {"itm": {"group": GROUP}, "contrastive": {"token": {"group": GROUP}}, "teacher": None}


def step(built, rows, chunk):
    built.grad_cache = chunk
    built.zero_grad()
    built.model.anchor_threshold.fill_(0.3)  # it moves between the passes of a step
    torch.manual_seed(5)
    output = built(rows, 0)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}
    return output, gradients


@pytest.mark.parametrize(
    "objectives",
    [
        {},
        {"contrastive": {"kind": "itc"}, "teacher": {"queue": 8, "warmup_steps": 0}},
        {"contrastive": {"kind": "paper"}, "mim": {"output": "cross"}},
        {"contrastive": {"kind": "sigmoid"}},
    ],
)
def test_losses_and_gradients_are_those_of_the_whole_batch(objectives):
    rows = batch(ROWS)
    rows.valid[5] = False
    rows.image_ids[3] = rows.image_ids[9]
    cross = TINY_MODEL["cross"] | {"options": {"anchor": {"threshold": 0.3}}}
    built = task(ALL | SMALL | objectives, cross=cross).double()
    rows = rows._replace(pixels=rows.pixels.double())
    if built.teacher:
        built.teacher.average.module.double()
        built.teacher.queue.image, built.teacher.queue.text = (
            torch.zeros(8, 8).double() for _ in range(2)
        )
    results = []
    for chunk in (None, CHUNK):
        results.append(step(built, rows, chunk))
        if built.teacher:
            built.teacher.forget()
    (whole, expected), (parts, found) = results
    torch.testing.assert_close(parts.losses, whole.losses, rtol=1e-6, atol=1e-9)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)
    assert parts.statistics.keys() == whole.statistics.keys()


def test_dropout_is_replayed(monkeypatch):
    """The same chunks, with everything kept, give the same bits."""
    drop = {name: TINY_MODEL[name] | {"dropout": 0.3} for name in ("text", "cross")}
    built = task(ALL | SMALL, **drop)
    with_checkpoints = step(built, batch(ROWS), CHUNK)
    for place in (module, task_module):
        monkeypatch.setattr(place, "recomputed", lambda function: function())
    kept = step(built, batch(ROWS), CHUNK)
    assert torch.equal(with_checkpoints[0].loss, kept[0].loss)
    assert all(torch.equal(kept[1][name], grad) for name, grad in with_checkpoints[1].items())
    assert not torch.equal(kept[0].loss, step(built, batch(ROWS), None)[0].loss)


def test_the_running_threshold_is_that_of_the_whole_batch():
    thresholds = []
    for chunk in (None, CHUNK):
        built = task(ALL | SMALL)
        step(built, batch(ROWS), chunk)
        thresholds.append(built.model.anchor_threshold)
    torch.testing.assert_close(*thresholds)
    assert thresholds[0] != 0.3


def test_activations_are_those_of_one_chunk():
    built = task(ALL | SMALL)

    def kept(chunk):
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        built.grad_cache = chunk
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            built(batch(32), 0)
        return total

    assert kept(4) < kept(None) / 3


def test_a_chunk_that_cuts_groups_is_refused():
    objectives = ObjectivesConfig.model_validate(SMALL)
    require_whole_groups(objectives, 32, 2, chunk=8)
    require_whole_groups(objectives, 32, 2, chunk=17)  # all of a rank's share
    with pytest.raises(ConfigError, match=r"grad_cache 6 is not a multiple of objectives\.itm"):
        require_whole_groups(objectives, 32, 2, chunk=6)
