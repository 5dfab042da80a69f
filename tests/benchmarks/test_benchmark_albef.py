import pytest
import torch

from benchmarks.albef import ALL, ALL_ACE, ANCHORED, EQUAL, OurStep, StepSizes, variants
from benchmarks.step import random_batch

SIZES = StepSizes(64, 1, 1, 2, image_size=32, rows=4, max_tokens=12, queue=8)
CPU = torch.device("cpu")
ALBEFS_LOSSES = {"contrastive", "itm", "mlm"}


def batch(words=(3, 7, 10, 20)):
    return random_batch(variants(SIZES)[ALL].inputs, SIZES.rows, words)


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        (EQUAL, ALBEFS_LOSSES),
        (ANCHORED, ALBEFS_LOSSES),
        (ALL, ALBEFS_LOSSES | {"mim", "token", "word", "phrase"}),
        (ALL_ACE, ALBEFS_LOSSES | {"mim", "token", "word", "phrase"}),
    ],
)
def test_a_step_has_the_losses_of_its_name_and_a_full_queue(name, losses):
    own = OurStep(variants(SIZES)[name], batch(), CPU)
    teacher = own.trainee.task.teacher
    assert int(teacher.queue.filled) == SIZES.queue
    before = {n: p.detach().clone() for n, p in own.trainee.task.named_parameters()}
    keys = teacher.queue.image.clone()
    assert own.losses().keys() == losses
    assert all(torch.equal(before[n], p) for n, p in own.trainee.task.named_parameters())
    assert own.step() > 0
    assert any(not torch.equal(before[n], p) for n, p in own.trainee.task.named_parameters())
    assert (keys != teacher.queue.image).any(1).sum() == SIZES.rows  # of one step, not of two
