"""Tars and JSON that are broken on purpose; the random damages are functions of their seed."""

import json
import tarfile

import numpy as np
from broken_images import photo

from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import ShardIndex, index_folder

END = bytes(1024)


def header(name, size, kind=b"0", link=b"", size_field=None):
    """One 512-byte tar header whose checksum is right, whatever its fields say."""
    name = name.encode() if isinstance(name, str) else name
    block = bytearray(512)
    block[:100] = name[:100].ljust(100, b"\0")
    block[100:108] = b"0000644\0"
    block[108:124] = b"0000000\0" * 2
    block[124:136] = size_field or tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[157:257] = link[:100].ljust(100, b"\0")
    block[257:265] = b"ustar\x0000"
    return checked(block)


def checked(block):
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name, content, kind=b"0", link=b""):
    """A header and its content, filled up to whole blocks."""
    return header(name, len(content), kind, link) + content + bytes(-len(content) % 512)


def pax(records, kind=b"x"):
    """An extended header that says `records` of the member behind it."""
    body = b""
    for key, value in records.items():
        value = value.encode() if isinstance(value, str) else value
        rest = b" " + key.encode() + b"=" + value + b"\n"
        length = len(rest)
        while length != len(str(length)) + len(rest):
            length = len(str(length)) + len(rest)
        body += str(length).encode() + rest
    return member("././@PaxHeader", body, kind)


def tar(*parts):
    return b"".join(parts) + END


def plain_tar(samples):
    return tar(
        *(
            member(f"{key}.{extension}", content)
            for key, files in samples
            for extension, content in files.items()
        )
    )


PNG = photo("png")
JSON = b'{"caption": "a dog"}'
GOOD = member("good.png", PNG) + member("good.json", JSON)
FINE = member("fine.png", PNG) + member("fine.json", JSON)


def found(folder, content):
    """Write `0.tar`, if there is content; each of its samples' key, or kind of error."""
    if content is not None:
        (folder / "0.tar").write_bytes(content)
    index_folder(folder)
    index = ShardIndex.open(folder)
    results = []
    for number in range(len(index)):
        try:
            sample = index.read(0, number)
        except BadSample as bad:
            results.append(bad.kind)
            continue
        assert sample.image == PNG
        results.append(sample.key)
    return results


def cut(rng, data):
    return data[: int(rng.integers(len(data)))]


def flip_bits(rng, data):
    changed = bytearray(data)
    for place in rng.integers(len(data), size=int(rng.integers(1, 9))):
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def overwrite(rng, data):
    length = int(rng.integers(1, 700))
    start = int(rng.integers(len(data)))
    filling = [bytes(length), b"\xff" * length, rng.bytes(length)][int(rng.integers(3))]
    return (data[:start] + filling + data[start + length :])[: len(data)]


def drop(rng, data):
    start = int(rng.integers(len(data)))
    return data[:start] + data[start + int(rng.integers(1, 700)) :]


def repeat(rng, data):
    start, length = int(rng.integers(len(data))), int(rng.integers(1, 1500))
    return data[: start + length] + data[start:]


def insert(rng, data):
    start = int(rng.integers(len(data)))
    return data[:start] + rng.bytes(int(rng.integers(1, 700))) + data[start:]


BYTES = (cut, flip_bits, overwrite, drop, repeat, insert)


def drop_blocks(rng, data):
    start = 512 * int(rng.integers(len(data) // 512))
    return data[:start] + data[start + 512 * int(rng.integers(1, 4)) :]


def swap_blocks(rng, data):
    first, second = 512 * np.sort(rng.integers(len(data) // 512, size=2))
    one, other = data[first : first + 512], data[second : second + 512]
    if first == second:
        return data
    return data[:first] + other + data[first + 512 : second] + one + data[second + 512 :]


def zero_blocks(rng, data):
    """A hole, as a crash of the machine leaves it."""
    start = 512 * int(rng.integers(len(data) // 512))
    length = 512 * int(rng.integers(1, 5))
    return (data[:start] + bytes(length) + data[start + length :])[: len(data)]


_SIZES = (b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"77777777777\0", b"-0000000001\0", b"\0" * 12)
_SIZES += (b"\xff" * 10 + b"\xfc\0", b"99999999999\0", b"\x80" + b"\xff" * 11, b"0x10       \0")
_KINDS = b"0\x001234567xgLKNSVMAXZ~\xff"


def lying_header(rng, data):
    """A header whose name, size or kind is another, under a right checksum."""
    starts = [place for place in range(0, len(data), 512) if data[place + 257 :][:5] == b"ustar"]
    start = starts[int(rng.integers(len(starts)))]
    block = bytearray(data[start : start + 512])
    what = int(rng.integers(3))
    if what == 0:
        block[124:136] = _SIZES[int(rng.integers(len(_SIZES)))]
    elif what == 1:
        block[156] = _KINDS[int(rng.integers(len(_KINDS)))]
    else:
        block[:100] = rng.bytes(int(rng.integers(1, 101))).ljust(100, b"\0")
    return data[:start] + checked(block) + data[start + 512 :]


TARS = (*BYTES, drop_blocks, swap_blocks, zero_blocks, lying_header)


def splice_json(rng, data):
    """JSON in which one value is another: of another kind, absurd, or no JSON at all."""
    tree = json.loads(data)
    places = list(_places(tree, ()))
    place = places[int(rng.integers(len(places)))]
    text = json.dumps(_with(tree, place, "@@"), ensure_ascii=False)
    return text.encode().replace(b'"@@"', ABSURD[int(rng.integers(len(ABSURD)))])


ABSURD = (
    b"NaN", b"-Infinity", b"1e999", b"-1", b"-0.5", b"0", b"1e308", b"9" * 400, b"9" * 5000,
    b"null", b"true", b"{}", b"[]", b"[[]]", b'""', b'" "', b'"\xff\xfe"', b'"\\ud800"',
    b'"\\u0000"', b'{"a": 1, "a": 2}', b"[1, 2, 3, 4, 5]", b"[-1, -1, -1, -1]", b"[0, 0, 1e999, 1]",
    b'[{"caption": 0}]', b'["a", null]', b'"' + b"word " * 3000 + b'"', b'"' + b"x" * 70000 + b'"',
    b"[" * 300 + b"]" * 300, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"[" * 50000, b"undefined", b"",
    '"\U0001f600\u0301\u200b\ufeff\u2028 [MASK] [SEP] ##ing"'.encode(),
)  # fmt: skip


def _places(tree, path):
    if path:
        yield path
    children = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)
    for key, value in children:
        yield from _places(value, (*path, key))


def _with(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = _with(copy[path[0]], path[1:], value)
    return copy


def full_annotation(number, captions, **more):
    """The JSON of a sample that has something of every kind."""
    word = {"caption": 0, "index": 1, "word": "red", "kind": "colour", "box": [1, 2, 3, 4]}
    return Annotation(
        captions=captions,
        source="here",
        image_id=str(number),
        boxes=[[0, 0, 5, 6]],
        questions=[{"id": "1", "question": "what", "answers": [{"answer": "red", "count": 3}]}],
        expressions=[{"id": "2", "text": "the dog", "box": [1, 1, 2, 2]}],
        words=[word],
        scene={"objects": [{"colour": "red"}]},
        **more,
    ).to_json()


def index_columns(folder):
    with np.load(folder / "index.npz") as found:
        return dict(found)


def change_index(folder, **changed):
    """Write an index again with other columns; None leaves one out."""
    columns = index_columns(folder) | changed
    kept = {name: column for name, column in columns.items() if column is not None}
    np.savez(folder / "index.npz", **kept)
