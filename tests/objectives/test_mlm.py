import pytest
import torch
import torch.nn.functional as F

from vlp.objectives.mlm import MLMHead, masked_positions, mlm_loss, prediction_slots


def test_positions_are_the_masked_words_of_real_rows():
    states = torch.arange(12.0).view(2, 3, 2)
    labels = torch.tensor([[-100, 4, -100], [7, -100, 9]])
    chosen, targets = masked_positions(states, labels)
    assert targets.tolist() == [4, 7, 9]
    assert chosen.tolist() == [states[0, 1].tolist(), states[1, 0].tolist(), states[1, 2].tolist()]
    chosen, targets = masked_positions(states, labels, torch.tensor([False, True]))
    assert targets.tolist() == [7, 9]
    assert chosen.shape == (2, 2)


def test_head_is_tied_to_the_embedding_it_is_given():
    head = MLMHead(4, 7).double()
    embedding = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    states = torch.randn(5, 4, dtype=torch.float64)
    torch.nn.init.normal_(head.bias)
    hidden = states @ head.dense.weight.T + head.dense.bias
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    hidden = (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, correction=0, keepdim=True)
    logits = head(states, embedding)
    torch.testing.assert_close(logits, hidden @ embedding.T + head.bias, atol=1e-6, rtol=1e-5)
    logits.square().sum().backward()
    assert embedding.grad.norm() > 0
    assert sum(p.numel() for p in head.parameters()) == 4 * 4 + 4 + 2 * 4 + 7


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_equals_the_loop(alpha):
    logits = torch.randn(4, 6, dtype=torch.float64)
    soft = torch.randn(4, 6, dtype=torch.float64).softmax(-1)
    labels = torch.tensor([5, 0, -100, 2])
    total = 0.0
    for row in (0, 1, 3):
        log_p = (logits[row].exp() / logits[row].exp().sum()).log()
        total -= (1 - alpha) * log_p[labels[row]] + alpha * (soft[row] * log_p).sum()
    loss = mlm_loss(logits, labels, soft, alpha)
    torch.testing.assert_close(loss.total, total)
    assert loss.count == 3


def test_selecting_first_equals_ignoring_later():
    head, embedding = MLMHead(4, 7), torch.randn(7, 4)
    states, labels = torch.randn(2, 5, 4), torch.full((2, 5), -100)
    labels[0, 3], labels[1, 1] = 6, 2
    chosen, targets = masked_positions(states, labels)
    early = mlm_loss(head(chosen, embedding), targets)
    late = mlm_loss(head(states, embedding).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(early.total, late.total)
    assert early.count == late.count == 2


def test_batch_without_masked_words_is_zero_and_differentiable():
    head, embedding = MLMHead(4, 7), torch.randn(7, 4, requires_grad=True)
    chosen, targets = masked_positions(torch.randn(2, 3, 4), torch.full((2, 3), -100))
    loss = mlm_loss(head(chosen, embedding), targets)
    loss.total.backward()
    assert loss.total == 0
    assert loss.count == 0
    assert (head.dense.weight.grad == 0).all()


def test_loss_is_float32_under_autocast():
    states, embedding, labels = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3])
    head = MLMHead(4, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(states, embedding)
        loss = mlm_loss(logits, labels)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(
        loss.total, F.cross_entropy(logits.float(), labels, reduction="sum"), atol=0, rtol=0
    )


@pytest.mark.parametrize("slots", [7, 20, 40])
def test_slots_give_the_loss_and_the_gradient_of_the_masked_tokens_alone(slots):
    states, labels = torch.randn(4, 10, 6, dtype=torch.float64), torch.full((4, 10), -100)
    labels[torch.tensor([0, 0, 1, 2, 2, 3, 3]), torch.tensor([1, 4, 9, 0, 3, 2, 9])] = 5
    valid, head = torch.tensor([True, True, True, False]), torch.randn(6, 11).double()
    found = []
    for number in (None, slots):
        given = states.clone().requires_grad_()
        chosen, wanted = masked_positions(given, labels, valid, number)
        assert len(chosen) == (number or 5)
        soft = (chosen.detach() @ head).softmax(-1)
        loss = mlm_loss(chosen @ head, wanted, soft, 0.4)
        loss.total.backward()
        found.append((loss.total, loss.count, given.grad))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


def test_slots_suffice_for_every_draw():
    draws = torch.rand(20_000, 64 * 30, generator=torch.Generator().manual_seed(0)) < 0.15
    assert draws.sum(1).max() <= prediction_slots(64 * 30, 0.15) <= 0.25 * 64 * 30
    assert prediction_slots(12, 0.15) == 12
