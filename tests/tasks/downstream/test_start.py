"""A model folder as the start of fine-tuning, and the parts that a task freezes."""

from __future__ import annotations

import pytest
import torch
from pair_shards import entailment_shards, statement_shards, tiny_folder
from question_shards import AUGMENT, coloured, write_shards
from safetensors.torch import load_file, save_file

from vlp.models.folder import WEIGHTS, from_pretrained
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.downstream.task import DELTA, start_parts

DECODER = {"decoder": {"layers": 2}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    questions = write_shards(folder / "questions", coloured(12))
    statements = statement_shards(folder / "statements")
    return {
        "snli_ve": entailment_shards(folder / "hypotheses", 8),
        "nlvr2": statements,
        "vqa": questions,
        "caption": questions,
    }


@pytest.mark.parametrize(
    "cross",
    [
        {},
        {"options": {"anchor": {"path_gradient": True}}},
        {"options": {"anchor": {"path_gradient": True}}, "position": ["uniform"]},
    ],
)
@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "data"),
    [
        ("snli_ve", {"teacher": {}}, {}),
        ("nlvr2", {}, {}),
        ("vqa", DECODER, {}),
        ("caption", DECODER, {"max_caption": 10}),
        ("caption", {"decoder": {"layers": 2, "embedding": "own"}}, {"max_caption": 10}),
    ],
)
def test_what_has_no_gradient_is_frozen_and_nothing_else(
    kind, options, data, own_tokens, cross, shards, tmp_path
):
    """DeepSpeed gives parameters without a gradient one of zeros, and AdamW then shrinks them."""
    changes = {"token_projection": own_tokens, "cross": cross}
    parts, _ = start_parts(str(tiny_folder(tmp_path / "start")), changes)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    values = {"train": [str(shards[kind])], "canonical_streams": 1, "augment": AUGMENT, **data}
    config = get_task(kind).config.model_validate({"kind": kind, "data": values, **options})
    task, batches = get_task(kind).build(config, parts, 8, 0, "float32")
    if options.get("teacher"):
        task.start_teacher(1)
    ((batch, _),) = batches.batches(stop_after=1)
    task(batch, 0).loss.backward()
    for name, parameter in task.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert not task.model.match_head.weight.requires_grad
    task.save_model(tmp_path / "model", task.state_dict())
    saved = from_pretrained(tmp_path / "model").model.state_dict()
    assert saved.keys() == before.keys()
    assert torch.equal(saved["match_head.weight"], before["match_head.weight"])


@pytest.mark.parametrize(
    ("position", "threshold", "found"),
    [(["anchor"], None, DELTA), (["anchor"], 0.3, 0.3), ([], None, 0)],
)
def test_a_folder_without_anchors_gives_the_papers_threshold(tmp_path, position, threshold, found):
    folder = tiny_folder(tmp_path / "model", position=[])
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"anchor_threshold": torch.zeros(())}, folder / WEIGHTS)
    changes = {"cross": {"position": position, "options": {"anchor": {"threshold": threshold}}}}
    parts, _ = start_parts(str(folder), changes)
    assert parts.model.anchor_threshold == pytest.approx(found)
