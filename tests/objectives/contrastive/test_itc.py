import pytest
import torch
import torch.nn.functional as F

from vlp.objectives.contrastive import itc_loss, positives, soft_targets


def unit(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=random, dtype=dtype), dim=-1)


def reference(image, text, image_keys, text_keys, ids, key_ids, temperature, valid, key_valid):
    """Mean of both directions, one row and one candidate at a time."""
    total, count = 0.0, 0
    for i in range(len(image)):
        if not valid[i]:
            continue
        count += 1
        for query, keys in ((image[i], text_keys), (text[i], image_keys)):
            logits = {k: query @ keys[k] / temperature for k in range(len(keys)) if key_valid[k]}
            mine = [k for k in logits if key_ids[k] == ids[i]]
            log_sum = torch.stack(list(logits.values())).exp().sum().log()
            total += 0.5 * sum(log_sum - logits[k] for k in mine) / len(mine)
    return total, count


@pytest.fixture
def pairs():
    image, text = unit(4, 6, seed=1), unit(4, 6, seed=2)
    image_keys = torch.cat([image, unit(5, 6, seed=3)])
    text_keys = torch.cat([text, unit(5, 6, seed=4)])
    ids = torch.tensor([7, 8, 7, 0])
    key_ids = torch.cat([ids, torch.tensor([8, 11, 12, 7, 0])])
    valid = torch.tensor([True, True, True, False])
    key_valid = torch.cat([valid, torch.tensor([True, True, False, True, True])])
    return image, text, image_keys, text_keys, ids, key_ids, valid, key_valid


def test_positives_are_the_pairs_of_one_image():
    assert positives(torch.tensor([3, 5]), torch.tensor([5, 3, 3])).tolist() == [
        [False, True, True],
        [True, False, False],
    ]


def test_equals_the_loop(pairs):
    image, text, image_keys, text_keys, ids, key_ids, valid, key_valid = pairs
    loss = itc_loss(
        *(image, text, image_keys, text_keys, positives(ids, key_ids), 0.07),
        valid=valid,
        candidate_valid=key_valid,
    )
    total, count = reference(
        image, text, image_keys, text_keys, ids, key_ids, 0.07, valid, key_valid
    )
    torch.testing.assert_close(loss.total, total)
    assert loss.count == count == 3


def test_empty_slots_change_nothing(pairs):
    image, text, image_keys, text_keys, ids, key_ids, valid, key_valid = pairs
    positive = positives(ids, key_ids)
    full = itc_loss(
        *(image, text, image_keys, text_keys, positive, 0.1),
        valid=valid,
        candidate_valid=key_valid,
    )
    cut = itc_loss(
        *(image[valid], text[valid], image_keys[key_valid], text_keys[key_valid]),
        *(positive[valid][:, key_valid], 0.1),
    )
    torch.testing.assert_close(full.total, cut.total)
    assert full.count == cut.count


def test_captions_of_one_image_are_not_negatives():
    """Two equal captions: as one image's they are at rest, as two images' they repel."""
    image = unit(1, 8).repeat(2, 1)
    gradients = []
    for ids in (torch.tensor([1, 1]), torch.tensor([1, 2])):
        text = image.clone().requires_grad_()
        itc_loss(image[:1], text[:1].detach(), image, text, positives(ids[:1], ids), 0.1)[
            0
        ].backward()
        gradients.append(text.grad)
    torch.testing.assert_close(gradients[0], torch.zeros_like(image))
    assert gradients[1].norm() > 1


def test_soft_targets_mix_with_the_hard_ones(pairs):
    image, text, image_keys, text_keys, ids, key_ids, _, key_valid = pairs
    positive = positives(ids, key_ids)
    soft = soft_targets(image, text, image_keys, text_keys, 0.2, key_valid)
    for target in soft:
        torch.testing.assert_close(target.sum(-1), torch.ones(4, dtype=torch.float64))
        assert (target[:, ~key_valid] == 0).all()
    alpha, total, rows = 0.4, 0.0, [0, 1, 2]  # row 3 is an empty slot
    valid = torch.tensor([True, True, True, False])
    for query, keys, target in ((image, text_keys, soft[0]), (text, image_keys, soft[1])):
        logits = (query @ keys.T / 0.07).masked_fill(~key_valid, -torch.inf)
        for i in rows:
            hard = (positive[i] & key_valid).double()
            mixed = (1 - alpha) * hard / hard.sum() + alpha * target[i]
            total = total - 0.5 * (mixed * logits[i].log_softmax(-1))[key_valid].sum()
    loss = itc_loss(
        *(image, text, image_keys, text_keys, positive, 0.07),
        valid=valid,
        candidate_valid=key_valid,
        soft_targets=soft,
        alpha=alpha,
    )
    torch.testing.assert_close(loss.total, total)


def test_autocast_does_not_touch_it(pairs):
    image, text, image_keys, text_keys, ids, key_ids, *_ = pairs
    arguments = [x.float() for x in (image, text, image_keys, text_keys)]
    positive = positives(ids, key_ids)
    outside = itc_loss(*arguments, positive, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = itc_loss(*arguments, positive, 0.05)
        half = itc_loss(*[x.bfloat16() for x in arguments], positive, 0.05)
    assert inside.total == outside.total
    assert half.total.dtype == torch.float32


def test_gradient(pairs):
    image, text, _, _, ids, *_ = pairs
    positive = positives(ids, ids)
    image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, y, t: itc_loss(x, y, x, y, positive, t).total, (image, text, temperature)
    )
