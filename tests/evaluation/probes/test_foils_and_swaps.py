import itertools

import numpy as np
import pytest
import torch
from retrieval_stub import png

import vlp
from data_tools.scenes import make_sample
from evaluation.__main__ import main
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils, examples
from evaluation.probes.swaps import (
    CHANCE,
    SCORES,
    differing_words,
    evaluate_swaps,
    load_mlm_head,
    swap_scores,
)
from evaluation.samples import EvaluationError, Samples
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.data.text.foils import make_foils


@pytest.fixture
def loaded(model_folder):
    found = vlp.load(model_folder)
    # An untrained head hardly tells pairs apart; larger weights do.
    torch.nn.init.normal_(found.model.match_head.weight)
    return found


def slow_shares(loaded, shards):
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


@pytest.fixture(scope="module")
def swap_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swaps")
    with ShardWriter(folder, samples_per_shard=4) as writer:
        for number in range(9):
            sample = make_sample("swaps", 0, 64, number)
            writer.write(sample.key, sample.image, "png", sample.annotation, sample.second_image)
    return folder


def test_scores_are_winogrounds():
    right = np.array([[2.0, 1.0], [0.0, 3.0]])  # image 0: 2 > 1; caption 1: 3 > 1
    assert swap_scores(right).tolist() == [1, 1, 1, 1]
    text_only = np.array([[2.0, 1.0], [5.0, 6.0]])  # captions: image 1 wins both
    assert swap_scores(text_only).tolist() == [1, 0, 0, 0.75]
    image_only = text_only.T
    assert swap_scores(image_only).tolist() == [0, 1, 0, 0.75]
    assert swap_scores(np.zeros((2, 2))).tolist() == [0, 0, 0, 0]
    assert swap_scores(np.full((2, 2), np.nan)).tolist() == [0, 0, 0, 0]


def test_chance_is_that_of_random_orders():
    orders = np.array(list(itertools.permutations(range(4))), dtype=float).reshape(-1, 2, 2)
    expected = swap_scores(orders).mean(0)
    assert dict(zip(SCORES, expected)) == pytest.approx(CHANCE)


def test_figures_equal_pair_by_pair_scoring(loaded, swap_shards):
    result = evaluate_swaps(loaded, [swap_shards], options=EvalOptions(batch=2))
    index = ShardIndex.open(swap_shards)
    hits = []
    for number in range(9):
        raw = index.read(*divmod(number, 4))
        captions = [raw.annotation.caption, raw.annotation.scene["swap"]["foil"]]
        scores = np.zeros((2, 2))
        for row, content in enumerate((raw.image, raw.second_image)):
            pixels = loaded.preprocess(decode_image(content, ""))[None]
            for column, caption in enumerate(captions):
                with torch.no_grad():
                    image = loaded.model.encode_image(pixels)
                    scores[row, column] = loaded.model.match(
                        image, loaded.model.encode_text(*loaded.text([caption]))
                    )
        hits.append(swap_scores(scores))
    for column, name in enumerate(SCORES):
        figure = result.figures["match", "all", name]
        assert figure.value == pytest.approx(np.mean([row[column] for row in hits]))
        assert figure.low <= figure.value <= figure.high
    kinds = dict.fromkeys(kind for _, kind, _ in result.figures)
    assert list(kinds) == ["place", "relation", "order", "binding", "all"]
    assert result.counts == {"swaps": 9}
    one_by_one = evaluate_swaps(loaded, [swap_shards], options=EvalOptions(batch=9))
    assert one_by_one.figures == result.figures


def test_words_are_scored_by_their_likelihood_when_masked(loaded, swap_shards):
    head = load_mlm_head(loaded)
    raw = ShardIndex.open(swap_shards).read(0, 0)
    captions = [raw.annotation.caption, raw.annotation.scene["swap"]["foil"]]
    scores = np.zeros((2, 2))
    for column, caption in enumerate(captions):
        own, other = (loaded.text.pieces(text)[1:-1] for text in (caption, captions[1 - column]))
        same_start = next(n for n, (a, b) in enumerate(zip(own, other)) if a != b)
        same_end = next(n for n, (a, b) in enumerate(zip(own[::-1], other[::-1])) if a != b)
        asked = range(1 + same_start, 1 + len(own) - same_end)
        tokens = loaded.text([caption])
        ids = tokens.text_ids.clone()
        for place in asked:
            ids[0, place] = loaded.text.mask_id
        for row, content in enumerate((raw.image, raw.second_image)):
            pixels = loaded.preprocess(decode_image(content, ""))[None]
            with torch.no_grad():
                image = loaded.model.encode_image(pixels)
                text = loaded.model.encode_text(ids, *tokens[1:])
                states = loaded.model.cross(image, text).text
                words = loaded.model.text_encoder.embedding.word.weight
                logits = head(states, words)[0].log_softmax(-1)
            scores[row, column] = sum(
                float(logits[place, tokens.text_ids[0, place]]) for place in asked
            )
    result = evaluate_swaps(loaded, [swap_shards], options=EvalOptions(limit=1))
    found = [result.figures["words", "all", name].value for name in SCORES]
    assert found == swap_scores(scores).tolist()
    headless = evaluate_swaps(loaded._replace(heads={}), [swap_shards], EvalOptions(limit=1))
    assert {scorer for scorer, *_ in headless.figures} == {"dual", "match"}


def test_what_captions_do_not_share_is_between_start_and_end():
    ids = torch.tensor([[1, 5, 6, 7, 9, 2, 0], [1, 5, 8, 9, 2, 0, 0]])
    words = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0, 0]]).bool()
    found = differing_words(ids, words)
    assert found.int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    longer = torch.tensor([[1, 5, 5, 2], [1, 5, 2, 0]])
    words = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]).bool()
    assert differing_words(longer, words).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert not differing_words(ids[:1].expand(2, -1), torch.ones(2, 7).bool()).any()


def test_without_images_nothing_can_be_told(loaded, swap_shards):
    blank = evaluate_swaps(loaded, [swap_shards], view="blank")
    for scorer in ("dual", "match", "words"):
        # One of the two captions wins at both images, and every caption's images tie.
        assert blank.figures[scorer, "all", "pair"].value == pytest.approx(0.25)
        assert blank.figures[scorer, "all", "group"].value == 0


def test_other_shards_are_refused(loaded, scene_shards):
    with pytest.raises(EvaluationError, match="is not a swap"):
        evaluate_swaps(loaded, [scene_shards])
