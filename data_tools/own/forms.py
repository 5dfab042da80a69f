"""Recognition of the form that own images and captions come in, and the images with captions."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_tools.builder.samples import Refused
from data_tools.converters.captions import read_karpathy
from data_tools.originals import IMAGE_SUFFIXES
from data_tools.own.file_tree import FileTree, without_gz
from data_tools.own.tables import (
    SUFFIXES,
    Columns,
    Named,
    OwnTable,
    find_columns,
    no_columns,
    open_table,
    require_splits,
    said_split,
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

BAD_ANNOTATION = "bad annotation"  # kind of fault of files next to images

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


class OwnImage(NamedTuple):
    """An image (path in the tree, or its name if missing) with raw captions, split and URL."""

    image: str
    captions: list[str]
    split: str | None = None
    url: str | None = None


class Form(NamedTuple):
    """A recognised form: its title, how it was read, and its images, once.

    `every_image`: all images of the place should have a caption.
    """

    title: str
    took: list[str]
    images: Iterable[OwnImage]
    every_image: bool = True


class _Found(NamedTuple):
    table: OwnTable
    columns: Columns
    path: str
    split: str | None


def recognise(
    tree: FileTree, named: Named, faults: Faults, place: Path, beside: Path | None
) -> Form:
    """Recognise the form of a place by its files' names and the columns of tables.

    Unusable rows are added to `faults` while images are read; images of a single table lie in
    `beside`.
    """
    files, images = tree.files, tree.images
    stems = {fold_case(path.rpartition(".")[0]) for path in images}
    tables = [path for path in files if _may_be_table(path, stems)][:_MOST_TABLES]
    described = [path for path in tables if _stem(path) == "metadata"]
    saved = [path for path in tables if path.endswith(".arrow")]
    sides = [path for path in files if _is_side(path, stems)]
    # The user means a table that is named itself, whatever else the folder holds.
    own = without_gz(place.name)
    is_table = place.is_file() and _suffix(own) in SUFFIXES
    if is_table:
        tables = [own]
    elif described or saved:
        tables = described or saved
    elif 2 * len(sides) >= len(images) > 0 and named == Named():
        return _side_files(tree, images, set(sides), named, faults, place)
    found, refused = [], None
    for path in tables:
        on_disk = tree.on_disk(path)
        karpathy = _karpathy(on_disk, path, tree, beside, faults)
        if karpathy is not None:
            others = [name for name in tables if name != path]
            if others:
                shown = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
                karpathy.took.append(f"{len(others)} other tables are left out: {shown}")
            return karpathy
        table = open_table(on_disk, path, named, faults)
        if table is None:
            refused = refused or ConfigError(f"{path}: no rows of images and captions in it")
            continue
        columns = find_columns(table.columns, named, table.bytes_columns)
        if columns is not None:
            split = next(filter(None, map(split_of, reversed(path.split("/")))), None)
            found.append(_Found(table, columns, path, split))
        elif refused is None:
            refused = no_columns(path, table.columns)
    if found:
        title = _KINDS[_suffix(found[0].path)]
        if described:
            title = "an imagefolder of Hugging Face"
        elif len(found) > 1 and not saved:
            title = f"{len(found)} tables, the first of them {title}"
        took = [f"{one.path}: {one.columns}" for one in found[:3]]
        rows = _table_images(found, tree, faults, beside)
        # A table that is named itself may speak of some of the images only.
        is_whole = not is_table and not any(one.table.bytes_columns for one in found)
        return Form(title, took, rows, every_image=is_whole)
    if sides and not is_table:
        return _side_files(tree, images, set(sides), named, faults, place)
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


def other_files(tree: FileTree) -> str:
    """Return the number of files that are neither images nor captions, as text; empty for 0."""
    known = {*SUFFIXES, *_SIDES, *IMAGE_SUFFIXES}
    files = [path for path in tree.files if _suffix(path) not in known]
    return f"{len(files)} files of other kinds are left out: {_by_kind(files)}" if files else ""


def value_image(value: Any, name: str, tree: FileTree) -> str | None:
    """Return the path of an image stored as bytes in a table's value; None for other values.

    The value is bytes or the struct of `datasets`; without its path the image gets `name`.
    BadSample beyond the limits.
    """
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    data = bytes(data)
    said = value.get("path") if isinstance(value, dict) else None
    if said:
        name = PurePosixPath(str(said).replace("\\", "/")).stem
    suffix = next((kind for start, kind in _STARTS.items() if data.startswith(start)), "jpg")
    return tree.add_bytes(f"{name}.{suffix}", data)


def _table_images(
    found: Sequence[_Found], tree: FileTree, faults: Faults, beside: Path | None
) -> Iterator[OwnImage]:
    for one in found:
        folder = one.path.rpartition("/")[0]
        stem = "-".join(PurePosixPath(one.path).with_suffix("").parts[-2:])
        rows: Iterator[Located] = one.table.rows(one.columns.wanted)
        for number, (where, row) in enumerate(rows):
            value = row.get(one.columns.image)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            try:
                captions = _texts_of(row, one.columns.captions)
                image = value_image(value, f"{stem}-{number:06d}", tree)
            except BadSample as bad:
                faults.append(Refused(bad.kind, where))
                continue
            if image is None:
                said = value.get("path") if isinstance(value, dict) else value
                if said in (None, "") or isinstance(said, list | dict):
                    faults.append(Refused("row without one image", where))
                    continue
                try:
                    image = _resolved(str(said), folder, tree, beside)
                except BadSample as bad:
                    faults.append(Refused(bad.kind, f"{where}: {bad.where}"))
                    continue
            split = row.get(one.columns.split) if one.columns.split else one.split
            yield OwnImage(image, captions, said_split(split))


def _resolved(name: str, folder: str, tree: FileTree, beside: Path | None) -> str:
    """Return an image's path, or the name if missing; BadSample outside the table's folder."""
    for said in (name, name.partition("#")[0]):
        if beside is None:
            if (path := tree.path_of(said, folder)) is not None:
                return path
        elif (file := _existing(Path(os.path.abspath(beside / said)))) is not None:
            if not file.is_relative_to(os.path.abspath(beside)):
                raise BadSample(OUTSIDE, name)
            return tree.add_file(file, said)
    return name


def _existing(file: Path) -> Path | None:
    """Return a file, else the only one in its folder that differs in case or accents alone."""
    if file.is_file():
        return file
    alike = _listed(file.parent).get(fold_case(file.name), [])
    return alike[0] if len(alike) == 1 else None


@lru_cache(maxsize=64)
def _listed(folder: Path) -> dict[str, list[Path]]:
    found = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        found[fold_case(path.name)].append(path)
    return found


def _side_files(
    tree: FileTree,
    images: Sequence[str],
    sides: set[str],
    named: Named,
    faults: Faults,
    place: Path,
) -> Form:
    counts = Counter(_suffix(path) for path in sides)
    shown = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common())
    # Of img2dataset; its `.json` says how the download went.
    downloaded = any(path.endswith("_stats.json") for path in tree.files)
    title = "images with their captions beside them"
    if downloaded:
        title = "img2dataset's output"
    elif place.is_file() or any(".tar/" in path for path in images):
        title = "an archive of images with their captions beside them"

    # Cameras write IMG_1.JPG, and what describes them img_1.TXT; the very name comes first.
    stems = {path.rpartition(".")[0] for path in images}
    beside: dict[str, str] = {}
    alike: dict[str, str] = {}
    for path in sides:
        stem, _, extension = path.rpartition(".")
        known = beside if stem in stems else alike
        known[f"{stem if stem in stems else fold_case(stem)}.{extension.lower()}"] = path

    def read() -> Iterator[OwnImage]:
        unseen = [name for name in (named.image, *(named.captions or ()), named.split) if name]
        for image in images:
            stem = image.rpartition(".")[0]
            names = ((f"{stem}{end}", f"{fold_case(stem)}{end}") for end in _SIDES)
            found = (beside.get(exact) or alike.get(other) for exact, other in names)
            paths = [path for path in found if path is not None]
            lines, content = _read_sides(paths, tree, faults)
            about = content if isinstance(content, dict) else {}
            unseen = [name for name in unseen if name not in about]
            stated = _texts_of(about, named.captions or ("captions",))
            if named.captions is None:
                stated = stated or _texts_of(about, ("caption",))
                # Both files of img2dataset hold the same. Elsewhere the rule is that of training.
                stated = (lines or stated) if downloaded else (stated or lines)
                stated = stated or texts_in(content)
            split = said_split(about.get(named.split)) if named.split else None
            yield OwnImage(image, stated, split, about.get("url") or None)
        if unseen:
            raise ConfigError(
                f"{place}: neither a table nor a .json file beside an image has {', '.join(unseen)}"
            )

    if named.captions:
        shown = f"{', '.join(map(repr, named.captions))} of .json"
    return Form(title, [f"captions from {shown} beside the images"], read())


def _texts_of(about: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [text for name in names for text in texts_in(about.get(name))]


def _read_sides(paths: Iterable[str], tree: FileTree, faults: Faults) -> tuple[list[str], Any]:
    """Return an image's lines of text, and the content of its JSON."""
    lines: list[str] = []
    content = None
    for path in paths:
        try:
            text = tree.read_text(path)
            if path.lower().endswith(".json"):
                content = parse_json(text)
            else:
                lines += [line for line in text.split("\n") if line.strip()]
        except (BadSample, ValueError) as error:
            where = error.where if isinstance(error, BadSample) else f"{path}: {error}"
            faults.append(Refused(BAD_ANNOTATION, where))
    return lines, content


def _karpathy(
    on_disk: Path, path: str, tree: FileTree, beside: Path | None, faults: Faults
) -> Form | None:
    if _suffix(path) != ".json" or b'"sentences"' not in _start_of(on_disk):
        return None
    content = read_json(on_disk, [])  # `read_karpathy` counts its faults
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return None
    entries = read_karpathy(on_disk, faults)
    folder = path.rpartition("/")[0]

    def read() -> Iterator[OwnImage]:
        for entry in entries:
            try:
                image = _resolved(entry.filename, folder, tree, beside)
            except BadSample as bad:
                faults.append(Refused(bad.kind, bad.where))
                continue
            yield OwnImage(image, [text or "" for text in entry.captions], entry.split)

    took = [f"{path}: filename, sentences and split"]
    return Form("Karpathy's JSON", took, read(), every_image=False)


def _by_kind(paths: Iterable[str]) -> str:
    held = Counter(_suffix(path) or "without an extension" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in held.most_common(8))


def _start_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 20)


def splits_by_name(paths: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the split of each image that its whole path's folders, archives or name tell."""
    parts = {image: path.split("/") for image, path in paths.items()}
    for depth in range(max(map(len, parts.values()), default=0)):
        # An image above these folders is of no split.
        folders = {path: one[depth] for path, one in parts.items() if len(one) > depth + 1}
        known = {path: split for path, name in folders.items() if (split := split_of(name))}
        apart = len(folders) < len(paths) and len(known) == len(folders)
        if len(set(known.values())) > 1 or (apart and {*known.values()} & {"val", "test"}):
            require_splits(Counter(folders.values()), f"folders of {place}")
            return known
    files = {path: split for path, one in parts.items() if (split := split_of(one[-1]))}
    return files if len(files) == len(paths) and len(set(files.values())) > 1 else {}


def _may_be_table(path: str, stems: set[str]) -> bool:
    name = PurePosixPath(path).name
    if _suffix(path) not in SUFFIXES or _is_side(path, stems):
        return False
    if name.startswith(("cache-", "tmp")) and name.endswith(".arrow"):
        return False  # cache of `datasets`
    # Of img2dataset, `datasets` and the hub.
    about = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
    return name not in about and not name.endswith("_stats.json")


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
    named: Named,
    faults: Faults,
    chosen: Sequence[str] | None = None,
) -> Form:
    """Open `hub:OWNER/NAME[:CONFIG]` (or a local folder NAME), some splits or all.

    Images pass through the tree's temporary folder; unusable rows are added to `faults`.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{place}: streaming from the hub needs the package datasets: pip install 'vlp[data]'"
        ) from None
    name, _, config = place.removeprefix(PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(name, config or None, streaming=True)
        wanted = [split for split in splits if chosen is None or split in chosen]
        parts = {split: _undecoded(splits[split], datasets) for split in wanted}
        columns_of = {split: list(_features(part)) for split, part in parts.items()}
    except Exception as error:  # of the hub, the network, or the data set's own form
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{place}: `datasets` cannot open it ({reason})") from error
    unknown = [split for split in chosen or () if split not in splits]
    if unknown:
        raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(splits)}")
    images = {
        key for part in parts.values() for key, kind in _features(part).items() if _is_image(kind)
    }
    names = next(iter(columns_of.values()), [])
    columns = find_columns(names, named, sorted(images))
    if columns is None:
        raise no_columns(place, names)
    if columns.split is None:  # before anything is streamed
        require_splits(dict.fromkeys(parts), place, "choose others with --splits")

    def rows() -> Iterator[OwnImage]:
        for split, part in parts.items():
            stream = iter(part.select_columns(columns.wanted))
            features = datasets.Features(_features(part)).to_dict()
            number = -1
            while True:
                number += 1
                where = f"{place}, {split}, row {number + 1}"
                try:
                    row = with_class_names(next(stream), features)
                except StopIteration:
                    break
                except Exception as error:  # of the network or the files
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
                said = row[columns.split] if columns.split else split
                yield OwnImage(image, captions, said_split(said))

    title = f"a data set of the hub with {', '.join(parts)}, streamed"
    return Form(title, [f"{place}: {columns}"], rows(), every_image=False)


def _undecoded(part: Any, datasets: Any) -> Any:
    """Return the stream with its images as they are stored."""
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
    """Return the value with its bytes, also for a data set of single files."""
    if not isinstance(value, dict) or value.get("bytes") is not None or not value.get("path"):
        return value
    import fsspec

    if not _is_own(str(value["path"]), name):
        raise BadSample("image outside the data set", str(value["path"]))
    with fsspec.open(value["path"], "rb") as file:
        return {**value, "bytes": file.read(MAX_IMAGE_BYTES + 1)}


def _is_own(path: str, name: str) -> bool:
    """Return whether a path, perhaps into an archive (`zip://a.jpg::PLACE`), is of a data set."""
    *inside, place = path.split("::")
    if any(one.partition("://")[0] not in _ARCHIVES for one in inside):
        return False
    if Path(name).is_dir():
        folder = os.path.abspath(name)
        return Path(os.path.abspath(place.removeprefix("file://"))).is_relative_to(folder)
    starts = f"hf://datasets/{name}@", f"hf://datasets/{name}/"
    return place.startswith((*starts, f"https://huggingface.co/datasets/{name}/"))
