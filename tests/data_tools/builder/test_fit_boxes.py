from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from raw_images import raw_image

from data_tools.builder.write_shard import CUT, OUTSIDE, Prepared, fit_boxes, prepare_image
from vlp.data.schema import Annotation, Expression, Word


def prepared(data: bytes) -> Prepared:
    return prepare_image(data, "it", None, 90)


def test_boxes_are_scaled_from_the_size_they_were_drawn_on() -> None:
    image = prepared(raw_image(1, (32, 16)))
    near, far = [10, 20, 30, 40], [400, 0, 9, 9]
    annotation = Annotation(
        boxes=[[10, 20, 30, 40]],
        proposals=[[0, 0, 320, 160]],
        expressions=[Expression(id="1", text="x", box=[160, 80, 160, 80])],
        words=[
            Word(caption=0, index=2, word="x", kind="object", box=[160, 0, 160, 40]),
            Word(caption=0, index=3, word="y", kind="objects", box=far, others=[near, far]),
            Word(caption=0, index=4, word="y", kind="objects", box=far, others=[far]),
        ],
    )
    fitted, lost = fit_boxes(annotation, image, (320, 160))
    assert fitted.boxes == [[1, 2, 3, 4]]
    assert fitted.proposals == [[0, 0, 32, 16]]
    assert fitted.expressions is not None
    assert fitted.expressions[0].box == [16, 8, 16, 8]
    assert fitted.words is not None
    assert [(word.box, word.others) for word in fitted.words] == [
        ([16, 0, 16, 4], None),
        ([1, 2, 3, 4], None),  # the only one of its boxes in the image
    ]
    assert lost == {OUTSIDE: ["word 0.3", "word 0.3", "word 0.4", "word 0.4"]}
    assert fit_boxes(Annotation(caption="a"), image, (9, 9))[0] == Annotation(caption="a")


@pytest.mark.parametrize(
    ("box", "kind", "kept"),
    [
        ([0.25, 0.5, 23.75, 15.5], None, [0.25, 0.5, 23.75, 15.5]),
        ([-1, -1, 26, 18], None, [0, 0, 24, 16]),
        ([-1.5, 0, 5, 5], CUT, [0, 0, 3.5, 5]),
        ([0, 0, 46, 5], CUT, [0, 0, 24, 5]),
        ([0, 0, 48, 5], OUTSIDE, None),
        ([20, 12, 6, 6], OUTSIDE, None),
        ([40, 3, 5, 5], OUTSIDE, None),
        ([3, 3, 0, 5], OUTSIDE, None),
        ([24.5, 0, 0.4, 5], OUTSIDE, None),
    ],
)
def test_boxes_that_stick_out(box: list[float], kind: str | None, kept: list[float] | None) -> None:
    image = prepared(raw_image(1))
    annotation = Annotation(
        boxes=[[1, 1, 2, 2], box],
        expressions=[Expression(id="e7", text="x", box=box)],
        words=[Word(caption=1, index=2, word="x", kind="object", box=box)],
    )
    fitted, faults = fit_boxes(annotation, image, None)
    assert fitted.boxes == [[1, 1, 2, 2]] + ([] if kept is None else [kept])
    assert [one.box for one in fitted.expressions or []] == ([] if kept is None else [kept])
    assert [one.box for one in fitted.words or []] == ([] if kept is None else [kept])
    assert faults == ({} if kind is None else {kind: ["expression e7", "word 1.2", "boxes 1"]})


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("drawn_on", ["stored", "shown"])
def test_boxes_turn_with_the_image(orientation: int, drawn_on: str) -> None:
    """A bright box on black is found again, whichever of the two images it was drawn on."""
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[8:16, 48:72] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "jpeg", exif=exif, quality=95)
    image = prepared(stream.getvalue())
    bright = np.argwhere(np.asarray(Image.open(io.BytesIO(image.data)).convert("L")) > 128)
    (top, left), (low, right) = bright.min(axis=0), bright.max(axis=0) + 1
    expected = [left, top, right - left, low - top]
    if drawn_on == "shown":
        fitted, _ = fit_boxes(Annotation(boxes=[expected]), image, None)
    elif orientation > 4:
        # The size tells: boxes were drawn on the image as it lies in the file.
        fitted, _ = fit_boxes(Annotation(boxes=[[48, 8, 24, 8]]), image, (80, 40))
    else:
        return
    assert fitted.boxes is not None
    assert np.allclose(fitted.boxes[0], expected, atol=1.01)


@given(
    st.lists(st.floats(-30, 60), min_size=2, max_size=2),
    st.lists(st.floats(0, 60), min_size=2, max_size=2),
    st.integers(1, 8),
    st.sampled_from([None, (24, 16), (16, 24), (48, 32), (7, 90)]),
)
def test_every_box_that_is_kept_lies_in_the_image(
    corner: list[float], sides: list[float], orientation: int, size: tuple[int, int] | None
) -> None:
    image = Prepared(b"", "jpg", (12, 20), (24, 16), orientation)
    fitted, lost = fit_boxes(Annotation(boxes=[[*corner, *sides]]), image, size)
    assert len(fitted.boxes or []) + len(lost.get(OUTSIDE, ())) == 1
    for x, y, wide, high in fitted.boxes or []:
        assert min(x, y) >= 0
        assert min(wide, high) > 0
        assert x + wide <= 12.02
        assert y + high <= 20.02
