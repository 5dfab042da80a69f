import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.objectives.config import ObjectivesConfig
from vlp.positions import create_fitting_position, list_positions, position_options
from vlp.tasks.pretraining import Pretraining
from vlp.training.optimiser import (
    OptimiserConfig,
    build_adamw,
    cosine_schedule,
    exempt_from_decay,
    lr_multiplier,
    parameter_groups,
    set_learning_rate,
)


@pytest.fixture(scope="module")
def task():
    with torch.device("meta"):
        return Pretraining(ModelConfig(), ObjectivesConfig(), vocabulary="unused")


def test_the_two_groups_of_the_real_task_by_name(task):
    named = dict(task.named_parameters())
    plain = exempt_from_decay(task)
    matrices = {name for name in plain if named[name].ndim > 1}
    # Of everything with two or more dimensions, only tables of positions and lone tokens.
    assert {name.removeprefix("model.") for name in matrices} == {
        "image_encoder.vit.cls_token",
        "image_encoder.vit.pos_embed",
        "text_encoder.embedding.position.weight",
        *(
            f"cross_encoder.layers.{layer}.cross_attention.positions.0.tables.{role}"
            for layer in range(6)
            for role in ("query", "key", "value")
        ),
    }
    decayed = named.keys() - plain
    assert all(name.endswith("weight") and named[name].ndim > 1 for name in decayed)
    assert not [name for name in decayed if "norm" in name.lower() or "bias" in name]
    assert "model.text_encoder.embedding.word.weight" in decayed


POSITION_NAMES = re.compile(r"(^|[._])tables?(_[a-z]+)?([._]|$)|(^|\.)(u|v|prefix)$")
OPTIONS = {"roles": {"roles": ("key", "value")}, "mode": {"mode": "bias"}}
CHOSEN = [(name, {}) for name in list_positions()] + [
    (name, {"mode": "both"} if (name, option) == ("sape", "mode") else choice)
    for name in list_positions()
    for option, choice in OPTIONS.items()
    if option in position_options(name)
]


@pytest.mark.parametrize(("name", "options"), CHOSEN)
def test_encodings_declare_their_tables_and_vectors(name, options):
    """By name they are tables, or Transformer-XL's two biases and prefix vector."""
    sizes = {"width": 48, "heads": 4, "grid": (3, 3)}
    position = create_fitting_position(name, sizes, **options)
    expected = {name for name, _ in position.named_parameters() if POSITION_NAMES.search(name)}
    assert position.no_weight_decay() == expected
    inside = nn.ModuleDict({"layer": nn.ModuleList([position])})
    vectors = {name for name, one in inside.named_parameters() if one.ndim < 2}
    assert exempt_from_decay(inside) == vectors | {f"layer.0.{name}" for name in expected}


def test_frozen_parameters_and_empty_groups_are_left_out():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    (group,) = parameter_groups(layer, 0.1, {})
    assert group["params"] == [layer.weight]
    assert group["weight_decay"] == 0.1


def test_scales_follow_the_longest_prefix_of_whole_parts():
    lr_multipliers = {"text": 0.5, "text.layers.0": 0.1}
    assert lr_multiplier("text.layers.0.weight", lr_multipliers) == 0.1
    assert lr_multiplier("text.layers.01.weight", lr_multipliers) == 0.5
    assert lr_multiplier("text.bias", lr_multipliers) == 0.5
    assert lr_multiplier("texts.bias", lr_multipliers) == 1.0


def test_scales_multiply_the_learning_rate_of_every_step(task):
    named = dict(task.named_parameters())
    lr_multipliers = {"model.text_encoder": 0.2, "model.text_encoder.projection": 0.5}
    adamw = build_adamw(task, OptimiserConfig(lr_multipliers=lr_multipliers))
    set_learning_rate(adamw, 1e-3)
    rates = {id(p): group["lr"] for group in adamw.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert len(rates) == len(named)
    without = exempt_from_decay(task)
    for name, parameter in named.items():
        if name.startswith("model.text_encoder.projection."):
            expected = 0.5e-3
        else:
            expected = 0.2e-3 if name.startswith("model.text_encoder.") else 1e-3
        assert rates[id(parameter)] == pytest.approx(expected), name
        assert decays[id(parameter)] == (0.0 if name in without else 0.02), name


def test_a_scale_for_nothing_is_refused_and_says_what_there_is(task):
    with pytest.raises(ConfigError, match=r"'model\.txt'.*model\.text_encoder"):
        build_adamw(task, OptimiserConfig(lr_multipliers={"model.txt": 0.1}))


def test_paper_schedule_rises_to_its_peak_and_ends_at_its_final_rate():
    rates = [cosine_schedule(step, 100, 1e-4, 1e-6, 10) for step in range(100)]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[9] == rates[10] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-6)
    expected = 1e-6 + (1e-4 - 1e-6) * 0.5 * (1 + math.cos(math.pi * (54 - 10) / 89))
    assert rates[54] == pytest.approx(expected)
    assert rates[54] > (1e-4 + 1e-6) / 2 > rates[55]


def test_a_run_of_one_step_moves():
    assert cosine_schedule(0, 1, 1.0, 0.0, 0) == 1.0
    assert cosine_schedule(0, 1, 1.0, 0.0, 1000) == pytest.approx(1e-3)


@given(st.integers(1, 300), st.integers(0, 400), st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_rates_rise_once_then_fall_and_stay_within_bounds(total, warmup, peak, share):
    final = peak * share
    rates = [cosine_schedule(step, total, peak, final, warmup) for step in range(total + 5)]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    turn = min(warmup, len(rates))
    assert all(a < b for a, b in pairwise(rates[:turn]))
    assert all(a >= b for a, b in pairwise(rates[turn:]))
    assert all(rate >= final * (1 - 1e-12) for rate in rates[turn:])
    if warmup < total - 1:
        assert rates[total - 1] == pytest.approx(final, rel=1e-9, abs=1e-18)


def test_a_task_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        build_adamw(nn.Identity(), OptimiserConfig())


def test_a_rate_never_ends_above_its_peak():
    with pytest.raises(ValueError, match="is above the peak"):
        OptimiserConfig(learning_rate=5e-7)
    OptimiserConfig(learning_rate=5e-7, final_learning_rate=5e-7)


def test_warm_up_is_a_share_of_short_runs():
    assert [OptimiserConfig().resolve_warmup(total) for total in (5, 200, 10**6)] == [0, 20, 1000]
    assert OptimiserConfig(warmup_steps=300).resolve_warmup(200) == 300
