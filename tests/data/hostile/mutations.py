"""Mutations of any file, each a function of its seed."""

import bz2
import gzip
import io
import lzma
import struct
import zipfile
from contextlib import suppress

import numpy as np
from broken_shards import BYTES, TARS, splice_json

_EXTREMES = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
_EXTREMES += (2**64 - 1, 2**40)
_ZIP_RECORDS = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
_TEXTS = (
    b"\0", b"\xff\xfe", b"\n", b"\t", b'"', b"'", b"{", b"}", b"[" * 3000, b"]", b":", b"- ",
    b"&a *a",
    b"!!python/object:os.system ", b"<<: ", b"9" * 30, b"-1", b"1e999", b"nan", b"../../etc/passwd",
    b"/etc/passwd", b"/dev/zero", b"\xc3", b"\xed\xa0\x80", b"2001-13-45", b"0x", b"? [a]\n: b\n",
    b"%",
    b"\xef\xbb\xbf", b",", b"|", b"\x1f\x8b", b"null", b"runs/x", b"~", b"\\u0000", b"\\ud800",
)  # fmt: skip


def length_field(rng, data):
    size = int(rng.choice((1, 2, 4, 8)))
    if len(data) < size:
        return data
    start = int(rng.integers(len(data) - size + 1))
    if rng.random() < 0.5:  # headers stand in front
        start = int(rng.integers(min(len(data) - size + 1, 64)))
    order = ("little", "big")[int(rng.integers(2))]
    value = int(_EXTREMES[int(rng.integers(len(_EXTREMES)))])
    if rng.random() < 0.3:
        value = int.from_bytes(data[start : start + size], order) + int(rng.integers(-3, 4))
    field = (value % 256**size).to_bytes(size, order)
    return data[:start] + field + data[start + size :]


def zip_field(rng, data):
    places = [
        place
        for record in _ZIP_RECORDS
        for place in range(len(data))
        if data.startswith(record, place)
    ]
    if not places:
        return length_field(rng, data)
    start = places[int(rng.integers(len(places)))] + 4 + 2 * int(rng.integers(21))
    value = int(_EXTREMES[int(rng.integers(len(_EXTREMES)))])
    changed = bytearray(data)
    size = int(rng.choice((2, 4)))
    changed[start : start + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(changed[: len(data)])


def splice(rng, data, other):
    start, stop = np.sort(rng.integers(len(data) + 1, size=2))
    first, last = np.sort(rng.integers(len(other) + 1, size=2))
    return data[:start] + other[first:last] + data[stop:]


def token(rng, data):
    start = int(rng.integers(len(data) + 1))
    return data[:start] + _TEXTS[int(rng.integers(len(_TEXTS)))] + data[start:]


def bomb(rng, data):
    """A compressed file that says what the other one did and then goes on, for 200 MB."""
    pack = (gzip.compress, bz2.compress, lzma.compress)[int(rng.integers(3))]
    flood = bytes(2**20)
    many = pack(flood)
    return pack(data) + many * 200


def zip_bomb(rng, data):
    """A zip whose members are 80 MB of zeros each, by any method."""
    kinds = (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kinds[int(rng.integers(3))]) as archive:
        archive.writestr("good.png", bytes(80 * 2**20))
    return stream.getvalue()


def safetensors_header(rng, data):
    """Another value in the JSON of a safetensors file, its length put right."""
    size = int.from_bytes(data[:8], "little")
    header = splice_json(rng, data[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def mutated(rng, name, data, other):
    """Change a file once or twice as its suffix suggests; `other` is content to splice in."""
    mutations = [*BYTES, length_field, lambda rng, data: splice(rng, data, other)]
    if name.endswith((".json", ".jsonl")) and data[:1] in (b"{", b"["):
        mutations += [_spliced_json] * 8 + [token]
    elif name.endswith((".yaml", ".csv", ".tsv", ".txt", "SUMS")):
        mutations += [token] * 6
    elif name.endswith(".safetensors"):
        mutations += [safetensors_header] * 6
    elif name.endswith(".tar"):
        mutations += TARS
    elif name.endswith((".zip", ".npz", ".pth")):
        mutations += [zip_field] * 8
    if name.endswith((".gz", ".bz2", ".xz")):
        mutations += [bomb]
    if name.endswith((".zip", ".npz")):
        mutations += [zip_bomb]
    for _ in range(1 + (rng.random() < 0.3)):
        change = mutations[int(rng.integers(len(mutations)))]
        # Nothing may be left by the first one of what the second one looks for.
        with suppress(ValueError, RecursionError):
            data = change(rng, data)
    return data


def _spliced_json(rng, data):
    try:
        return splice_json(rng, data)
    except ValueError:  # the first change left no JSON, or it is one object a line
        lines = data.split(b"\n")
        place = int(rng.integers(len(lines)))
        try:
            lines[place] = splice_json(rng, lines[place])
        except (ValueError, IndexError):
            return token(rng, data)
        return b"\n".join(lines)
