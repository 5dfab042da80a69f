import numpy as np
import pytest
import torch

from evaluation.options import EvalOptions
from evaluation.vision import grids as evaluation_grids
from evaluation.vision.grids import evaluate
from vlp.config import ConfigError
from vlp.precision import NotFiniteError
from vlp.tasks.grids.arc import RULES, held_out_variants
from vlp.tasks.grids.data import CORNER, open_grids, to_tokens
from vlp.tasks.grids.model import GridTransformer
from vlp.tasks.grids.task import Grids, GridsConfig

NAMES = ("74dd1130", "25ff71a9")


@pytest.fixture(scope="module")
def archive(shared):
    return shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz"


def task(path, *names, **data):
    return Grids(
        GridsConfig.model_validate(
            {
                "model": {"width": 16, "encoder_layers": 1, "decoder_layers": 1, "heads": 2,
                          "feed_forward": 16, "positions": [{"name": "sine-2d"}]},
                "data": {"path": str(path), "size": 3, "tasks": [{"name": n} for n in names]}
                | data,
            }
        )
    )  # fmt: skip


def to_grid(tokens):
    template = tokens.numpy().reshape(4, 4)
    rows, columns = np.argwhere(template == CORNER)[0]
    return template[:rows, :columns]


class Knowing(GridTransformer):
    """Answers by the tasks' rules, but for those it is told to get wrong."""

    wrong: tuple[str, ...] = ()

    def forward(self, question, outputs):
        logits = torch.zeros(*outputs.shape, 14)
        for row, (inputs, number) in enumerate(zip(question.inputs, question.tasks.tolist())):
            answer = RULES[NAMES[number]].answer(to_grid(inputs))
            if NAMES[number] in self.wrong:
                answer = (answer + 1) % 10
            logits[row, range(16), torch.from_numpy(to_tokens(np.ascontiguousarray(answer), 3))] = 1
        return logits


def test_right_answers_are_counted_task_by_task(archive):
    evaluated = task(archive, *NAMES, variants=7)
    evaluated.model.__class__ = Knowing
    assert evaluate(evaluated, EvalOptions()) == {
        f"{kind}{name}": 100.0
        for kind in ("exact", "original")
        for name in ("", *(f"/{one}" for one in NAMES))
    }
    evaluated.model.wrong = ("74dd1130",)
    figures = evaluate(evaluated, EvalOptions())
    assert (figures["exact"], figures["exact/74dd1130"], figures["exact/25ff71a9"]) == (50, 0, 100)
    evaluated.model.forward = lambda question, outputs: torch.full((*outputs.shape, 14), torch.nan)
    with pytest.raises(NotFiniteError):
        evaluate(evaluated, EvalOptions())


def test_questions_are_the_test_pairs_and_their_held_out_variants(archive, monkeypatch):
    evaluated = task(archive, *NAMES, variants=5)
    asked = evaluation_grids._questions(evaluated.config.data)
    tasks = open_grids(evaluated.config.data)
    # 74dd1130 has one test pair, 25ff71a9 two.
    keys, samples = zip(*asked)
    assert [name for _, name in keys] == ["74dd1130"] * 6 + ["25ff71a9"] * 12
    assert [kind for kind, _ in keys].count("original") == 3
    assert np.array_equal(to_grid(samples[0].inputs), tasks[NAMES[0]].test[0].input)
    assert np.array_equal(to_grid(samples[12].outputs), tasks[NAMES[1]].test[1].output)
    variants = held_out_variants(RULES[NAMES[0]].symmetry, 5, np.random.default_rng(0))
    for variant, sample in zip(variants, samples[1:6], strict=True):
        for tokens, grid in zip(sample[:2], tasks[NAMES[0]].test[0], strict=True):
            assert np.array_equal(to_grid(tokens), variant(grid))
    figures = evaluate(evaluated, EvalOptions())
    monkeypatch.setattr(evaluation_grids, "TOKENS", 1)
    assert evaluate(evaluated, EvalOptions()) == figures


def test_figures_of_a_limit_and_without_held_out_variants(archive):
    figures = evaluate(task(archive, *NAMES, variants=5), EvalOptions(limit=2))
    assert set(figures) == {"original", "original/74dd1130", "exact", "exact/25ff71a9"}
    figures = evaluate(task(archive, "74dd1130", variants=0), EvalOptions())
    assert set(figures) == {"original", "original/74dd1130"}
    with pytest.raises(ConfigError, match="neither a folder nor a tar file"):
        evaluate(task("nowhere", "74dd1130"), EvalOptions())
