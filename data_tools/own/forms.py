"""Recognition of the form of own data, and its images with captions."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_tools.builder.build import check_splits
from data_tools.builder.samples import Fault
from data_tools.converters.captions import read_karpathy
from data_tools.originals import IMAGE_SUFFIXES, UNREAD_IMAGE_SUFFIXES
from data_tools.own.file_tree import FileTree, without_gz
from data_tools.own.tables import (
    TABLE_SUFFIXES,
    ColumnOverrides,
    Columns,
    UserTable,
    find_columns,
    missing_columns,
    open_table,
    require_splits,
    split_name,
    texts_in,
    with_class_names,
)
from data_tools.rows import Faults, LocatedRow, read_json
from vlp.config import ConfigError
from vlp.data.file_names import fold_case, split_of
from vlp.data.limits import MAX_IMAGE_BYTES
from vlp.data.shards.sample_files import BadSample
from vlp.io import parse_json

FORMS = (
    "images with NAME.txt or NAME.json beside them, an imagefolder with metadata.jsonl or .csv, a "
    "CSV, TSV, JSON Lines, JSON or Parquet table, a data set saved by `datasets`, img2dataset's "
    "output, or a tar or zip of one of these"
)
BAD_ANNOTATION = "bad annotation"  # kind of fault of side files
OUTSIDE = "image outside the folder of its table, which --images may name"
# Side files have the name of an image with one of these suffixes.
_SIDE_SUFFIXES = (".txt", ".caption", ".json")
_TITLES = {
    ".csv": "a CSV table",
    ".tsv": "a TSV table",
    ".txt": "a text table",
    ".token": "a text table",
    ".jsonl": "a JSON Lines table",
    ".ndjson": "a JSON Lines table",
    ".json": "a JSON table",
    ".parquet": "a Parquet table",
    ".arrow": "a data set that `datasets` saved to disk",
}
_MAGIC = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}
_MAX_TABLES = 10_000
_NUM_CHECKED = 20  # side files that are checked for numbers


class UserImage(NamedTuple):
    """An image with captions."""

    path: str  # in the tree, or the name of a missing image
    captions: list[str]
    split: str | None = None  # as the data names it
    url: str | None = None


class Form(NamedTuple):
    """A form of data: its title, messages on how it is read, and its images (to read once)."""

    title: str
    notes: list[str]
    images: Iterable[UserImage]
    covers_all_images: bool = True  # a caption is expected for every image of the place


class _TableMatch(NamedTuple):
    table: UserTable
    columns: Columns
    path: str
    split: str | None
    digits: int = 6  # of the row numbers that name embedded images
    read: Callable[[Any], Any] = lambda value: value  # adds the bytes of an image; BadSample


def recognise(
    tree: FileTree,
    overrides: ColumnOverrides,
    faults: Faults,
    place: Path,
    table_folder: Path | None,
) -> Form:
    """Recognise the form of a place by the names of its files and the columns of its tables.

    `table_folder` is the folder on disk of a place that is a table, to look for its images in.
    Unusable rows are added to `faults` while the form's images are read.
    """
    files, images = tree.files, tree.images
    stems = {fold_case(path.rpartition(".")[0]) for path in images}
    tables = [path for path in files if _may_be_table(path, stems)][:_MAX_TABLES]
    metadata = [
        path for path in tables if PurePosixPath(without_gz(path)).stem.lower() == "metadata"
    ]
    arrow_files = [path for path in tables if path.endswith(".arrow")]
    side_files = [path for path in files if _is_side_file(path, stems)]
    # If the place is a table, tables in the folders of --images are ignored.
    table_name = without_gz(place.name)
    is_table = place.is_file() and _suffix(table_name) in TABLE_SUFFIXES
    if is_table:
        tables = [table_name]
    elif metadata or arrow_files:
        tables = metadata or arrow_files
    # Detectors write boxes into NAME.txt, while the captions are in a table.
    elif (
        2 * len(side_files) >= len(images) > 0
        and overrides == ColumnOverrides()
        and not (tables and _are_numeric(side_files[:_NUM_CHECKED], tree))
    ):
        return _side_form(tree, images, side_files, tables, overrides, faults, place)
    matches, problem = [], None
    for path in tables:
        on_disk = tree.on_disk(path)
        karpathy = _karpathy_form(on_disk, path, tree, table_folder, faults)
        if karpathy is not None:
            karpathy.notes.extend(_unread_tables(tables, [path]))
            return karpathy
        table = open_table(on_disk, path, overrides, faults)
        if table is None:
            problem = problem or ConfigError(f"{path}: no rows of images and captions in it")
            continue
        columns = find_columns(table.columns, overrides, table.bytes_columns)
        if columns is not None:
            split = next(filter(None, map(split_of, reversed(path.split("/")))), None)
            matches.append(_TableMatch(table, columns, path, split))
        else:
            problem = problem or missing_columns(
                path, table.columns, overrides, table.bytes_columns
            )
    if matches:
        title = _TITLES[_suffix(matches[0].path)]
        if metadata:
            title = "an imagefolder of Hugging Face"
        elif len(matches) > 1 and not arrow_files:
            title = f"{len(matches)} tables, the first of them {title}"
        notes = [
            f"{match.path}: {match.columns.describe(match.table.columns)}" for match in matches[:3]
        ]
        notes += _unread_tables(tables, [match.path for match in matches])
        rows = _table_images(matches, tree, faults, table_folder)
        # A table that the user names may describe some of the images only.
        covers_all = not is_table and not any(match.table.bytes_columns for match in matches)
        return Form(title, notes, rows, covers_all)
    if side_files and not is_table:
        return _side_form(tree, images, side_files, tables, overrides, faults, place)
    if problem is not None:
        raise problem
    if images:
        raise ConfigError(
            f"{place}: {len(images)} images and no caption; put a NAME.txt beside each NAME.jpg, "
            "or add a table with columns for images and captions"
        )
    has_spreadsheet = any(path.endswith(".xlsx") for path in files) or place.suffix == ".xlsx"
    hint = "; save a spreadsheet as CSV" if has_spreadsheet else ""
    contents = _count_by_suffix(files) or "nothing"
    raise ConfigError(f"{place}: holds {contents}{hint}; it should be {FORMS}")


def _unread_tables(tables: Sequence[str], form_tables: Sequence[str]) -> list[str]:
    others = [path for path in tables if path not in form_tables]
    listing = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
    return [f"{len(others)} other tables are left out: {listing}"] if others else []


def is_numeric(text: str) -> bool:
    """Return whether a text consists of numbers, such as a label or a box."""
    return bool(re.fullmatch(r"[-+.\deE\s]+", text)) and any(map(str.isdigit, text))


def _are_numeric(side_files: Sequence[str], tree: FileTree) -> bool:
    lines, content = _read_side_files(side_files, tree, [])
    return content is None and len(lines) > 0 and all(map(is_numeric, lines))


def other_files(tree: FileTree) -> list[str]:
    """Return messages on files of unknown kinds, and on images of unsupported formats."""
    suffixes = {*TABLE_SUFFIXES, *_SIDE_SUFFIXES, *IMAGE_SUFFIXES}
    files = [path for path in tree.files if _suffix(path) not in suffixes]
    counts = _count_by_suffix(files)
    notes = [f"{len(files)} files of other kinds are left out: {counts}"] if files else []
    unread = [path for path in tree.files if _suffix(path) in UNREAD_IMAGE_SUFFIXES]
    if unread:
        notes.append(
            f"{len(unread)} images are of formats that are not read ({_count_by_suffix(unread)}): "
            "convert them to JPEG or PNG"
        )
    return notes


def add_image(value: Any, name: str, tree: FileTree) -> str | None:
    """Add the encoded image in a table's cell to the tree; returns its path, None without bytes."""
    # `datasets` stores an object with bytes, and perhaps a path.
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    data = bytes(data)
    path = value.get("path") if isinstance(value, dict) else None
    if path:
        name = PurePosixPath(str(path).replace("\\", "/")).stem
    suffix = next((suffix for magic, suffix in _MAGIC.items() if data.startswith(magic)), "jpg")
    return tree.add_bytes(f"{name}.{suffix}", data)


def _table_images(
    matches: Sequence[_TableMatch], tree: FileTree, faults: Faults, table_folder: Path | None
) -> Iterator[UserImage]:
    for match in matches:
        folder = match.path.rpartition("/")[0]
        stem = "-".join(PurePosixPath(match.path).with_suffix("").parts[-2:])
        rows: Iterator[LocatedRow] = match.table.rows(match.columns.names)
        for number, (where, row) in enumerate(rows):
            value = row.get(match.columns.image)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            try:
                captions = _texts_of(row, match.columns.captions)
                value = match.read(value)
                image = add_image(value, f"{stem}-{number:0{match.digits}d}", tree)
            except BadSample as bad:
                faults.append(Fault(bad.kind, where))
                continue
            if image is None:
                name = value.get("path") if isinstance(value, dict) else value
                if name in (None, "") or isinstance(name, list | dict):
                    faults.append(Fault("row without one image", where))
                    continue
                try:
                    image = _resolve(str(name), folder, tree, table_folder)
                except BadSample as bad:
                    faults.append(Fault(bad.kind, f"{where}: {bad.where}"))
                    continue
            split = row.get(match.columns.split) if match.columns.split else match.split
            yield UserImage(image, captions, split_name(split))


def _resolve(name: str, folder: str, tree: FileTree, table_folder: Path | None) -> str:
    """Return the path of an image named in a table of `folder`, or the name if it is missing.

    Raises BadSample outside `table_folder`: a stranger's table could refer to private images, which
    would then be published with the shards.
    """
    # Flickr numbers the captions of an image: `1.jpg#0`.
    for path in (name, re.sub(r"(\.\w+)#\d+$", r"\1", name)):
        if table_folder is None:
            if (tree_path := tree.path_of(path, folder)) is not None:
                return tree_path
        elif (file := _find_file(Path(os.path.abspath(table_folder / path)))) is not None:
            if not file.is_relative_to(os.path.abspath(table_folder)):
                raise BadSample(OUTSIDE, name)
            return tree.add_file(file, path)
    return name


def _find_file(path: Path) -> Path | None:
    """Return the file, else the only file with its name in another case or Unicode form."""
    if path.is_file():
        return path
    similar = _files_by_name(path.parent).get(fold_case(path.name), [])
    return similar[0] if len(similar) == 1 else None


@lru_cache(maxsize=64)
def _files_by_name(folder: Path) -> dict[str, list[Path]]:
    by_name = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        by_name[fold_case(path.name)].append(path)
    return by_name


def _side_form(
    tree: FileTree,
    images: Sequence[str],
    side_files: Sequence[str],
    tables: Sequence[str],
    overrides: ColumnOverrides,
    faults: Faults,
    place: Path,
) -> Form:
    """Return the form of images with captions in files of the same name."""
    # img2dataset writes *_stats.json; its .json beside an image holds the download status.
    is_img2dataset = any(path.endswith("_stats.json") for path in tree.files)
    title = "images with their captions beside them"
    if is_img2dataset:
        title = "img2dataset's output"
    elif place.is_file() or any(".tar/" in path for path in images):
        title = "an archive of images with their captions beside them"

    # Case may differ from the image's (IMG_1.JPG, img_1.TXT); an exact match comes first.
    stems = {path.rpartition(".")[0] for path in images}
    by_stem: dict[str, str] = {}
    by_folded_stem: dict[str, str] = {}
    for path in side_files:
        stem, _, extension = path.rpartition(".")
        if stem in stems:
            by_stem[f"{stem}.{extension.lower()}"] = path
        else:
            by_folded_stem[f"{fold_case(stem)}.{extension.lower()}"] = path

    def read() -> Iterator[UserImage]:
        missing_fields = overrides.names
        for image in images:
            stem = image.rpartition(".")[0]
            paths = (
                by_stem.get(stem + suffix) or by_folded_stem.get(fold_case(stem) + suffix)
                for suffix in _SIDE_SUFFIXES
            )
            lines, content = _read_side_files(filter(None, paths), tree, faults)
            fields = content if isinstance(content, dict) else {}
            missing_fields = [name for name in missing_fields if name not in fields]
            captions = _texts_of(fields, overrides.captions or ("captions",))
            if overrides.captions is None:
                captions = captions or _texts_of(fields, ("caption",))
                # img2dataset writes one caption to .txt and .json; else .json wins, as in training.
                captions = (lines or captions) if is_img2dataset else (captions or lines)
                captions = captions or texts_in(content)
            split = split_name(fields.get(overrides.split)) if overrides.split else None
            yield UserImage(image, captions, split, fields.get("url") or None)
        if missing_fields:
            raise ConfigError(
                f"{place}: no table column or .json field is called {', '.join(missing_fields)}"
            )

    source = _count_by_suffix(side_files)
    if overrides.captions:
        source = f"{', '.join(map(repr, overrides.captions))} of .json"
    notes = [f"captions from {source} beside the images", *_unread_tables(tables, ())]
    return Form(title, notes, read())


def _texts_of(fields: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [text for name in names for text in texts_in(fields.get(name))]


def _read_side_files(paths: Iterable[str], tree: FileTree, faults: Faults) -> tuple[list[str], Any]:
    """Return the lines of an image's text files, and the content of its JSON file (or None)."""
    lines: list[str] = []
    content = None
    for path in paths:
        try:
            text = tree.read_text(path)
            if path.lower().endswith(".json"):
                content = parse_json(text)
            else:
                lines += [line for line in re.split("[\r\n]", text) if line.strip()]
        except (BadSample, ValueError) as error:
            where = error.where if isinstance(error, BadSample) else f"{path}: {error}"
            faults.append(Fault(BAD_ANNOTATION, where))
    return lines, content


def _karpathy_form(
    on_disk: Path, path: str, tree: FileTree, table_folder: Path | None, faults: Faults
) -> Form | None:
    """Return the form of a table in Karpathy's layout; None for another layout."""
    # Look at the start first: parsing a large table takes minutes.
    with open(on_disk, "rb") as file:
        if _suffix(path) != ".json" or b'"sentences"' not in file.read(1 << 20):
            return None
    file_faults: Faults = []
    content = read_json(on_disk, file_faults)
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return None
    faults += file_faults
    entries = read_karpathy(content, on_disk, faults)
    folder = path.rpartition("/")[0]

    def read() -> Iterator[UserImage]:
        for entry in entries:
            try:
                image = _resolve(entry.filename, folder, tree, table_folder)
            except BadSample as bad:
                faults.append(Fault(bad.kind, bad.where))
                continue
            yield UserImage(image, [text or "" for text in entry.captions], entry.split)

    notes = [f"{path}: filename, sentences and split"]
    return Form("Karpathy's JSON", notes, read(), covers_all_images=False)


def _count_by_suffix(paths: Iterable[str]) -> str:
    counts = Counter(_suffix(path) or "without an extension" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(8))


def splits_by_name(paths: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the splits of images by the names of folders and archives in their paths, or of files.

    The uppermost level with several splits is used; an image above that level has no split.
    """
    parts = {image: path.split("/") for image, path in paths.items()}
    for depth in range(max(map(len, parts.values()), default=0)):
        folders = {
            image: levels[depth] for image, levels in parts.items() if len(levels) > depth + 1
        }
        splits = {image: split for image, name in folders.items() if (split := split_of(name))}
        # A single split is used if it is val or test and other images lie above the level.
        is_partial = len(folders) < len(paths) and len(splits) == len(folders)
        if len(set(splits.values())) > 1 or (is_partial and {*splits.values()} & {"val", "test"}):
            require_splits(Counter(folders.values()), f"folders of {place}")
            return splits
    by_file = {image: split for image, levels in parts.items() if (split := split_of(levels[-1]))}
    return by_file if len(by_file) == len(paths) and len(set(by_file.values())) > 1 else {}


def _may_be_table(path: str, stems: set[str]) -> bool:
    name = PurePosixPath(path).name
    if _suffix(path) not in TABLE_SUFFIXES or _is_side_file(path, stems):
        return False
    # `datasets` caches results in such files.
    if name.startswith(("cache-", "tmp")) and name.endswith(".arrow"):
        return False
    # Of img2dataset, `datasets` and the hub.
    bookkeeping = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
    return name not in bookkeeping and not name.endswith("_stats.json")


def _is_side_file(path: str, stems: set[str]) -> bool:
    stem, _, extension = path.rpartition(".")
    return f".{extension.lower()}" in _SIDE_SUFFIXES and fold_case(stem) in stems


def _suffix(path: str) -> str:
    return PurePosixPath(without_gz(path)).suffix.lower()


PREFIX = "hub:"
_ARCHIVES = {"zip", "tar", "gzip", "bz2", "xz", "zstd", "lz4"}


def hub_form(
    place: str,
    tree: FileTree,
    overrides: ColumnOverrides,
    faults: Faults,
    selection: Sequence[str] | None = None,
) -> Form:
    """Return the form of `hub:OWNER/NAME[:CONFIG]` (or a local folder), with some or all splits."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{place}: streaming from the hub needs the package datasets: pip install 'vlp[data]'"
        ) from None
    name, _, config = place.removeprefix(PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(name, config or None, streaming=True)
        selected = [split for split in splits if selection is None or split in selection]
        parts = {split: _without_decoding(splits[split], datasets) for split in selected}
        features_by_split = {split: _features(part) for split, part in parts.items()}
    except Exception as error:  # of the hub, the network or the data set's files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{place}: `datasets` cannot open it ({reason})") from error
    check_splits(selection, list(splits))
    image_columns = {
        name
        for features in features_by_split.values()
        for name, feature in features.items()
        if _is_image(feature)
    }
    column_names = list(next(iter(features_by_split.values()), ()))
    columns = find_columns(column_names, overrides, sorted(image_columns))
    if columns is None:
        raise missing_columns(place, column_names, overrides, sorted(image_columns))
    # Before streaming, which takes hours.
    if columns.split is None:
        require_splits(dict.fromkeys(parts), place, "choose others with --splits")

    def rows(split: str, names: Sequence[str]) -> Iterator[LocatedRow]:
        stream = iter(parts[split].select_columns(list(names)))
        features = datasets.Features(features_by_split[split]).to_dict()
        for number in count(1):
            where = f"{place}, {split}, row {number}"
            try:
                row = with_class_names(next(stream), features)
            except StopIteration:
                return
            except Exception as error:  # of the network or the files
                raise ConfigError(f"{where}: cannot be read ({error}); run again") from error
            yield where, row

    title = f"a data set of the hub with {', '.join(parts)}, streamed"
    notes = [f"{place}: {columns.describe(column_names)}"]
    tables = {split: UserTable(column_names, partial(rows, split)) for split in parts}
    read = partial(_read_bytes, name=name)
    matches = [
        # Names of splits may hold dots, and the suffix of a path is dropped.
        _TableMatch(table, columns, f"{split}.hub", split, digits=8, read=read)
        for split, table in tables.items()
    ]
    images = _table_images(matches, tree, faults, None)
    return Form(title, notes, images, covers_all_images=False)


def _without_decoding(part: Any, datasets: Any) -> Any:
    for key, feature in _features(part).items():
        if _is_image(feature):
            part = part.cast_column(key, datasets.Image(decode=False))
    return part


def _features(part: Any) -> dict[str, Any]:
    if part.features is None:
        part = part._resolve_features()
    return dict(part.features)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


def _read_bytes(value: Any, name: str) -> Any:
    """Return an image's value with its bytes, read from its path if missing."""
    if not isinstance(value, dict) or value.get("bytes") is not None or not value.get("path"):
        return value
    import fsspec

    if not _is_inside(str(value["path"]), name):
        raise BadSample("image outside the data set", str(value["path"]))
    try:
        with fsspec.open(value["path"], "rb") as file:
            return {**value, "bytes": file.read(MAX_IMAGE_BYTES + 1)}
    except OSError as error:
        raise BadSample("missing image", str(value["path"])) from error


def _is_inside(path: str, name: str) -> bool:
    """Return whether a path, perhaps into an archive (`zip://a.jpg::PATH`), lies in the data set.

    A stranger's data set could refer to private files of this machine or network.
    """
    *archives, location = path.split("::")
    if any(scheme.partition("://")[0] not in _ARCHIVES for scheme in archives):
        return False
    if Path(name).is_dir():
        folder = os.path.abspath(name)
        return Path(os.path.abspath(location.removeprefix("file://"))).is_relative_to(folder)
    starts = f"hf://datasets/{name}@", f"hf://datasets/{name}/"
    return location.startswith((*starts, f"https://huggingface.co/datasets/{name}/"))
