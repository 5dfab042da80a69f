from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval_stub import png

import vlp
from evaluation.anchors import AnchorMap, WordMap, anchor_maps
from evaluation.pictures import draw_anchor_maps
from evaluation.samples import EvaluationError, Samples
from vlp.data.schema import Annotation
from vlp.data.shards import ShardWriter


def test_heat_is_the_share_of_groups_at_the_threshold(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    loaded.model.anchor_threshold.fill_(0.1)
    maps = anchor_maps(loaded, [scene_shards], count=3)
    assert len(maps) == 3
    sample = Samples([scene_shards]).read(1)
    row = maps[1]
    assert row.caption == sample.captions[0]
    # The corpus' words are whole pieces of its own vocabulary, so token = word + 1.
    assert [word.word for word in row.words] == loaded.text.words(row.caption)[1:-1]
    with torch.no_grad():
        image = loaded.model.encode_image(loaded.preprocess(sample.image)[None]).tokens[0]
        text = loaded.model.encode_text(*loaded.text([row.caption])).tokens[0]
    seen = set()
    for place, word in enumerate(row.words):
        assert word.heat.shape == (4, 4)
        for patch in range(16):
            share = 0.0
            for part in (slice(0, 4), slice(4, 8)):  # two groups of four channels
                a, b = image[patch, part], text[place + 1, part]
                share += float(a @ b / (a.norm() * b.norm()) >= 0.1) / 2
            assert word.heat[patch // 4, patch % 4] == share
            seen.add(share)
    assert seen == {0.0, 0.5, 1.0}


def test_words_that_name_an_object_carry_its_box(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    row = anchor_maps(loaded, [scene_shards], count=1)[0]
    sample = Samples([scene_shards]).read(0)
    named = {
        entry["index"]: tuple(entry["box"])
        for entry in sample.annotation.scene["words"]
        if entry["caption"] == 0
    }
    assert {place: word.box for place, word in enumerate(row.words) if word.box} == named


def test_pictures_without_a_scene_are_drawn_too(model_folder, tmp_path):
    with ShardWriter(tmp_path / "dogs") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation(caption="a circle"))
    maps = anchor_maps(vlp.load(model_folder), [tmp_path / "dogs"])
    assert len(maps) == 1
    assert all(word.box is None for word in maps[0].words)


def test_the_picture_shows_heat_where_it_is(tmp_path):
    heat = np.zeros((2, 2), np.float32)
    none = WordMap("a", heat)
    full = WordMap("b", heat + 1, box=(1, 1, 4, 4))
    image = Image.new("RGB", (16, 16), (128, 128, 128))
    path = draw_anchor_maps(
        [AnchorMap(image, "a b", [none, full], 0.5)], tmp_path / "new" / "a.png"
    )
    drawn = np.asarray(Image.open(path).convert("RGB"), dtype=int)
    assert drawn.shape[1] > drawn.shape[0] > 100
    # The hottest colour of the map over pale grey, and only in one panel of three.
    warm = (drawn[..., 0] > 200) & (drawn[..., 2] < 200)
    columns = np.flatnonzero(warm[:, : int(0.9 * drawn.shape[1])].any(axis=0))
    assert columns.size > 50
    assert np.ptp(columns) < 0.35 * drawn.shape[1]


def test_count_and_empty_folders_are_checked(model_folder, scene_shards, tmp_path):
    loaded = vlp.load(model_folder)
    with pytest.raises(EvaluationError, match="at least one"):
        anchor_maps(loaded, [scene_shards], count=0)
    with ShardWriter(tmp_path / "blank") as writer:
        writer.write("0", png((1, 2, 3)), "png", Annotation())
    with pytest.raises(EvaluationError, match="no usable sample"):
        anchor_maps(loaded, [tmp_path / "blank"])
