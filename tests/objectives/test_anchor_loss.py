import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests_support import unit

from vlp.compilation import gpu_form
from vlp.objectives.anchor import anchor_loss, paper_anchor_loss
from vlp.tasks.pretraining.statistics import (
    BINS,
    CollapseMonitor,
    _histogram,
    anchor_statistics,
    feature_spread,
    similarity_quantile,
    token_cosine,
)


def reference(case, scale, margin):
    """Eqs 1-2 with plain loops, one loss per row."""
    image, text, image_keys, text_keys, positive, image_tokens, text_tokens, text_mask = case
    rows = []
    for b in range(len(image)):
        loss = 0.0
        for query, keys in ((image[b], text_keys), (text[b], image_keys)):
            negative = [k for k in range(len(keys)) if not positive[b][k]]
            right = [k for k in range(len(keys)) if positive[b][k]]
            for k in right:
                hinge = 0.0
                if negative:
                    log_sum = math.log(sum(math.exp(scale * query @ keys[j]) for j in negative))
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
    expected = reference(case, scale, margin)
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
    case[4] = torch.ones(4, 6, dtype=torch.bool)
    expected = sum(reference(case, 2.0, 0.05)) / 4
    case[0].requires_grad_()
    loss = anchor_loss(*case)
    loss.backward()
    assert (case[0].grad == 0).all()
    assert loss.item() == pytest.approx(expected)


def test_empty_slots_count_nowhere(case):
    valid = torch.tensor([True, False, True, True])
    candidate_valid = torch.tensor([True, False, True, True, False, True])
    loss = paper_anchor_loss(*case, 2.0, 0.05, valid, candidate_valid)
    image, text, image_keys, text_keys, positive, *tokens = case
    cut = [
        *(image[valid], text[valid], image_keys[candidate_valid], text_keys[candidate_valid]),
        *(positive[valid][:, candidate_valid], *(x[valid] for x in tokens)),
    ]
    assert loss.total.item() == pytest.approx(sum(reference(cut, 2.0, 0.05)))
    assert loss.count == 3


@given(st.integers(0, 99), st.floats(0.05, 0.95), st.sampled_from([0.01, 0.2, 1]))
def test_equals_the_sorted_entries_to_one_bin(seed, quantile, spread):
    generator = torch.Generator().manual_seed(seed)
    similarity = (torch.randn(3, 6, 5, 2, generator=generator) * spread).clamp(-1, 1)
    word_mask = torch.rand(3, 5, generator=generator) < 0.6
    word_mask[0, 0] = True
    valid = torch.tensor([True, False, True])
    entries = similarity.transpose(1, 2)[[0, 2]][word_mask[[0, 2]]]
    ordered = entries.flatten().sort().values
    expected = ordered[int(torch.ceil(torch.tensor(quantile * len(ordered)))) - 1]
    found = similarity_quantile(similarity, word_mask, valid, quantile)
    assert found.dtype == torch.float32
    assert abs(float(found) - float(expected)) <= 2.01 / BINS


@pytest.mark.parametrize("nothing", ["words", "slots"])
def test_without_entries_it_is_nan(nothing):
    similarity = torch.zeros(2, 4, 3, 1)
    words = torch.full((2, 3), nothing != "words")
    valid = torch.full((2,), nothing != "slots")
    assert similarity_quantile(similarity, words, valid, 0.9).isnan()


def test_the_form_for_a_gpu_counts_the_same():
    similarity = torch.rand(3, 7, 5, 2) * 2 - 1
    similarity[0, 0, 0] = torch.tensor([-1.0, 1.0])
    words = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1], [1, 1, 0, 0, 1]]).bool()
    compact = _histogram(similarity, words)
    with gpu_form():
        torch.testing.assert_close(_histogram(similarity, words), compact, rtol=0, atol=0)
    assert compact.sum() == words.sum() * 14


def test_equals_the_loop_of_anchor_statistics():
    shape = (3, 4, 5, 2)
    similarity = torch.rand(shape, dtype=torch.float64) * 2 - 1
    reachable = torch.rand(shape) < 0.6
    path = (torch.rand(shape, dtype=torch.float64) * 10 + 1) * reachable
    word_mask = torch.rand(3, 5) < 0.7
    word_mask[0, 0] = True
    valid = torch.tensor([True, True, False])
    result = anchor_statistics(similarity, 0.3, path, reachable, word_mask, valid)
    for g in range(2):
        passing, reached, entries, spreads = 0, 0, 0, []
        for b in range(2):
            for n in range(5):
                if not word_mask[b, n]:
                    continue
                entries += 4
                passing += sum(similarity[b, m, n, g].item() >= 0.3 for m in range(4))
                values = [path[b, m, n, g].item() for m in range(4) if reachable[b, m, n, g]]
                reached += len(values)
                if len(values) >= 2:
                    mean = sum(values) / len(values)
                    spreads.append((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5)
        assert result.anchors[g].item() == pytest.approx(passing / entries)
        assert result.reachable[g].item() == pytest.approx(reached / entries)
        assert result.spread[g].item() == pytest.approx(sum(spreads) / len(spreads))


def test_constant_path_has_no_spread_and_infinite_distances_do_not_matter():
    similarity = torch.full((1, 4, 2, 1), 0.5)
    path = torch.full((1, 4, 2, 1), 3.0)
    path[0, 0] = torch.inf
    reachable = path.isfinite()
    masks = torch.ones(1, 2) > 0, torch.ones(1) > 0
    result = anchor_statistics(similarity, torch.tensor(0.5), path, reachable, *masks)
    assert result.spread.item() == 0
    assert result.anchors.item() == 1
    assert result.reachable.item() == 0.75


def test_no_word_at_all_is_zero():
    x = torch.ones(1, 4, 2, 3)
    result = anchor_statistics(x, 0.5, x, x > 0, torch.zeros(1, 2) > 0, torch.ones(1) > 0)
    assert all((value == 0).all() for value in result)


def test_token_cosine_equals_the_loop():
    tokens = torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 1, 0, 0], [1, 1, 1, 0, 0]]) > 0
    valid = torch.tensor([True, True, True, False])
    means = []
    for row, real in list(zip(tokens, mask, strict=True))[:3]:
        cosines = [
            torch.cosine_similarity(row[a], row[b], dim=0)
            for a in range(5)
            for b in range(5)
            if a != b and real[a] and real[b]
        ]
        if cosines:
            means.append(sum(cosines) / len(cosines))
    torch.testing.assert_close(token_cosine(tokens, mask, valid), sum(means) / len(means))
    assert token_cosine(tokens[:, :1]) == 0


def test_feature_spread_equals_the_loop():
    features = torch.randn(6, 4, dtype=torch.float64)
    valid = torch.tensor([True, True, False, True, True, True])
    unit = [row / row.norm() for row, real in zip(features, valid, strict=True) if real]
    deviations = []
    for channel in range(4):
        column = [row[channel].item() for row in unit]
        mean = sum(column) / 5
        deviations.append((sum((x - mean) ** 2 for x in column) / 5) ** 0.5)
    assert feature_spread(features, valid).item() == pytest.approx(2 * sum(deviations) / 4)
    assert feature_spread(features[:1]) == 0


def test_watch_warns_once_and_again_after_a_recovery(caplog):
    watch, warned = CollapseMonitor(), []
    dead = {"image_token_cosine": 0.99, "image_spread": 0.5, "anchor_share": 1.0}
    alive = {"image_token_cosine": 0.4, "text_spread": 0.05}
    for step in (100, 199, *range(200, 205)):
        watch.check(step, dead)
        warned.append(len(caplog.records))
    assert warned == [0, 0, 0, 0, 1, 1, 1]
    for step in (205, 206, 207):
        watch.check(step, alive)
    for step in (208, 209, 210):
        watch.check(step, dead)
    one, two, three = (record.message for record in caplog.records)
    assert "image_token_cosine is 0.990 (above 0.95)" in one
    assert "text_spread is 0.050 (below 0.1)" in two
    assert three == one.replace("step 202", "step 210")
