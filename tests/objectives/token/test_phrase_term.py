import math

import pytest
import torch
import torch.nn.functional as F

from vlp.objectives.token import MARGIN, REACH, SCALE, phrase_loss


def unit(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=random, dtype=torch.float64), dim=-1)


def softmax(row):
    parts = [math.exp(SCALE * float(value)) for value in row]
    return [part / sum(parts) for part in parts]


def slow_loss(image_tokens, text_tokens, word_mask, valid):
    """One word after the other, over real words of valid rows: sum and count."""
    total, count = 0.0, 0
    for row in range(len(valid)):
        if not valid[row]:
            continue
        places = [n for n in range(word_mask.shape[1]) if word_mask[row, n]]
        cosines = {n: [text_tokens[row, n] @ patch for patch in image_tokens[row]] for n in places}
        points = {
            n: float(max(found) - sum(max(c, 0) for c in found) / len(found))
            for n, found in cosines.items()
        }
        for n in places:
            count += 1
            near = [k for k in places if 0 < abs(k - n) <= REACH]
            if not near:
                continue
            leader = max(near, key=lambda k: (points[k], -k))
            gap = points[leader] - points[n] - MARGIN
            if gap > 0:
                target, own = softmax(cosines[leader]), softmax(cosines[n])
                total -= gap * sum(t * math.log(o) for t, o in zip(target, own))
    return total, count


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_equals_the_loop(seed):
    random = torch.Generator().manual_seed(seed)
    image_tokens, text_tokens = unit(4, 9, 3, seed=seed), unit(4, 7, 3, seed=seed + 100)
    word_mask = torch.rand(4, 7, generator=random) < 0.7
    valid = torch.tensor([True, True, False, True])
    loss = phrase_loss(image_tokens, text_tokens, word_mask, valid)
    total, count = slow_loss(image_tokens, text_tokens, word_mask, valid)
    assert total > 0
    assert loss.count == count
    torch.testing.assert_close(loss.total, torch.tensor(total, dtype=torch.float64))


def phrase(*words):
    """One image of four patches, each a direction of its own, and a text of given words."""
    text = F.normalize(torch.tensor(words, dtype=torch.float64), dim=-1)[None]
    every = torch.ones(1, len(words), dtype=torch.bool)
    return torch.eye(4, dtype=torch.float64)[None], text, every, torch.ones(1, dtype=torch.bool)


RED, BLUE, VAGUE = (1.0, 0, 0, 0), (0, 1.0, 0, 0), (1.0, 1, 1, 1)


def test_a_vague_word_learns_from_its_neighbour_and_the_neighbour_nothing():
    image, text, words, valid = phrase(RED, VAGUE)
    text.requires_grad_(True)
    phrase_loss(image, text, words, valid).total.backward()
    assert (text.grad[0, 0] == 0).all()
    assert text.grad[0, 1].argmin() == 0  # a step downhill raises the response to the red patch
    assert (text.grad[0, 1, 1:] > 0).all()


def test_training_brings_each_word_to_the_patch_of_its_own_phrase():
    image, text, words, valid = phrase(RED, VAGUE, VAGUE, VAGUE, VAGUE, BLUE)
    free = text.clone().requires_grad_(True)
    for _ in range(200):
        tokens = F.normalize(free, dim=-1)
        (gradient,) = torch.autograd.grad(phrase_loss(image, tokens, words, valid).total, free)
        with torch.no_grad():
            free -= 0.1 * gradient
    assert free[0].argmax(-1).tolist() == [0, 0, 0, 1, 1, 1]


def test_words_that_point_as_well_as_their_neighbours_are_left_alone():
    assert phrase_loss(*phrase(RED, BLUE)).total == 0


def test_a_neighbour_out_of_reach_leads_nobody():
    within = phrase(*([RED] + [VAGUE] * REACH))
    beyond = phrase(*([RED] + [VAGUE] * (REACH + 1)))
    rest = torch.zeros(1, REACH + 2, dtype=torch.bool)
    rest[:, [0, REACH + 1]] = True
    assert phrase_loss(*within).total > 0
    assert phrase_loss(beyond[0], beyond[1], rest, beyond[3]).total == 0


@pytest.mark.parametrize("width", [1, 4])
def test_one_word_one_patch_or_nothing_at_all_is_zero(width):
    patches, word = unit(2, width, 3), unit(2, 1, 3, seed=1)
    one, valid = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    for mask, rows in ((one, valid), (~one, valid), (one, ~valid)):
        text = word.clone().requires_grad_(True)
        loss = phrase_loss(patches, text, mask, rows)
        loss.total.backward()
        assert loss.total == 0
        assert (text.grad == 0).all()


def test_under_autocast_it_is_computed_in_float32():
    args = (unit(2, 9, 8).float(), unit(2, 5, 8, seed=1).float())
    masks = (torch.ones(2, 5, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    plain = phrase_loss(*args, *masks).total
    with torch.autocast("cpu", torch.bfloat16):
        mixed = phrase_loss(*args, *masks).total
    assert mixed.dtype == torch.float32
    assert mixed == plain
