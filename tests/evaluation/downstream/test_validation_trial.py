"""Validation of a fine-tuning is tried on a few items before it, and on all where those lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from launch import finetune
from vlp.config import ConfigError
from vlp.training.config import FinetuneConfig


def config(**training: Any) -> FinetuneConfig:
    data = {"train": ["a"], "validation": ["b"], "workers": 0}
    task = {"kind": "snli_ve", "data": data}
    return FinetuneConfig.model_validate({"init_from": "x", "task": task, "training": training})


class Task(nn.Linear):
    metric = "accuracy"

    def __init__(self) -> None:
        super().__init__(1, 1)


def select(chosen: FinetuneConfig) -> Any:
    data = SimpleNamespace(batches_in_epoch=lambda epoch: 4)
    return finetune.select(chosen, Task(), data)  # type: ignore[arg-type]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Limits of the evaluations; the first items are all of one class, or without a label."""
    asked: list[int | None] = []

    def evaluate(task: nn.Module, folders: Any, options: EvalOptions) -> Any:
        asked.append(options.limit)
        assert options.workers == 0  # as many as the training reads by, at most
        if options.limit is not None:
            raise EvaluationError("no sample has a label")
        return SimpleNamespace(metrics={"accuracy": 1.0, "contradiction": 0.5})

    monkeypatch.setattr(finetune, "evaluate_task", evaluate)
    return asked


def test_all_items_are_tried_where_the_first_ones_have_no_truth(limits: list[int | None]) -> None:
    assert select(config(metric="contradiction")) is not None
    assert limits == [16, None]


def test_a_figure_that_is_nowhere_is_refused(limits: list[int | None]) -> None:
    with pytest.raises(ConfigError, match="no figure 'nonsense'; there are accuracy, contra"):
        select(config(metric="nonsense"))
    assert limits == [16, None]


@pytest.mark.parametrize("key", [{"metric": "accuracy"}, {"evaluate_every": 3}, {"patience": 1}])
def test_settings_of_a_validation_need_its_data(key: dict[str, Any]) -> None:
    chosen = config(**key)
    data = chosen.task.data.model_copy(update={"validation": ()})
    task = chosen.task.model_copy(update={"data": data})
    with pytest.raises(ConfigError, match=r"needs task\.data\.validation"):
        select(chosen.model_copy(update={"task": task}))
