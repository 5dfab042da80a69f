"""The demo's own verdict on what it trained."""

from __future__ import annotations

import pytest
from tests_support import launch_script

from evaluation.probes.word_pointing import KindFigures, PointingResult
from evaluation.results import Figure
from evaluation.retrieval.retrieval import RetrievalResult

DIRECTIONS = ("text_to_image", "image_to_text")


@pytest.fixture(scope="module")
def demo():
    return launch_script("demo")


def results(colour=0.9, shape=0.8, **changed):
    values = {"dual R@1": 0.80, "dual R@10": 0.99, "rerank R@1": 0.81, "rerank R@10": 0.99}
    values |= {name.replace("_", " ").replace(" at ", "@"): v for name, v in changed.items()}
    figures = {
        (name.split()[0], direction, name.split()[1]): Figure(value, value, value, 0.0)
        for name, value in values.items()
        for direction in DIRECTIONS
    }
    kinds = {
        kind: KindFigures(10, Figure(pointing, 0, 1, 0.09), 0.4, Figure(1, 1, 1, 0.2), None)
        for kind, pointing in (("colour", colour), ("shape", shape))
    }
    return (
        RetrievalResult("retrieval", {}, ("val",), figures),
        PointingResult("pointing", {}, ("val",), {}, kinds=kinds),
    )


def test_a_good_model_passes(demo):
    assert demo.shortfalls(*results()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dual_R_at_1": 0.74}, "R@1 74.0% is below 75%"),
        ({"dual_R_at_10": 0.94}, "R@10 94.0% is below 95%"),
        ({"rerank_R_at_1": 0.79}, "R@1 80.0% drops to 79.0% re-ranked"),
        ({"colour": 0.79}, "colour words point right in 79.0%, below 80%"),
        ({"shape": 0.59}, "shape words point right in 59.0%, below 60%"),
    ],
)
def test_every_promise_is_checked(demo, change, message):
    assert any(message in problem for problem in demo.shortfalls(*results(**change)))
