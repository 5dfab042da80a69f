import numpy as np
import pytest
import torch
from retrieval_stub import png

import vlp
from evaluation.__main__ import main
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils, examples
from evaluation.samples import EvaluationError, Samples
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.foils import make_foils


@pytest.fixture
def loaded(model_folder):
    found = vlp.load(model_folder)
    # An untrained head hardly tells pairs apart; larger weights do.
    torch.nn.init.normal_(found.model.match_head.weight)
    return found


def slow_shares(loaded, shards):
    """One caption and one foil at a time."""
    right = {}
    samples = Samples([shards])
    for sample in map(samples.read, range(len(samples))):
        for caption, foils in zip(sample.captions, make_foils(sample.captions, 0, sample.key)):
            for foil in foils:
                scores = []
                with torch.no_grad():
                    image = loaded.model.encode_image(loaded.preprocess(sample.image)[None])
                    for said in (caption, foil.text):
                        text = loaded.model.encode_text(*loaded.text([said]))
                        cosine = (image.feature.double() * text.feature.double()).sum()
                        scores.append((float(loaded.model.match(image, text)), float(cosine)))
                for place, scorer in enumerate(("match", "dual")):
                    hit = scores[0][place] > scores[1][place]
                    for kind in ("all", foil.kind):
                        right.setdefault(f"{scorer}, {kind}", []).append(hit)
    return {name: np.mean(hits) for name, hits in right.items()}


def test_shares_equal_a_loop_over_pairs(loaded, scene_shards):
    result = evaluate_foils(loaded, [scene_shards], options=EvalOptions(batch=8))
    expected = slow_shares(loaded, scene_shards)
    assert result.metrics == pytest.approx(expected)
    assert {"match, all", "dual, colour"} <= set(expected)
    for figure in result.figures.values():
        assert figure.low <= figure.value <= figure.high
        assert figure.chance == 0.5
    assert next(iter(result.figures)) == "match, all"
    other_batch = evaluate_foils(loaded, [scene_shards], options=EvalOptions(batch=21))
    assert other_batch.figures == result.figures


def test_rows_say_what_was_compared(loaded, scene_shards):
    result = evaluate_foils(loaded, [scene_shards], options=EvalOptions(limit=5))
    assert result.counts["items"] == len(result.predictions)
    for row in result.predictions:
        caption, foil = row["match"]
        assert row["scores"]["match, all"] == row["scores"][f"match, {row['kind']}"]
        assert row["scores"]["match, all"] == float(caption > foil)
    shown = list(examples(result, 2))
    assert 0 < len(shown) <= 2 * len({row["kind"] for row in result.predictions})
    assert result.predictions[0]["foil"] in "".join(shown)
    assert not list(examples(result, 0))


def test_blank_images_leave_the_text_alone(loaded, scene_shards):
    first = evaluate_foils(loaded, [scene_shards], view="blank").predictions
    again = {}
    for row in first:  # the same captions of another image: the same scores
        again.setdefault((row["caption"], row["foil"]), []).append(row["dual"])
    assert all(np.allclose(rows, rows[0], atol=1e-6) for rows in again.values())


def test_captions_cut_off_before_the_exchange_are_left_out(loaded, tmp_path):
    long = "red " + "circle " * 30 + "behind a blue square"
    with ShardWriter(tmp_path / "s") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(caption=long))
        writer.write("1", png((1, 2, 3)), "png", Annotation(source="no caption"))
    result = evaluate_foils(loaded, [tmp_path / "s"])
    made = {foil.kind for foil in make_foils([long], 0, "0")[0]}
    assert made == {"colour", "binding", "preposition"}
    assert {row["kind"] for row in result.predictions} == made - {"preposition"}
    assert result.skipped == {"no text": 1}


def test_captions_without_foils_are_refused(loaded, tmp_path):
    with ShardWriter(tmp_path / "s") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(caption="ein Hund"))
    with pytest.raises(EvaluationError, match="English captions"):
        evaluate_foils(loaded, [tmp_path / "s"])


def test_the_command_lists_pairs(model_folder, scene_shards, tmp_path, capsys):
    command = ["foils", "--model", str(model_folder), "--shards", str(scene_shards)]
    assert main([*command, "--out", str(tmp_path), "--limit", "4", "--list", "1"]) == 0
    assert capsys.readouterr().out.startswith("colour\n  ")
