import math

import pytest
import torch
import torch.nn.functional as F

from vlp.objectives.anchor import anchor_loss, paper_anchor_loss


def unit(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=random, dtype=torch.float64), dim=-1)


def reference(
    image,
    text,
    image_keys,
    text_keys,
    positive,
    image_tokens,
    text_tokens,
    text_mask,
    scale,
    margin,
):
    """Eqs 1-2 with plain loops, one loss per row."""
    rows = []
    for b in range(len(image)):
        loss = 0.0
        for query, keys in ((image[b], text_keys), (text[b], image_keys)):
            negative = [k for k in range(len(keys)) if not positive[b][k]]
            right = [k for k in range(len(keys)) if positive[b][k]]
            for k in right:
                hinge = 0.0
                if negative:
                    log_sum = math.log(
                        sum(math.exp(scale * float(query @ keys[j])) for j in negative)
                    )
                    hinge = float(query @ keys[k]) - margin - log_sum / scale
                loss += -min(0.0, hinge) / len(right)
        tokens = [
            math.exp(scale * float(image_tokens[b, m] @ text_tokens[b, n]))
            for m in range(image_tokens.shape[1])
            for n in range(text_tokens.shape[1])
            if text_mask[b][n]
        ]
        if tokens:
            loss -= math.log(sum(tokens)) / scale
        rows.append(loss / 2)
    return rows


@pytest.fixture
def case():
    text_mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]) > 0
    positive = torch.eye(4, 6) > 0
    positive[0, 5] = positive[2, 3] = True
    return [
        *(unit(4, 8, seed=1), unit(4, 8, seed=2), unit(6, 8, seed=3), unit(6, 8, seed=4)),
        *(positive, unit(4, 5, 8, seed=5), unit(4, 3, 8, seed=6), text_mask),
    ]


@pytest.mark.parametrize(("scale", "margin"), [(2.0, 0.05), (14.0, 0.2), (0.5, -1.0)])
def test_equals_the_loop(case, scale, margin):
    loss = anchor_loss(*case, scale=scale, margin=margin)
    expected = reference(*case, scale, margin)
    torch.testing.assert_close(loss, torch.tensor(sum(expected) / 4, dtype=torch.float64))
    assert loss.dtype == torch.float64


def test_without_a_mask_every_token_is_a_word(case):
    unmasked = anchor_loss(*case[:-1])
    all_words = torch.ones_like(case[-1])
    torch.testing.assert_close(unmasked, anchor_loss(*case[:-1], all_words))
    assert unmasked != anchor_loss(*case)


def test_zero_branch_is_reached_with_one_weak_negative():
    """papers.md#ace-a2: the zero branch of Eq. 2 is kept; one opposite negative reaches it."""
    image = unit(1, 4)
    keys = torch.cat([image, -image])
    tokens = image[:, None]
    loss = anchor_loss(image, image, keys, keys, torch.tensor([[True, False]]), tokens, tokens)
    torch.testing.assert_close(loss, torch.tensor(-0.5, dtype=torch.float64))  # third term alone


def test_row_without_negatives_has_no_margin_term_and_finite_gradients(case):
    image, text = case[0].clone().requires_grad_(), case[1]
    positive = torch.ones(4, 6, dtype=torch.bool)
    loss = anchor_loss(image, text, case[2], case[3], positive, *case[5:])
    loss.backward()
    assert (image.grad == 0).all()
    torch.testing.assert_close(
        loss.detach(),
        torch.tensor(
            sum(reference(image.detach(), *case[1:4], positive, *case[5:], 2.0, 0.05)) / 4,
            dtype=torch.float64,
        ),
    )


def test_empty_slots_count_nowhere(case):
    valid = torch.tensor([True, False, True, True])
    candidate_valid = torch.tensor([True, False, True, True, False, True])
    loss = paper_anchor_loss(*case, valid=valid, candidate_valid=candidate_valid)
    image, text, image_keys, text_keys, positive, *tokens = case
    cut = [
        *(image[valid], text[valid], image_keys[candidate_valid], text_keys[candidate_valid]),
        *(positive[valid][:, candidate_valid], *(x[valid] for x in tokens)),
    ]
    expected = torch.tensor(sum(reference(*cut, 2.0, 0.05)), dtype=torch.float64)
    torch.testing.assert_close(loss.total, expected)
    assert loss.count == 3


def test_gradient(case):
    inputs = [case[i].clone().requires_grad_() for i in (0, 1, 5, 6)]
    positive = torch.eye(4) > 0

    def loss(image, text, image_tokens, text_tokens):
        return anchor_loss(image, text, image, text, positive, image_tokens, text_tokens, case[-1])

    assert torch.autograd.gradcheck(loss, inputs)


def test_autocast_does_not_touch_it(case):
    single = [x.float() if x.is_floating_point() else x for x in case]
    outside = anchor_loss(*single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert anchor_loss(*single) == outside
