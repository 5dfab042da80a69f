from itertools import combinations, permutations

import numpy as np
import pytest
from boxes_by_hand import centre_distance
from hypothesis import given
from hypothesis import strategies as st

from vlp.scenes.captions import captions
from vlp.scenes.graph import (
    PLACES,
    Meaning,
    Obj,
    ObjectPhrase,
    Scene,
    holds,
    relation_holds,
    subjects,
    truth,
)
from vlp.scenes.negatives import SWAP_KINDS, swap_pair
from vlp.scenes.render import cover_box, render
from vlp.scenes.sample import (
    PALETTE,
    SPLITS,
    ambiguous_share,
    content,
    distinct_scenes,
    held_out_pairs,
    sample_scene,
    split_of,
    swap_family,
)

indices = st.integers(0, 10**9)


@given(indices, st.integers(0, 10**6), st.sampled_from(SPLITS))
def test_a_scene_is_a_function_of_its_arguments(index, seed, split):
    scene = sample_scene(seed, index, split)
    assert scene == sample_scene(seed, index, split)
    assert scene._replace(key="") != sample_scene(seed, index + 1, split)._replace(key="")
    assert scene._replace(key="") != sample_scene(seed + 1, index, split)._replace(key="")
    assert split_of(scene) == split


@given(indices, st.sampled_from([16, 33, 64, 96, 224]))
def test_objects_lie_apart_inside_the_image_and_their_place(index, size):
    scene = sample_scene(1, index, image_size=size)
    for obj in scene.objects:
        x, y, width, height = obj.box
        assert min(x, y) >= 0
        assert max(x + width, y + height) <= size
        column, row = int((x + width / 2) * 3 / size), int((y + height / 2) * 3 / size)
        assert PLACES[3 * row + column] == obj.place
    for left, right in combinations(scene.objects, 2):
        ends = [min(left.box[a] + left.box[a + 2], right.box[a] + right.box[a + 2]) for a in (0, 1)]
        assert not all(ends[a] > max(left.box[a], right.box[a]) for a in (0, 1))
        assert left.place != right.place
        assert (left.colour, left.shape) != (right.colour, right.shape)


def _share(scenes):
    fits = [
        any(holds(caption.meaning, other, lenient=True) for other in scenes if other is not scene)
        for scene in scenes
        for caption in captions(scene)
    ]
    return sum(fits) / len(fits)


def test_no_caption_fits_a_second_scene():
    scenes = list(distinct_scenes(0, 96))
    assert _share(scenes) == 0
    assert ambiguous_share(scenes) == 0
    assert {split_of(scene) for scene in scenes} == {"val"}


def test_redrawing_keeps_the_number_of_objects_and_the_prefix():
    scenes = list(distinct_scenes(0, 64))
    assert scenes[:20] == list(distinct_scenes(0, 20))
    for index, scene in enumerate(scenes):
        assert len(scene.objects) == len(sample_scene(0, index, "val").objects)


UNSEEN = {
    ("horizontal", frozenset({"circle", "star"})),
    ("vertical", frozenset({"square", "triangle"})),
    ("vertical", frozenset({"cross", "star"})),
}


def _families(scene):
    families = set()
    for first, second in combinations(scene.objects, 2):
        right, down = (centre_distance(first.box, words, second.box) for words in ("left", "above"))
        direction = "horizontal" if abs(right) >= abs(down) else "vertical"
        families.add((direction, frozenset({first.shape, second.shape})))
    return families


def test_training_never_shows_the_unseen_relations():
    for index in range(400):
        assert not _families(sample_scene(index % 3, index)) & UNSEEN
    for index in range(60):
        assert _families(sample_scene(0, index, "unseen")) & UNSEEN


def test_swaps_keep_the_family():
    rng = np.random.default_rng(0)
    swapped = 0
    for index in range(200):
        scene = sample_scene(0, index, "swaps")
        for pair in held_out_pairs(scene, "swaps"):
            for kind in SWAP_KINDS[1:]:  # `place` is about one object
                result = swap_pair(scene, kind, pair, rng)
                if result is not None:
                    swapped += 1
                    assert swap_family(result.twin, *pair) == swap_family(scene, *pair)
                    # So no twin of a held-out caption was ever trained on.
                    assert split_of(result.twin) in ("swaps", "unseen")
    assert swapped > 200


def test_contents_of_train_and_val_never_meet_whatever_the_seeds():
    train = {content(sample_scene(seed, index)) for seed in (0, 1) for index in range(800)}
    scenes = [sample_scene(seed, index, "val") for seed in (0, 7) for index in range(200)]
    assert not train & {content(scene) for scene in scenes}
    for scene in scenes[:50]:
        turned = scene._replace(objects=scene.objects[::-1], tints=scene.tints[::-1])
        assert (content(turned), split_of(turned)) == (content(scene), "val")


positions = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 24))


def _scene(first, second):
    objects = tuple(
        Obj("circle", "red", "small", (x, y, w, w), "top") for x, y, w in (first, second)
    )
    return Scene("two", 64, objects, (0, 0, 0), ((0, 0, 0),) * 2)


@given(positions, positions)
def test_relations_are_read_off_the_centres(first, second):
    scene = _scene(first, second)
    for relation in ("left", "right", "above", "below"):
        distance = centre_distance(scene.objects[0].box, relation, scene.objects[1].box)
        assert relation_holds(scene, 0, relation, 1) == (distance >= 8)
        assert relation_holds(scene, 0, relation, 1, lenient=True) == (distance > 0)


RED_CIRCLE = ObjectPhrase(shape="circle", colour="red")


def test_vague_claims_are_neither_true_nor_false(make_scene):
    scene = make_scene("small red circle top left")
    for place, value in (("top", None), ("left", None), ("bottom", False), ("top left", True)):
        assert truth(Meaning((ObjectPhrase(colour="red", place=place),)), scene) is value
    moved = make_scene("small red circle left", "small blue square right")
    red, blue = moved.objects
    # Nearly level: three pixels higher is neither 'above' nor surely not above.
    nearly = moved._replace(objects=(red, blue._replace(box=(46.0, 28.0, 14.0, 14.0))))
    meaning = Meaning((RED_CIRCLE, ObjectPhrase(shape="square")), ((0, "above", 1),))
    assert truth(meaning, nearly) is None


def before(scene, first, second, relation, lenient):
    distance = centre_distance(scene.objects[first].box, relation, scene.objects[second].box)
    return distance > 0 if lenient else distance >= 8


@pytest.mark.parametrize("lenient", [False, True])
def test_subjects_against_trying_every_assignment(lenient):
    answers = set()
    for index in range(60):
        scene = sample_scene(3, index)
        if len(scene.objects) < 3:
            continue
        obj = scene.objects[index % 3]
        for relation in ("left", "above"):
            nouns = (ObjectPhrase(), ObjectPhrase(size=obj.size), ObjectPhrase(colour=obj.colour))
            meaning = Meaning(nouns, ((0, relation, 1), (1, relation, 2)))
            expected = {
                a
                for a, b, c in permutations(range(3))
                if (scene.objects[b].size, scene.objects[c].colour) == (obj.size, obj.colour)
                and before(scene, a, b, relation, lenient)
                and before(scene, b, c, relation, lenient)
            }
            assert subjects(meaning, scene, lenient) == sorted(expected)
            answers.add(bool(expected))
    assert answers == {True, False}


@pytest.mark.parametrize("size", [64, 96])
def test_boxes_are_tight_around_their_objects(size):
    for index in range(40):
        scene = sample_scene(0, index, image_size=size)
        pixels = np.asarray(render(scene)).astype(int)
        changed = np.abs(pixels - np.array(scene.background)).max(axis=-1) > 8
        for obj in scene.objects:
            x, y, width, height = obj.box
            left, top = int(x), int(y)
            right, bottom = int(np.ceil(x + width)), int(np.ceil(y + height))
            rows, columns = np.nonzero(changed[top:bottom, left:right])
            # The point of a star or triangle fades out within its last pixel.
            assert max(columns.min(), rows.min()) <= 1
            assert columns.max() >= right - left - 2
            assert rows.max() >= bottom - top - 2
            changed[top:bottom, left:right] = False
        assert not changed.any()


def test_objects_have_the_colour_of_their_name():
    names, values = list(PALETTE), np.array(list(PALETTE.values()))
    for index in range(40):
        scene = sample_scene(5, index)
        pixels = np.asarray(render(scene)).astype(int)
        for obj in scene.objects:
            x, y, width, height = obj.box
            middle = pixels[int(y + height / 2), int(x + width / 2)]  # inside every shape
            assert names[np.abs(values - middle).sum(axis=1).argmin()] == obj.colour


def test_a_curtain_hides_its_place_only(make_scene):
    scene = make_scene("small red circle top left")
    covered = np.asarray(render(scene._replace(cover="bottom right")))
    x, y, width, height = cover_box("bottom right", 64)
    assert (x + width, y + height) == pytest.approx((64, 64))
    changed = (np.asarray(render(scene)) != covered).any(axis=-1)
    assert changed[44:, 44:].all()
    assert changed[42:, 42:].sum() == changed.sum()
