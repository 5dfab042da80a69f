from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval_stub import png

import vlp
from evaluation.options import EvalOptions
from evaluation.probes.anchor_maps import first_samples
from evaluation.probes.word_pointing import KINDS, evaluate_pointing, score_words
from evaluation.samples import CaptionedSample, EvaluationError, Samples
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.word_boxes import named_words, word_positions
from vlp.positions.anchor import anchor_distance, anchor_path, group_similarity

# A 4 x 4 grid of 8 px patches; two objects of four and one patches.
SIZE = (32, 32)
LEFT, RIGHT = (0, 0, 16, 16), (24, 24, 8, 8)
PIECES = [["[CLS]", "re", "##d", "square", "blue", "star", "[SEP]"]]


def two_objects() -> CaptionedSample:
    words = [(0, "red", "colour", LEFT), (1, "square", "shape", LEFT)]
    words += [(2, "blue", "colour", RIGHT), (3, "star", "shape", RIGHT)]
    entries = [
        {"caption": 0, "index": index, "word": word, "kind": kind, "box": list(box)}
        for index, word, kind, box in words
    ]
    annotation = Annotation(captions=["red square blue star"], words=entries)
    return CaptionedSample(Image.new("RGB", SIZE), annotation.captions, annotation, ("s", "0"))


def ask(cosine, anchors=None, pieces=PIECES):
    anchors = np.zeros_like(cosine, dtype=int) if anchors is None else anchors
    return score_words(0, two_objects().annotation, SIZE, pieces, cosine, anchors, (4, 4))


def test_each_word_is_asked_at_its_own_tokens():
    cosine = np.zeros((1, 16, 7), np.float32)
    cosine[0, 0, 1], cosine[0, 15, 2] = 0.9, 0.8  # pieces of 'red': the mean decides
    cosine[0, 5, 3] = 0.5  # square: in its box
    cosine[0, 5, 4] = 0.5  # blue: in the other object's box
    cosine[0, 3, 5] = 0.5  # star: in no box
    red, square, blue, star = ask(cosine)
    assert [word.hit for word in (red, square, blue, star)] == [True, True, False, False]
    assert [word.any_hit for word in (red, square, blue, star)] == [True, True, True, False]
    assert (red.share, blue.share, red.any_share) == (4 / 16, 1 / 16, 5 / 16)
    # An object at random: half for either of two objects that do not overlap.
    assert [word.bar for word in (red, blue)] == [0.5, 0.5]
    assert [KINDS[word.kind] for word in (red, square)] == ["colour", "shape"]


def test_equal_cosines_count_against_the_model():
    assert not any(word.hit or word.any_hit for word in ask(np.zeros((1, 16, 7), np.float32)))
    inside = np.zeros((1, 16, 7), np.float32)
    inside[0, [0, 1, 4, 5], 1:4] = 1  # all of the best lie in the box: that is a hit
    assert [word.hit for word in ask(inside)] == [True, True, False, False]
    assert not any(word.hit for word in ask(np.full((1, 16, 7), np.nan, np.float32)))


def test_anchors_are_counted_in_and_out_of_the_box():
    anchors = np.zeros((1, 16, 7), int)
    anchors[0, 0, 1], anchors[0, 5, 2], anchors[0, 10, 2] = 3, 1, 4
    red, square, *_ = ask(np.zeros((1, 16, 7), np.float32), anchors)
    assert (red.anchors, red.anchors_inside) == (8, 4)
    assert (square.anchors, square.anchors_inside) == (0, 0)


def test_words_cut_off_are_not_asked():
    cut = [["[CLS]", "re", "##d", "square", "[SEP]"]]
    assert len(ask(np.zeros((1, 16, 5), np.float32), pieces=cut)) == 2


def slow_patches(box, rows, columns, width, height):
    """Patches with their centre in the box, else the one under the middle of the box."""
    left, top, w, h = box
    found = []
    for patch in range(rows * columns):
        x = (patch % columns + 0.5) * width / columns
        y = (patch // columns + 0.5) * height / rows
        if left <= x < left + w and top <= y < top + h:
            found.append(patch)
    middle = int((top + h / 2) * rows / height) * columns + int((left + w / 2) * columns / width)
    return found or [middle]


def slow_hits(loaded, shards):
    """One caption and one word at a time, through the public calls."""
    samples = Samples([shards])
    hits = {kind: [] for kind in KINDS[:2]}
    rows, columns = loaded.model.config.image.grid
    for place in range(len(samples)):
        sample = samples.read(place)
        width, height = sample.image.size
        for word in named_words(sample.annotation):
            caption = sample.captions[word.caption]
            with torch.no_grad():
                image = loaded.model.encode_image(loaded.preprocess(sample.image)[None]).tokens[0]
                text = loaded.model.encode_text(*loaded.text([caption])).tokens[0]
            places = word_positions(loaded.text.words(caption))[word.position]
            best = int((image @ text[list(places)].mean(0)).argmax())
            hits[word.kind].append(best in slow_patches(word.box, rows, columns, width, height))
    return {kind: np.mean(found) for kind, found in hits.items()}


def test_accuracy_equals_a_loop_over_words(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    loaded.model.anchor_threshold.fill_(0.3)
    result = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(batch=8))
    expected = slow_hits(loaded, scene_shards)
    assert result.counts == {"scenes": 21}
    assert list(result.kinds) == ["colour", "shape"]
    for kind in result.kinds:
        figures = result.kinds[kind]
        assert figures.pointing.value == pytest.approx(expected[kind])
        assert figures.pointing.low <= figures.pointing.value <= figures.pointing.high
        # One to three objects: the bar lies between a third and one, well above chance.
        assert 1 / 3 < figures.some_object < 0.7
        assert 0 < figures.pointing.chance < 0.2 < figures.some_object
        assert figures.any_object.value >= figures.pointing.value
        assert figures.anchors is not None


def test_path_figures_equal_a_loop_over_captions(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    model, threshold = loaded.model, 0.2
    model.anchor_threshold.fill_(threshold)
    passing, reached = [], []
    spreads = [[] for _ in range(model.config.cross.anchor.groups)]
    samples = Samples([scene_shards])
    for sample in map(samples.read, range(len(samples))):
        with torch.no_grad():
            patches = model.encode_image(loaded.preprocess(sample.image)[None]).tokens
            for caption in sample.captions:
                ids, attention, words = loaded.text([caption])
                pieces = model.encode_text(ids, attention, words).tokens
                groups = group_similarity(patches, pieces, model.config.cross.anchor.groups)
                distance = anchor_distance(groups, threshold)
                path, reach = anchor_path(distance, model.config.image.grid, words)
                passing.append((groups >= threshold)[:, :, words[0]])
                reached.append(reach[:, :, words[0]])
                for word in words[0].nonzero()[:, 0]:
                    for group in range(len(spreads)):
                        one, there = path[0, :, word, group], reach[0, :, word, group]
                        if there.sum() >= 2:
                            spreads[group].append(one[there].double().std(correction=0))
    result = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(batch=8)).paths
    assert result.anchors == pytest.approx(torch.cat(passing, 2).double().mean().item())
    assert result.reachable == pytest.approx(torch.cat(reached, 2).double().mean().item())
    assert 0 < result.anchors < result.reachable < 1
    mean = torch.stack([torch.stack(of_group).mean() for of_group in spreads]).mean()
    assert result.spread == pytest.approx(mean.item())


def test_a_model_without_ace_rpe_has_no_path_figures(model_folder, scene_shards, tmp_path):
    loaded = vlp.load(model_folder)
    with_paths = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    assert "have a path" in with_paths.table().text()
    loaded.model.config = loaded.model.config.model_copy(
        update={"cross": loaded.model.config.cross.model_copy(update={"position": ()})}
    )
    without = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    assert without.paths is None
    assert without.kinds == with_paths.kinds
    assert "have a path" not in without.table().text()


def test_no_anchor_at_all_is_no_figure(model_folder, scene_shards, tmp_path):
    loaded = vlp.load(model_folder)
    loaded.model.anchor_threshold.fill_(2.0)
    result = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    assert result.kinds["colour"].anchors is None
    written = json.loads((result.save(tmp_path) / "pointing.json").read_text())
    assert written["kinds"]["colour"]["anchors"] is None
    assert written["kinds"]["shape"]["words"] == result.kinds["shape"].words
    assert "bar: some object" in (tmp_path / "pointing.md").read_text()


def test_other_data_is_refused(model_folder, tmp_path):
    with ShardWriter(tmp_path / "dogs") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(caption="a dog"))
    with pytest.raises(EvaluationError, match="do not know which word names what"):
        evaluate_pointing(vlp.load(model_folder), [tmp_path / "dogs"])


def test_a_word_of_several_boxes_hits_any_of_them():
    sample = two_objects()
    words = [
        {**sample.annotation.words[0].model_dump(), "kind": "objects", "others": [list(RIGHT)]}
    ]
    several = Annotation(captions=sample.captions, words=words)
    cosine = np.zeros((1, 16, 7), np.float32)
    cosine[0, 15, 1:3] = 1
    (word,) = score_words(0, several, SIZE, PIECES, cosine, np.zeros((1, 16, 7), int), (4, 4))
    assert (KINDS[word.kind], word.hit, word.share) == ("objects", True, 5 / 16)
    assert word.bar == 1  # both objects are meant


def write_captions(folder, captions, number):
    """Two words of caption `number`; the same image and boxes each time."""
    sample = two_objects()
    words = [word.model_copy(update={"caption": number}) for word in sample.annotation.words]
    with ShardWriter(folder) as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(captions=captions, words=words))
    return folder


def test_blank_captions_are_not_counted(model_folder, tmp_path):
    loaded, said = vlp.load(model_folder), "a red square above a blue star"
    plain = write_captions(tmp_path / "plain", [said, "two dogs"], 0)
    blank = write_captions(tmp_path / "blank", [" ", said, "", "two dogs"], 1)
    found = [evaluate_pointing(loaded, [folder]).kinds for folder in (plain, blank)]
    assert found[0] == found[1]
    (sample,) = first_samples([blank], 1)
    assert [word.caption for word in named_words(sample.annotation)] == [0] * 4
    assert sample.annotation.captions == sample.captions


@pytest.mark.parametrize("number", [0, 2])
def test_a_word_of_a_caption_that_is_blank_or_not_there_is_a_bad_annotation(
    model_folder, tmp_path, number
):
    folder = write_captions(tmp_path / "bad", [" ", "a red square"], number)
    with pytest.raises(EvaluationError, match=r"'bad annotation': 1"):
        evaluate_pointing(vlp.load(model_folder), [folder])
