import io
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from raw_images import raw_image

from data_tools.builder.samples import EMPTY, LINK, LONG, clean_caption, drop_reason
from data_tools.builder.write_shard import StoredImage, fit_boxes, prepare_image
from vlp.data.boxes import CUT, OTHER_SHAPE, OUTSIDE, SHARES
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, Expression, Word
from vlp.data.shards.sample_files import BadSample


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("  a dog\t and\n a cat . ", "a dog and a cat ."),
        ("salt &amp; pepper &lt;3", "salt & pepper <3"),
        ("salt &amp pepper, Disney&copy 2010, &#8217;", "salt & pepper, Disney\u00a9 2010, \u2019"),
        (
            "pens &notes, ?a=1&section=2&copy=3, &notit;",
            "pens &notes, ?a=1&section=2&copy=3, &notit;",
        ),
        ("twice &amp;quot;escaped&amp;quot;", 'twice "escaped"'),
        ("<PERSON> and < Person > at home", "person and person at home"),
        ("[/EN#1/people Two men] and [/EN#23/other/scene a dog]", "Two men and a dog"),
        ("cafe\u0301", "caf\u00e9"),
        ("soft\u00adhyphen\ufeff \u200bzero\u200b", "softhyphen zero"),
        ("line\u2028break\x00and\x1bbell", "line break and bell"),
        ("\U0001f468\u200d\U0001f469 joined", "\U0001f468\u200d\U0001f469 joined"),
        ("no\u00a0break", "no break"),
        ("Case, Stays!", "Case, Stays!"),
    ],
)
def test_the_rule(raw, clean):
    assert clean_caption(raw) == clean


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", EMPTY),
        (" .,- ", EMPTY),
        ("&nbsp;", EMPTY),
        ("https://x.org/a.jpg", LINK),
        ("www.x.org , http://y.org", LINK),
        ("see www.x.org", None),
        ("a b c d", LONG),
        ("a b c", None),
        ("\u72ac", None),
    ],
)
def test_what_is_dropped(raw, reason):
    assert drop_reason(clean_caption(raw), max_words=3) == reason


@given(st.text())
def test_what_is_clean_stays(text):
    clean = clean_caption(text)
    assert clean == " ".join(clean.split())
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in clean)
    if "&" not in clean and "<" not in clean:
        assert clean_caption(clean) == clean


def prepared(data, max_side=None):
    return prepare_image(data, "it", max_side, 90)


def opened(image):
    return Image.open(io.BytesIO(image.data))


def turned(orientation, size=(24, 16)):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return raw_image(orientation, size, exif=exif, quality=95)


@pytest.mark.parametrize(
    ("kind", "extension"), [("jpeg", "jpg"), ("png", "png"), ("webp", "webp"), ("mpo", "jpg")]
)
def test_what_a_shard_can_hold_stays_as_it_is(kind, extension):
    data = raw_image(1, kind=kind)
    assert prepared(data) == StoredImage(data, extension, (24, 16), (24, 16))


@pytest.mark.parametrize("kind", ["gif", "bmp"])
def test_other_formats_become_jpeg(kind):
    image = prepared(raw_image(1, kind=kind))
    assert (image.extension, image.size) == ("jpg", (24, 16))
    assert opened(image).format == "JPEG"


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_images_are_stored_upright(orientation):
    data = turned(orientation)
    image = prepared(data)
    assert image.size == ((16, 24) if orientation > 4 else (24, 16))
    assert 0x0112 not in opened(image).getexif()
    shown = np.asarray(decode_image(data, ""), dtype=float)
    stored = np.asarray(decode_image(image.data, ""), dtype=float)
    assert np.abs(shown - stored).mean() < 25  # noise written as JPEG again
    flipped = np.abs(shown[::-1] - stored).mean()
    assert flipped > 2 * np.abs(shown - stored).mean()


@pytest.mark.parametrize(
    ("size", "max_side", "expected"),
    [((200, 100), 50, (50, 25)), ((1, 200), 20, (1, 20)), ((50, 20), 50, (50, 20))],
)
def test_reduced_to_the_longest_side(size, max_side, expected):
    for kind, extension in (("jpeg", "jpg"), ("png", "png"), ("webp", "jpg")):
        data = raw_image(1, size, kind)
        image = prepared(data, max_side)
        assert image.size == opened(image).size == expected
        assert (image.data == data) == (size == expected)
        if size != expected:
            assert image.extension == extension


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("how", [{}, {"progressive": True}])
def test_a_cut_jpeg_is_noticed_though_only_an_eighth_is_decoded(share, how):
    data = raw_image(1, (320, 200), **how)
    prepared(data)
    with pytest.raises(BadSample, match="unreadable image"):
        prepared(data[: int(len(data) * share)])


def test_what_is_no_image():
    for data in (b"", b"text", b"<svg/>", raw_image(1, kind="tiff")):
        with pytest.raises(BadSample, match="unreadable image: it"):
            prepared(data)


def test_boxes_are_scaled_from_the_size_they_were_drawn_on():
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
        ([20, 12, 60, 6], CUT, [20, 12, 4, 4]),
        ([40, 3, 5, 5], OUTSIDE, None),
        ([3, 3, 0, 5], OUTSIDE, None),
        ([24.5, 0, 0.4, 5], OUTSIDE, None),
        ([0.2, 0, 0.8, 0.5], SHARES, None),
        ([0, -20, 1, 21], CUT, [0, 0, 1, 1]),
    ],
)
def test_boxes_that_stick_out(box, kind, kept):
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
def test_boxes_turn_with_the_image(orientation, drawn_on):
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


@pytest.mark.parametrize("size", [(16, 24), (48, 16), (7, 90)])
def test_boxes_of_an_image_of_another_shape_are_left_out(size):
    fitted, lost = fit_boxes(Annotation(boxes=[[1, 1, 2, 2]]), prepared(raw_image(1)), size)
    assert (fitted.boxes, lost) == ([], {OTHER_SHAPE: ["boxes 0"]})
    assert fit_boxes(Annotation(boxes=[[1, 1, 2, 2]]), prepared(raw_image(1)), (25, 16))[0].boxes


@given(
    st.lists(st.floats(-30, 60), min_size=2, max_size=2),
    st.lists(st.floats(0, 60), min_size=2, max_size=2),
    st.integers(1, 8),
    st.sampled_from([None, (24, 16), (16, 24), (48, 32), (7, 90)]),
)
def test_every_box_that_is_kept_lies_in_the_image(corner, sides, orientation, size):
    image = StoredImage(b"", "jpg", (12, 20), (24, 16), orientation)
    fitted, lost = fit_boxes(Annotation(boxes=[[*corner, *sides]]), image, size)
    lost.pop(CUT, None)
    assert len(fitted.boxes or []) + len(lost) == 1
    for x, y, wide, high in fitted.boxes or []:
        assert min(x, y) >= 0
        assert min(wide, high) > 0
        assert x + wide <= 12.02
        assert y + high <= 20.02
