import json

import pytest
import torch
from pair_shards import annotated_shards, tiny_folder
from tests_support import first_batch

from evaluation.downstream.task_evaluation import evaluate_task
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.options import EvalOptions
from evaluation.retrieval.retrieval import evaluate_retrieval
from launch.finetune import build_task, build_validation
from vlp.config import ConfigError, validate
from vlp.models.folder import from_pretrained, save_pretrained
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.training.config import FinetuneConfig
from vlp.training.progress import Progress

OBJECTIVES = {"mlm": None, "mim": None, "teacher": None, "itm": {"group": 4}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    scenes = [annotation(sample_scene(0, number, image_size=32)) for number in range(8)]
    image = encode_png(render(sample_scene(0, 3, image_size=32)))
    return annotated_shards(tmp_path_factory.mktemp("pairs") / "shards", scenes, image)


def settings(folder, shards, kind, **task):
    data = {"sources": [{"path": str(shards)}], "validation": [str(shards)], "canonical_streams": 4}
    data["augment"] = {"randaugment": False, "crop_scale": [1.0, 1.0], "hflip": False}
    content = {
        "init_from": str(folder),
        "task": {"kind": kind, "data": data, "objectives": OBJECTIVES} | task,
        "training": {"batch": 4, "precision": "float32"},
    }
    return validate(content, FinetuneConfig, "test")


@pytest.mark.parametrize("kind", ["retrieval", "grounding"])
def test_nothing_is_masked_and_the_folder_loads(kind, shards, tmp_path):
    config = settings(tiny_folder(tmp_path / "start"), shards, kind)
    task, data = build_task(config)
    output = task(first_batch(data), 0)
    assert not any("mlm" in name or "mim" in name for name in output.losses)
    task.save_model(tmp_path / "saved", task.state_dict())
    if kind == "grounding":
        made = json.loads((tmp_path / "saved" / "grounding.json").read_text())
        assert made == {"by": "gradcam", "layer": None, "head": None}
    saved = from_pretrained(tmp_path / "saved").model.state_dict()
    for name, value in task.model.state_dict().items():
        assert torch.equal(saved[name], value)


def test_grounding_trains_on_expressions_and_retrieval_on_captions(shards, tmp_path):
    folder, texts = tiny_folder(tmp_path / "start"), {}
    for kind in ("retrieval", "grounding"):
        task, data = build_task(settings(folder, shards, kind))
        batch = first_batch(data)
        texts[kind] = {tuple(row[row != 0].tolist()) for row in batch.text_ids}
    known = [annotation(sample_scene(0, number, image_size=32)) for number in range(8)]
    said = {
        "retrieval": [text for one in known for text in one.captions],
        "grounding": [expression.text for one in known for expression in one.expressions],
    }
    for kind, found in texts.items():
        ids, mask, _ = task.parts.text(said[kind])
        assert found <= {tuple(row[real].tolist()) for row, real in zip(ids, mask)}


def test_each_is_judged_by_its_own_evaluation(shards, tmp_path):
    folder, options = tiny_folder(tmp_path / "start"), EvalOptions(resamples=1)
    for kind, how in (
        ("grounding", {"by": "similarity", "head": 2}),
        ("retrieval", {"rerank": 3}),
    ):
        config = settings(folder, shards, kind, **how)
        task, data = build_task(config)
        metrics = evaluate_task(task, [shards], options=options).metrics
        if kind == "grounding":
            direct = evaluate_grounding(task.loaded, [shards], **how, options=options).metrics
            assert metrics == direct
        else:
            direct = evaluate_retrieval(task.loaded, [shards], **how, options=options)
            assert metrics["mean"] == direct.mean("rerank").value
        build_validation(config, task, data).validate(progress := Progress(), dict)
        assert progress.best == metrics["pointing" if kind == "grounding" else "mean"]


def test_a_model_that_ranks_hold_in_parts_is_validated_by_its_whole_parameters(shards, tmp_path):
    config = settings(tiny_folder(tmp_path / "start"), shards, "retrieval")
    parts = {"engine": "zero3"}
    sharded = config.model_copy(update={"training": config.training.model_copy(update=parts)})
    task, data = build_task(sharded)
    selection = build_validation(sharded, task, data)
    selection.validate(before := Progress(), lambda: dict(task.named_parameters()))
    torch.manual_seed(3)
    moved = {name: torch.randn_like(value) for name, value in task.named_parameters()}
    expected, _ = build_task(config)
    expected.load_state_dict(expected.state_dict() | moved)
    for parameter in task.parameters():
        parameter.data = torch.empty(0)
    selection.validate(progress := Progress(), lambda: moved)
    assert (
        progress.best_metrics
        == evaluate_task(expected, [shards], options=EvalOptions(resamples=1)).metrics
    )
    assert progress.best_metrics != before.best_metrics


@pytest.mark.parametrize("kind", ["retrieval", "grounding"])
def test_groups_that_do_not_fit_are_refused(kind, shards, tmp_path):
    objectives = OBJECTIVES | {"itm": {"group": 3}}
    config = settings(tiny_folder(tmp_path / "start"), shards, kind, objectives=objectives)
    with pytest.raises(ConfigError, match=r"task\.objectives\.itm\.group 3 does not divide"):
        build_task(config)


@pytest.mark.parametrize(("fine_tuned", "kept"), [(False, ["mlm_head.bias"]), (True, [])])
def test_heads_of_pretraining_stay_in_the_folder(shards, tmp_path, fine_tuned, kept):
    start = tiny_folder(tmp_path / "start")
    model, text, preprocess, *_ = from_pretrained(start)
    heads = {"mlm_head.bias": torch.ones(3)}
    save_pretrained(start, model.config, model.state_dict(), text, preprocess, heads)
    if fine_tuned:  # then they are those of a task
        (start / "task.json").write_text("{}")
    task, _ = build_task(settings(start, shards, "retrieval"))
    task.save_model(tmp_path / "saved", task.state_dict())
    assert [*from_pretrained(tmp_path / "saved").heads] == kept
