"""Rows of annotation files: read, validated for a converter, and counted if faulty."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_tools.builder.samples import Refused
from data_tools.originals import TOO_MUCH, most_unpacked, shown
from vlp.config import ConfigError
from vlp.io import lines_of, parse_json

# Location for messages, content.
Located = tuple[str, Any]


class WrongFile:
    """Refusal of a file with only bad rows, or `MOST` bad ones first; `good` after a good row."""

    MOST = 100

    def __init__(self) -> None:
        self.good = False
        self._problems: list[str] = []

    def bad(self, problem: str) -> None:
        """Count a bad row."""
        if not self.good:
            self._problems.append(problem)
            if len(self._problems) == self.MOST:
                self.end()

    def end(self) -> None:
        """Raise the first problem if there was no good row."""
        if self._problems and not self.good:
            raise ConfigError(self._problems[0])


class Row(BaseModel):
    """Base of the rows of one layout; unused fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


AnyRow = TypeVar("AnyRow", bound=Row)

# A split becomes a folder in OUT, and the file may be a stranger's: one plain name, not `..`.
SplitName = Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")]


Faults = list[Refused]  # filled during reading; the manifest counts them


def sound(text: str) -> bool:
    """Return whether a text that was read with `surrogateescape` is UTF-8 throughout."""
    return text.isascii() or not _ESCAPED.search(text)


_ESCAPED = re.compile("[\udc80-\udcff]")
_SURROGATE = re.compile(r"\\u[dD]")
HALF = "half a character, replaced (kept)"


def read_json(path: Path, faults: Faults) -> Any:
    """Return the content of a JSON file, gzipped or not; members that are not UTF-8 are None."""
    try:
        with _opened(path) as file:
            data = file.read()
        # One bad text costs no file: its member is None, or half a character is replaced.
        try:
            return parse_json(data)
        except ValueError:
            text = data.decode("utf-8-sig", "surrogateescape")
            content = parse_json(text, "surrogateescape")
        # Without halves of characters, a replacement character is the file's own.
        halves = faults if _SURROGATE.search(text) else []
        if isinstance(content, dict):
            return {
                name: _checked(value, f"{shown(path)}, {name}", halves)
                for name, value in content.items()
            }
        if isinstance(content, list):
            return _checked(content, shown(path), halves)
        raise ConfigError(f"{shown(path)}: not UTF-8")
    except json.JSONDecodeError as error:
        hint = "; it has one object a line" if error.msg == "Extra data" else ""
        raise ConfigError(f"{shown(path)}: not a JSON file ({error}){hint}") from error


def _checked(value: Any, where: str, faults: Faults) -> Any:
    if isinstance(value, list):
        return [
            _checked_row(row, f"{where}, row {number}", faults)
            for number, row in enumerate(value, 1)
        ]
    return _checked_row(value, where, faults)


def _checked_row(row: Any, where: str, faults: Faults) -> Any:
    text = json.dumps(row, ensure_ascii=False)
    if not sound(text):
        return None
    if "\ufffd" in text:
        faults.append(Refused(HALF, where))
    return row


def _parsed_row(source: str | bytes, where: str, faults: Faults) -> Any:
    try:
        return parse_json(source)
    except ValueError as error:
        row = parse_json(source, "surrogateescape")
        # A row's bad bytes may be of any encoding, so its texts cannot be mended.
        if not sound(json.dumps(row, ensure_ascii=False)):
            raise error
        return _checked_row(row, where, faults)


def json_lines(path: Path, faults: Faults) -> Iterator[Located]:
    """Yield the objects of a file of JSON lines, gzipped or not; other lines are counted."""
    wrong = WrongFile()
    for number, line in enumerate(raw_lines(path), 1):
        if not line.strip():
            continue
        where = f"{shown(path)}, line {number}"
        try:
            row = _parsed_row(line, where, faults)
        except ValueError as error:
            wrong.bad(f"{where}: no JSON object on a line of its own ({error})")
            faults.append(Refused("line that is not JSON", where))
            continue
        wrong.good = True
        yield where, row
    wrong.end()


def line_count(paths: Iterable[Path]) -> int:
    """Return how many lines some files have, gzipped or not, for progress bars."""
    return sum(1 for path in paths for _ in raw_lines(path))


def json_list(path: Path, faults: Faults, key: str | None = None) -> Iterator[Located]:
    """Return the members of the list in a JSON file, perhaps under a key of its object."""
    return members(read_json(path, faults), path, key)


def members(content: Any, path: Path, key: str | None = None) -> Iterator[Located]:
    """Yield the members of parsed content; errors as in `json_list`."""
    rows = content.get(key) if key is not None and isinstance(content, dict) else content
    if not isinstance(rows, list) or (key is not None and not isinstance(content, dict)):
        place = "a list" if key is None else f'an object with a list "{key}"'
        raise ConfigError(f"{shown(path)}: this should be {place}; is it the right file?")
    name = shown(path) if key is None else f"{shown(path)}, {key}"
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def parsed(rows: Iterable[Located], layout: type[AnyRow], faults: Faults) -> Iterator[AnyRow]:
    """Yield rows in their layout; one that does not fit is counted."""
    wrong = WrongFile()
    for where, row in rows:
        try:
            fitting = layout.model_validate(row)
        except ValidationError as error:
            problem = f"{where}: {explained(error)}"
            wrong.bad(f"{problem}; is it the right file?")
            faults.append(Refused("row of another layout", problem))
            continue
        wrong.good = True
        yield fitting
    wrong.end()


def parsed_parts(
    parts: Iterable[Any], layout: type[AnyRow], where: str, faults: Faults
) -> Iterator[AnyRow]:
    """Yield the parts of a row in their layout; one that does not fit costs itself."""
    for part in parts:
        try:
            yield layout.model_validate(part)
        except ValidationError as error:
            faults.append(Refused("part of another layout", f"{where}: {explained(error)}"))


def explained(error: ValidationError) -> str:
    """Return the first problem of a row with its field."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the row"
    return f"{place}: {first['msg']}"


def text_lines(path: Path) -> list[str]:
    """Return `lines_of` a file with invalid bytes escaped (`sound`)."""
    try:
        return lines_of(path, "surrogateescape")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if gzipped; failures within are a ConfigError."""
    try:
        with open(path, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                yield file
                return
        with gzip.open(path) as inside:
            yield _Measured(inside, path)  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{shown(path)}: a damaged gzip file ({error}); download it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read ({error.strerror})") from error


class _Measured:
    """The content of a gzip file, limited in length."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        self._file, self._path, self._left = file, path, most_unpacked(path)

    def read(self) -> bytes:
        """Return all of it."""
        data = self._file.read(self._left + 1)
        self._take(len(data))
        return data

    def __iter__(self) -> Iterator[bytes]:
        while line := self._file.readline(self._left + 1):
            self._take(len(line))
            yield line

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ConfigError(f"{shown(self._path)}: {TOO_MUCH}")


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, gzipped or not."""
    with _opened(path) as file:
        yield from file


# Read at once.
CHARACTERS = 1 << 24
_BETWEEN = re.compile(r"[\s,]*")
_BEHIND = re.compile(r"\s*[,\]]")


def streamed_list(path: Path, faults: Faults) -> Iterator[Located]:
    """Yield the members of the list that a JSON file holds, each with its place for messages."""
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            text = file.read(CHARACTERS)
            at, number = _next(text, 0), 0
            if text[at : at + 1] != "[":
                raise ConfigError(f"{shown(path)}: this should be a list; is it the right file?")
            at += 1
            while True:
                at = _next(text, at)
                if text[at : at + 1] == "]":
                    return
                try:
                    member, end = decoder.raw_decode(text, at)
                # The member goes on in the next block, or is damaged.
                except (ValueError, RecursionError):
                    end = len(text)
                # A number may go on in the next block; the character behind it tells.
                if _BEHIND.match(text, end):
                    number += 1
                    where = f"{shown(path)}, row {number}"
                    yield where, _checked_member(member, text[at:end], where, faults)
                    at = end
                    continue
                # A member longer than the buffer doubles it, so that no file takes long.
                more = file.read(max(CHARACTERS, len(text) - at))
                if not more:
                    raise ConfigError(
                        f"{shown(path)}: damaged or cut off behind row {number}; download it again"
                    )
                text, at = text[at:] + more, 0
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read ({error.strerror})") from error


def _checked_member(member: Any, source: str, where: str, faults: Faults) -> Any:
    if not sound(source):
        return None
    if not _SURROGATE.search(source):
        return member
    try:
        return _parsed_row(source, where, faults)
    # An integer may have more than 64 bits.
    except ValueError:
        return None


def _next(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    # It may match nothing, but always matches.
    assert match is not None
    return match.end()
