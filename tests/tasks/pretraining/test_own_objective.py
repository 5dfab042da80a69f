"""Objectives from outside the package, that of the how-to page among them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pretraining_batch import ROWS, batch
from pydantic import ValidationError
from test_pretraining import task

import vlp.objectives.config as objectives_config
from vlp.config import Config
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.loss import Loss
from vlp.tasks.pretraining import Objective, Term, register_objective
from vlp.tasks.pretraining import objectives as objective
from vlp.tasks.pretraining import task as pretraining_task

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "add-an-objective.md"


class ToyConfig(Config):
    """Settings of an objective outside the package."""

    weight: float = 1.0


class Toy(Objective):
    """Pull image and text features together, through a layer of its own."""

    def __init__(self, settings, objectives, model):
        super().__init__(settings, objectives, model)
        self.layer = torch.nn.Linear(model.embed_dim, model.embed_dim)

    def modules(self):
        return {"toy_head": self.layer}

    def __call__(self, step):
        distance = (self.layer(step.image.feature) - step.text.feature).square().sum(-1)
        valid = step.batch.valid
        step.statistics["toy_rows"] = valid.sum()
        loss = Loss(torch.where(valid, distance, 0).sum(), valid.sum())
        return {"toy": Term(loss, self.settings.weight)}


@pytest.fixture
def own_registry(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(objective, "OBJECTIVES", dict(objective.OBJECTIVES))
    monkeypatch.setattr(objectives_config, "_registered", {})
    monkeypatch.setattr(pretraining_task, "OBJECTIVES", objective.OBJECTIVES)


@pytest.fixture
def toy_objective(own_registry):
    register_objective("toy", Toy, ToyConfig)


def test_an_objective_from_outside_is_trained(toy_objective):
    built = task({"contrastive": None, "itm": None, "teacher": None, "toy": {"weight": 0.5}})
    optimiser = torch.optim.AdamW(built.parameters(), 3e-3)
    start = built.toy_head.weight.detach().clone()
    for step in range(2):
        output = built(batch(), step)
        parts = output.losses
        expected = parts["mlm"] + parts["mim"] + 0.5 * parts["toy"]
        torch.testing.assert_close(output.loss.detach(), expected)
        output.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert list(output.losses)[-1] == "toy"
    assert output.statistics["toy_rows"] == ROWS
    assert not torch.equal(built.toy_head.weight, start)


def test_the_objective_of_the_page_is_trained(own_registry, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page = ModuleType("my_objective")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # where its annotations are looked up
    exec(compile(code, PAGE, "exec"), page.__dict__)
    built = task({"contrastive": None, "itm": None, "mim": None, "teacher": None,
                  "feature_norm": {"weight": 0.2}})  # fmt: skip
    given = batch()._replace(valid=torch.arange(ROWS) < 5)
    output = built(given, 0)
    states = built.model.encode_image(given.pixels).states[:5]
    torch.testing.assert_close(output.losses["feature_norm"], states.square().mean().detach())
    expected = output.losses["mlm"] + 0.2 * output.losses["feature_norm"]
    torch.testing.assert_close(output.loss.detach(), expected)
    output.loss.backward()
    assert built.model.image_encoder.vit.norm.weight.grad.any()


def test_settings_of_a_registered_objective_are_checked(toy_objective):
    alone = {"contrastive": None, "itm": None, "mlm": None, "mim": None}
    config = ObjectivesConfig.model_validate(alone | {"toy": {"weight": 2}})
    assert config.toy == ToyConfig(weight=2.0)
    assert ObjectivesConfig.model_validate(config.model_dump(mode="json")) == config
    for wrong, key in (({"toys": {}}, "toys"), ({"toy": {"wait": 1}}, "toy.wait")):
        with pytest.raises(ValidationError) as caught:
            ObjectivesConfig.model_validate(wrong)
        (problem,) = caught.value.errors()
        assert (".".join(problem["loc"]), problem["type"]) == (key, "extra_forbidden")
    with pytest.raises(ValueError, match="registered already"):
        register_objective("toy", Toy)
    with pytest.raises(ValueError, match=r"objectives\.mlm is a key already"):
        objectives_config.register_settings("mlm", ToyConfig)
