"""Readers of annotation files: rows of JSON, validated for a converter; bad rows are faults."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_tools.builder.samples import Fault
from data_tools.originals import TOO_MUCH, display_path, max_unpacked_bytes
from vlp.config import ConfigError
from vlp.io import lines_of, parse_json

LocatedRow = tuple[str, Any]  # location for messages, content


class LayoutCheck:
    """Check for a wrong file: ConfigError if all of its rows, or the first 100, are bad.

    Set `has_good_row` at a good row, call `add_bad_row` at a bad row, and `finish` after all rows.
    """

    MAX_BAD_ROWS = 100

    def __init__(self) -> None:
        self.has_good_row = False
        self._problems: list[str] = []

    def add_bad_row(self, problem: str) -> None:
        """Record a bad row; ConfigError with the first problem at 100 bad rows and no good row."""
        if not self.has_good_row:
            self._problems.append(problem)
            if len(self._problems) == self.MAX_BAD_ROWS:
                self.finish()

    def finish(self) -> None:
        """Raise ConfigError with the first problem if there was no good row."""
        if self._problems and not self.has_good_row:
            raise ConfigError(self._problems[0])


class Row(BaseModel):
    """Base of row layouts; fields that a layout does not declare are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


AnyRow = TypeVar("AnyRow", bound=Row)

# A split becomes a folder in OUT, so a stranger's file must not name `..` or a path.
SplitName = Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")]
Faults = list[Fault]  # filled during reading; the manifest counts them


def is_utf8(text: str) -> bool:
    """Return whether the bytes of a text that was decoded with `surrogateescape` are UTF-8."""
    return text.isascii() or not _INVALID_BYTE.search(text)


_INVALID_BYTE = re.compile("[\udc80-\udcff]")  # as `surrogateescape` decodes it
_SURROGATE = re.compile(r"\\u[dD]")
LONE_SURROGATE = "half a character, replaced (kept)"


class JsonLinesError(ConfigError):
    """Error for a file that holds JSON Lines in place of JSON."""


def read_json(path: Path, faults: Faults) -> Any:
    """Return the content of a JSON file, gzipped or not.

    Rows are the items of the top-level list, or of lists in the top-level object. A row with bytes
    that are not UTF-8 becomes None; lone surrogates (`\\ud83d`) in a row become U+FFFD, a fault.
    """
    try:
        with _open(path) as file:
            data = file.read()
        try:
            return parse_json(data)
        except ValueError:
            text = data.decode("utf-8-sig", "surrogateescape")
            content = parse_json(text, "surrogateescape")
        # Without escaped surrogates, U+FFFD is a character of the file and no fault.
        surrogate_faults = faults if _SURROGATE.search(text) else []
        if isinstance(content, dict):
            return {
                name: _check_rows(value, f"{display_path(path)}, {name}", surrogate_faults)
                for name, value in content.items()
            }
        if isinstance(content, list):
            return _check_rows(content, display_path(path), surrogate_faults)
        raise ConfigError(f"{display_path(path)}: not UTF-8")
    except json.JSONDecodeError as error:
        message = f"{display_path(path)}: not a JSON file ({error})"
        if error.msg == "Extra data":
            raise JsonLinesError(f"{message}; it has one object a line") from error
        raise ConfigError(message) from error


def _check_rows(value: Any, where: str, faults: Faults) -> Any:
    if isinstance(value, list):
        return [
            _check_row(row, f"{where}, row {number}", faults) for number, row in enumerate(value, 1)
        ]
    return _check_row(value, where, faults)


def _check_row(row: Any, where: str, faults: Faults) -> Any:
    """Return a row, None if it is not UTF-8; U+FFFD, from a lone surrogate, is a fault."""
    text = json.dumps(row, ensure_ascii=False)
    if not is_utf8(text):
        return None
    if "\ufffd" in text:
        faults.append(Fault(LONE_SURROGATE, where))
    return row


def _parse_row(source: str | bytes, where: str, faults: Faults) -> Any:
    """Parse the JSON of one row as `read_json` does; raises ValueError if it is not UTF-8."""
    try:
        return parse_json(source)
    except ValueError:
        row = _check_row(parse_json(source, "surrogateescape"), where, faults)
        if row is None:
            raise
        return row


def json_lines(path: Path, faults: Faults) -> Iterator[LocatedRow]:
    """Yield the objects of a JSON Lines file, gzipped or not; bad lines are faults."""
    check = LayoutCheck()
    for number, line in enumerate(raw_lines(path), 1):
        if not line.strip():
            continue
        where = f"{display_path(path)}, line {number}"
        try:
            row = _parse_row(line, where, faults)
        except ValueError as error:
            check.add_bad_row(f"{where}: no JSON object on a line of its own ({error})")
            faults.append(Fault("line that is not JSON", where))
            continue
        check.has_good_row = True
        yield where, row
    check.finish()


def line_count(paths: Iterable[Path]) -> int:
    """Count the lines of files, gzipped or not, for progress bars."""
    return sum(1 for path in paths for _ in raw_lines(path))


def json_rows(path: Path, faults: Faults, key: str | None = None) -> Iterator[LocatedRow]:
    """Return the rows of a JSON file: its list, or the list under a key of its object."""
    return list_rows(read_json(path, faults), path, key)


def list_rows(content: Any, path: Path, key: str | None = None) -> Iterator[LocatedRow]:
    """Return the rows of a file's parsed content, as `json_rows` does."""
    rows = content.get(key) if key is not None and isinstance(content, dict) else content
    if not isinstance(rows, list) or (key is not None and not isinstance(content, dict)):
        layout = "a list" if key is None else f'an object with a list "{key}"'
        raise ConfigError(f"{display_path(path)}: this should be {layout}; is it the right file?")
    name = display_path(path) if key is None else f"{display_path(path)}, {key}"
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def parse_rows(
    rows: Iterable[LocatedRow], layout: type[AnyRow], faults: Faults
) -> Iterator[AnyRow]:
    """Yield rows validated against a layout; rows of another layout are faults."""
    return (row for _, row in parse_numbered_rows(rows, layout, faults))


def parse_numbered_rows(
    rows: Iterable[LocatedRow], layout: type[AnyRow], faults: Faults
) -> Iterator[tuple[int, AnyRow]]:
    """Yield rows as `parse_rows` does, with their numbers from 0 among all rows."""
    check = LayoutCheck()
    for number, (where, content) in enumerate(rows):
        try:
            row = layout.model_validate(content)
        except ValidationError as error:
            problem = f"{where}: {first_problem(error)}"
            check.add_bad_row(f"{problem}; is it the right file?")
            faults.append(Fault("row of another layout", problem))
            continue
        check.has_good_row = True
        yield number, row
    check.finish()


def parse_parts(
    parts: Iterable[Any], layout: type[AnyRow], where: str, faults: Faults
) -> Iterator[AnyRow]:
    """Yield the parts of a row validated against a layout; parts of another layout are faults."""
    for part in parts:
        try:
            yield layout.model_validate(part)
        except ValidationError as error:
            faults.append(Fault("part of another layout", f"{where}: {first_problem(error)}"))


def first_problem(error: ValidationError) -> str:
    """Return the first faulty field of a row, with the problem."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "the row"
    return f"{field}: {first['msg']}"


def text_lines(path: Path) -> list[str]:
    """Return the non-blank lines of a file, decoded with `surrogateescape` (see `is_utf8`)."""
    try:
        return lines_of(path, "surrogateescape")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if gzipped; read errors in the block become a ConfigError."""
    try:
        with open(path, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                yield file
                return
        with gzip.open(path) as unzipped:
            yield io.BufferedReader(_LimitedGzip(unzipped, path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{display_path(path)}: a damaged gzip file ({error}); download it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"{display_path(path)}: cannot be read ({error.strerror})") from error


class _LimitedGzip(io.RawIOBase):
    """A gzip file that raises a ConfigError where it unpacks to too many bytes."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        self._file, self._path, self._remaining = file, path, max_unpacked_bytes(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)
        self._remaining -= count
        if self._remaining < 0:
            raise ConfigError(f"{display_path(self._path)}: {TOO_MUCH}")
        return count


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, gzipped or not."""
    with _open(path) as file:
        yield from file


CHARACTERS = 1 << 24  # read at once
_SEPARATORS = re.compile(r"[\s,]*")
_AFTER_ROW = re.compile(r"\s*[,\]]")


def streamed_list(path: Path, faults: Faults) -> Iterator[LocatedRow]:
    """Yield the rows of a JSON file's list, as `json_rows` does, with little memory."""
    decoder = json.JSONDecoder()
    name = display_path(path)
    with _open(path) as stream:
        file = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")
        text = file.read(CHARACTERS)
        start, number = _skip_separators(text, 0), 0
        if text[start : start + 1] != "[":
            raise ConfigError(f"{name}: this should be a list; is it the right file?")
        start += 1
        while True:
            start = _skip_separators(text, start)
            if text[start : start + 1] == "]":
                return
            try:
                row, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                end = len(text)  # the row continues in the next block, or is damaged
            # Only the character after a number shows that its digits are complete.
            if _AFTER_ROW.match(text, end):
                number += 1
                where = f"{name}, row {number}"
                yield where, _check_streamed_row(row, text[start:end], where, faults)
                start = end
                continue
            # Doubling the buffer keeps the time for a long row linear.
            block = file.read(max(CHARACTERS, len(text) - start))
            if not block:
                raise ConfigError(
                    f"{name}: damaged or truncated after row {number}; download it again"
                )
            text, start = text[start:] + block, 0


def _check_streamed_row(row: Any, source: str, where: str, faults: Faults) -> Any:
    if not is_utf8(source):
        return None
    if not _SURROGATE.search(source):
        return row
    try:
        return _parse_row(source, where, faults)
    except ValueError:  # also for an integer of more than 64 bits
        return None


def _skip_separators(text: str, start: int) -> int:
    match = _SEPARATORS.match(text, start)
    assert match is not None  # the pattern also matches an empty text
    return match.end()
