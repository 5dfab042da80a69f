from __future__ import annotations

from collections import Counter

import numpy as np

from vlp.scenes.captions import PLACE_WORDS
from vlp.scenes.graph import ObjectPhrase
from vlp.scenes.render import render
from vlp.scenes.snli_ve import LABELS, hides_nothing, label_of, sample_triple


def test_labels_follow_from_what_can_be_seen():
    labels = Counter()
    for index in range(200):
        triple = sample_triple(0, index)
        scene = triple.scene
        # The longest, since 'at the bottom in the middle' ends in another place's words.
        where = max(
            (each for words in PLACE_WORDS.values() for each in words),
            key=lambda words: len(words) * triple.hypothesis.endswith(" " + words),
        )
        place = next(name for name, words in PLACE_WORDS.items() if where in words)
        said = set(triple.hypothesis.split()[3:5]) - {"object", "at", "in", "on"}
        visible = [obj for obj in scene.objects if obj.place == place]
        if scene.cover == place:
            assert triple.label == "neutral"
        elif visible and said <= {visible[0].colour, visible[0].shape}:
            assert triple.label == "entailment"
        else:
            assert triple.label == "contradiction"
        labels[triple.label] += 1
        assert scene.cover is not None
    assert set(labels) == set(LABELS)
    assert min(labels.values()) > 40


def test_the_curtain_leaves_every_object_in_view():
    for index in range(25):
        scene = sample_triple(1, index).scene
        bare, covered = (np.asarray(render(each)) for each in (scene._replace(cover=None), scene))
        for obj in scene.objects:
            x, y, width, height = (int(value) for value in obj.box)
            seen = covered[y : y + height, x : x + width]
            assert np.array_equal(seen, bare[y : y + height, x : x + width])
        assert not np.array_equal(bare, covered)


def test_label_of(make_scene):
    scene = make_scene("small red circle top left")._replace(cover="bottom")
    assert label_of(ObjectPhrase(colour="red", place="top left"), scene) == "entailment"
    assert label_of(ObjectPhrase(colour="blue", place="top left"), scene) == "contradiction"
    assert label_of(ObjectPhrase(colour="red", place="centre"), scene) == "contradiction"
    assert label_of(ObjectPhrase(colour="red", place="bottom"), scene) == "neutral"
    assert label_of(ObjectPhrase(colour="red", place="top"), scene) is None
    corner = scene._replace(cover="bottom right")
    assert label_of(ObjectPhrase(colour="red", place="bottom"), corner) is None
    assert label_of(ObjectPhrase(colour="red", place="bottom left"), corner) == "contradiction"
    assert not hides_nothing(scene, "top left")
    assert hides_nothing(scene, "bottom right")
