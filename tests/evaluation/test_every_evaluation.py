"""Every evaluation: any workers and ranks, bad samples, result files, its command, its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import active_children
from typing import Any, NamedTuple

import pytest
from pair_shards import annotated_shards
from question_shards import photo, write_shards

import vlp
from data_tools.scenes import make_sample
from evaluation.__main__ import main
from evaluation.downstream.task_evaluation import evaluate_task
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.swaps import evaluate_swaps
from evaluation.probes.word_pointing import evaluate_pointing
from evaluation.results import saved_figures
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError, format_kinds
from evaluation.work_sharding import ProcessGroup
from evaluation.zeroshot import Prompts, evaluate_zeroshot
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.scenes.annotation import annotation
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import load_task

CLASSES = ("red", "green", "blue")


def zeroshot(loaded, shards, options=EvalOptions(), **more):
    return evaluate_zeroshot(loaded, shards, Prompts(CLASSES, CLASSES), options, **more)


class Case(NamedTuple):
    """An evaluation, `arguments` of its function and command; `matches`: for the match score."""

    evaluate: Callable[..., Any]
    arguments: dict[str, Any]
    command: str
    data: str = "scenes"
    matches: dict[str, Any] | None = None


CASES = {
    "retrieval": Case(evaluate_retrieval, {"rerank": 4}, "--rerank 4", matches={"rerank": 2}),
    "foils": Case(evaluate_foils, {"view": "shuffled"}, "--view shuffled", matches={}),
    "grounding": Case(evaluate_grounding, {"by": "similarity"}, "--by similarity", matches={}),
    "pointing": Case(
        evaluate_pointing, {"controls": True}, "--controls", matches={"controls": True}
    ),
    "swaps": Case(evaluate_swaps, {"view": "shuffled"}, "--view shuffled", "swaps", {}),
    "zeroshot": Case(
        zeroshot, {"match": 2}, "--match 2 --classes CLASSES", "labelled", {"match": 2}
    ),
    "snli_ve": Case(evaluate_task, {}, "", "claims"),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory, scene_shards):
    """Two folders by kind, the second with images alone that cannot be decoded."""
    root = tmp_path_factory.mktemp("contract")
    scene = annotation(sample_scene(0, 50))
    swap = [make_sample("swaps", 0, 32, number) for number in range(5)]
    for name, samples in (("swaps", swap), ("bad swaps", swap[:2])):
        with ShardWriter(root / name, samples_per_shard=4) as writer:
            for one in samples:
                image = one.image if name == "swaps" else b""
                writer.write(one.key, image, "png", one.annotation, one.second_image)
    claims = [Annotation(hypothesis="a red circle", label=label)
              for label in ("neutral", "entailment", None, "neutral", "entailment")]  # fmt: skip
    labelled = [Annotation(label=label) for label in CLASSES]
    images = [photo(label) for label in CLASSES]
    return {
        "scenes": [scene_shards, write_shards(root / "bad", [(b"", scene)] * 2)],
        "swaps": [root / "swaps", root / "bad swaps"],
        "claims": [
            annotated_shards(root / "claims", claims, photo()),
            annotated_shards(root / "bad claims", claims[:2], b""),
        ],
        "labelled": [
            write_shards(root / "labelled", [*zip(images, labelled)], per_shard=2),
            write_shards(root / "bad labelled", [(b"", labelled[0])] * 2),
        ],
    }


@pytest.fixture(scope="module", params=CASES)
def name(request):
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name, model_folder, task_folders):
    return task_folders.get(name, model_folder)


@pytest.fixture(scope="module")
def evaluate(name, folder):
    case = CASES[name]
    model = load_task(folder) if case.data == "claims" else vlp.load(folder)

    def evaluated(folders, own=None, **options):
        settings = EvalOptions(**({"batch": 4, "resamples": 20} | options))
        arguments = case.arguments if own is None else own
        return case.evaluate(model, folders, options=settings, **arguments)

    return evaluated


@pytest.fixture(scope="module")
def result(name, evaluate, shards):
    return evaluate(shards[CASES[name].data])


def content(result):
    return result.to_json(), result.predictions, result.table()


def of_three_ranks(self, count, work):
    done = {
        block: work(block) for rank in (2, 0, 1) for block in ProcessGroup(rank, 3).share(count)
    }
    return [done[block] for block in range(count)]


def test_workers_and_ranks_change_nothing(name, evaluate, result, shards, monkeypatch):
    folders = shards[CASES[name].data]
    assert content(evaluate(folders, workers=2)) == content(result)
    assert active_children() == []
    monkeypatch.setattr(ProcessGroup, "map_blocks", of_three_ranks)
    assert content(evaluate(folders)) == content(result)


def test_bad_samples_are_counted_and_change_no_figure(name, evaluate, result, shards):
    good = evaluate(shards[CASES[name].data][:1])
    assert result.skipped["unreadable image"] >= 2
    assert result.to_json()["skipped"] == result.skipped
    assert format_kinds(result.skipped) in result.table().text()
    assert good.skipped == {}
    alone, together = (saved_figures(one.to_json()).figures for one in (good, result))
    assert {key: figure.value for key, figure in together.items()} == pytest.approx(
        {key: figure.value for key, figure in alone.items()}, abs=1e-6
    )


def test_files_hold_the_result(name, result, tmp_path):
    folder = result.save(tmp_path / "new" / "out")
    written = json.loads((folder / f"{name}.json").read_text())
    assert written == json.loads(json.dumps(result.to_json()))
    saved = saved_figures(written)
    assert saved.figures[saved.main].percent() in result.table().text()
    assert (folder / f"{name}.md").read_text() == result.table().markdown()
    rows = result.predictions
    lines = folder / f"{name}.predictions.jsonl"
    assert lines.exists() == (rows is not None)
    if rows is not None:
        found = [json.loads(line) for line in lines.read_text().splitlines()]
        assert found == json.loads(json.dumps(rows))


def test_the_command_writes_what_the_function_gives(
    name, folder, evaluate, shards, tmp_path, capsys
):
    (tmp_path / "classes").write_text("\n".join(CLASSES))
    case, folders = CASES[name], shards[CASES[name].data]
    words = case.command.replace("CLASSES", str(tmp_path / "classes")).split()
    command = [name, "--model", str(folder), "--shards", *map(str, folders), *words]
    options = ["--batch", "4", "--limit", "6", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 0
    expected = evaluate(folders, limit=6, resamples=1000)
    assert expected.table().text() in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert written == json.loads(json.dumps(expected.to_json()))


def test_nothing_to_evaluate_is_an_error(name, evaluate, shards, tmp_path):
    with pytest.raises(EvaluationError, match="unreadable image"):
        evaluate(shards[CASES[name].data][1:])
    for folders, options in (
        ([tmp_path / "nowhere"], {}),
        ([], {}),
        (shards[CASES[name].data], {"limit": 0}),
    ):
        with pytest.raises((ConfigError, EvaluationError)):
            evaluate(folders, **options)


def test_a_match_score_that_was_never_trained_is_named(name, evaluate, folder, shards, monkeypatch):
    case = CASES[name]
    if case.matches is None:
        pytest.skip("does not use it")
    words = ("never trained", "is meaningless")
    for trained in (True, False):
        monkeypatch.setattr(type(vlp.load(folder).model), "match_is_trained", trained)
        notes = str(evaluate(shards[case.data][:1], case.matches, limit=4).table())
        assert any(word in notes for word in words) != trained
