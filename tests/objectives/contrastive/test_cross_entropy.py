import math

import pytest
import torch

from vlp.objectives.contrastive import candidate_cross_entropy


def reference(logits, positive, candidate_valid, soft=None, alpha=0.0):
    """Cross-entropy row by row, with plain numbers."""
    losses = []
    for row in range(len(logits)):
        open_ = [k for k in range(len(candidate_valid)) if candidate_valid[k]]
        right = [k for k in open_ if positive[row][k]]
        if not right:
            losses.append(0.0)
            continue
        total = sum(math.exp(logits[row][k]) for k in open_)
        loss = 0.0
        for k in open_:
            target = 1 / len(right) if k in right else 0.0
            if soft is not None:
                target = (1 - alpha) * target + alpha * soft[row][k]
            loss -= target * math.log(math.exp(logits[row][k]) / total)
        losses.append(loss)
    return losses


@pytest.fixture
def case():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=random)
    positive = torch.rand(5, 7, generator=random) < 0.4
    positive[0], positive[1, :3] = False, True  # a row without, a row with several positives
    candidate_valid = torch.tensor([True, False, True, True, True, False, True])
    return logits, positive, candidate_valid


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_equals_the_loop(case, alpha):
    logits, positive, candidate_valid = case
    soft = logits.flip(0).masked_fill(~candidate_valid, -math.inf).softmax(-1)
    result = candidate_cross_entropy(logits, positive, candidate_valid, soft, alpha)
    expected = reference(
        logits.tolist(), positive.tolist(), candidate_valid.tolist(), soft.tolist(), alpha
    )
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_invalid_candidates_and_lonely_rows_have_finite_zero_gradients(case):
    logits, positive, candidate_valid = case
    logits = logits.clone().requires_grad_()
    candidate_cross_entropy(logits, positive, candidate_valid).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, ~candidate_valid] == 0).all()
    assert (logits.grad[0] == 0).all()
    assert (logits.grad[1] != 0).any()


def test_no_valid_candidate_at_all():
    logits = torch.randn(2, 3, requires_grad=True)
    loss = candidate_cross_entropy(logits, torch.ones(2, 3) > 0, torch.zeros(3) > 0)
    loss.sum().backward()
    assert (loss == 0).all()
    assert (logits.grad == 0).all()


def test_gradient(case):
    logits, positive, candidate_valid = case
    logits = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: candidate_cross_entropy(x, positive, candidate_valid), (logits,)
    )
