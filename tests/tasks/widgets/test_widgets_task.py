"""Widget captioning learns from places, and comes back from its folder."""

from __future__ import annotations

import pytest
import torch

from vlp.objectives.loss import Loss
from vlp.positions.fourier import kl_regulariser
from vlp.tasks.task import Task
from vlp.tasks.widgets.task import WidgetsConfig, build

FOURIER = {"dimensions": 4, "groups": 4, "extent": 100, "gamma": 10, "features": 16}


def settings(name="fourier", options=FOURIER, dropout=0.0, **more):
    positions = [{"name": name, "options": options}] if name else []
    return WidgetsConfig.model_validate(
        {
            "model": {
                "width": 32,
                "heads": 4,
                "layers": 1,
                "decoder_layers": 1,
                "intermediate": 64,
                "dropout": dropout,
                "positions": positions,
            },
            "data": {
                "screens": {"kind": "generated", "train": 64, "test": 4, "nodes": "leaves"},
                "vocabulary_size": 300,
                "max_words": 3,
                "max_caption": 8,
                "canonical_streams": 2,
            },
            "java": False,
            **more,
        }
    )


def batches(data, count):
    return [batch for (batch, _), _ in zip(data.batches(), range(count))]


def test_the_task_is_one_and_its_loss_the_cross_entropy_of_words():
    task, data = build(settings(), 8, 0, "float32")
    assert isinstance(task, Task)
    (batch,) = batches(data, 1)
    out = task(batch, 0)
    logits = task.model(batch).log_softmax(-1)
    total = count = hits = 0
    for row, caption in enumerate(batch.captions.tolist()):
        said = caption[1 : caption.index(task.text.sep_id) + 1]
        for place, word in enumerate(said):
            total -= logits[row, place, word]
            hits += int(logits[row, place].argmax()) == word
            count += 1
    torch.testing.assert_close(out.losses["words"], total / count)
    torch.testing.assert_close(out.statistics["accuracy"].item(), hits / count)
    assert set(out.losses) == {"words"}
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.parameters())


def test_the_regulariser_pulls_on_regularised_encodings():
    options = {**FOURIER, "regularised": True}
    task, data = build(settings(options=options, regulariser=0.5), 8, 0, "float32")
    (batch,) = batches(data, 1)
    out = task(batch, 0)
    (encoding,) = task.model.encoder.positions
    wanted = kl_regulariser(encoding.frequencies, encoding.log_variance)
    torch.testing.assert_close(out.losses["regulariser"], wanted)
    torch.testing.assert_close(out.loss, out.losses["words"] + 0.5 * wanted)
    assert isinstance(task._regulariser(wanted), Loss)
    without, _ = build(settings(regulariser=0.5), 8, 0, "float32")
    assert without(batch, 0).losses["regulariser"] == 0


def train(config, steps=150):
    torch.manual_seed(0)
    task, data = build(config, 16, 0, "float32")
    optimiser = torch.optim.Adam(task.parameters(), 5e-3)
    losses = []
    for step, batch in enumerate(batches(data, steps)):
        out = task(batch, step)
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
        losses.append(out.losses["words"].item())
    return losses


@pytest.mark.nightly
def test_training_learns_captions_and_places():
    blind, seeing = train(settings(None)), train(settings())
    # Captions alone give much of their words away; which widget it is takes places.
    assert sum(seeing[-10:]) / 10 < 0.25 * seeing[0]
    assert sum(seeing[-10:]) < 0.8 * sum(blind[-10:])


def test_the_seed_does_not_change_the_vocabulary():
    one, other = (build(settings(), 8, seed, "float32")[0] for seed in (0, 1))
    assert one.text.to_json() == other.text.to_json()
