from __future__ import annotations

import numpy as np
import pytest

from vlp.scenes.render import cover_box, render
from vlp.scenes.sample import PALETTE, sample_scene


def _changed(scene) -> np.ndarray:
    pixels = np.asarray(render(scene)).astype(int)
    return np.abs(pixels - np.array(scene.background)).max(axis=-1) > 8


@pytest.mark.parametrize("size", [64, 96])
def test_boxes_are_tight_around_their_objects(size):
    for index in range(40):
        scene = sample_scene(0, index, image_size=size)
        changed = _changed(scene)
        for obj in scene.objects:
            x, y, width, height = obj.box
            left, top = int(x), int(y)
            right, bottom = int(np.ceil(x + width)), int(np.ceil(y + height))
            rows, columns = np.nonzero(changed[top:bottom, left:right])
            # The point of a star or triangle fades out within its last pixel.
            assert columns.min() <= 1
            assert rows.min() <= 1
            assert columns.max() >= right - left - 2
            assert rows.max() >= bottom - top - 2
            changed[top:bottom, left:right] = False
        assert not changed.any()


def test_objects_have_the_colour_they_are_called():
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
    bare, covered = (
        np.asarray(render(each)) for each in (scene, scene._replace(cover="bottom right"))
    )
    x, y, width, height = cover_box("bottom right", 64)
    assert (x + width, y + height) == pytest.approx((64, 64))
    changed = (bare != covered).any(axis=-1)
    assert changed[44:, 44:].all()
    assert not changed[:42].any()
    assert not changed[:, :42].any()
