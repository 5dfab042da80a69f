import pytest
import torch

from evaluation.options import EvalOptions
from evaluation.vision import widgets
from evaluation.vision.widgets import evaluate
from vlp.tasks.caption.metrics import caption_scores
from vlp.tasks.widgets.data import open_screens
from vlp.tasks.widgets.task import WidgetsConfig, build


@pytest.fixture
def task():
    torch.manual_seed(0)
    config = WidgetsConfig.model_validate(
        {
            "model": {"width": 16, "heads": 2, "layers": 1, "decoder_layers": 1, "intermediate": 16,
                      "positions": [{"name": "learned-4d"}]},
            "data": {
                "screens": {"kind": "generated", "train": 40, "test": 9},
                "vocabulary_size": 300,
                "max_caption": 8,
            },
            "java": False,
        }
    )  # fmt: skip
    return build(config, 8, 0, "float32")[0]


def answers(monkeypatch, task, what):
    def said(_, screens, *computing):
        return [what(screen, both) for screen in screens for both in screen.captions.values()]

    monkeypatch.setattr(widgets, "_generate_captions", said)
    return evaluate(task, EvalOptions())


def test_right_answers_are_perfect(monkeypatch, task):
    figures = answers(monkeypatch, task, lambda screen, both: both[1])
    for name in ("bleu1", "bleu4", "rouge_l", "exact"):
        assert figures[name] == pytest.approx(100, abs=1e-4)
    assert figures["cider"] > 300
    assert "meteor" not in figures


def test_seen_and_unseen_places_make_up_the_whole(monkeypatch, task):
    figures = answers(monkeypatch, task, lambda screen, both: "open the home tab")
    train, test = (open_screens(task.config.data.screens, part) for part in ("train", "test"))

    def lines(box):
        return [round(99 * edge) for edge in box]

    known = [lines(w.box) for n in range(len(train)) for w in train.read(n).widgets]
    read = [test.read(n) for n in range(len(test))]
    seen = [lines(s.widgets[place].box) in known for s in read for place in s.captions]
    assert 0 < sum(seen) < len(seen)
    assert figures["seen"] == pytest.approx(100 * sum(seen) / len(seen))
    share = figures["seen"] / 100
    mean = share * figures["cider_seen"] + (1 - share) * figures["cider_unseen"]
    assert figures["cider"] == pytest.approx(mean)
    said = [both for screen in read for both in screen.captions.values()]
    exact = sum("open the home tab" in both for both in said)
    assert figures["exact"] == pytest.approx(100 * exact / len(said))


def test_a_model_is_evaluated_by_what_it_generates(task):
    kept = task.training
    figures = evaluate(task, EvalOptions(limit=4))
    assert task.training == kept
    assert figures == evaluate(task, EvalOptions(limit=4))
    assert figures["bleu1"] < 50
    screens = open_screens(task.config.data.screens, "test")
    read = [screens.read(n) for n in (0, 3, 5, 8)]
    task.eval()
    said = [
        one
        for screen in read
        for one in widgets._generate_captions(task, [screen], torch.device("cpu"), None)
    ]
    wanted = [both for screen in read for both in screen.captions.values()]
    scores = caption_scores(said, wanted, java=False)
    assert figures["rouge_l"] == pytest.approx(100 * scores.corpus["rouge_l"])
