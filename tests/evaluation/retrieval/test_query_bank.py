"""Similarities that are normalised by a bank of queries, against full matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from retrieval_stub import StubITMScorer, make_stub, write_numbered
from torch.nn import functional

from evaluation.retrieval import query_bank
from evaluation.retrieval.query_bank import log_mass, normalised_sides
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from vlp.metrics import pessimistic_ranks

CAPTIONS = [2, 1, 3, 1, 2, 5, 1, 1, 2, 4]


def unit(*shape):
    return functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(3)), dim=-1
    )


@pytest.mark.parametrize("temperature", [0.02, 0.1, 10.0])
@pytest.mark.parametrize("at_a_time", [2, 100])
def test_log_mass_equals_the_loop(temperature, at_a_time, monkeypatch):
    monkeypatch.setattr(query_bank, "QUERIES", at_a_time)
    monkeypatch.setattr(query_bank, "CANDIDATES", at_a_time + 1)
    candidates, bank = unit(4, 8), unit(7, 8).flip(0)
    for candidate, mass in zip(candidates, log_mass(candidates, bank, temperature), strict=True):
        terms = [math.exp(float(candidate @ query) / temperature) for query in bank]
        assert mass.item() == pytest.approx(temperature * math.log(sum(terms) / 7), abs=1e-5)


def test_a_hub_loses_most_and_by_the_same_for_every_query():
    queries, hub = unit(5, 8), unit(9, 8)[8:]
    bank = functional.normalize(hub + 0.3 * unit(50, 8), dim=-1)
    candidates = torch.cat([unit(6, 8), hub])
    asked, answers = normalised_sides(queries, candidates, bank, 0.1)
    change = asked @ answers.T - queries @ candidates.T
    torch.testing.assert_close(change, change[:1].expand_as(change))
    assert change[0].argmin() == 6


def test_recall_equals_the_full_matrices(tmp_path, monkeypatch):
    """The bank may be of any pairs; here they are those of the evaluation."""
    monkeypatch.setattr("evaluation.encoder.ITMScorer", StubITMScorer)
    folder = tmp_path / "numbered"
    write_numbered(folder, CAPTIONS)
    stub = make_stub(CAPTIONS)
    result = evaluate_retrieval(stub, [folder], bank=[folder], bank_temperature=0.2)
    plain = evaluate_retrieval(stub, [folder])
    dual = (stub.model.image.double() @ stub.model.text.double().T).numpy()
    owner = np.repeat(np.arange(len(CAPTIONS)), CAPTIONS)
    right = owner[None] == np.arange(len(CAPTIONS))[:, None]
    of_images = 0.2 * np.log(np.exp(dual / 0.2).mean(1))
    of_texts = 0.2 * np.log(np.exp(dual / 0.2).mean(0))
    for direction, scores, positive in (
        ("text_to_image", (dual - of_images[:, None]).T, right.T),
        ("image_to_text", dual - of_texts[None], right),
    ):
        ranks = pessimistic_ranks(scores, positive)
        for k in (1, 5, 10):
            assert result.recall("dual", direction, k).value == pytest.approx((ranks < k).mean())
    assert result.figures != plain.figures
    assert result.to_json()["bank"] == [str(folder)]
    assert "normalised by the queries" in str(result.table())
    assert result.to_json()["bank_shared"] == len(CAPTIONS)
    assert f"{len(CAPTIONS)} of these images are in the bank" in str(result.table())
    assert "are in the bank" not in str(plain.table())


def test_a_temperature_must_be_positive(tmp_path):
    with pytest.raises(EvaluationError, match="bank_temperature 0: it must be above 0"):
        evaluate_retrieval(make_stub(CAPTIONS), [tmp_path], bank_temperature=0)


def test_the_bank_is_known_however_its_folder_is_spelled(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.encoder.ITMScorer", StubITMScorer)
    monkeypatch.chdir(tmp_path)
    write_numbered(tmp_path / "numbered", CAPTIONS)
    (tmp_path / "link").symlink_to("numbered")
    stub = make_stub(CAPTIONS)
    for bank in ("numbered", "./link/"):
        result = evaluate_retrieval(stub, [tmp_path / "numbered"], bank=[bank])
        assert result.facts["bank_shared"] == len(CAPTIONS)
        assert result.to_json()["notes"] == list(result.notes)
        assert len(result.notes) == 2
    twice = evaluate_retrieval(stub, ["numbered", "./link"])
    assert twice.counts["images"] == len(CAPTIONS), "the same images"
