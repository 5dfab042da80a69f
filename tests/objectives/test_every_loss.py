"""What must hold for every loss, whatever it compares."""

import pytest
import torch
from torch.nn.functional import normalize

from vlp.objectives.anchor import paper_anchor_loss
from vlp.objectives.contrastive import itc_loss, positives, sigmoid_loss
from vlp.objectives.itm import itm_loss, listwise_itm_loss
from vlp.objectives.loss import Loss
from vlp.objectives.mim import mim_loss
from vlp.objectives.mlm import mlm_loss
from vlp.objectives.token import phrase_loss, token_losses

ROWS, PATCHES, WORDS, WIDTH = 4, 5, 3, 6
IDS = torch.tensor([[7, 7], [8, 8], [7, 7], [9, 9]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]) > 0
LABELS = torch.tensor([1, 0, 1, 1])
TAU = torch.tensor(0.3)


def anchor(image, text, patches, words, valid):
    same = positives(IDS, IDS)
    options = MASK, 2.0, 0.05, valid, valid
    return paper_anchor_loss(image, text, image, text, same, patches, words, *options)


def token(patches, words, valid):
    captions, single = token_losses(patches, words, MASK, MASK * IDS[:, :1], IDS, valid, 5.0)
    return Loss(captions.total + single.total, captions.count + single.count)


def contrastive(image, text, valid):
    same = positives(IDS, IDS)
    return itc_loss(image, text, image, text, same, TAU, valid=valid, candidate_valid=valid)


PAIRS, TOKENS = ((WIDTH,), (WIDTH,)), ((PATCHES, WIDTH), (WORDS, WIDTH))
PIXELS = torch.randn(ROWS, 3, 4, 4, generator=torch.Generator().manual_seed(1))
MASKED = torch.tensor([[[1, 0], [0, 1]]] * ROWS) > 0
LOSSES = {
    "itc": (contrastive, PAIRS),
    "sigmoid": (lambda *two: sigmoid_loss(*two[:2], IDS, two[2], TAU, torch.tensor(-1.5)), PAIRS),
    "anchor": (anchor, (*PAIRS, *TOKENS)),
    "token": (token, TOKENS),
    "phrase": (lambda patches, words, valid: phrase_loss(patches, words, MASK, valid), TOKENS),
    "itm": (lambda logits, valid: itm_loss(logits, LABELS, valid), ((2,),)),
    "lists": (lambda own, valid: listwise_itm_loss(own[:, 0], own[:, 1:], valid), ((4,),)),
    "mlm": (lambda logits, valid: mlm_loss(logits, LABELS.where(valid, -100)), ((5,),)),
    "mim": (lambda found, valid: mim_loss(found, PIXELS.to(found), MASKED, valid), ((4, 12),)),
}
"""Loss by name of random inputs of these shapes, after the rows, and of valid rows."""
every_loss = pytest.mark.parametrize("name", LOSSES)


def inputs(name, dtype):
    random = torch.Generator().manual_seed(0)
    leaves = (torch.randn(ROWS, *shape, generator=random) for shape in LOSSES[name][1])
    return [normalize(leaf, dim=-1).to(dtype).requires_grad_() for leaf in leaves]


def computed(name, leaves, valid):
    loss = LOSSES[name][0](*leaves, valid)
    return loss, torch.autograd.grad(loss.total, leaves)


@every_loss
def test_without_a_valid_row_it_is_zero_and_so_are_its_gradients(name):
    every = torch.ones(ROWS, dtype=torch.bool)
    assert LOSSES[name][0](*inputs(name, torch.float32), every).count > 0
    loss, gradients = computed(name, inputs(name, torch.float32), ~every)
    assert loss.total == loss.count == 0
    assert not any(gradient.any() for gradient in gradients)


@every_loss
def test_rows_that_are_not_valid_get_no_gradient_and_count_nowhere(name):
    valid = torch.tensor([True, True, False, True])  # the pair of an image that another row has
    leaves = inputs(name, torch.float64)
    loss, gradients = computed(name, leaves, valid)
    assert not any(gradient[2].any() for gradient in gradients)
    with torch.no_grad():
        for leaf in leaves:
            leaf[2] = leaf[2].flip(-1)
    again, _ = computed(name, leaves, valid)
    assert (again.total, again.count) == (loss.total, loss.count)


@every_loss
def test_autocast_touches_neither_value_nor_gradient(name):
    leaves, valid = inputs(name, torch.float32), torch.ones(ROWS, dtype=torch.bool)
    outside, expected = computed(name, leaves, valid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = LOSSES[name][0](*leaves, valid)
        half = LOSSES[name][0](*inputs(name, torch.bfloat16), valid)
    assert inside.total == outside.total
    assert all(map(torch.equal, torch.autograd.grad(inside.total, leaves), expected))
    assert half.total.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "phrase"])
def test_gradients_are_right(name):
    """Of the phrase loss alone a part is stopped."""
    valid = torch.tensor([True, True, False, True])
    loss = lambda *leaves: LOSSES[name][0](*leaves, valid).total  # noqa: E731
    assert torch.autograd.gradcheck(loss, inputs(name, torch.float64))
