import pytest
import torch
import torch.nn.functional as F

from vlp.objectives.anchor import token_loss, token_scores
from vlp.objectives.word_response import word_response


def unit(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=random, dtype=torch.float64), dim=-1)


def slow_scores(image_tokens, text_tokens, word_mask, alpha):
    """One picture, text, word and patch at a time."""
    scores = torch.zeros(len(image_tokens), len(text_tokens), dtype=image_tokens.dtype)
    for i, picture in enumerate(image_tokens):
        for j, text in enumerate(text_tokens):
            words = [text[n] for n in range(len(text)) if word_mask[j][n]]
            for word in words:
                cosines = [float(word @ patch) for patch in picture]
                mean = sum(max(c, 0) for c in cosines) / len(cosines)
                scores[i, j] += (max(cosines) - alpha * mean) / len(words)
    return scores


def slow_loss(image_tokens, text_tokens, word_mask, ids, valid, scale, alpha, group):
    """Cross-entropy both ways, group after group, over valid rows alone."""
    total, count = 0.0, 0
    for start in range(0, len(ids), group):
        rows = [r for r in range(start, min(start + group, len(ids))) if valid[r]]
        rows = [r for r in rows if word_mask[r].any()]
        logits = scale * slow_scores(image_tokens[rows], text_tokens[rows], word_mask[rows], alpha)
        for a, row in enumerate(rows):
            count += 1
            mine = [b for b, other in enumerate(rows) if ids[other] == ids[row]]
            for side in (logits[a], logits[:, a]):
                total = total - 0.5 * sum(side.log_softmax(0)[b] for b in mine) / len(mine)
    return total, count


@pytest.fixture
def batch():
    """Eight samples; two captions of one picture, an empty slot, a caption without words."""
    word_mask = torch.rand(8, 4, generator=torch.Generator().manual_seed(3)) < 0.7
    word_mask[:, 1] = True
    word_mask[6] = False
    ids = torch.tensor([1, 2, 1, 3, 4, 5, 6, 7])
    valid = torch.ones(8, dtype=torch.bool)
    valid[3] = False
    return unit(8, 9, 6, seed=1), unit(8, 4, 6, seed=2), word_mask, ids, valid


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_scores_equal_the_loop(batch, alpha):
    image_tokens, text_tokens, word_mask, *_ = batch
    fast = token_scores(image_tokens, text_tokens[:5], word_mask[:5], alpha)
    assert fast.shape == (8, 5)
    torch.testing.assert_close(
        fast, slow_scores(image_tokens, text_tokens[:5], word_mask[:5], alpha)
    )


def test_leading_dimensions_are_groups_that_never_meet(batch):
    image_tokens, text_tokens, word_mask, *_ = batch
    grouped = token_scores(
        *(x.unflatten(0, (2, 4)) for x in (image_tokens, text_tokens)),
        word_mask.unflatten(0, (2, 4)),
    )
    for g in range(2):
        own = slice(4 * g, 4 * g + 4)
        torch.testing.assert_close(
            grouped[g], token_scores(image_tokens[own], text_tokens[own], word_mask[own])
        )


def test_a_text_without_words_scores_zero(batch):
    image_tokens, text_tokens, word_mask, *_ = batch
    assert (token_scores(image_tokens, text_tokens, word_mask)[:, 6] == 0).all()


@pytest.mark.parametrize("group", [4, 8, 16])
def test_loss_equals_the_loop(batch, group):
    loss = token_loss(*batch, 7.0, 1.0, group)
    total, count = slow_loss(*batch, 7.0, 1.0, group)
    torch.testing.assert_close(loss.total, total)
    assert loss.count == count == 6


def test_groups_of_different_size_see_different_negatives(batch):
    assert token_loss(*batch, 7.0, 1.0, 4).total < token_loss(*batch, 7.0, 1.0, 8).total


def test_refuses_a_batch_that_groups_do_not_cut(batch):
    with pytest.raises(ValueError, match="8 rows cannot be cut into groups of 3"):
        token_loss(*batch, 7.0, 1.0, 3)


def test_written_out_gradient_equals_autograd(batch):
    image_tokens, text_tokens = (x.clone().requires_grad_() for x in batch[:2])
    weight = torch.randn(32, 8, dtype=torch.float64)
    fast = word_response(text_tokens.flatten(0, 1), image_tokens, 0.7)
    ours = torch.autograd.grad((fast * weight).sum(), (image_tokens, text_tokens))
    similarity = torch.einsum("wd,bmd->wbm", text_tokens.flatten(0, 1), image_tokens)
    plain = similarity.amax(-1) - 0.7 * similarity.relu().mean(-1)
    expected = torch.autograd.grad((plain * weight).sum(), (image_tokens, text_tokens))
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(ours, expected)


def test_gradient_by_finite_differences(batch):
    image_tokens, text_tokens, *rest = batch
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)

    def loss(image_tokens, text_tokens, scale):
        return token_loss(image_tokens, text_tokens, *rest, scale, 1.0, 4).total

    inputs = image_tokens.clone().requires_grad_(), text_tokens.clone().requires_grad_(), scale
    assert torch.autograd.gradcheck(loss, inputs)


def test_autocast_does_not_touch_value_or_gradient(batch):
    image_tokens, text_tokens = (x.float().requires_grad_() for x in batch[:2])

    def value_and_gradient():
        loss = token_loss(image_tokens, text_tokens, *batch[2:], 10.0, 1.0, 4).total
        return loss, *torch.autograd.grad(loss, (image_tokens, text_tokens))

    outside = value_and_gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = value_and_gradient()
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))
