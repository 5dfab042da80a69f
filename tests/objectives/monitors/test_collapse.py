import logging

import pytest
import torch

from vlp.objectives.monitors import CollapseWatch, feature_spread, token_cosine


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


def test_token_cosine_of_equal_and_opposite_tokens():
    token = torch.randn(2, 1, 6)
    assert token_cosine(token.repeat(1, 4, 1)).item() == pytest.approx(1)
    assert token_cosine(torch.cat([token, -3 * token], 1)).item() == pytest.approx(-1)
    assert token_cosine(token) == 0


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


def test_feature_spread_near_one_when_even_and_zero_when_collapsed():
    assert feature_spread(torch.randn(2000, 64)).item() == pytest.approx(1, abs=0.02)
    assert feature_spread(torch.randn(1, 64).repeat(9, 1)).item() == pytest.approx(0, abs=1e-4)
    assert feature_spread(torch.randn(1, 64)) == 0


def test_watch_warns_once_and_again_after_a_recovery(caplog):
    watch = CollapseWatch(grace_steps=10, patience=2)
    dead, alive = {"image_token_cosine": 0.99}, {"image_token_cosine": 0.4}
    history = [(5, dead), (9, dead), (10, dead), (11, dead), (12, dead), (13, alive), (14, dead)]
    with caplog.at_level(logging.WARNING):
        warned = [watch.check(step, statistics) for step, statistics in history]
        assert warned == [[], [], [], ["image_token_cosine"], [], [], []]
        assert watch.check(15, dead) == ["image_token_cosine"]
    assert len(caplog.records) == 2
    assert "image_token_cosine is 0.990 (above 0.95)" in caplog.records[0].message


def test_watch_knows_spreads_and_ignores_other_names():
    watch = CollapseWatch(grace_steps=0, patience=1)
    statistics = {"text_spread": 0.05, "image_spread": 0.5, "anchor_share": 1.0}
    assert watch.check(0, statistics) == ["text_spread"]
