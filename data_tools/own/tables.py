"""Tables of images and captions: CSV, TSV, JSON, JSON Lines, Parquet, and Arrow of datasets."""

from __future__ import annotations

import ast
import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_tools.builder.samples import Refused
from data_tools.originals import IMAGE_SUFFIXES, TOO_MUCH, most_unpacked, shown
from data_tools.rows import Faults, Located, json_lines, read_json, sound, streamed_list
from vlp.config import ConfigError
from vlp.data.file_names import SPLIT_NAMES, split_of
from vlp.data.shards.sample_files import BadSample
from vlp.io import parse_json

# Usual names, the most telling first.
IMAGES = (
    *("image", "images", "file_name", "filename", "image_file_name", "image_path", "img_path"),
    *("image_file", "image_name", "img", "img_name", "filepath", "file_path", "path", "file"),
    *("photo", "jpg", "jpeg", "png", "webp", "image_id", "img_id"),
)
CAPTIONS = (
    *("caption", "captions", "text", "texts", "txt", "sentence", "sentences", "raw"),
    *("description", "descriptions", "alt_text", "alt", "comment", "title", "prompt"),
)
SPLITS = ("split", "set", "subset", "partition", "fold", "phase", "usage")

# written by pandas and others for a missing caption
_MISSING = {"", "nan", "none", "null", "<null>", "na", "<na>", "n/a", "#n/a", "\\n"}
_BYTES = re.compile(r"""b('([^'\\]|\\.)*'|"([^"\\]|\\.)*")""")
_PRINTED = re.compile(
    r"""(array|list)?[\[({]\s*([\[({]|[bu]?['"]|np\.|array|list|None|nan).*[\])}]""", re.DOTALL
)
# An item of a printed list, with the space for a comma; else what NumPy writes around items.
_ITEM = re.compile(
    r"""([bu]?'(?:[^'\\]|\\.)*'|[bu]?"(?:[^"\\]|\\.)*"|None|nan|[\])}])(\s+(?=[^\s,\])}]))?"""
    r"|(?:np\.str_|array|list)(?=\()|,\s*dtype=[^\s)]+",
    re.DOTALL,
)
_NUMBERED = re.compile(r"(caption|sentence|text|description)_?\d+")
_DEPTH = 3  # of nested lists of captions


class Columns(NamedTuple):
    """Columns of a table by name."""

    image: str
    captions: tuple[str, ...]
    split: str | None = None

    @property
    def names(self) -> list[str]:
        """Return all columns to read."""
        return [self.image, *self.captions, *([self.split] if self.split else [])]

    def __str__(self) -> str:
        captions = ", ".join(repr(name) for name in self.captions)
        split = f", split from {self.split!r}" if self.split else ""
        return f"image from column {self.image!r}, captions from {captions}{split}"


class ColumnOverrides(NamedTuple):
    """Columns that the command line names; None: to be found."""

    image: str | None = None
    captions: tuple[str, ...] | None = None
    split: str | None = None


def find_columns(
    names: Sequence[str], overrides: ColumnOverrides, bytes_columns: Sequence[str] = ()
) -> Columns | None:
    """Find the columns by `overrides`, else by usual names; None without images or captions."""
    overridden = (overrides.image, *(overrides.captions or ()), overrides.split)
    if any(name is not None and name not in names for name in overridden):
        return None
    by_name = {plain(name): name for name in reversed(names)}
    image = overrides.image or next((by_name[name] for name in IMAGES if name in by_name), None)
    captions = overrides.captions
    if captions is None:
        numbered = tuple(name for name in names if _NUMBERED.fullmatch(plain(name)))
        first = next((by_name[name] for name in CAPTIONS if name in by_name), None)
        captions = (first,) if first is not None else numbered
    # Captions may be stored as bytes, too.
    binary = [name for name in bytes_columns if name not in captions]
    if overrides.image is None and image not in binary and len(binary) == 1:
        image = binary[0]
    if image is None or not captions:
        return None
    # An exact `split` comes first, then names like `data_split`.
    usual = (SPLITS[0], *(name for name in by_name if "split" in name), *SPLITS[1:])
    split = overrides.split or next((by_name[name] for name in usual if name in by_name), None)
    return Columns(image, captions, None if split in (image, *captions) else split)


def plain(name: str) -> str:
    """Return a column's name as the lists here have it."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def no_columns(where: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a table without columns that are known or named."""
    shown = ", ".join(list(names)[:20])
    return ConfigError(
        f"{where}: no columns for images and captions among {shown}; name them with --image COLUMN "
        "--caption COLUMN"
    )


def texts_in(value: Any, depth: int = _DEPTH) -> list[str]:
    """Return the captions in a value: a text, UTF-8 bytes, a list, or objects with one each.

    Raises BadSample for other bytes.
    """
    # NaN stands for a missing value.
    if value is None or value != value or depth < 0:
        return []
    if isinstance(value, dict):
        keys = {plain(str(key)): key for key in reversed(value)}
        key = next((keys[name] for name in ("raw", *CAPTIONS) if name in keys), None)
        return [] if key is None else texts_in(value[key], depth - 1)
    if isinstance(value, list | tuple):
        return [text for part in value for text in texts_in(part, depth - 1)]
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise BadSample("caption that is not UTF-8", repr(value[:20])) from None
    text = str(value).strip()
    if text.lower() in _MISSING:
        return []
    if _BYTES.fullmatch(text):
        with suppress(ValueError, SyntaxError):
            return [ast.literal_eval(text).decode().strip()]
    # Tables of pandas have lists as they were printed, those of NumPy without commas.
    if _PRINTED.fullmatch(text):
        with_commas = _ITEM.sub(_with_comma, text)
        # A set has no order, so it is read as a list.
        as_list = re.sub(r"^\{(.*)\}$", r"[\1]", with_commas, flags=re.DOTALL)
        readings: list[tuple[Callable[[str], Any], str]] = [
            *((parse_json, text), (ast.literal_eval, with_commas), (ast.literal_eval, as_list))
        ]
        for parse, written in readings:
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                if isinstance(values := parse(written), list | tuple | dict):
                    return texts_in(values, depth - 1)
    return [text]


def _with_comma(item: re.Match[str]) -> str:
    value = "None" if item[1] == "nan" else item[1] or ""
    return value + "," * bool(item[2])


def split_name(value: Any) -> str | None:
    """Return a row's split; None without one."""
    name = "" if value is None or value != value else str(value).strip()
    return name or None


def require_splits(
    counts: Mapping[str, int | None], where: str, remedy: str = "it should be train, val or test"
) -> None:
    """Refuse names that are only partly splits; `counts` are images by name, if known."""
    split_by_name = {name: split_of(name) for name in sorted(counts)}
    splits = [split for split in SPLIT_NAMES if split in split_by_name.values()]
    unknown = [name for name, split in split_by_name.items() if split is None]
    # Else images of a test set, by whatever name, would be dealt anew.
    if unknown and splits:
        count = counts[unknown[0]]
        shown = repr(unknown[0]) if count is None else f"{unknown[0]!r} ({count} images)"
        raise ConfigError(
            f"{where}: {shown} is no split, but stands beside {' and '.join(splits)}; {remedy}"
        )


SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".txt", ".token")
_IMAGE_NAME = re.compile(rf"[^\t;|]+({'|'.join(map(re.escape, IMAGE_SUFFIXES))})(#\d+)?")
# JSON rows that define the columns.
_SAMPLED = 50
_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
# A last line that an open quote swallows.
_END = "\0"
_BATCH = 32  # rows of images at once


class UserTable(NamedTuple):
    """One readable table: `rows` yields (location, row); `bytes_columns` hold encoded images."""

    columns: list[str]
    rows: Callable[[Sequence[str]], Iterator[Located]]
    bytes_columns: tuple[str, ...] = ()


def open_table(
    path: Path, where: str, overrides: ColumnOverrides, faults: Faults
) -> UserTable | None:
    """Open a table by its suffix; None without rows; unreadable rows are added to `faults`."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _columnar(path, where)
    if suffix in (".jsonl", ".ndjson"):
        return _of_objects(json_lines(path, faults), faults)
    if suffix == ".json":
        return _of_objects(_json_rows(path, faults), faults)
    return _delimited(path, where, overrides, faults)


def _of_objects(rows: Iterator[Located], faults: Faults) -> UserTable | None:
    first = list(islice(rows, _SAMPLED))
    columns = list(dict.fromkeys(key for _, row in first if isinstance(row, dict) for key in row))

    def objects(names: Sequence[str]) -> Iterator[Located]:
        for where, row in chain(first, rows):
            if isinstance(row, dict):
                yield where, row
            else:
                faults.append(Refused("row of another layout", where))

    return UserTable(columns, objects) if columns else None


def _json_rows(path: Path, faults: Faults) -> Iterator[Located]:
    """Yield the objects of a list, of lines, or of an object with lists, images or columns."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        yield from streamed_list(path, faults)
        return
    try:
        content = read_json(path, faults)
    except ConfigError as error:
        if "one object a line" not in str(error):
            raise
        yield from json_lines(path, faults)
        return
    if not isinstance(content, dict):
        return
    if {"images", "annotations"} <= content.keys():
        raise ConfigError(
            f"{shown(path)}: COCO's own layout; take it with: vlp data coco --annotations FILE"
        )
    by_name = {
        name: value if isinstance(value, dict) else {"caption": value}
        for name, value in content.items()
        if name.lower().endswith(IMAGE_SUFFIXES)
    }
    # Several lists may be splits.
    lists = {
        name: rows
        for name, rows in content.items()
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows)
    }
    if by_name:
        yield from (
            (f"{shown(path)}, {name}", {"image": name, **row}) for name, row in by_name.items()
        )
    elif lists:
        for name, rows in lists.items():
            split = {"split": name} if split_of(name) else {}
            for number, row in enumerate(rows, 1):
                if isinstance(row, dict):
                    yield f"{shown(path)}, {name}, row {number}", {**split, **row}
    else:
        # pandas writes columns where it is not told otherwise.
        columns = {
            name: list(values.values() if isinstance(values, dict) else values)
            for name, values in content.items()
            if isinstance(values, list | dict)
        }
        if len({len(values) for values in columns.values()}) == 1:
            for number, values in enumerate(zip(*columns.values()), 1):
                yield f"{shown(path)}, row {number}", dict(zip(columns, values))


def _delimited(
    path: Path, where: str, overrides: ColumnOverrides, faults: Faults
) -> UserTable | None:
    # Comma, tab, semicolon or bar separated text, with or without a header.
    with open(path, **_TEXT) as file:
        line = file.readline(1 << 16)
    if not sound(line) or "\0" in line:
        raise ConfigError(f"{where}: not UTF-8; save it as UTF-8")
    if not line.strip():
        return None
    delimiters = "\t" if path.suffix.lower() == ".tsv" else ",\t;|"

    def score(cells: list[str]) -> tuple[int, int, int]:
        stripped = [cell.strip() for cell in cells]
        has_columns = find_columns(stripped, overrides) is not None
        images = sum(plain(cell) in IMAGES or is_image_name(cell) for cell in stripped)
        return has_columns, images, len(cells)

    cut = {mark: next(csv.reader([line], delimiter=mark)) for mark in delimiters}
    # The delimiter under which the first line has the columns, else image names, else most cells.
    delimiter = max(delimiters, key=lambda mark: score(cut[mark]))
    names = [cell.strip() for cell in cut[delimiter]]
    headless = find_columns(names, overrides) is None and len(names) > 1
    image_position = next((at for at, cell in enumerate(names) if is_image_name(cell)), None)
    headless = headless and image_position is not None
    if headless:
        names = [
            "image" if at == image_position else f"column {at + 1}" for at in range(len(names))
        ]
        if len(names) == 2:
            names[1 - (image_position or 0)] = "caption"

    def is_row(line: str) -> bool:
        cells = next(csv.reader([line], delimiter=delimiter), [])
        return len(cells) >= len(names) > 1 and any(is_image_name(cell.strip()) for cell in cells)

    def rows(columns: Sequence[str]) -> Iterator[Located]:
        # MySQL writes a backslash before a quote, where others write two quotes.
        marks = (None, "\\") if delimiter == "\t" or _escapes_quotes(path) else ()
        escape = next((mark for mark in marks if _quotes_end_cells(path, delimiter, mark)), "")
        bare = delimiter == "\t" and escape == "" and not line.startswith('"')
        quoting: Literal[0, 3] = csv.QUOTE_NONE if bare else csv.QUOTE_MINIMAL
        options: dict[str, Any] = {"quoting": quoting, "escapechar": escape or None}
        with open(path, **_TEXT) as file:
            lines = _Lines(chain(file, [_END]))
            reader = csv.reader(lines, delimiter=delimiter, **options)
            for number in count():
                lines.row.clear()
                try:
                    cells = next(reader)
                    is_open = len(cells) > 0 and cells != [_END] and cells[-1].endswith(_END)
                except StopIteration:
                    break
                except csv.Error:  # more than 128 KiB in quotes
                    cells, is_open = [], True
                # A quote that is not closed swallows rows up to the next one.
                if is_open or any(map(is_row, lines.row[1:])):
                    lines.rewind()
                    faults.append(Refused("quote left open", f"{where}, line {lines.number}"))
                    continue
                if (not number and not headless) or cells in ([], [_END]):
                    continue
                cells = [*map(_unquoted, cells)] if bare else cells
                location = f"{where}, line {lines.number}"
                if not sound("".join(cells)):
                    faults.append(Refused("line that is not UTF-8", location))
                elif len(cells) < len(names) or any(cells[len(names) :]):
                    faults.append(Refused("row of another layout", location))
                else:
                    # Captions may be in several columns of one name.
                    values: dict[str, Any] = defaultdict(list)
                    for name, cell in zip(names, cells):
                        values[name].append(cell)
                    row = {name: v if len(v) > 1 else v[0] for name, v in values.items()}
                    yield location, row

    return UserTable(names, rows)


class _Lines:
    """Lines of a file; those of a row can be read again, but the first."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self._again = iter(lines), list[str]()
        self.row: list[str] = []  # lines since it was cleared
        self.number = 0  # of the last line, from 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._lines)
        self.row.append(line)
        self.number += 1
        return line

    def rewind(self) -> None:
        """Go back to the line after the row's first."""
        self._again += reversed(self.row[1:])
        self.number -= len(self.row) - 1


def _unquoted(cell: str) -> str:
    # Quotes within a caption belong to it.
    inner = cell[1:-1].replace('""', "")
    enclosed = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner
    return cell[1:-1].replace('""', '"') if enclosed else cell


def _escapes_quotes(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(b'\\"' in line for line in file)


def _quotes_end_cells(path: Path, delimiter: str, escape: str | None) -> bool:
    # If not all quotes of a tab separated file enclose cells, they belong to captions. A cell of
    # several lines with tabs lies between two such quotes.
    with open(path, **_TEXT) as file:
        try:
            rows = csv.reader(file, delimiter=delimiter, escapechar=escape, strict=True)
            return not any("\n" in cell and "\t" in cell for row in rows for cell in row)
        except csv.Error:
            return False


def is_image_name(cell: str) -> bool:
    """Return whether a value is an image's file name, perhaps with Flickr's `#0` after it."""
    return bool(_IMAGE_NAME.fullmatch(cell.strip().lower()))


def _columnar(path: Path, where: str) -> UserTable:
    # Rows hold images, so only a few are read at a time.
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError:
        raise ConfigError(
            f"{where}: {path.suffix[1:].capitalize()} needs pyarrow: pip install 'vlp[data]'"
        ) from None

    features: dict[str, Any] = {}

    def batches(names: Sequence[str]) -> Iterator[Any]:
        if path.suffix.lower() == ".parquet":
            file = parquet.ParquetFile(path)
            groups = (file.metadata.row_group(n) for n in range(file.metadata.num_row_groups))
            if sum(group.total_byte_size for group in groups) > most_unpacked(path):
                raise ConfigError(f"{where}: {TOO_MUCH}")
            yield from file.iter_batches(batch_size=_BATCH, columns=list(names))
            return
        with _arrow(path, pa, ipc) as reader:
            for batch in reader:
                chosen = batch.select(list(names))
                for start in range(0, len(chosen), _BATCH):
                    yield chosen.slice(start, _BATCH)

    def rows(names: Sequence[str]) -> Iterator[Located]:
        number = 0
        try:
            for batch in batches(names):
                # Arrow reads where damaged offsets point.
                batch.validate(full=True)
                for row in batch.to_pylist():
                    number += 1
                    yield f"{where}, row {number}", with_class_names(row, features)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where}: damaged behind row {number} ({reason})") from error

    try:
        if path.suffix.lower() == ".parquet":
            schema = parquet.read_schema(path)
        else:
            with _arrow(path, pa, ipc) as reader:
                schema = reader.schema
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not a readable {path.suffix[1:]} file ({reason})") from error
    # Other writers leave no features of `datasets`.
    with suppress(KeyError, TypeError, ValueError):
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
    with_bytes = tuple(field.name for field in schema if _holds_bytes(field.type, pa))
    return UserTable(list(schema.names), rows, with_bytes)


def with_class_names(row: dict[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with class names for class numbers, by the features that `datasets` writes."""

    def with_names(value: Any, feature: Any) -> Any:
        if isinstance(value, list):
            inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            return [with_names(item, inner) for item in value]
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, list) and isinstance(value, int):
            return names[value] if 0 <= value < len(names) else None
        return value

    return {name: with_names(value, features.get(name, {})) for name, value in row.items()}


def _arrow(path: Path, pa: Any, ipc: Any) -> Any:
    # `datasets` writes streams, others files.
    try:
        return ipc.open_stream(pa.memory_map(str(path)))
    except pa.ArrowInvalid:
        file = ipc.open_file(pa.memory_map(str(path)))
        return pa.RecordBatchReader.from_batches(
            file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
        )


def _holds_bytes(kind: Any, pa: Any) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in {kind.field(number).name for number in range(kind.num_fields)}
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
