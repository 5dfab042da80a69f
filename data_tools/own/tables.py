"""Tables of images and captions: CSV, TSV, JSON, JSON Lines, Parquet and Arrow."""

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

from data_tools.builder.samples import Fault
from data_tools.originals import IMAGE_SUFFIXES, TOO_MUCH, display_path, max_unpacked_bytes
from data_tools.rows import (
    Faults,
    JsonLinesError,
    LocatedRow,
    is_utf8,
    json_lines,
    read_json,
    streamed_list,
)
from vlp.config import ConfigError
from vlp.data.file_names import SPLIT_NAMES, split_of
from vlp.data.shards.sample_files import BadSample
from vlp.io import parse_json

# Usual names of columns, in order of preference.
IMAGES = (
    *("image", "images", "file_name", "filename", "image_file_name", "image_path", "img_path"),
    *("image_file", "image_name", "img", "img_name", "filepath", "file_path", "path", "file"),
    *("photo", "jpg", "jpeg", "png", "webp", "image_id", "img_id"),
)
CAPTIONS = (
    *("caption", "captions", "text", "texts", "txt", "sentence", "sentences", "raw"),
    *("description", "descriptions", "alt_text", "alt", "comment", "title", "prompt"),
)
SPLITS = ("split", "set", "subset", "partition", "fold", "phase", "usage", "set_name")

# Pandas and other tools write these for a missing value.
_MISSING = {
    *("", "nan", "none", "null", "<null>", "(null)", "na", "<na>", "n/a", "\\n", "undefined"),
    *("#n/a", "#name?", "#ref!", "#value!", "#div/0!", "#null!", "#num!", "[object object]"),
}
_BYTES = re.compile(r"""b('([^'\\]|\\.)*'|"([^"\\]|\\.)*")""")
# A list, tuple, set or array as Python or NumPy prints it.
_PRINTED = re.compile(
    r"""(array|list)?[\[({]\s*([\[({]|[bu]?['"]|np\.|array|list|None|nan).*[\])}]""", re.DOTALL
)
# Group 1: an item or closing bracket; group 2: space after it where NumPy prints no comma. Matches
# without groups are NumPy's names and dtypes, to be dropped.
_ITEM = re.compile(
    r"""([bu]?'(?:[^'\\]|\\.)*'|[bu]?"(?:[^"\\]|\\.)*"|None|nan|[\])}])(\s+(?=[^\s,\])}]))?"""
    r"|(?:np\.str_|array|list)(?=\()|,\s*dtype=[^\s)]+",
    re.DOTALL,
)
_NUMBERED = re.compile(r"(caption|sentence|text|description)[_.]?\d+")
_DEPTH = 3  # of nested lists of captions


class Columns(NamedTuple):
    """The names of a table's columns with images, captions and splits."""

    image: str
    captions: tuple[str, ...]
    split: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the columns to read."""
        return [self.image, *self.captions, *([self.split] if self.split else [])]

    def describe(self, available: Sequence[str]) -> str:
        """Return a message on the use of the table's columns, all of which are `available`."""
        captions = ", ".join(map(repr, self.captions))
        split = f", split from {self.split!r}" if self.split else ""
        others = [name for name in available if name not in self.names]
        unused = f"; not used: {', '.join(map(repr, others[:8]))}" if others else ""
        more = ", ..." if len(others) > 8 else ""
        return f"image from column {self.image!r}, captions from {captions}{split}{unused}{more}"


class ColumnOverrides(NamedTuple):
    """Columns that the command line names; others are found by their usual names."""

    image: str | None = None
    captions: tuple[str, ...] | None = None
    split: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the columns to read."""
        names = (self.image, *(self.captions or ()), self.split)
        return [name for name in names if name is not None]


def find_columns(
    names: Sequence[str], overrides: ColumnOverrides, bytes_columns: Sequence[str] = ()
) -> Columns | None:
    """Find the columns by `overrides`, else by usual names; None without images or captions."""
    if not set(names).issuperset(overrides.names):
        return None
    by_name = {normalise_name(name): name for name in reversed(names)}
    image = overrides.image or next((by_name[name] for name in IMAGES if name in by_name), None)
    captions = overrides.captions
    if captions is None:
        numbered = [name for name in names if _NUMBERED.fullmatch(normalise_name(name))]
        first = next((by_name[name] for name in CAPTIONS if name in by_name), None)
        # pandas calls columns of one name `caption`, `caption.1`, `caption.2`.
        captions = tuple(name for name in numbered if name.startswith(first or ""))
        captions = captions if first is None else (first, *captions)
    # Encoded images need no usual name, if a single column has them.
    image_columns = [name for name in bytes_columns if name not in captions]
    if overrides.image is None and image not in image_columns and len(image_columns) == 1:
        image = image_columns[0]
    if image is None or not captions:
        return None
    # An exact `split` comes first, then names like `data_split`.
    usual = (SPLITS[0], *(name for name in reversed(by_name) if "split" in name), *SPLITS[1:])
    split = overrides.split or next((by_name[name] for name in usual if name in by_name), None)
    return Columns(image, captions, None if split in (image, *captions) else split)


def _may_be_split(name: str) -> bool:
    return "split" in normalise_name(name) or normalise_name(name) in SPLITS


def normalise_name(name: str) -> str:
    """Return a column's name in lower case with `_` for spaces and hyphens."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def missing_columns(
    where: str, names: Sequence[str], overrides: ColumnOverrides, bytes_columns: Sequence[str] = ()
) -> ConfigError:
    """Return the error for a table in which `find_columns` does not find all columns."""
    unknown = [name for name in overrides.names if name not in names]
    missing, remedy = "columns of images and captions", "them with --image COLUMN --caption COLUMN"
    if unknown:
        missing, remedy = f"column {unknown[0]!r}", "one of these"
    elif find_columns([*names, CAPTIONS[0]], overrides, bytes_columns):
        missing, remedy = "column of captions", "it with --caption COLUMN"
    elif find_columns([*names, IMAGES[0]], overrides, bytes_columns):
        missing, remedy = "column of images", "it with --image COLUMN"
    return ConfigError(f"{where}: no {missing} among {', '.join(names[:20])}; name {remedy}")


def texts_in(value: Any, depth: int = _DEPTH) -> list[str]:
    """Return the captions in a value: text, UTF-8 bytes, an object with a caption, or a list.

    Raises BadSample for other bytes.
    """
    # NaN, the only value that is not equal to itself, stands for a missing one.
    if value is None or value != value or depth < 0:
        return []
    if isinstance(value, dict):
        keys = {normalise_name(str(key)): key for key in reversed(value)}
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
    # Pandas writes lists into CSV files as Python or NumPy prints them.
    if _PRINTED.fullmatch(text):
        literal = _ITEM.sub(_add_comma, text)
        # A set has no order, so it is read as a list.
        as_list = re.sub(r"^\{(.*)\}$", r"[\1]", literal, flags=re.DOTALL)
        readings: list[tuple[Callable[[str], Any], str]] = [
            (parse_json, text),
            (ast.literal_eval, literal),
            (ast.literal_eval, as_list),
        ]
        for parse, source in readings:
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                values = parse(source)
                if isinstance(values, list | tuple | dict):
                    return texts_in(values, depth - 1)
    return [text]


def _add_comma(item: re.Match[str]) -> str:
    value = "None" if item[1] == "nan" else item[1] or ""
    return value + "," * bool(item[2])


def split_name(value: Any) -> str | None:
    """Return the name of a split in a table's cell; None if missing."""
    # NaN is not equal to itself.
    name = "" if value is None or value != value else str(value).strip()
    return name or None


def require_splits(
    counts: Mapping[str, int | None], where: str, remedy: str = "it should be train, val or test"
) -> None:
    """Refuse names if only some of them are splits; `counts`: images by name, if known."""
    split_by_name = {name: split_of(name) for name in sorted(counts)}
    splits = [split for split in SPLIT_NAMES if split in split_by_name.values()]
    unknown = [name for name, split in split_by_name.items() if split is None]
    # If the other names were ignored, their images could be test images that move to train.
    if unknown and splits:
        count = counts[unknown[0]]
        label = repr(unknown[0]) if count is None else f"{unknown[0]!r} ({count} images)"
        raise ConfigError(
            f"{where}: {label} is not a split, but there are {' and '.join(splits)}; {remedy}"
        )


TABLE_SUFFIXES = (
    *(".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".txt", ".token"),
)
_IMAGE_NAME = re.compile(rf"[^\t;|]+({'|'.join(map(re.escape, IMAGE_SUFFIXES))})(#\d+)?")
_HEAD = 50  # first JSON rows, which define the columns
_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
_END = "\0"  # added as a last line, which ends up in a cell if a quote is left open
_BATCH = 32  # rows of images at once


class UserTable(NamedTuple):
    """An opened table."""

    columns: list[str]
    rows: Callable[[Sequence[str]], Iterator[LocatedRow]]  # with at least the columns to read
    bytes_columns: tuple[str, ...] = ()


def open_table(
    path: Path, where: str, overrides: ColumnOverrides, faults: Faults
) -> UserTable | None:
    """Open a table by its suffix; None without rows; unreadable rows are added to `faults`."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _arrow_table(path, where)
    if suffix in (".jsonl", ".ndjson"):
        return _object_table(json_lines(path, faults), faults)
    if suffix == ".json":
        return _object_table(_json_rows(path, faults), faults)
    return _text_table(path, where, overrides, faults)


def _object_table(objects: Iterator[LocatedRow], faults: Faults) -> UserTable | None:
    head = list(islice(objects, _HEAD))
    columns = list(dict.fromkeys(key for _, row in head if isinstance(row, dict) for key in row))

    def rows(names: Sequence[str]) -> Iterator[LocatedRow]:
        for where, row in chain(head, objects):
            if not isinstance(row, dict):
                faults.append(Fault("row of another layout", where))
                continue
            late = [key for key in row if key not in columns and _may_be_split(key)]
            if late and not any(map(_may_be_split, columns)):
                raise ConfigError(
                    f"{where}: the first {_HEAD} rows have no {late[0]!r}; give it to every row, "
                    "if only as null"
                )
            yield where, row

    return UserTable(columns, rows) if columns else None


def _json_rows(path: Path, faults: Faults) -> Iterator[LocatedRow]:
    """Yield the rows of a JSON file: a list, lines, or an object of lists, images or columns."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        yield from streamed_list(path, faults)
        return
    try:
        content = read_json(path, faults)
    except JsonLinesError:
        yield from json_lines(path, faults)
        return
    if not isinstance(content, dict):
        return
    if {"images", "annotations"} <= content.keys():
        raise ConfigError(
            f"{display_path(path)}: COCO's own layout; take it with: vlp data coco --annotations "
            "FILE"
        )
    row_by_image = {
        name: value if isinstance(value, dict) else {"caption": value}
        for name, value in content.items()
        if name.lower().endswith(IMAGE_SUFFIXES)
    }
    lists = {
        name: rows
        for name, rows in content.items()
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows)
    }
    if row_by_image:
        for name, row in row_by_image.items():
            yield f"{display_path(path)}, {name}", {"image": name, **row}
    elif lists:
        for name, rows in lists.items():
            # The list's name may be a split.
            split = {"split": name} if split_of(name) else {}
            for number, row in enumerate(rows, 1):
                where = f"{display_path(path)}, {name}, row {number}"
                yield where, {**split, **row} if isinstance(row, dict) else row
    else:
        # pandas' default layout has an object or a list per column.
        columns = {
            name: list(values.values() if isinstance(values, dict) else values)
            for name, values in content.items()
            if isinstance(values, list | dict)
        }
        if len({len(values) for values in columns.values()}) == 1:
            for number, values in enumerate(zip(*columns.values()), 1):
                yield f"{display_path(path)}, row {number}", dict(zip(columns, values))


def _text_table(
    path: Path, where: str, overrides: ColumnOverrides, faults: Faults
) -> UserTable | None:
    """Open a text separated by commas, tabs, semicolons or bars, with or without a header."""
    with open(path, **_TEXT) as file:
        first_line = file.readline(1 << 16)
    if not is_utf8(first_line) or "\0" in first_line:
        raise ConfigError(f"{where}: not UTF-8; save it as UTF-8")
    if not first_line.strip():
        return None
    delimiters = "\t" if path.suffix.lower() == ".tsv" else ",\t;|"
    delimiter, names = _split_first_line(first_line, delimiters, overrides)
    image_column = next((i for i, cell in enumerate(names) if is_image_name(cell)), None)
    has_header = (
        image_column is None or len(names) < 2 or find_columns(names, overrides) is not None
    )
    if not has_header:
        names = ["image" if i == image_column else f"column {i + 1}" for i in range(len(names))]
        if len(names) == 2:
            names[1 - (image_column or 0)] = "caption"

    def is_row(line: str) -> bool:
        cells = next(csv.reader([line], delimiter=delimiter), [])
        return len(cells) >= len(names) > 1 and any(map(is_image_name, cells))

    def rows(columns: Sequence[str]) -> Iterator[LocatedRow]:
        is_quoted, escape = _find_quoting(path, delimiter, first_line)
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
        with open(path, **_TEXT) as file:
            lines = _Lines(chain(file, [_END]))
            reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, escapechar=escape)
            for number in count():
                lines.row.clear()
                try:
                    cells = next(reader)
                    is_open = len(cells) > 0 and cells != [_END] and cells[-1].endswith(_END)
                except StopIteration:
                    break
                except csv.Error:  # a cell of more than 128 KiB
                    if len(lines.row) == 1 and lines.row[0].count('"') % 2 == 0:
                        faults.append(Fault("cell too long", f"{where}, line {lines.number}"))
                        continue
                    cells, is_open = [], True
                # An open quote takes in all rows up to the next quote.
                if is_open or any(map(is_row, lines.row[1:])):
                    lines.rewind()
                    faults.append(Fault("quote left open", f"{where}, line {lines.number}"))
                    continue
                if (not number and has_header) or cells in ([], [_END]):
                    continue
                cells = cells if is_quoted else [*map(_unquote, cells)]
                location = f"{where}, line {lines.number}"
                if not is_utf8("".join(cells)):
                    faults.append(Fault("line that is not UTF-8", location))
                elif len(cells) < len(names) or any(cells[len(names) :]):
                    faults.append(Fault("row of another layout", location))
                else:
                    # Captions may be in several columns of one name.
                    values: dict[str, Any] = defaultdict(list)
                    for name, cell in zip(names, cells):
                        values[name].append(cell)
                    row = {name: v if len(v) > 1 else v[0] for name, v in values.items()}
                    yield location, row

    return UserTable(names, rows)


def _split_first_line(
    line: str, delimiters: str, overrides: ColumnOverrides
) -> tuple[str, list[str]]:
    """Return the best of the `delimiters` for a table's first line, and the line's cells."""
    cells_by_delimiter = {
        delimiter: [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
        for delimiter in delimiters
    }

    def score(delimiter: str) -> tuple[int, int, int]:
        cells = cells_by_delimiter[delimiter]
        has_columns = find_columns(cells, overrides) is not None
        images = sum(normalise_name(cell) in IMAGES or is_image_name(cell) for cell in cells)
        return has_columns, images, len(cells)

    delimiter = max(delimiters, key=score)
    return delimiter, cells_by_delimiter[delimiter]


def _find_quoting(path: Path, delimiter: str, first_line: str) -> tuple[bool, str | None]:
    """Return whether a table has quoted cells, and their escape character; None: doubled quotes."""
    # Only a backslash, as MySQL writes it, makes a search necessary in files without tabs.
    if delimiter == "\t" or _escapes_quotes(path):
        for escape in (None, "\\"):
            if _has_quoted_cells(path, delimiter, escape):
                return True, escape
    # In a tab-separated file, quotes that cannot enclose cells belong to captions.
    return delimiter != "\t" or first_line.startswith('"'), None


class _Lines:
    """Iterator of a file's lines that can go back to the second line of the current row."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self._again = iter(lines), list[str]()
        self.row: list[str] = []  # lines of the current row; the caller clears it
        self.number = 0  # of the last line, from 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._lines)
        self.row.append(line)
        self.number += 1
        return line

    def rewind(self) -> None:
        """Go back to the row's second line."""
        self._again += reversed(self.row[1:])
        self.number -= len(self.row) - 1


def _unquote(cell: str) -> str:
    """Return a cell without enclosing quotes; quotes within a caption stay."""
    inner = cell[1:-1].replace('""', "")
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner
    return cell[1:-1].replace('""', '"') if is_quoted else cell


def _escapes_quotes(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(b'\\"' in line for line in file)


def _has_quoted_cells(path: Path, delimiter: str, escape: str | None) -> bool:
    """Return whether all quotes of a file can enclose cells; if not, they belong to captions."""
    with open(path, **_TEXT) as file:
        try:
            rows = csv.reader(file, delimiter=delimiter, escapechar=escape, strict=True)
            # A cell with tab and line break reaches from a quote in one caption to another caption.
            return not any("\n" in cell and "\t" in cell for row in rows for cell in row)
        except csv.Error:
            return False


def is_image_name(cell: str) -> bool:
    """Return whether a cell is an image's file name, perhaps with Flickr's `#0` after it."""
    return bool(_IMAGE_NAME.fullmatch(cell.strip().lower()))


def _arrow_table(path: Path, where: str) -> UserTable:
    """Open a Parquet or Arrow file, of which `_BATCH` rows are in memory at a time."""
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
            if sum(group.total_byte_size for group in groups) > max_unpacked_bytes(path):
                raise ConfigError(f"{where}: {TOO_MUCH}")
            yield from file.iter_batches(batch_size=_BATCH, columns=list(names))
            return
        with _open_arrow(path, pa, ipc) as reader:
            for batch in reader:
                columns = batch.select(list(names))
                for start in range(0, len(columns), _BATCH):
                    yield columns.slice(start, _BATCH)

    def rows(names: Sequence[str]) -> Iterator[LocatedRow]:
        number = 0
        try:
            for batch in batches(names):
                # Arrow itself does not check offsets, and would read outside its memory.
                batch.validate(full=True)
                for row in batch.to_pylist():
                    number += 1
                    yield f"{where}, row {number}", with_class_names(row, features)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where}: damaged after row {number} ({reason})") from error

    try:
        if path.suffix.lower() == ".parquet":
            schema = parquet.read_schema(path)
        else:
            with _open_arrow(path, pa, ipc) as reader:
                schema = reader.schema
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not a readable {path.suffix[1:]} file ({reason})") from error
    # Only `datasets` writes its features.
    with suppress(KeyError, TypeError, ValueError):
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
    with_bytes = tuple(field.name for field in schema if _has_bytes(field.type, pa))
    return UserTable(list(schema.names), rows, with_bytes)


def with_class_names(row: dict[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with class names in place of class numbers, by the features of `datasets`."""

    def with_names(value: Any, feature: Any) -> Any:
        if isinstance(value, list):
            inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            return [with_names(item, inner) for item in value]
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, list) and isinstance(value, int):
            return names[value] if 0 <= value < len(names) else None
        return value

    return {name: with_names(value, features.get(name, {})) for name, value in row.items()}


def _open_arrow(path: Path, pa: Any, ipc: Any) -> Any:
    # `datasets` writes Arrow's stream format, other tools its file format.
    try:
        return ipc.open_stream(pa.memory_map(str(path)))
    except pa.ArrowInvalid:
        file = ipc.open_file(pa.memory_map(str(path)))
        return pa.RecordBatchReader.from_batches(
            file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
        )


def _has_bytes(dtype: Any, pa: Any) -> bool:
    if pa.types.is_struct(dtype):
        return "bytes" in {dtype.field(number).name for number in range(dtype.num_fields)}
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype))
