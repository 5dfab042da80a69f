import torch

from vlp.objectives.loss import Loss, normalise


def test_sums_become_means_and_keep_their_gradient():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    losses = {
        "itc": Loss(x.sum(), torch.tensor(3)),
        "mlm": Loss((2 * x[:1]).sum(), torch.tensor(1)),
    }
    means = normalise(losses)
    assert list(means) == ["itc", "mlm"]
    assert means["itc"].item() == 3
    assert means["mlm"].item() == 2
    assert means["itc"].dtype == torch.float64
    (means["itc"] + means["mlm"]).backward()
    torch.testing.assert_close(x.grad, torch.tensor([7 / 3, 1 / 3, 1 / 3], dtype=torch.float64))


def test_a_loss_without_items_is_zero():
    x = torch.tensor(5.0, requires_grad=True)
    mean = normalise({"itm": Loss(x * 0, torch.tensor(0))})["itm"]
    mean.backward()
    assert mean == 0
    assert x.grad == 0


def test_nothing_to_do():
    assert normalise({}) == {}
