import pytest
import torch

from vlp.objectives.loss import Loss, normalise
from vlp.objectives.mim import MIMHead, mim_loss, patchify
from vlp.objectives.mlm import MLMHead, masked_token_bound, mlm_loss, select_masked


def test_positions_are_the_masked_words_of_real_rows():
    states = torch.arange(12.0).view(2, 3, 2)
    labels = torch.tensor([[-100, 4, -100], [7, -100, 9]])
    chosen, targets = select_masked(states, labels, torch.tensor([True, True]))
    assert targets.tolist() == [4, 7, 9]
    assert chosen.tolist() == [states[0, 1].tolist(), states[1, 0].tolist(), states[1, 2].tolist()]
    chosen, targets = select_masked(states, labels, torch.tensor([False, True]))
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


@pytest.mark.parametrize("max_masked", [7, 20, 40])
def test_slots_give_the_loss_and_the_gradient_of_the_masked_tokens_alone(max_masked):
    states, labels = torch.randn(4, 10, 6).double(), torch.full((4, 10), -100)
    labels[torch.tensor([0, 0, 1, 2, 2, 3, 3]), torch.tensor([1, 4, 9, 0, 3, 2, 9])] = 5
    valid, head = torch.tensor([True, True, True, False]), torch.randn(6, 11).double()
    results = []
    for number in (None, max_masked):
        leaf = states.clone().requires_grad_()
        chosen, targets = select_masked(leaf, labels, valid, number)
        assert len(chosen) == (number or 5)
        soft = (chosen.detach() @ head).softmax(-1)
        loss = mlm_loss(chosen @ head, targets, soft, 0.4)
        loss.total.backward()
        results.append((*loss, leaf.grad))
    torch.testing.assert_close(*results)


def test_slots_suffice_for_every_draw():
    draws = torch.rand(20_000, 64 * 30, generator=torch.Generator().manual_seed(0)) < 0.15
    assert draws.sum(1).max() <= masked_token_bound(64 * 30, 0.15) <= 424
    assert masked_token_bound(12, 0.15) == 12


def test_patch_layout_is_that_of_a_patch_convolution():
    pixels, convolution = torch.randn(1, 3, 8, 8), torch.nn.Conv2d(3, 5, 4, stride=4)
    by_patch = patchify(pixels, 4) @ convolution.weight.flatten(1).T + convolution.bias
    torch.testing.assert_close(by_patch, convolution(pixels).flatten(2).transpose(1, 2))


def test_refuses_images_of_broken_patches():
    with pytest.raises(ValueError, match="5 x 4 pixels are not whole patches of 2"):
        patchify(torch.zeros(1, 3, 5, 4), 2)
    masked = torch.zeros(1, 2, 2) > 0
    with pytest.raises(ValueError, match="do not fit images"):
        mim_loss(torch.zeros(1, 4, 27), torch.zeros(1, 3, 4, 4), masked, masked[:, 0, 0])


def test_equals_the_loop_of_mim():
    pixels, prediction = torch.randn(3, 3, 4, 8).double(), torch.randn(3, 8, 12).double()
    mask = torch.rand(3, 2, 4) < 0.5
    mask[0, 0, 0] = True
    valid = torch.tensor([True, True, False])
    total, count = 0.0, 0
    for b in range(2):
        for row in range(2):
            for column in range(4):
                if mask[b, row, column]:
                    square = pixels[b, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    error = (prediction[b, 4 * row + column] - square.flatten()).abs()
                    total += error.sum().item() / 12
                    count += 1
    loss = mim_loss(prediction, pixels, mask, valid)
    assert loss.total.item() == pytest.approx(total)
    assert loss.count == count


def test_masked_patches_are_replaced_by_the_mask_token():
    head = MIMHead(5, 2)
    patches, mask = torch.randn(2, 4, 5), torch.rand(2, 2, 2) < 0.5
    mask[0, 0, 0], mask[1, 1, 1] = True, False
    replaced = head.mask_token(patches, mask)
    assert torch.equal(replaced[~mask.flatten(1)], patches[~mask.flatten(1)])
    assert (replaced[mask.flatten(1)] == head.mask_token.token).all()
    assert head(replaced).shape == (2, 4, 12)


def test_sums_become_means_and_keep_their_gradient():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    losses = {"itc": Loss(x.sum(), torch.tensor(3)), "mlm": Loss(2 * x[0], torch.tensor(1))}
    losses["itm"] = Loss(0 * x[0], torch.tensor(0))
    means = normalise(losses)
    assert {name: mean.item() for name, mean in means.items()} == {"itc": 3, "mlm": 2, "itm": 0}
    assert means["itc"].dtype == torch.float64
    sum(means.values()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([7 / 3, 1 / 3, 1 / 3], dtype=torch.float64))
    assert normalise({}) == {}
