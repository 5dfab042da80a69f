"""Recognition of the form that own images and captions come in, and the images with captions."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_tools.builder.build import check_splits
from data_tools.builder.samples import Refused
from data_tools.converters.captions import read_karpathy
from data_tools.originals import IMAGE_SUFFIXES
from data_tools.own.file_tree import FileTree, without_gz
from data_tools.own.tables import (
    SUFFIXES,
    ColumnOverrides,
    Columns,
    UserTable,
    find_columns,
    no_columns,
    open_table,
    require_splits,
    split_name,
    texts_in,
    with_class_names,
)
from data_tools.rows import Faults, Located, read_json
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
# Kind of fault of files next to images.
BAD_ANNOTATION = "bad annotation"
OUTSIDE = "image outside the folder of its table, which --images may name"
_SIDES = (".txt", ".caption", ".json")
_KINDS = {
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
_STARTS = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}
_MOST_TABLES = 10_000
_SAMPLED = 20  # files beside images that tell whether all hold labels


class UserImage(NamedTuple):
    """An image (path in the tree, or its name if missing) with raw captions, split and URL."""

    image: str
    captions: list[str]
    split: str | None = None
    url: str | None = None


class Form(NamedTuple):
    """A recognised form: its title, how it was read, and its images, once."""

    title: str
    took: list[str]
    images: Iterable[UserImage]
    every_image: bool = True  # all images of the place should have a caption


class _TableMatch(NamedTuple):
    table: UserTable
    columns: Columns
    path: str
    split: str | None


def recognise(
    tree: FileTree, overrides: ColumnOverrides, faults: Faults, place: Path, beside: Path | None
) -> Form:
    """Recognise the form of a place by its files' names and the columns of tables.

    Unusable rows are added to `faults` while images are read.
    """
    files, images = tree.files, tree.images
    stems = {fold_case(path.rpartition(".")[0]) for path in images}
    tables = [path for path in files if _may_be_table(path, stems)][:_MOST_TABLES]
    metadata = [path for path in tables if _stem(path) == "metadata"]
    arrow_files = [path for path in tables if path.endswith(".arrow")]
    sides = [path for path in files if _is_side(path, stems)]
    # The user means a table that is named itself, whatever else the folder holds.
    table_name = without_gz(place.name)
    is_table = place.is_file() and _suffix(table_name) in SUFFIXES
    if is_table:
        tables = [table_name]
    elif metadata or arrow_files:
        tables = metadata or arrow_files
    # Detectors write boxes into NAME.txt, while the captions are in a table.
    elif (
        2 * len(sides) >= len(images) > 0
        and overrides == ColumnOverrides()
        and not (tables and _hold_numbers(sides[:_SAMPLED], tree))
    ):
        return _side_files(tree, images, set(sides), tables, overrides, faults, place)
    matches, refused = [], None
    for path in tables:
        on_disk = tree.on_disk(path)
        karpathy = _karpathy(on_disk, path, tree, beside, faults)
        if karpathy is not None:
            karpathy.took.extend(_left_out(tables, [path]))
            return karpathy
        table = open_table(on_disk, path, overrides, faults)
        if table is None:
            refused = refused or ConfigError(f"{path}: no rows of images and captions in it")
            continue
        columns = find_columns(table.columns, overrides, table.bytes_columns)
        if columns is not None:
            split = next(filter(None, map(split_of, reversed(path.split("/")))), None)
            matches.append(_TableMatch(table, columns, path, split))
        elif refused is None:
            refused = no_columns(path, table.columns)
    if matches:
        title = _KINDS[_suffix(matches[0].path)]
        if metadata:
            title = "an imagefolder of Hugging Face"
        elif len(matches) > 1 and not arrow_files:
            title = f"{len(matches)} tables, the first of them {title}"
        took = [f"{match.path}: {match.columns}" for match in matches[:3]]
        took += _left_out(tables, [match.path for match in matches])
        rows = _table_images(matches, tree, faults, beside)
        # A table that is named itself may speak of some of the images only.
        is_whole = not is_table and not any(match.table.bytes_columns for match in matches)
        return Form(title, took, rows, every_image=is_whole)
    if sides and not is_table:
        return _side_files(tree, images, set(sides), tables, overrides, faults, place)
    if refused is not None:
        raise refused
    if images:
        raise ConfigError(
            f"{place}: {len(images)} images and not one caption; put a NAME.txt beside each "
            "NAME.jpg, or a table with columns for images and captions"
        )
    spreadsheet = any(path.endswith(".xlsx") for path in files) or place.suffix == ".xlsx"
    hint = "; save a spreadsheet as CSV" if spreadsheet else ""
    raise ConfigError(f"{place}: holds {_by_kind(files) or 'nothing'}{hint}; it should be {FORMS}")


def _left_out(tables: Sequence[str], read: Iterable[str]) -> list[str]:
    known = set(read)
    others = [path for path in tables if path not in known]
    shown = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
    return [f"{len(others)} other tables are left out: {shown}"] if others else []


def is_number(text: str) -> bool:
    """Return whether a text is one or more numbers, such as a label or a box."""
    return bool(re.fullmatch(r"[-+.\deE\s]*\d[-+.\deE\s]*", text))


def _hold_numbers(sides: Sequence[str], tree: FileTree) -> bool:
    lines, content = _read_sides(sides, tree, [])
    return content is None and len(lines) > 0 and all(map(is_number, lines))


def other_files(tree: FileTree) -> str:
    """Return the number of files that are neither images nor captions, as text; empty for 0."""
    suffixes = {*SUFFIXES, *_SIDES, *IMAGE_SUFFIXES}
    files = [path for path in tree.files if _suffix(path) not in suffixes]
    return f"{len(files)} files of other kinds are left out: {_by_kind(files)}" if files else ""


def value_image(value: Any, name: str, tree: FileTree) -> str | None:
    """Return the path of an image stored as bytes in a table's value; None for other values."""
    # The struct of `datasets` may have a path, too.
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    data = bytes(data)
    path = value.get("path") if isinstance(value, dict) else None
    if path:
        name = PurePosixPath(str(path).replace("\\", "/")).stem
    suffix = next((kind for start, kind in _STARTS.items() if data.startswith(start)), "jpg")
    return tree.add_bytes(f"{name}.{suffix}", data)


def _table_images(
    matches: Sequence[_TableMatch], tree: FileTree, faults: Faults, beside: Path | None
) -> Iterator[UserImage]:
    for match in matches:
        folder = match.path.rpartition("/")[0]
        stem = "-".join(PurePosixPath(match.path).with_suffix("").parts[-2:])
        rows: Iterator[Located] = match.table.rows(match.columns.names)
        for number, (where, row) in enumerate(rows):
            value = row.get(match.columns.image)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            try:
                captions = _texts_of(row, match.columns.captions)
                image = value_image(value, f"{stem}-{number:06d}", tree)
            except BadSample as bad:
                faults.append(Refused(bad.kind, where))
                continue
            if image is None:
                path = value.get("path") if isinstance(value, dict) else value
                if path in (None, "") or isinstance(path, list | dict):
                    faults.append(Refused("row without one image", where))
                    continue
                try:
                    image = _resolved(str(path), folder, tree, beside)
                except BadSample as bad:
                    faults.append(Refused(bad.kind, f"{where}: {bad.where}"))
                    continue
            split = row.get(match.columns.split) if match.columns.split else match.split
            yield UserImage(image, captions, split_name(split))


def _resolved(name: str, folder: str, tree: FileTree, beside: Path | None) -> str:
    """Return an image's path, or the name if missing; BadSample outside the table's folder."""
    # A stranger's table could name private images, which would end in shards that are shared.
    # Flickr numbers the captions of an image: `1.jpg#0`.
    for path in (name, re.sub(r"(\.\w+)#\d+$", r"\1", name)):
        if beside is None:
            if (tree_path := tree.path_of(path, folder)) is not None:
                return tree_path
        elif (file := _existing(Path(os.path.abspath(beside / path)))) is not None:
            if not file.is_relative_to(os.path.abspath(beside)):
                raise BadSample(OUTSIDE, name)
            return tree.add_file(file, path)
    return name


def _existing(file: Path) -> Path | None:
    # Some systems compare names without case, or write accents in another form.
    if file.is_file():
        return file
    alike = _listed(file.parent).get(fold_case(file.name), [])
    return alike[0] if len(alike) == 1 else None


@lru_cache(maxsize=64)
def _listed(folder: Path) -> dict[str, list[Path]]:
    by_name = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        by_name[fold_case(path.name)].append(path)
    return by_name


def _side_files(
    tree: FileTree,
    images: Sequence[str],
    sides: set[str],
    tables: Sequence[str],
    overrides: ColumnOverrides,
    faults: Faults,
    place: Path,
) -> Form:
    suffixes = Counter(_suffix(path) for path in sides)
    shown = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
    # img2dataset writes *_stats.json; its .json beside an image holds the download status.
    downloaded = any(path.endswith("_stats.json") for path in tree.files)
    title = "images with their captions beside them"
    if downloaded:
        title = "img2dataset's output"
    elif place.is_file() or any(".tar/" in path for path in images):
        title = "an archive of images with their captions beside them"

    # Case may differ beside images (IMG_1.JPG, img_1.TXT); an exact match comes first.
    stems = {path.rpartition(".")[0] for path in images}
    by_stem: dict[str, str] = {}
    by_folded: dict[str, str] = {}
    for path in sides:
        stem, _, extension = path.rpartition(".")
        index = by_stem if stem in stems else by_folded
        index[f"{stem if stem in stems else fold_case(stem)}.{extension.lower()}"] = path

    def read() -> Iterator[UserImage]:
        unseen_fields = [
            name for name in (overrides.image, *(overrides.captions or ()), overrides.split) if name
        ]
        for image in images:
            stem = image.rpartition(".")[0]
            names = ((f"{stem}{end}", f"{fold_case(stem)}{end}") for end in _SIDES)
            side_paths = (by_stem.get(exact) or by_folded.get(folded) for exact, folded in names)
            paths = [path for path in side_paths if path is not None]
            lines, content = _read_sides(paths, tree, faults)
            fields = content if isinstance(content, dict) else {}
            unseen_fields = [name for name in unseen_fields if name not in fields]
            captions = _texts_of(fields, overrides.captions or ("captions",))
            if overrides.captions is None:
                captions = captions or _texts_of(fields, ("caption",))
                # img2dataset writes one caption to .txt and .json; else .json wins, as in training.
                captions = (lines or captions) if downloaded else (captions or lines)
                captions = captions or texts_in(content)
            split = split_name(fields.get(overrides.split)) if overrides.split else None
            yield UserImage(image, captions, split, fields.get("url") or None)
        if unseen_fields:
            raise ConfigError(
                f"{place}: no table column or .json field is called {', '.join(unseen_fields)}"
            )

    if overrides.captions:
        shown = f"{', '.join(map(repr, overrides.captions))} of .json"
    took = [f"captions from {shown} beside the images", *_left_out(tables, ())]
    return Form(title, took, read())


def _texts_of(fields: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [text for name in names for text in texts_in(fields.get(name))]


def _read_sides(paths: Iterable[str], tree: FileTree, faults: Faults) -> tuple[list[str], Any]:
    # Both a text and a JSON file may describe an image.
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
            faults.append(Refused(BAD_ANNOTATION, where))
    return lines, content


def _karpathy(
    on_disk: Path, path: str, tree: FileTree, beside: Path | None, faults: Faults
) -> Form | None:
    # Parsing a large table of another form twice would take minutes.
    with open(on_disk, "rb") as file:
        if _suffix(path) != ".json" or b'"sentences"' not in file.read(1 << 20):
            return None
    # Its faults are counted by `read_karpathy`.
    content = read_json(on_disk, [])
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return None
    entries = read_karpathy(on_disk, faults)
    folder = path.rpartition("/")[0]

    def read() -> Iterator[UserImage]:
        for entry in entries:
            try:
                image = _resolved(entry.filename, folder, tree, beside)
            except BadSample as bad:
                faults.append(Refused(bad.kind, bad.where))
                continue
            yield UserImage(image, [text or "" for text in entry.captions], entry.split)

    took = [f"{path}: filename, sentences and split"]
    return Form("Karpathy's JSON", took, read(), every_image=False)


def _by_kind(paths: Iterable[str]) -> str:
    kinds = Counter(_suffix(path) or "without an extension" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(8))


def splits_by_name(paths: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the split of each image that its whole path's folders, archives or name tell."""
    # The uppermost folders that tell splits apart count.
    parts = {image: path.split("/") for image, path in paths.items()}
    for depth in range(max(map(len, parts.values()), default=0)):
        # An image above these folders is of no split.
        folders = {path: levels[depth] for path, levels in parts.items() if len(levels) > depth + 1}
        splits = {path: split for path, name in folders.items() if (split := split_of(name))}
        is_partial = len(folders) < len(paths) and len(splits) == len(folders)
        if len(set(splits.values())) > 1 or (is_partial and {*splits.values()} & {"val", "test"}):
            require_splits(Counter(folders.values()), f"folders of {place}")
            return splits
    files = {path: split for path, levels in parts.items() if (split := split_of(levels[-1]))}
    return files if len(files) == len(paths) and len(set(files.values())) > 1 else {}


def _may_be_table(path: str, stems: set[str]) -> bool:
    name = PurePosixPath(path).name
    if _suffix(path) not in SUFFIXES or _is_side(path, stems):
        return False
    # `datasets` keeps its cache in such files.
    if name.startswith(("cache-", "tmp")) and name.endswith(".arrow"):
        return False
    # Of img2dataset, `datasets` and the hub.
    bookkeeping = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
    return name not in bookkeeping and not name.endswith("_stats.json")


def _is_side(path: str, stems: set[str]) -> bool:
    base, _, extension = path.rpartition(".")
    return f".{extension.lower()}" in _SIDES and fold_case(base) in stems


def _suffix(path: str) -> str:
    return PurePosixPath(without_gz(path)).suffix.lower()


def _stem(path: str) -> str:
    return PurePosixPath(without_gz(path)).stem.lower()


PREFIX = "hub:"
_ARCHIVES = {"zip", "tar", "gzip", "bz2", "xz", "zstd", "lz4"}


def hub_form(
    place: str,
    tree: FileTree,
    overrides: ColumnOverrides,
    faults: Faults,
    selection: Sequence[str] | None = None,
) -> Form:
    """Open `hub:OWNER/NAME[:CONFIG]` (or a local folder NAME); bad rows are added to `faults`."""
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
        parts = {split: _undecoded(splits[split], datasets) for split in selected}
        columns_of = {split: list(_features(part)) for split, part in parts.items()}
    # Of the hub, the network, or the data set's own form.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{place}: `datasets` cannot open it ({reason})") from error
    check_splits(selection, list(splits))
    images = {
        key for part in parts.values() for key, kind in _features(part).items() if _is_image(kind)
    }
    names = next(iter(columns_of.values()), [])
    columns = find_columns(names, overrides, sorted(images))
    if columns is None:
        raise no_columns(place, names)
    # Before anything is streamed, which takes hours.
    if columns.split is None:
        require_splits(dict.fromkeys(parts), place, "choose others with --splits")

    def rows() -> Iterator[UserImage]:
        for split, part in parts.items():
            stream = iter(part.select_columns(columns.names))
            features = datasets.Features(_features(part)).to_dict()
            number = -1
            while True:
                number += 1
                where = f"{place}, {split}, row {number + 1}"
                try:
                    row = with_class_names(next(stream), features)
                except StopIteration:
                    break
                # Of the network or the files.
                except Exception as error:
                    raise ConfigError(f"{where}: cannot be read ({error}); run again") from error
                try:
                    captions = _texts_of(row, columns.captions)
                    image = value_image(
                        _with_bytes(row[columns.image], name), f"{split}-{number:08d}", tree
                    )
                except (BadSample, OSError) as error:
                    faults.append(Refused(getattr(error, "kind", "missing image"), where))
                    continue
                if image is None:
                    faults.append(Refused("row without one image", where))
                    continue
                name_of_split = row[columns.split] if columns.split else split
                yield UserImage(image, captions, split_name(name_of_split))

    title = f"a data set of the hub with {', '.join(parts)}, streamed"
    return Form(title, [f"{place}: {columns}"], rows(), every_image=False)


def _undecoded(part: Any, datasets: Any) -> Any:
    # Images stay as they are stored.
    for key, kind in _features(part).items():
        if _is_image(kind):
            part = part.cast_column(key, datasets.Image(decode=False))
    return part


def _features(part: Any) -> dict[str, Any]:
    if part.features is None:
        part = part._resolve_features()
    return dict(part.features)


def _is_image(kind: Any) -> bool:
    return type(kind).__name__ == "Image"


def _with_bytes(value: Any, name: str) -> Any:
    # A data set of single files has paths alone.
    if not isinstance(value, dict) or value.get("bytes") is not None or not value.get("path"):
        return value
    import fsspec

    if not _is_inside(str(value["path"]), name):
        raise BadSample("image outside the data set", str(value["path"]))
    with fsspec.open(value["path"], "rb") as file:
        return {**value, "bytes": file.read(MAX_IMAGE_BYTES + 1)}


def _is_inside(path: str, name: str) -> bool:
    """Return whether a path, perhaps into an archive (`zip://a.jpg::PLACE`), is of a data set."""
    # A data set could name files of this machine or network.
    *archives, location = path.split("::")
    if any(scheme.partition("://")[0] not in _ARCHIVES for scheme in archives):
        return False
    if Path(name).is_dir():
        folder = os.path.abspath(name)
        return Path(os.path.abspath(location.removeprefix("file://"))).is_relative_to(folder)
    starts = f"hf://datasets/{name}@", f"hf://datasets/{name}/"
    return location.startswith((*starts, f"https://huggingface.co/datasets/{name}/"))
