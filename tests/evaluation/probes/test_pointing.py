import json

import numpy as np
import pytest
import torch
from made_shards import encoded
from PIL import Image
from retrieval_stub import png
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vlp
from evaluation.__main__ import main
from evaluation.grounding.grounding import grad_cam
from evaluation.options import EvalOptions
from evaluation.probes.anchor_maps import first_samples
from evaluation.probes.word_pointing import (
    CONTROLS,
    KINDS,
    centre_map,
    evaluate_pointing,
    last_attention,
    mean_box_shares,
    pointer_figures,
    score_words,
    share_of_best,
    word_maps,
)
from evaluation.results import saved_figures
from evaluation.samples import CaptionedSample, EvaluationError, Samples
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.word_boxes import patches_in_box, token_positions, words_with_boxes
from vlp.models.cross_encoder import PairIndices
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import anchor_distance, anchor_path, group_similarity

# A 4 x 4 grid of 8 px patches; two objects of four and one patches.
SIZE = (32, 32)
LEFT, RIGHT = (0, 0, 16, 16), (24, 24, 8, 8)
PIECES = [["[CLS]", "re", "##d", "square", "blue", "star", "[SEP]"]]


def two_objects():
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
    return score_words(0, two_objects().annotation, SIZE, pieces, cosine, anchors, (4, 4), {})


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
    assert [word.some_object for word in (red, blue)] == [0.5, 0.5]
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


def slow_shares(loaded, shards, threshold=0.3):
    shares = {"cosine": {}, "anchors": {}, "centre": {}}
    samples, grid = Samples([shards]), loaded.model.config.image.grid
    for sample in map(samples.read, range(len(samples))):
        for word in words_with_boxes(sample.annotation):
            caption = sample.captions[word.caption]
            with torch.no_grad():
                image = loaded.model.encode_image(loaded.preprocess(sample.image)[None])
                text = loaded.model.encode_text(*loaded.text([caption]))
            places = list(token_positions(loaded.text.pieces(caption))[word.index])
            anchors = group_similarity(image.tokens, text.tokens, 2)[0] >= threshold
            scores = {"cosine": image.tokens[0] @ text.tokens[0, places].mean(0)}
            scores["anchors"] = anchors.sum(-1)[:, places].double().mean(1)
            scores["centre"] = centre_map(grid)
            own = patches_in_box(word.box, grid, sample.image.size)
            for name, values in scores.items():
                best = np.asarray(values == values.max())
                shares[name].setdefault(word.kind, []).append(own[best].mean())
    return {
        name: {kind: np.mean(values) for kind, values in kinds.items()}
        for name, kinds in shares.items()
    }


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
    assert result["anchors"] == pytest.approx(torch.cat(passing, 2).double().mean().item())
    assert result["reachable"] == pytest.approx(torch.cat(reached, 2).double().mean().item())
    assert 0 < result["anchors"] < result["reachable"] < 1
    mean = torch.stack([torch.stack(of_group).mean() for of_group in spreads]).mean()
    assert result["spread"] == pytest.approx(mean.item())


def test_without_ace_rpe_or_anchors_there_are_no_such_figures(model_folder, scene_shards, tmp_path):
    loaded = vlp.load(model_folder)
    with_paths = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    assert "have a path" in with_paths.table().text()
    cross = loaded.model.config.cross.model_copy(update={"position": ()})
    loaded.model.config = loaded.model.config.model_copy(update={"cross": cross})
    without = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    assert without.paths == {}
    assert without.kinds == with_paths.kinds
    assert "have a path" not in without.table().text()
    loaded.model.anchor_threshold.fill_(2.0)
    result = evaluate_pointing(loaded, [scene_shards], options=EvalOptions(limit=4))
    written = json.loads((result.save(tmp_path) / "pointing.json").read_text())
    assert written["kinds"]["colour"]["anchors"] is None


def test_other_data_is_refused(model_folder, tmp_path):
    with ShardWriter(tmp_path / "dogs") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(caption="a dog"))
    with pytest.raises(EvaluationError, match="have no boxes of words"):
        evaluate_pointing(vlp.load(model_folder), [tmp_path / "dogs"])


def test_a_word_of_several_boxes_hits_any_of_them():
    sample = two_objects()
    word = sample.annotation.words[0].model_dump()
    words = [{**word, "kind": "objects", "others": [list(RIGHT)]}]
    several = Annotation(captions=sample.captions, words=words)
    cosine = np.zeros((1, 16, 7), np.float32)
    cosine[0, 15, 1:3] = 1
    (word,) = score_words(0, several, SIZE, PIECES, cosine, np.zeros((1, 16, 7), int), (4, 4), {})
    assert (KINDS[word.kind], word.hit, word.share) == ("objects", True, 5 / 16)
    assert word.some_object == 1  # both objects are meant


def write_captions(folder, captions, number, size=SIZE):
    sample = two_objects()
    words = [word.model_copy(update={"caption": number}) for word in sample.annotation.words]
    with ShardWriter(folder) as writer:
        image = encoded(Image.new("RGB", size), "png")
        writer.write("0", image, "png", Annotation(captions=captions, words=words))
    return folder


def test_blank_captions_are_not_counted(model_folder, tmp_path):
    loaded, said = vlp.load(model_folder), "a red square above a blue star"
    plain = write_captions(tmp_path / "plain", [said, "two dogs"], 0)
    blank = write_captions(tmp_path / "blank", [" ", said, "", "two dogs"], 1)
    found = [evaluate_pointing(loaded, [folder]).kinds for folder in (plain, blank)]
    assert found[0] == found[1]
    (sample,) = first_samples([blank], 1)
    assert [word.caption for word in words_with_boxes(sample.annotation)] == [0] * 4
    assert sample.annotation.captions == sample.captions


@pytest.mark.parametrize(("number", "size"), [(0, SIZE), (2, SIZE), (1, (16, 16))])
def test_words_without_a_caption_or_a_box_in_the_image_are_bad(
    model_folder, tmp_path, number, size
):
    folder = write_captions(tmp_path / "bad", [" ", "a red square"], number, size)
    with pytest.raises(EvaluationError, match="1 bad annotation"):
        evaluate_pointing(vlp.load(model_folder), [folder])


def slow_attention(vit, pixels, prefix):
    """[CLS]'s row of the last block's softmax, from its inputs, or the mean of all rows."""
    inputs = []
    hook = vit.blocks[-1].attn.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        vit.forward_features(pixels)
    hook.remove()
    attention, (x,) = vit.blocks[-1].attn, inputs
    qkv = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))
    found = []
    for query, key, _ in (row.unbind(1) for row in qkv):  # (T, heads, channels)
        weights = torch.einsum("thc,shc->hts", query, key * attention.scale).softmax(-1)
        asked = weights[:, 0] if prefix else weights.mean(1)
        found.append(asked.mean(0)[prefix:])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("prefix", "options"),
    [(5, {"reg_tokens": 4}), (0, {"class_token": False, "global_pool": "avg"})],
)
@pytest.mark.parametrize("times", [1, 2])
def test_attention_of_the_last_block_is_that_of_its_queries_and_keys(prefix, options, times):
    vit = VisionTransformer(24, 4, embed_dim=16, depth=2, num_heads=2, num_classes=0, **options)
    vit.eval()
    for parameter in vit.parameters():  # timm's start is nearly uniform attention
        nn.init.normal_(parameter, std=0.5)
    pixels = torch.randn(3, 3, 24, 24)
    expected = slow_attention(vit, pixels, prefix).view(3, 6 // times, times, 6 // times, times)
    fused = [block.attn.fused_attn for block in vit.blocks]
    with last_attention(nn.Sequential(vit), (6 // times, 6 // times)) as seen, torch.no_grad():
        vit.forward_features(pixels)
    torch.testing.assert_close(seen[0], expected.mean((2, 4)).flatten(1))
    assert [block.attn.fused_attn for block in vit.blocks] == fused
    with torch.no_grad():
        vit.forward_features(pixels)
    assert len(seen) == 1, "the hook is gone"
    with last_attention(nn.Linear(2, 2), (1, 1)) as nothing:
        assert nothing == []


def test_equal_maxima_share_the_point():
    own = np.array([True, True, False, False])
    assert share_of_best(np.array([0.0, 2.0, 2.0, 1.0]), own) == 0.5
    assert share_of_best(np.array([3.0, 2.0, 2.0, 1.0]), own) == 1
    assert share_of_best(np.zeros(4), own) == own.mean()
    assert share_of_best(np.array([np.nan, 1.0, 0.0, 0.0]), own) == 1
    assert share_of_best(np.full(4, np.nan), own) == 0


def test_the_centre_is_the_patches_in_the_middle():
    assert np.flatnonzero(centre_map((3, 5)) == centre_map((3, 5)).max()).tolist() == [7]
    assert np.flatnonzero(centre_map((2, 4)) == centre_map((2, 4)).max()).tolist() == [1, 2, 5, 6]


def test_the_mean_box_is_of_the_other_images():
    generator = np.random.default_rng(0)
    masks = list(generator.random((12, 6)) < 0.4)
    scenes = [4, 4, 4, 9, 9, 1, 1, 1, 1, 7, 7, 4]
    expected = []
    for scene, mask in zip(scenes, masks):
        rest = [
            np.mean([m for s, m in zip(scenes, masks) if s == other], axis=0)
            for other in {*scenes} - {scene}
        ]
        # Sums of thirds and quarters may differ in the last digit.
        expected.append(share_of_best(np.mean(rest, axis=0).round(12), mask))
    found = mean_box_shares(masks, scenes)
    assert found == pytest.approx(expected)
    assert mean_box_shares(masks[:1], [3]) == pytest.approx([masks[0].mean()])


def test_pointers_are_held_against_the_best_control():
    right = {"cosine": 1.0, "centre": 0.5, "mean box": 0.25}
    pointed = [right, {**right, "cosine": 0.5}] * 5
    figures = pointer_figures(pointed, 0.2, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 50)
    assert list(figures) == ["cosine", "mean box", "centre", "cosine - centre"]
    assert figures["cosine"].value == 0.75
    assert figures["cosine"].chance == 0.2
    assert figures["cosine - centre"].value == 0.25


@pytest.fixture
def two_layers(model_folder):
    """The model with a second cross-modal layer, so that words have Grad-CAM maps."""
    loaded = vlp.load(model_folder)
    cross = loaded.model.config.cross.model_copy(update={"layers": 2})
    model = VLPModel(loaded.model.config.model_copy(update={"cross": cross})).eval()
    for parameter in model.cross_encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.anchor_threshold.fill_(0.3)
    return loaded._replace(model=model)


def test_word_maps_equal_those_of_single_captions(two_layers, scene_shards):
    model, sample = two_layers.model, Samples([scene_shards]).read(0)
    with torch.no_grad():
        image = model.encode_image(two_layers.preprocess(sample.image)[None])
        texts = model.encode_text(*two_layers.text(sample.captions))
        places = torch.arange(len(sample.captions))
        field = model.anchor_paths(image, texts, PairIndices(places, torch.zeros_like(places)))
        maps = word_maps(model, image, texts, field)
    assert set(maps) == {"path", "Grad-CAM"}
    for number in range(len(sample.captions)):
        text = texts.select(torch.tensor([number]))
        heat = grad_cam(model, image, text, 0)[0].flatten(1).T
        np.testing.assert_allclose(maps["Grad-CAM"][number], heat, atol=1e-6)
        groups = group_similarity(image.tokens, text.tokens, model.config.cross.anchor.groups)
        distance = anchor_distance(groups, 0.3)
        path, reachable = anchor_path(distance, model.config.image.grid, text.word_mask)
        near = np.where(reachable[0], 1 / np.where(reachable[0], path[0], 1), 0).mean(-1)
        np.testing.assert_allclose(maps["path"][number], near, rtol=1e-5)


def test_controls_stand_beside_what_is_measured_without_them(two_layers, scene_shards, tmp_path):
    plain = evaluate_pointing(two_layers, [scene_shards], EvalOptions(batch=8))
    result = evaluate_pointing(two_layers, [scene_shards], EvalOptions(batch=8), controls=True)
    expected = slow_shares(two_layers, scene_shards)
    for kind, figures in result.kinds.items():
        assert figures._replace(controls=None) == plain.kinds[kind]
        assert set(CONTROLS) < set(figures.controls)
        assert any(name.startswith("Grad-CAM - ") for name in figures.controls)
    for kind in ("colour", "shape"):
        controls = result.kinds[kind].controls
        for name, kinds in expected.items():
            assert controls[name].value == pytest.approx(kinds[kind])
        assert controls["cosine"].value == pytest.approx(plain.kinds[kind].pointing.value)
        # One to three objects: the bar lies between a third and one, well above chance.
        assert 0 < plain.kinds[kind].pointing.chance < 0.2 < 1 / 3 < plain.kinds[kind].some_object
        assert plain.kinds[kind].any_object.value >= plain.kinds[kind].pointing.value
    written = json.loads((result.save(tmp_path) / "pointing.json").read_text())
    assert saved_figures(written).figures["shape words by centre"].chance < 0.2
    assert "control: image attention" in (tmp_path / "pointing.md").read_text()
    assert "controls" not in plain.to_json()["kinds"]["colour"]


def test_a_single_cross_modal_layer_has_no_gradcam_of_words(model_folder, scene_shards, capsys):
    arguments = ["pointing", "--model", str(model_folder), "--shards", str(scene_shards)]
    assert main([*arguments, "--limit", "6", "--controls"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Grad-CAM"))
    assert row == "Grad-CAM"
