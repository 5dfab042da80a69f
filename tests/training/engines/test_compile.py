"""`training.compile`: few graphs, unbroken and shared, that change neither losses nor names."""

import pytest
import torch
from compile_toy import ROWS, configuration, task_of
from torch import nn

from benchmarks.step import random_batch
from vlp.compilation import compile_regions
from vlp.config import ConfigError
from vlp.layers.blocks import PostNormLayer
from vlp.training.engines.compile import compile_task, transformer_blocks, uncompiled

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def counters():
    """Counts of this test alone; graphs of others are forgotten."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    limit = dynamo.config.recompile_limit
    compile_regions(None)
    yield dynamo.utils.counters
    compile_regions(None)
    dynamo.config.recompile_limit = limit
    dynamo.reset()


def losses(task, config, steps):
    """Train by plain descent on captions of other lengths each step."""
    found = []
    descent = torch.optim.SGD(task.parameters(), 1e-2)
    for step in range(1, 1 + steps):
        batch = random_batch(config.inputs, ROWS, 1 + step, seed=step)
        loss = task(batch, step).loss
        loss.backward()
        descent.step()
        descent.zero_grad()
        task.after_step(lambda: dict(task.named_parameters()))
        found.append(float(loss.detach()))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "graphs"),
    [
        # As counted: few, and no more for other lengths. A text and an image block have one each,
        # losses and other regions the rest.
        ("blocks", 26),
        # Text once; images as they are and masked; pairs of ITM and of MLM; regions.
        ("step", 1 + 2 + 2 + 12),
    ],
)
def test_graphs_are_few_whole_and_of_all_lengths(how, graphs, counters):
    config = configuration(layers=2 if how == "blocks" else 1)
    plain = task_of(config)
    expected = losses(plain, config, 3)
    task = task_of(config)
    compile_task(task, how, CPU, backend="eager")
    assert losses(task, config, 1) == pytest.approx(expected[:1], abs=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs
    assert losses(task_of(config), config, 3) == expected
    # That task is not compiled: its texts are cut, and regions compiled for these lengths, too.
    known = counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    losses(task, config, 3)
    # A CPU predicts as many words as are masked: first one of them, then any number.
    found = counters["stats"]["unique_graphs"]
    assert known <= found <= known + 2  # whatever the length of the captions
    assert list(task.state_dict()) == list(plain.state_dict())
    with uncompiled():
        task(random_batch(config.inputs, 3, 2), 1)  # batches of a validation have other sizes
    assert counters["stats"]["unique_graphs"] == found


@pytest.mark.nightly
def test_sizes_that_change_become_symbols(counters):
    """Of tasks whose texts are as long as the longest of a batch."""

    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(PostNormLayer(8, 2, 16) for _ in range(2))

        def forward(self, states):
            for layer in self.layers:
                states = layer(states, states.new_ones(states.shape[:2], dtype=torch.bool))
            return states

    texts = Texts()
    sizes = [torch.randn(3, length, 8, requires_grad=True) for length in range(4, 8)]
    expected = [texts(states) for states in sizes]
    compile_task(texts, "blocks", CPU, backend="eager")
    for states, before in zip(sizes, expected):
        torch.testing.assert_close(texts(states), before)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_inductor_changes_losses_by_rounding_alone():
    config = configuration(masked=False)
    task = task_of(config)
    compile_task(task, "blocks", CPU)
    expected = losses(task_of(config), config, 3)
    assert losses(task, config, 3) == pytest.approx(expected, abs=1e-5)


def test_blocks_of_a_task_are_those_of_its_encoders():
    task = task_of(configuration(layers=2))
    kinds = [type(block).__name__ for block in transformer_blocks(task)]
    assert kinds == ["PostNormLayer"] * 2 + ["Block"] * 2 + ["CrossLayer"] * 2


def test_a_cpu_compiles_nothing_unless_told(counters):
    task = task_of(configuration(masked=False))
    compile_task(task, "auto", CPU)
    losses(task, configuration(masked=False), 1)
    assert not counters["stats"]


@pytest.mark.nightly
def test_one_graph_needs_texts_of_one_length():
    task = task_of(configuration(masked=False, length_groups=2))
    with pytest.raises(ConfigError, match="length_groups"):
        compile_task(task, "step", CPU)


def test_a_machine_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    cpp_builder.cpp_compiler_search.cache_clear()
    with pytest.raises(ConfigError, match=r"training\.compile=blocks needs a C\+\+ compiler"):
        compile_task(nn.Linear(2, 2), "blocks", CPU)
    compile_task(nn.Linear(2, 2), "none", CPU)
