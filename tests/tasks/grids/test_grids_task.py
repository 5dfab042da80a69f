"""The task on grids: its loss, learning, and the folder it leaves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evaluation.options import EvalOptions
from evaluation.vision.grids import evaluate
from vlp.tasks.grids.task import Grids, GridsConfig, build, question_of
from vlp.tasks.vision_only import read_task

MODEL = {"width": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 4, "feed_forward": 128}


@pytest.fixture(scope="module")
def archive(shared):
    return shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz"


def config(path, *tasks, positions=("sine-2d", "alibi-2d"), **data):
    return GridsConfig.model_validate(
        {
            "model": MODEL | {"positions": [{"name": name} for name in positions]},
            "data": {
                "path": str(path),
                "tasks": [{"name": name} for name in tasks],
                "size": 3,
                "canonical_streams": 2,
            }
            | data,
        }
    )


def test_the_loss_is_torchs_cross_entropy_over_all_cells(archive):
    task, data = build(config(archive, "74dd1130", "25ff71a9"), 6, 0, "float32")
    batch, _ = next(data.batches())
    out = task(batch, 0)
    logits = task.model(question_of(batch), batch.outputs)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.outputs.flatten())
    torch.testing.assert_close(out.loss, expected)
    right = logits.argmax(-1) == batch.outputs
    assert float(out.statistics["cells"]) == pytest.approx(float(right.float().mean()))
    assert float(out.statistics["exact"]) == pytest.approx(float(right.all(-1).float().mean()))


def test_training_learns_a_shift_and_the_folder_keeps_it(archive, tmp_path):
    torch.manual_seed(0)
    task, data = build(config(archive, "25ff71a9"), 32, 0, "float32")
    assert evaluate(task, EvalOptions())["exact"] < 20
    optimiser = torch.optim.Adam(task.parameters(), lr=3e-3)
    losses = []
    for step, (batch, _) in enumerate(data.batches(stop_after=250)):
        out = task(batch, step)
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
        losses.append(float(out.loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    after = evaluate(task, EvalOptions())
    assert after["exact"] > 80

    task.save_model(tmp_path / "model", task.state_dict())
    plain, known, state = read_task(tmp_path / "model")
    again = Grids.restore(GridsConfig.model_validate(plain), known)
    again.load_state_dict(state)
    assert evaluate(again.eval(), EvalOptions()) == after
