import json
import math

import numpy as np
import pytest
import torch
import yaml
from retrieval_stub import Stub, StubITMScorer, StubModel, make_stub, png, write_numbered
from tests_support import unit
from torch.nn import functional

import vlp
from data_tools.__main__ import main as data_tools
from evaluation import samples
from evaluation.__main__ import main
from evaluation.encoder import Block, BlockCache
from evaluation.options import EvalOptions
from evaluation.retrieval import query_bank
from evaluation.retrieval.query_bank import log_mass, normalised_features
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.metrics import pessimistic_ranks
from vlp.models.itm_scorer import ITMScorer
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import distinct_scenes

CAPTIONS = [2, 1, 3, 1, 2, 5, 1, 1, 2, 4, 1, 3, 2, 1]


@pytest.fixture(autouse=True)
def stubs_are_matched_by_their_tables(monkeypatch):
    def itm_scorer(model):
        return StubITMScorer(model) if isinstance(model, StubModel) else ITMScorer(model)

    monkeypatch.setattr("evaluation.encoder.ITMScorer", itm_scorer)


@pytest.fixture
def numbered(tmp_path):
    folder = tmp_path / "numbered"
    write_numbered(folder, CAPTIONS)
    return folder


def slow_recalls(stub, captions, rerank, rerank_by):
    """Recall from full matrices: candidates outside the nearest fall below all others."""
    owner = np.repeat(np.arange(len(captions)), captions)
    right = owner[None] == np.arange(len(captions))[:, None]  # (images, texts)
    dual = (stub.model.image.double() @ stub.model.text.double().T).float().numpy()
    match = stub.model.scores.numpy().astype(np.float64)
    recalls = {}
    for direction, scores, cross, positive in (
        ("text_to_image", dual.T, match.T, right.T),
        ("image_to_text", dual, match, right),
    ):
        final = {"dual": scores.astype(np.float64)}
        if rerank:
            new = cross + (scores.astype(np.float64) / 0.07 if rerank_by == "sum" else 0)
            order = np.argsort(-scores, axis=1, kind="stable")
            ranked = scores.astype(np.float64) - 1e6
            for query, near in enumerate(order[:, :rerank]):
                ranked[query, near] = new[query, near]
            final["rerank"] = ranked
        for stage, table in final.items():
            ranks = pessimistic_ranks(table, positive)
            for k in (1, 5, 10):
                recalls[stage, direction, f"R@{k}"] = (ranks < k).mean()
    return recalls


@pytest.mark.parametrize(
    ("rerank", "rerank_by"), [(0, "sum"), (4, "sum"), (4, "match"), (99, "match")]
)
@pytest.mark.parametrize("batch", [4, 100])
def test_recall_equals_the_full_matrices(numbered, rerank, rerank_by, batch):
    stub, how = make_stub(CAPTIONS), {"rerank": rerank, "rerank_by": rerank_by}
    result = evaluate_retrieval(stub, [numbered], EvalOptions(batch=batch), match_batch=3, **how)
    expected = slow_recalls(stub, CAPTIONS, rerank, rerank_by)
    assert result.counts == {"images": len(CAPTIONS), "texts": sum(CAPTIONS)}
    numbers = [row["caption"] for row in result.predictions if "caption" in row]
    assert numbers == [number for count in CAPTIONS for number in range(count)]
    for key, value in expected.items():
        figure = result.figures[key]
        assert figure.value == pytest.approx(value), key
        assert figure.low <= figure.value <= figure.high
    sides = ("text_to_image", "image_to_text")
    dual = [expected["dual", side, f"R@{k}"] for side in sides for k in (1, 5, 10)]
    assert result.mean("dual").value == pytest.approx(np.mean(dual))
    assert result.mean("dual", "text_to_image").value == pytest.approx(np.mean(dual[:3]))
    assert result.recall("dual", "text_to_image", 1).chance == pytest.approx(1 / len(CAPTIONS))
    # No pair is matched twice, and a call never exceeds its batch.
    pairs = sum(stub.model.calls)
    assert pairs <= min(rerank, 14) * sum(CAPTIONS) + min(rerank, 29) * 14
    assert max(stub.model.calls, default=0) <= 3


def test_samples_of_one_image_become_one_image(tmp_path):
    apart = tmp_path / "apart"
    with ShardWriter(apart, samples_per_shard=4) as writer:
        for number, count in enumerate(CAPTIONS):
            for slot in range(count):
                said = Annotation(caption=f"{number} {slot}", source="s", image_id=str(number))
                writer.write(f"{number}-{slot}", png((number, 0, 0)), "png", said)
    together = tmp_path / "together"
    write_numbered(together, CAPTIONS)
    stub = make_stub(CAPTIONS)
    one = evaluate_retrieval(stub, [apart], rerank=4, options=EvalOptions(batch=3))
    other = evaluate_retrieval(stub, [together], rerank=4, options=EvalOptions(batch=3))
    assert one.counts["images"] == len(CAPTIONS)
    assert one.figures == other.figures


def test_equal_captions_are_right_for_all_their_images(tmp_path, monkeypatch):
    """And of samples without an image_id, equal bytes are told, not guessed to be one image."""
    folder = tmp_path / "equal"
    with ShardWriter(folder) as writer:
        for number, text in enumerate(["0 0", "1 0", "0  0"]):
            writer.write(str(number), png((number, 0, 0)), "png", Annotation(caption=text))
        writer.write("3", png((0, 0, 0)), "png", Annotation(caption="3 0"))
    stub = make_stub([1, 1, 1, 1])
    monkeypatch.setattr(Stub.text, "count_truncated", lambda texts: 2, raising=False)
    stub.model.image = torch.eye(4, 8)
    stub.model.text = stub.model.image[[2, 1, 2, 0]]
    result = evaluate_retrieval(stub, [folder])
    assert result.recall("dual", "text_to_image", 1).value == 0.75, "the fourth looks like the 1st"
    assert [row["ranks"]["dual"] for row in result.predictions][:3] == [1, 1, 1]
    right = (2 / 4 + 1 / 4 + 2 / 4 + 1 / 4) / 4
    assert result.recall("dual", "image_to_text", 1).chance == pytest.approx(right)
    assert [note.split()[0] for note in result.notes] == ["2", "1", "2"]
    assert all(word in note for word, note in zip(("correct", "byte", "truncated"), result.notes))


def test_features_that_are_not_finite_are_an_error(numbered):
    stub = make_stub(CAPTIONS)
    stub.model.text[3, 0] = torch.nan
    with pytest.raises(EvaluationError, match="not finite"):
        evaluate_retrieval(stub, [numbered])


def test_nothing_to_evaluate_is_one_clear_error(tmp_path):
    folder = tmp_path / "blank"
    with ShardWriter(folder) as writer:
        writer.write("blank", png((1, 0, 0)), "png", Annotation())
    with pytest.raises(EvaluationError, match="no usable sample in 1 \\(1 no text\\)"):
        evaluate_retrieval(make_stub([1]), [folder])


def test_block_cache_drops_the_least_recently_used():
    encoded = []

    def encode(key):
        encoded.append(key)
        return Block((torch.zeros(10),), key)  # 40 bytes

    cache = BlockCache(encode, 100)
    assert [cache[key].samples for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert encoded == [1, 2, 3, 2]


def test_a_real_model_keeps_its_mode_and_gives_the_same_table_twice(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    loaded.model.train()
    options = EvalOptions(batch=8)
    first = evaluate_retrieval(loaded, [scene_shards], options, rerank=4)
    assert loaded.model.training
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = evaluate_retrieval(loaded, [scene_shards], options, rerank=4, memory=0)
    assert first == second
    assert first.counts["images"] == 21
    assert 0 <= first.recall("rerank", "text_to_image", 10).value <= 1


def store_features(model_folder, shards, folder):
    model = json.loads((model_folder / "config.json").read_text())
    del model["model_type"]
    data = {"sources": [{"path": str(shards)}], "vocabulary": str(model_folder)}
    values = {"init_from": str(model_folder), "model": model, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    command = ["features", "--config", folder / "config.yaml", "--out", folder / "features"]
    assert data_tools([*map(str, command)]) == 0
    return folder / "features"


@pytest.fixture(scope="module")
def features(model_folder, scene_shards, tmp_path_factory):
    return store_features(model_folder, scene_shards, tmp_path_factory.mktemp("stored"))


def test_ranks_are_those_of_pixels_but_for_rounding(
    model_folder, scene_shards, features, monkeypatch
):
    loaded = vlp.load(model_folder)
    options = EvalOptions(batch=8)
    plain = evaluate_retrieval(loaded, [scene_shards], options, rerank=4)
    monkeypatch.setattr(samples, "decode_image", None)
    stored = evaluate_retrieval(loaded, [scene_shards], options, rerank=4, features=[features])
    assert (stored.counts, stored.skipped) == (plain.counts, {})
    ranks = [
        np.array([row.pop("ranks")["dual"] for row in one.predictions]) for one in (plain, stored)
    ]
    assert stored.predictions == plain.predictions
    assert (ranks[0] == ranks[1]).mean() > 0.9
    assert np.abs(ranks[0] - ranks[1]).max() <= 3


def test_several_folders_hold_features_together(
    model_folder, scene_shards, features, tmp_path, capsys
):
    other = tmp_path / "other"
    with ShardWriter(other) as writer:
        for number, scene in enumerate(distinct_scenes(50, 5)):
            writer.write(f"{number}", encode_png(render(scene)), "png", annotation(scene))
        writer.write("broken", b"no image", "png", annotation(scene))
    others = store_features(model_folder, other, tmp_path)
    ask = ["retrieval", "--model", str(model_folder), "--shards", str(scene_shards)]
    ask += ["--bank", str(other), "--features", str(features)]
    assert main(ask) == 2
    assert f"holds no features of {other}" in capsys.readouterr().err
    assert main([*ask, str(others)]) == 0
    table = capsys.readouterr().out
    assert "normalised by the queries" in table
    assert "skipped there: 1 unreadable image" in table
    assert "are in the bank" not in table


def test_another_tower_or_other_shards_are_refused(
    model_folder, scene_shards, features, tmp_path, capsys
):
    command = ["retrieval", "--model", model_folder, "--shards", scene_shards, "--limit", 9]
    command = [*map(str, command), "--out", str(tmp_path / "out")]
    assert main([*command, "--features", str(features)]) == 0
    assert main([*command, "--features", str(tmp_path)]) == 2
    assert "features.json: cannot be read" in capsys.readouterr().err
    loaded = vlp.load(model_folder)
    with torch.no_grad():
        loaded.model.image_encoder.vit.norm.bias += 1
    with pytest.raises(ConfigError, match=r"weights is '\w+' there, '\w+' here"):
        evaluate_retrieval(loaded, [scene_shards], features=[features])


@pytest.mark.parametrize("temperature", [0.02, 0.1, 10.0])
@pytest.mark.parametrize("at_a_time", [2, 100])
def test_log_mass_equals_the_loop(temperature, at_a_time, monkeypatch):
    monkeypatch.setattr(query_bank, "_QUERY_CHUNK", at_a_time)
    monkeypatch.setattr(query_bank, "_CANDIDATE_CHUNK", at_a_time + 1)
    candidates, bank = unit(4, 8), unit(7, 8).flip(0)
    for candidate, mass in zip(candidates, log_mass(candidates, bank, temperature), strict=True):
        terms = [math.exp(float(candidate @ query) / temperature) for query in bank]
        assert mass.item() == pytest.approx(temperature * math.log(sum(terms) / 7), abs=1e-5)


def test_a_hub_loses_most_and_by_the_same_for_every_query():
    queries, hub = unit(5, 8), unit(9, 8)[8:]
    bank = functional.normalize(hub + 0.3 * unit(50, 8), dim=-1)
    candidates = torch.cat([unit(6, 8), hub])
    asked, answers = normalised_features(queries, candidates, bank, 0.1)
    change = asked @ answers.T - queries @ candidates.T
    torch.testing.assert_close(change, change[:1].expand_as(change))
    assert change[0].argmin() == 6


def test_recall_with_a_bank_equals_the_full_matrices(numbered):
    """The bank may be of any pairs; here it has the pairs of the evaluation."""
    stub = make_stub(CAPTIONS)
    result = evaluate_retrieval(stub, [numbered], bank=[numbered], bank_temperature=0.2)
    plain = evaluate_retrieval(stub, [numbered])
    dual = (stub.model.image.double() @ stub.model.text.double().T).numpy()
    owner = np.repeat(np.arange(len(CAPTIONS)), CAPTIONS)
    right = owner[None] == np.arange(len(CAPTIONS))[:, None]
    of_images = 0.2 * np.log(np.exp(dual / 0.2).mean(1))
    of_texts = 0.2 * np.log(np.exp(dual / 0.2).mean(0))
    for direction, scores, positive in (
        ("text_to_image", (dual - of_images[:, None]).T, right.T),
        ("image_to_text", dual - of_texts[None], right),
    ):
        ranks = pessimistic_ranks(scores, positive)
        for k in (1, 5, 10):
            assert result.recall("dual", direction, k).value == pytest.approx((ranks < k).mean())
    assert result.figures != plain.figures
    assert result.to_json()["bank"] == [str(numbered)]
    assert result.to_json()["bank_shared"] == len(CAPTIONS)
    assert "are in the bank" in str(result.table())
    assert "are in the bank" not in str(plain.table())


def test_the_bank_is_known_however_its_folder_is_spelled(numbered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("numbered")
    stub = make_stub(CAPTIONS)
    for bank in ("numbered", "./link/"):
        result = evaluate_retrieval(stub, [tmp_path / "numbered"], bank=[bank])
        assert result.facts["bank_shared"] == len(CAPTIONS)
        assert len(result.notes) == 2
    twice = evaluate_retrieval(stub, ["numbered", "./link"])
    assert twice.counts["images"] == len(CAPTIONS), "the same images"
