from types import SimpleNamespace

import pytest
from torch import nn

from evaluation.samples import EvaluationError
from launch import finetune
from vlp.config import ConfigError
from vlp.training.config import FinetuneConfig


def config(**training):
    data = {"train": ["a"], "validation": ["b"], "workers": 0}
    task = {"kind": "snli_ve", "data": data}
    return FinetuneConfig.model_validate({"init_from": "x", "task": task, "training": training})


def select(chosen):
    task = nn.Linear(1, 1)
    task.metric = "accuracy"
    data = SimpleNamespace(batches_in_epoch=lambda epoch: 4)
    return finetune.build_validation(chosen, task, data)


@pytest.fixture
def limits(monkeypatch):
    asked = []

    def evaluate(task, folders, options):
        asked.append(options.limit)
        assert options.workers == 0  # as many as the training reads by, at most
        if options.limit is not None:
            raise EvaluationError("no sample has a label")
        return SimpleNamespace(metrics={"accuracy": 1.0, "contradiction": 0.5})

    monkeypatch.setattr(finetune, "evaluate_task", evaluate)
    return asked


def test_all_items_are_tried_where_the_first_ones_have_no_truth(limits):
    assert select(config(metric="contradiction")) is not None
    assert limits == [16, None]
    limits.clear()
    with pytest.raises(ConfigError, match="no metric 'nonsense'; choose one of accuracy, contra"):
        select(config(metric="nonsense"))
    assert limits == [16, None]


@pytest.mark.parametrize("key", [{"metric": "accuracy"}, {"evaluate_every": 3}, {"patience": 1}])
def test_settings_of_a_validation_need_its_data(key):
    chosen = config(**key)
    data = chosen.task.data.model_copy(update={"validation": ()})
    task = chosen.task.model_copy(update={"data": data})
    with pytest.raises(ConfigError, match=r"needs task\.data\.validation"):
        select(chosen.model_copy(update={"task": task}))
