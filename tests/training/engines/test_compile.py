from contextlib import nullcontext

import pytest
import torch
from tests_support import POOLED_TOWER, TINY_MODEL, saved_bytes
from torch import nn

from benchmarks.step import random_batch
from vlp.compilation import compile_regions, gpu_form
from vlp.config import ConfigError
from vlp.layers.blocks import PostNormLayer
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.compile import (
    block_stacks,
    checkpoint_activations,
    compile_task,
    force_eager,
)
from vlp.training.engines.ddp import DdpEngine

ROWS = 4


def configuration(*, masked=True, layers=1, **text):
    sizes = {"layers": layers, "heads": 2, "intermediate": 16}
    model = {
        "text": sizes | {"width": 16, "vocab_size": 64, "max_tokens": 8} | text,
        "image": sizes | {"width": 16, "image_size": 16, "patch_size": 8},
        "cross": sizes | {"anchor": {"groups": 2}},
        "embed_dim": 16,
    }
    itm, other = ({"group": ROWS}, {}) if masked else (None, None)
    return PretrainConfig(
        model=model,
        data={"sources": ["unused"], "vocabulary": "unused", "canonical_streams": 1},
        objectives={"itm": itm, "mlm": other, "mim": other, "teacher": None},
        training={"batch": ROWS, "precision": "float32"},
    )


def task_of(config):
    torch.manual_seed(0)
    return Pretraining(config.model, config.objectives, "", "float32", log_every=10**6)


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
    with force_eager():
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


STEPS = 200


def trained(values, precision, steps, rate, how="none", before=lambda task: None):
    """A task after steps of AdamW, with a teacher and its queue; returns its losses, too."""
    values["objectives"] |= {"teacher": {"queue": 16, "warmup_steps": 10}}
    values["training"] |= {"precision": precision, "engine": "ddp"}
    config = PretrainConfig.model_validate(values)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", precision, log_every=10**6)
    compile_task(task, how, CPU)
    engine = DdpEngine(task, config.training)
    before(task)
    losses = []
    for step in range(steps):
        batch = random_batch(config.inputs, config.training.batch, 5, seed=step)
        output = engine.forward(batch, step)
        engine.backward(output.loss)
        update = engine.step(rate)
        task.after_step(engine.parameters, torch.tensor(update.applied))
        losses.append(float(output.loss.detach()))
    return task, losses


def test_a_teacher_that_keeps_rounded_weights_changes_no_bit():
    """Against one whose weights autocast casts in each call."""

    def unrounded(task):
        task.teacher.average._autocast_dtype = None

    found = []
    for before, expected in ((lambda task: None, torch.bfloat16), (unrounded, torch.float32)):
        task, losses = trained(configuration().model_dump(), "bf16", 6, 1e-3, before=before)
        teacher = task.teacher.average.module.model.cross_encoder
        assert next(teacher.parameters()).dtype == expected
        found.append((losses, task.extra_state()))
    (losses, state), (expected, expected_state) = found
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def losses_of(how, rows, text_window):
    values = configuration().model_dump()
    values["objectives"]["itm"] = {"group": rows}
    values["model"]["cross"]["options"] = {"anchor": {"text_window": text_window}}
    values["training"]["batch"] = rows
    return trained(values, "float32", STEPS, 1e-4, how="none" if how == "fused" else how)[1]


@pytest.mark.nightly  # minutes of compiling, or of interpreting
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("how", "rows", "text_window"),
    # A kernel's program is one pair's, and the interpreter takes each step of a window by itself.
    [("blocks", ROWS, 5), ("step", ROWS, 5), ("fused", 2, 3)],
)
def test_steps_have_the_same_losses_of(how, rows, text_window):
    as_written = losses_of("none", rows, text_window)
    fused = pytest.importorskip("interpreted_triton").interpreted() if how == "fused" else None
    with fused or nullcontext(), gpu_form() if fused else nullcontext():
        found = losses_of(how, rows, text_window)
    pairs = list(zip(found, as_written, strict=True))
    farthest = max(abs(a - b) / b for a, b in pairs)
    equal = sum(a == b for a, b in pairs)
    print(f"{how}: losses of {max(found):.1f} differ by at most {farthest:.1e} of themselves, "
          f"{max(abs(a - b) for a, b in pairs):.1e}; {equal} of {STEPS} are equal")  # fmt: skip
    assert farthest < 1e-5


TOWERS = {
    "image": POOLED_TOWER | {"trainable": 1},
    "text": {"architecture": {"model_type": "distilbert", "vocab_size": 64, "dim": 24,
                              "n_layers": 3, "n_heads": 2, "hidden_dim": 48,
                              "max_position_embeddings": 16}},
}  # fmt: skip


def model(**parts):
    torch.manual_seed(0)
    values = {key: {**TINY_MODEL.get(key, {}), **part} for key, part in parts.items()}
    built = VLPModel(ModelConfig.model_validate(TINY_MODEL | values))
    for name, parameter in built.named_parameters():
        if "table" in name:
            nn.init.normal_(parameter, std=0.05)
    return built.train()


def loss(built):
    torch.manual_seed(1)
    side, vocabulary = built.config.image.image_size, built.config.text.vocab_size
    mask = torch.arange(8) < torch.tensor([[8], [5], [6]])
    image = built.encode_image(torch.randn(3, 3, side, side))
    text = built.encode_text(torch.randint(5, vocabulary, (3, 8)), mask, mask)
    crossed = built.cross(image, text)
    return crossed.text.square().mean() + image.feature[0] @ text.feature[1]


@pytest.mark.parametrize("parts", [{"text": {"dropout": 0.2}, "cross": {"dropout": 0.2}}, TOWERS])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_losses_and_gradients_keep_every_bit(parts, precision):
    results, memory = [], []
    for setting in ("none", 1, "blocks"):
        built = model(**parts)
        checkpoint_activations(built, setting)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            memory.append(saved_bytes(lambda built=built: loss(built)))
            total = loss(built)
        total.backward()
        gradients = {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
        results.append((total.detach(), gradients))
    assert memory[0] > memory[1] > memory[2]
    for total, gradients in results[1:]:
        assert torch.equal(total, results[0][0])
        assert gradients.keys() == results[0][1].keys()
        assert all(torch.equal(results[0][1][name], g) for name, g in gradients.items())


def test_stacks_are_the_layers_of_the_three_encoders():
    built = model(**TOWERS)
    stacks = block_stacks(built)
    assert [len(stack) for stack in stacks] == [3, 2, built.config.cross.layers]
    assert stacks[0][0] is built.text_encoder.tower.transformer.layer[0]
    assert stacks[1][0] is built.image_encoder.vit.blocks[0]
    assert stacks[2][0] is built.cross_encoder.layers[0]


def test_a_model_without_blocks_or_with_batch_norms_is_refused():
    with pytest.raises(ConfigError, match="no transformer blocks"):
        checkpoint_activations(nn.Linear(2, 2), "blocks")
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="batch norm"):
        checkpoint_activations(nn.ModuleList([block]), "blocks")
