from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vlp
from evaluation.__main__ import main
from evaluation.grounding.grounding import grad_cam
from evaluation.options import EvalOptions
from evaluation.probes.word_pointing import (
    CONTROLS,
    centre_map,
    evaluate_pointing,
    last_attention,
    mean_box_shares,
    pointer_figures,
    share_of_best,
    word_maps,
)
from evaluation.results import saved_figures
from evaluation.samples import Samples
from vlp.data.text.word_boxes import named_words, patches_in_box, word_positions
from vlp.models.cross_encoder import PairIndices
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import anchor_distance, anchor_path, group_similarity


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
    [(1, {}), (5, {"reg_tokens": 4}), (0, {"class_token": False, "global_pool": "avg"})],
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
    assert len(seen) == 1


def test_an_encoder_without_attention_gives_no_map():
    with last_attention(nn.Linear(2, 2), (1, 1)) as seen:
        pass
    assert seen == []


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
        field = model.anchors(image, texts, PairIndices(places, torch.zeros_like(places)))
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


def slow_accuracy(loaded, shards, threshold):
    """Anchors and the centre, one word at a time."""
    hits = {"anchors": [], "centre": []}
    samples, grid = Samples([shards]), loaded.model.config.image.grid
    for sample in map(samples.read, range(len(samples))):
        for word in named_words(sample.annotation):
            if word.kind != "colour":
                continue
            caption = sample.captions[word.caption]
            with torch.no_grad():
                image = loaded.model.encode_image(loaded.preprocess(sample.image)[None])
                text = loaded.model.encode_text(*loaded.text([caption]))
            groups = group_similarity(image.tokens, text.tokens, 2)[0] >= threshold
            places = list(word_positions(loaded.text.words(caption))[word.position])
            counts = groups.sum(-1).numpy()[:, places].mean(1)
            own = patches_in_box(word.box, grid, sample.image.size)
            for name, scores in (("anchors", counts), ("centre", centre_map(grid))):
                best = np.flatnonzero(scores == scores.max())
                hits[name].append(np.mean([own[patch] for patch in best]))
    return {name: np.mean(found) for name, found in hits.items()}


def test_controls_stand_beside_what_is_measured_without_them(two_layers, scene_shards, tmp_path):
    plain = evaluate_pointing(two_layers, [scene_shards], options=EvalOptions(batch=8))
    result = evaluate_pointing(
        two_layers, [scene_shards], options=EvalOptions(batch=8), controls=True
    )
    expected = slow_accuracy(two_layers, scene_shards, 0.3)
    for kind, figures in result.kinds.items():
        assert figures._replace(controls=None) == plain.kinds[kind]
        assert set(CONTROLS) < set(figures.controls)
        assert any(name.startswith("Grad-CAM - ") for name in figures.controls)
    controls = result.kinds["colour"].controls
    assert {name: controls[name].value for name in expected} == pytest.approx(expected)
    assert controls["cosine"].value == pytest.approx(plain.kinds["colour"].pointing.value)
    written = json.loads((result.save(tmp_path) / "pointing.json").read_text())
    assert saved_figures(written).figures["shape words by centre"].chance < 0.2
    assert "control: image attention" in (tmp_path / "pointing.md").read_text()
    assert "controls" not in plain.to_json()["kinds"]["colour"]


def test_a_single_cross_modal_layer_has_no_gradcam_of_words(model_folder, scene_shards, capsys):
    arguments = ["pointing", "--model", str(model_folder), "--shards", str(scene_shards)]
    assert main([*arguments, "--limit", "6", "--controls"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Grad-CAM"))
    assert row == "Grad-CAM"
