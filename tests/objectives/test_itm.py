import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.objectives.itm import hard_negatives, itm_loss, listwise_itm_loss


def slow_choice(logits, candidates, draw):
    weights = [math.exp(logits[k] - max(logits[c] for c in candidates)) for k in candidates]
    point, so_far = draw * sum(weights), 0.0
    for k, weight in zip(candidates, weights, strict=True):
        so_far += weight
        if so_far > point:
            return k
    return candidates[-1]


def slow_negatives(similarity, ids, valid, uniform, group):
    rows = []
    for i in range(len(ids)):
        start = i // group * group
        block = range(start, min(start + group, len(ids)))
        candidates = [k for k in block if valid[k] and valid[i] and ids[k, 0] != ids[i, 0]]
        if not candidates:
            rows.append((i, i, False))
            continue
        to_text = [float(x) for x in similarity[i]]
        to_image = [float(x) for x in similarity[:, i]]
        text = slow_choice(to_text, candidates, float(uniform[i, 0]))
        image = slow_choice(to_image, candidates, float(uniform[i, 1]))
        rows.append((text, image, True))
    return rows


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(2, 5), st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 30.0])
)
def test_equals_the_loop(groups, size, seed, sharpness):
    random = torch.Generator().manual_seed(seed)
    rows = groups * size
    similarity = sharpness * torch.randn(rows, rows, generator=random)
    ids = torch.randint(0, 4, (rows, 1), generator=random).expand(-1, 2)
    valid = torch.rand(rows, generator=random) < 0.8
    uniform = torch.rand(rows, 2, generator=random, dtype=torch.float64)
    result = hard_negatives(similarity, ids, valid, uniform, size)
    expected = slow_negatives(similarity, ids, valid, uniform, size)
    assert result.text_for_image.tolist() == [text for text, _, _ in expected]
    assert result.image_for_text.tolist() == [image for _, image, _ in expected]
    assert result.exists.tolist() == [has for *_, has in expected]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10_000))
def test_several_negatives_are_those_of_several_draws(count, seed):
    random = torch.Generator().manual_seed(seed)
    similarity = 3 * torch.randn(8, 8, generator=random)
    ids = torch.randint(0, 5, (8, 1), generator=random).expand(-1, 2)
    valid = torch.rand(8, generator=random) < 0.8
    uniform = torch.rand(8, 2, generator=random, dtype=torch.float64)
    result = hard_negatives(similarity, ids, valid, uniform, 4, count)
    for k in range(count):
        expected = slow_negatives(similarity, ids, valid, (uniform + k) / count, 4)
        assert result.text_for_image[k::count].tolist() == [text for text, _, _ in expected]
        assert result.image_for_text[k::count].tolist() == [image for _, image, _ in expected]
        assert result.exists[k::count].tolist() == [has for *_, has in expected]


@pytest.mark.parametrize("draw", [0.0, 0.5, math.nextafter(1.0, 0.0), 1.0])
def test_extreme_draws_and_logits_stay_inside(draw):
    similarity = torch.tensor([[0.0, 3000.0, -3000.0, 0.0]] * 4)
    ids = torch.tensor([0, 1, 2, 0])[:, None].expand(-1, 2)
    valid = torch.ones(4, dtype=torch.bool)
    result = hard_negatives(similarity, ids, valid, torch.full((4, 2), draw).double(), 4)
    assert result.text_for_image[0] == 1  # all weight is there; 2 has none, 3 is the same image
    assert (ids[result.text_for_image] != ids).all()
    assert (ids[result.image_for_text] != ids).all()


def test_similarities_that_are_not_finite_and_no_rows_at_all():
    for rows in (4, 0):
        similarity, valid = torch.full((rows, rows), torch.nan), torch.ones(rows) > 0
        ids = torch.arange(rows)[:, None].expand(-1, 2)
        result = hard_negatives(similarity, ids, valid, torch.rand(rows, 2), 2)
        assert (result.text_for_image // 2).tolist() == [0, 0, 1, 1][:rows]


@pytest.mark.parametrize("by_id", [True, False])
def test_an_equal_caption_of_another_image_is_no_negative(by_id):
    random = torch.Generator().manual_seed(7)
    similarity = torch.randn(8, 8, generator=random)
    similarity[:, 1] = similarity[:, 0] = 9
    ids, valid = torch.arange(8), torch.ones(8, dtype=torch.bool)
    pairs = torch.stack([ids, torch.tensor([5, 5, 2, 3, 4, 6, 7, 8])], dim=1) if by_id else ids
    plain = torch.stack([ids, ids], dim=1)
    for _ in range(50):
        uniform = torch.rand(8, 2, generator=random, dtype=torch.float64)
        drawn = hard_negatives(similarity, pairs, valid, uniform, 8)
        before = hard_negatives(similarity, plain, valid, uniform, 8)
        assert drawn.text_for_image[0] != 1
        assert drawn.image_for_text[1] != 0
        for new, old in zip(drawn, before):
            assert torch.equal(new[2:], old[2:]), "rows without equal captions draw as ever"


def test_a_caption_of_the_image_that_comes_with_another_one_is_no_negative():
    ids = torch.tensor([[1, 11], [1, 12], [2, 12], [3, 13]])
    similarity = 10 * torch.eye(4).roll(2, 0)
    drawn = hard_negatives(similarity, ids, torch.ones(4) > 0, torch.rand(4, 2), 4)
    assert drawn.text_for_image.tolist()[:3] == [3, 3, 3]
    assert drawn.image_for_text.tolist()[:3] == [3, 3, 3]


def test_loss_equals_the_loop():
    logits = torch.randn(5, 2, dtype=torch.float64)
    labels = torch.tensor([1, 0, 0, 1, 0])
    weight = torch.tensor([True, True, False, True, False])
    loss = itm_loss(logits, labels, weight)
    expected = sum(
        math.log(sum(math.exp(x) for x in row)) - row[label]
        for row, label, use in zip(logits.tolist(), labels.tolist(), weight.tolist(), strict=True)
        if use
    )
    assert loss.total.item() == pytest.approx(expected)
    assert loss.count == 3


def test_listwise_loss_equals_the_loop():
    matched = torch.randn(3, dtype=torch.float64)
    wrong = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([True, False, True])
    loss = listwise_itm_loss(matched, wrong, weight)
    expected = sum(
        math.log(math.exp(own) + sum(math.exp(other) for other in others)) - own
        for own, others, use in zip(matched.tolist(), wrong.tolist(), weight.tolist(), strict=True)
        if use
    )
    assert loss.total.item() == pytest.approx(expected)
    assert loss.count == 2
    loss.total.backward()
    assert wrong.grad[1].tolist() == [0, 0]
