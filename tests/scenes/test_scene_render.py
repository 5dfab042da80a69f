from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vlp.scenes.graph import SHAPES
from vlp.scenes.render import cover_box, encode_png, outline, render
from vlp.scenes.sample import PALETTE, sample_scene


def _changed(scene) -> np.ndarray:
    pixels = np.asarray(render(scene)).astype(int)
    return np.abs(pixels - np.array(scene.background)).max(axis=-1) > 8


@pytest.mark.parametrize("size", [64, 96])
def test_boxes_are_tight_around_their_objects(size) -> None:
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


def test_objects_have_the_colour_they_are_called() -> None:
    names, values = list(PALETTE), np.array(list(PALETTE.values()))
    for index in range(40):
        scene = sample_scene(5, index)
        pixels = np.asarray(render(scene)).astype(int)
        for obj in scene.objects:
            x, y, width, height = obj.box
            middle = pixels[int(y + height / 2), int(x + width / 2)]  # inside every shape
            assert names[np.abs(values - middle).sum(axis=1).argmin()] == obj.colour


def test_shapes_cover_different_shares_of_their_box(make_scene) -> None:
    shares = []
    for shape in SHAPES:
        scene = make_scene(f"large red {shape} centre")
        x, y, width, height = (int(value) for value in scene.objects[0].box)
        pixels = np.asarray(render(scene)).astype(float)[y : y + height, x : x + width]
        ground, ink = np.array(scene.background), np.array(scene.tints[0])
        coverage = (pixels - ground) @ (ink - ground) / ((ink - ground) @ (ink - ground))
        shares.append(coverage.mean())
    expected = [np.pi / 4, 1, 0.5, 5 / 9]  # circle, square, triangle, cross
    assert shares[:4] == pytest.approx(expected, abs=0.03)
    assert 0.25 < shares[4] < 0.45


def test_outlines_touch_all_four_sides() -> None:
    for shape in SHAPES[1:]:
        points = np.array(outline(shape, (3, 5, 20, 10)))
        assert points.min(axis=0) == pytest.approx([3, 5])
        assert points.max(axis=0) == pytest.approx([23, 15])
    with pytest.raises(ValueError, match="no polygon"):
        outline("circle", (0, 0, 1, 1))


def test_a_curtain_hides_its_place_only(make_scene) -> None:
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


def test_png_keeps_every_pixel() -> None:
    image = render(sample_scene(0, 1))
    assert image.size == (64, 64)
    again = Image.open(io.BytesIO(encode_png(image)))
    assert np.array_equal(np.asarray(again), np.asarray(image))
