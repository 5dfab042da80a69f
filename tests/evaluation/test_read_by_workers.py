"""Worker processes and ranks change no digit of an evaluation, bad samples among them."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_shards import annotated_shards, tiny_folder
from question_shards import coloured, photo, write_shards

import vlp
from data_tools.scenes import make_sample
from evaluation.__main__ import main
from evaluation.downstream import evaluate_task
from evaluation.embed import embed
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.swaps import evaluate_swaps
from evaluation.probes.word_pointing import evaluate_pointing
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from evaluation.work_sharding import Ranks
from evaluation.zeroshot import Prompts, evaluate_zeroshot
from launch import pretrain as validation
from launch.pretrain import HeldOutLosses
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.scenes.annotation import annotation
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification.task import PairClassification, SnliVeConfig
from vlp.tasks.pretraining import Pretraining

WORKERS = (0, 2)


@pytest.fixture(scope="module")
def bad_shards(tmp_path_factory) -> Path:
    """Two images that cannot be decoded, two without text, and one that is whole."""
    scene = annotation(sample_scene(0, 50))
    samples = [(b"", scene), (photo(), Annotation()), (photo(side=20), scene)]
    return write_shards(tmp_path_factory.mktemp("bad"), [*samples, *samples[:2]], per_shard=2)


@pytest.fixture(scope="module")
def loaded(model_folder):
    return vlp.load(model_folder)


def of_three_ranks(self: Ranks, count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run shares as ranks have them, one rank after the other in this process."""
    mine = {block: work(block) for rank in (2, 0, 1) for block in Ranks(rank, 3).share(count)}
    return [mine[block] for block in range(count)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("evaluate", "options"),
    [
        (evaluate_retrieval, {"rerank": 4, "memory": 0}),
        (evaluate_foils, {"view": "shuffled"}),
        (evaluate_grounding, {"by": "similarity"}),
        (evaluate_pointing, {"controls": True}),
    ],
)
def test_results_are_the_same(
    loaded,
    scene_shards,
    bad_shards,
    monkeypatch,
    evaluate: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    shards = [bad_shards, scene_shards]
    alone, helped = (
        evaluate(loaded, shards, EvalOptions(batch=4, resamples=20, workers=workers), **options)
        for workers in WORKERS
    )
    monkeypatch.setattr(Ranks, "map_blocks", of_three_ranks)
    assert evaluate(loaded, shards, EvalOptions(batch=4, resamples=20), **options) == alone
    assert alone.skipped["unreadable image"] >= 2
    assert alone.skipped == helped.skipped
    assert alone == helped
    assert active_children() == []


def test_classes_and_swaps_are_the_same(loaded, tmp_path, monkeypatch) -> None:
    with ShardWriter(tmp_path / "swaps", samples_per_shard=4) as writer:
        for number in range(5):
            one = make_sample("swaps", 0, 32, number)
            image = b"" if number == 3 else one.image
            writer.write(one.key, image, "png", one.annotation, one.second_image)
    alone, helped = (
        evaluate_swaps(
            loaded,
            [tmp_path / "swaps"],
            options=EvalOptions(batch=2, workers=workers),
            view="shuffled",
        )
        for workers in WORKERS
    )
    assert alone.to_json() == helped.to_json()
    assert alone.skipped == {"unreadable image": 1}
    names = ("red", "green", "blue")
    labelled = [(photo(name), Annotation(label=name)) for name in names] + [(b"", Annotation())]
    shards = write_shards(tmp_path / "labelled", labelled, per_shard=2)
    prompts = Prompts(names, names, ("{}",))
    alone, helped = (
        evaluate_zeroshot(loaded, [shards], prompts, options=EvalOptions(batch=2, workers=workers))
        for workers in WORKERS
    )
    assert alone == helped
    assert alone.skipped == {"no class": 1}
    monkeypatch.setattr(Ranks, "map_blocks", of_three_ranks)
    assert evaluate_zeroshot(loaded, [shards], prompts, options=EvalOptions(batch=2)) == alone


def test_a_fine_tuned_task_is_the_same(tmp_path, monkeypatch) -> None:
    said = [
        Annotation(hypothesis="a red circle", label=label)
        for label in ("neutral", "perhaps", None, "entailment", "neutral")
    ]
    shards = annotated_shards(tmp_path / "shards", said, photo())
    parts, _ = start_parts(str(tiny_folder(tmp_path / "model")), {})
    config = SnliVeConfig.model_validate({"data": {"train": ["unused"]}})
    task = PairClassification(config, parts)
    alone, helped = (
        evaluate_task(task, [shards], options=EvalOptions(batch=2, workers=n)) for n in WORKERS
    )
    assert alone == helped
    monkeypatch.setattr(Ranks, "map_blocks", of_three_ranks)
    assert evaluate_task(task, [shards], options=EvalOptions(batch=2)) == alone
    assert alone.skipped == {"unknown label": 1}


def test_features_are_the_same_files(loaded, scene_shards, bad_shards, tmp_path) -> None:
    shards = [bad_shards, scene_shards]
    for workers in WORKERS:
        found = embed(
            loaded, shards, tmp_path / f"{workers}", options=EvalOptions(batch=4, workers=workers)
        )
        assert found.skipped == {"unreadable image": 2}
    assert files(tmp_path / "0") == files(tmp_path / "2")


def test_held_out_losses_are_the_same(
    validated_pretraining, model_folder, scene_shards, bad_shards, monkeypatch
) -> None:
    held_out = {"shards": [str(bad_shards), str(scene_shards)]}
    objectives = {"contrastive": {}, "itm": {}}
    config = validated_pretraining(objectives, 4, held_out)
    assert config.validation is not None
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, str(model_folder), log_every=1)
    found = []
    for workers in WORKERS:
        monkeypatch.setattr(validation, "workers_for", lambda *_, workers=workers: workers)
        losses = HeldOutLosses(config, config.validation, task)
        losses._data.max_skipped_share = 0.9
        found.append(losses(3))
        assert active_children() == []
    assert found[0] == found[1]
    assert found[0].keys() >= {"loss/total", "loss/itm"}
    assert losses(0) == {}


def test_commands_take_their_number(model_folder, scene_shards, bad_shards, tmp_path) -> None:
    command = ["retrieval", "--model", str(model_folder), "--batch", "8", "--rerank", "3"]
    command += ["--shards", str(scene_shards), str(bad_shards)]
    for workers in WORKERS:
        chosen = ["--workers", f"{workers}", "--out", str(tmp_path / f"{workers}")]
        assert main([*command, *chosen]) == 0
    assert files(tmp_path / "0") == files(tmp_path / "2")


def test_data_of_another_kind_are_refused_in_the_same_words(loaded, tmp_path) -> None:
    shards = write_shards(tmp_path / "shards", coloured(5), per_shard=2)
    said = []
    for workers in WORKERS:
        with pytest.raises(EvaluationError, match="is not a swap") as caught:
            evaluate_swaps(loaded, [shards], options=EvalOptions(batch=2, workers=workers))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert active_children() == []


def test_a_pair_of_a_short_batch_weighs_like_any_other(
    validated_pretraining, model_folder, scene_shards
):
    """A loss that compares no pairs does not depend on the batch: 16 and 5 pairs, or 21."""
    found = {}
    objectives = {"itm": None, "mlm": None, "mim": {}, "teacher": None}
    for batch in (16, 32):
        config = validated_pretraining(objectives, batch, {"shards": [str(scene_shards)]})
        torch.manual_seed(0)
        task = Pretraining(config.model, config.objectives, str(model_folder))
        found[batch] = HeldOutLosses(config, config.validation, task)(4)
    assert found[16]["loss/mim"] == pytest.approx(found[32]["loss/mim"], rel=1e-6)
