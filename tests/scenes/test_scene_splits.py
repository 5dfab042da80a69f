from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from vlp.scenes.negatives import SWAP_KINDS, swap_pair
from vlp.scenes.sample import sample_scene
from vlp.scenes.splits import content, held_out_pairs, split_of, swap_family

UNSEEN = {
    ("horizontal", frozenset({"circle", "star"})),
    ("vertical", frozenset({"square", "triangle"})),
    ("vertical", frozenset({"cross", "star"})),
}


def _families(scene) -> set:
    """Direction and shapes of each pair, straight from the boxes."""
    found = set()
    for one, other in combinations(scene.objects, 2):
        right = abs(other.box[0] + other.box[2] / 2 - one.box[0] - one.box[2] / 2)
        down = abs(other.box[1] + other.box[3] / 2 - one.box[1] - one.box[3] / 2)
        direction = "horizontal" if right >= down else "vertical"
        found.add((direction, frozenset({one.shape, other.shape})))
    return found


def test_training_never_shows_the_unseen_relations() -> None:
    for index in range(400):
        assert not _families(sample_scene(index % 3, index)) & UNSEEN
    for index in range(60):
        assert _families(sample_scene(0, index, "unseen")) & UNSEEN


def test_swapping_a_pair_stays_in_its_family() -> None:
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


def test_contents_of_train_and_val_never_meet_whatever_the_seeds() -> None:
    train = {content(sample_scene(seed, index)) for seed in (0, 1) for index in range(800)}
    val = {content(sample_scene(seed, index, "val")) for seed in (0, 7) for index in range(200)}
    assert not train & val


def test_contents_do_not_depend_on_the_order_of_objects() -> None:
    for index in range(50):
        scene = sample_scene(0, index)
        turned = scene._replace(objects=scene.objects[::-1], tints=scene.tints[::-1])
        assert content(turned) == content(scene)
        assert split_of(turned) == split_of(scene)


@pytest.mark.parametrize("split", ["swaps", "unseen"])
def test_held_out_splits_have_their_pairs(split) -> None:
    for index in range(40):
        scene = sample_scene(2, index, split)
        assert len(scene.objects) >= 2
        assert held_out_pairs(scene, split)
