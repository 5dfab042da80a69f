import math

import pytest
import torch
from tests_support import unit

from vlp.objectives import token
from vlp.objectives.token import phrase_loss, token_losses, word_response


def softmax(row):
    parts = [math.exp(token.PHRASE_SCALE * float(value)) for value in row]
    return [part / sum(parts) for part in parts]


def slow_loss(image_tokens, text_tokens, word_mask, valid):
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
            near = [k for k in places if 0 < abs(k - n) <= token.PHRASE_REACH]
            if not near:
                continue
            leader = max(near, key=lambda k: (points[k], -k))
            gap = points[leader] - points[n] - token.PHRASE_MARGIN
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


def slow_response(word, images):
    cosines = [[word @ patch for patch in image] for image in images]
    found = []
    for row in cosines:
        best = max(
            c - sum(max(other[m], 0) for other in cosines) / len(cosines) for m, c in enumerate(row)
        )
        found.append(best - sum(max(c, 0) for c in row) / len(row))
    return torch.stack(found)


def slow_scores(image_tokens, text_tokens, word_mask):
    scores = torch.zeros(len(image_tokens), len(text_tokens), dtype=image_tokens.dtype)
    for j, text in enumerate(text_tokens):
        words = text[word_mask[j]]
        for word in words:
            scores[:, j] += slow_response(word, image_tokens) / len(words)
    return scores


def slow_losses(image_tokens, text_tokens, word_mask, words, pairs, valid, scale, group):
    ids = [tuple(pair) for pair in pairs.tolist()]
    captions, rows_counted, single, words_counted = 0.0, 0, 0.0, 0
    for start in range(0, len(ids), group):
        rows = [r for r in range(start, min(start + group, len(ids))) if valid[r]]
        rows = [r for r in rows if word_mask[r].any()]
        own = image_tokens[rows]
        every = ids[start : start + group]
        logits = scale * slow_scores(own, text_tokens[rows], word_mask[rows])
        for a, row in enumerate(rows):
            rows_counted += 1
            mine = [b for b, r in enumerate(rows) if {*enumerate(ids[r])} & {*enumerate(ids[row])}]
            linked = {b for b, r in enumerate(rows) if (ids[row][0], ids[r][1]) in every}
            linked |= {b for b, r in enumerate(rows) if (ids[r][0], ids[row][1]) in every}
            kept = [b for b in range(len(rows)) if b in mine or b not in linked]
            for side in (logits[a], logits[:, a]):
                log_sum = side[kept].logsumexp(0)
                captions = captions + 0.5 * (log_sum - side[mine].mean())
            for n in word_mask[row].nonzero():
                response = slow_response(text_tokens[row, n[0]], own)
                named = []
                for other in rows:
                    texts = [
                        words[r][word_mask[r]] for r in rows if (ids[other][0], ids[r][1]) in every
                    ]
                    named.append(any((words[row, n] == text).any() for text in texts))
                wrong = [scale * response[b] for b in range(len(rows)) if not named[b]]
                if wrong:
                    words_counted += 1
                    for b in range(len(rows)):
                        if named[b]:
                            choice = torch.stack([scale * response[b], *wrong])
                            single = single - choice.log_softmax(0)[0] / sum(named)
    return captions, rows_counted, single, words_counted


@pytest.fixture
def batch():
    random = torch.Generator().manual_seed(3)
    word_mask = torch.rand(8, 4, generator=random) < 0.7
    word_mask[:, 1] = True
    word_mask[6] = False
    words = torch.randint(5, 9, (8, 4), generator=random)
    words[:, 1] = 4  # in every text
    # Caption 11 of image 1 comes again with image 4, caption 15 of image 5 with image 2.
    images, captions = [1, 2, 1, 3, 4, 5, 5, 2], [10, 12, 11, 13, 11, 14, 15, 15]
    ids = torch.tensor([images, captions]).T
    valid = torch.ones(8, dtype=torch.bool)
    valid[3] = False
    return unit(8, 9, 6, seed=1), unit(8, 4, 6, seed=2), word_mask, words, ids, valid


@pytest.mark.parametrize("group", [4, 8, 16])
def test_losses_equal_the_loop(batch, group):
    (caption_loss, caption_count), (word_loss, word_count) = token_losses(*batch, 7.0, group)
    captions, rows, words, counted = slow_losses(*batch, 7.0, group)
    torch.testing.assert_close(caption_loss, captions)
    torch.testing.assert_close(word_loss, words)
    assert caption_count == rows == 6
    assert word_count == counted > 0


def test_written_out_gradient_equals_autograd(batch):
    image_tokens, text_tokens = (x.clone().requires_grad_() for x in batch[:2])
    valid = batch[-1]
    weight = torch.randn(32, 8, dtype=torch.float64)
    fast = word_response(text_tokens.flatten(0, 1), image_tokens, valid)
    ours = torch.autograd.grad((fast * weight).sum(), (image_tokens, text_tokens))
    similarity = torch.einsum("wd,bmd->wbm", text_tokens.flatten(0, 1), image_tokens)
    everywhere = similarity.relu()[:, valid].mean(1, keepdim=True)
    plain = (similarity - everywhere).amax(-1) - similarity.relu().mean(-1)
    expected = torch.autograd.grad((plain * weight).sum(), (image_tokens, text_tokens))
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(ours, expected)
