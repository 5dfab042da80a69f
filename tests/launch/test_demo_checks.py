"""The demo's own verdict on what it trained."""

from __future__ import annotations

import pytest
from tests_support import launch_script

from evaluation.pointing import KindFigures, PointingResult
from evaluation.report import Figure
from evaluation.retrieval import RetrievalResult

DIRECTIONS = ("text_to_image", "image_to_text")


@pytest.fixture(scope="module")
def demo():
    return launch_script("demo")


def results(pointing=0.9, **changed):
    values = {"dual R@1": 0.65, "dual R@10": 0.99, "rerank R@1": 0.66, "rerank R@10": 0.99}
    values |= {name.replace("_", " ").replace(" at ", "@"): v for name, v in changed.items()}
    figures = {
        (name.split()[0], direction, name.split()[1]): Figure(value, value, value, 0.0)
        for name, value in values.items()
        for direction in DIRECTIONS
    }
    colour = KindFigures(10, Figure(pointing, 0, 1, 0.09), 0.4, Figure(1, 1, 1, 0.2), None)
    return (
        RetrievalResult(256, 1280, 16, ("val",), figures),
        PointingResult(256, ("val",), {"colour": colour}),
    )


def test_a_good_model_passes(demo):
    assert demo.shortfalls(*results()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dual_R_at_1": 0.59}, "R@1 59.0% is below 60%"),
        ({"dual_R_at_10": 0.94}, "R@10 94.0% is below 95%"),
        ({"rerank_R_at_1": 0.64}, "R@1 65.0% drops to 64.0% re-ranked"),
        ({"pointing": 0.79}, "point right in 79.0%"),
    ],
)
def test_every_promise_is_checked(demo, change, message):
    assert any(message in problem for problem in demo.shortfalls(*results(**change)))
