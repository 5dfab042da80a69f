"""Data sets of the hub, streamed by `datasets`: `hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIG`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.builder.sample_spec import Refused
from data_tools.converters.own.columns import (
    Named,
    find_columns,
    no_columns,
    require_splits,
    said_split,
    texts_in,
)
from data_tools.converters.own.file_tree import FileTree
from data_tools.converters.own.forms import Form, OwnImage, value_image
from data_tools.sources.annotation_rows import Faults
from vlp.config import ConfigError
from vlp.data.limits import MAX_IMAGE_BYTES
from vlp.data.shards.sample_files import BadSample

PREFIX = "hub:"


def hub_form(
    place: str,
    tree: FileTree,
    named: Named,
    faults: Faults,
    chosen: Sequence[str] | None = None,
) -> Form:
    """Open a data set of the hub; its images pass through the tree's temporary folder.

    Args:
        place: `hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIG`; NAME may be a local folder.
        tree: that takes the images.
        named: columns on the command line.
        faults: rows that cannot be used are added.
        chosen: only these splits; None: all.

    Raises:
        ConfigError: `datasets` is not installed, or it cannot open the data set or find columns; or
            a split does not exist, or is none.
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
            number = -1
            while True:
                number += 1
                where = f"{place}, {split}, row {number + 1}"
                try:
                    row = next(stream)
                except StopIteration:
                    break
                except Exception as error:  # of the network or the files
                    raise ConfigError(f"{where}: cannot be read ({error}); run again") from error
                try:
                    image = value_image(
                        _with_bytes(row[columns.image]), f"{split}-{number:08d}", tree
                    )
                except (BadSample, OSError) as error:
                    faults.append(Refused(getattr(error, "kind", "missing image"), where))
                    continue
                if image is None:
                    faults.append(Refused("row without one image", where))
                    continue
                captions = [text for key in columns.captions for text in texts_in(row[key])]
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


def _with_bytes(value: Any) -> Any:
    """Return the value with its bytes, which a data set of single files only points at."""
    if not isinstance(value, dict) or value.get("bytes") is not None or not value.get("path"):
        return value
    import fsspec

    with fsspec.open(value["path"], "rb") as file:
        return {**value, "bytes": file.read(MAX_IMAGE_BYTES + 1)}
