"""The headers of one sample's files, as nearly every tar has them."""

from __future__ import annotations

from functools import lru_cache

from vlp.data.shards.tar import Member

_BLOCK = 512
_REGULAR = (0, ord("0"))
# Mode, owner, group, time and device: not wanted, but where they are no numbers, there is damage.
_UNUSED = ((100, 108), (108, 116), (116, 124), (136, 148), (329, 337), (337, 345))
_NUMBER = frozenset(b"01234567")


def plain_members(data: bytes) -> list[Member] | None:
    """List the files of a part of a tar, in a tenth of the time that `tarfile` takes.

    Returns:
        The members as `vlp.data.shards.tar.members_in` gives them, or None where a header is
        damaged, or is more than the name, in ASCII, and the length of a regular file.
    """
    members = []
    place = 0
    while place < len(data):
        header = data[place : place + _BLOCK]
        if len(header) < _BLOCK or header[156] not in _REGULAR or header[345:500].strip(b"\0"):
            return None
        for start, stop in _UNUSED:
            if _octal(header[start:stop]) is None:
                return None
        name = header[:100].partition(b"\0")[0]
        size, checksum = _octal(header[124:136]), _octal(header[148:156])
        if size is None or checksum is None or not name.isascii() or not name or name[-1:] == b"/":
            return None
        # The field of the checksum counts as eight spaces.
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != checksum:
            return None
        text = name.decode()
        if not text.isprintable():
            return None
        place += _BLOCK
        members.append(Member(text, place, size))
        place += -(-size // _BLOCK) * _BLOCK
    return members if place == len(data) else None


@lru_cache(maxsize=1024)  # nearly all of a shard's are alike
def _octal(field: bytes) -> int | None:
    digits = field.rstrip(b"\0 ").lstrip(b" ") or b"0"
    return int(digits, 8) if _NUMBER.issuperset(digits) else None
