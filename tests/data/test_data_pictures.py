from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vlp.data.pictures import decode_picture
from vlp.data.stored import BadSample


def jpeg() -> bytes:
    rng = np.random.default_rng(0)
    stream = BytesIO()
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(stream, "jpeg")
    return stream.getvalue()


def test_decoded_whole_and_to_rgb() -> None:
    image = decode_picture(jpeg(), "here")
    assert (image.mode, image.size) == ("RGB", (64, 64))
    stream = BytesIO()
    image.convert("P").save(stream, "png")
    assert decode_picture(stream.getvalue(), "here").mode == "RGB"


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.0])
def test_a_truncated_jpeg_is_refused(share: float) -> None:
    data = jpeg()
    with pytest.raises(BadSample) as bad:
        decode_picture(data[: int(len(data) * share)], "shard-3.tar, key")
    assert bad.value.kind == "unreadable picture"
    assert "shard-3.tar, key" in bad.value.where


def test_no_picture_at_all() -> None:
    with pytest.raises(BadSample, match="unreadable picture"):
        decode_picture(b"<html>not found</html>", "x")
