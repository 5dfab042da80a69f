"""Captions of images on the web (CC3M, CC12M, SBU): rows of a list to samples, joined by URL."""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import shlex
import string
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from tqdm import tqdm

from data_tools.builder.build_corpus import CorpusPart, make_corpus
from data_tools.builder.caption_cleaning import add_caption_arguments, clean_caption, why_dropped
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.builder.take_down import TakeDown
from data_tools.executor.options import executor_of
from data_tools.sources.image_sources import Originals
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.io import atomic_write

URLS_NAME = "urls.tsv"
NAMES = "{row:08d}"

_EXTENSIONS = ("", ".jpg", ".jpeg", ".png", ".webp", ".gif")


class WebRow(NamedTuple):
    """One line of a list: its number from 0, the caption, the image's URL, and what else."""

    row: int
    caption: str
    url: str
    more: Mapping[str, Any] = {}


class WebList(NamedTuple):
    """A corpus of the web: what it is called, and how its list is read."""

    source: str
    title: str
    licence: str
    read: Callable[[Path], Iterator[WebRow | Refused]]


def add_web_arguments(parser: argparse.ArgumentParser, listed: str) -> None:
    """Declare the options of a web corpus; `listed` says what its list is."""
    parser.add_argument("--annotations", type=Path, required=True, metavar="FILE", help=listed)
    found = parser.add_mutually_exclusive_group(required=True)
    found.add_argument(
        "--urls-only",
        action="store_true",
        help=f"write OUT/{URLS_NAME} for img2dataset, cleaned, and no shards",
    )
    found.add_argument(
        "--img2dataset",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="folders of tars that img2dataset wrote; images are found by their URL",
    )
    found.add_argument(
        "--images",
        type=Path,
        nargs="+",
        metavar="PLACE",
        help="folders (two levels deep), tars or zips with images that are named by --names",
    )
    parser.add_argument(
        "--names",
        default=NAMES,
        metavar="RULE",
        help="how --images are called, the extension may be left out: {row} counts lines from 0, "
        "{md5} {sha256} {crc32} are of the URL, {file} is its last part "
        f"(default {NAMES})",
    )
    add_caption_arguments(parser)
    add_build_arguments(parser, images=False)


def run_web(arguments: argparse.Namespace, web: WebList) -> int:
    """Write the shards of a web corpus, or with --urls-only the list to download.

    Raises:
        ConfigError: the list has no rows.
    """
    rows = web.read(arguments.annotations)
    # A wrong file is told before downloads are looked through.
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{arguments.annotations}: holds no rows")
    rows = chain([first], rows)
    if arguments.urls_only:
        return _write_urls(arguments, web, rows)
    if arguments.img2dataset:
        from data_tools.converters.corpora.img2dataset import Downloads

        arguments.images = arguments.img2dataset
        originals: Callable[[Sequence[Path]], Originals] = partial(
            Downloads, executor=executor_of(arguments)
        )
        name = None
    else:
        originals, name = Originals, arguments.names
        _file_name(name, WebRow(0, "", "http://x.org/a.jpg"))

    def wanted(found: Originals) -> Iterator[SampleSpec | Refused]:
        for item in rows:
            yield _wanted(item, web.source, name, found, arguments.max_words)

    part = CorpusPart("", wanted, _lines_of(arguments.annotations))
    return make_corpus(arguments, [part], title=web.title, licence=web.licence, originals=originals)


def read_tsv(path: Path, caption_first: bool) -> Iterator[WebRow | Refused]:
    """Yield `caption<TAB>url` or `url<TAB>caption` lines; one of another layout is refused.

    Raises:
        ConfigError: the file cannot be read, or its first line is of another layout.
    """
    layout = "caption<TAB>url" if caption_first else "url<TAB>caption"
    try:
        with _opened(path) as file:
            for number, line in enumerate(file):
                parts = line.rstrip("\r\n").split("\t")
                if not caption_first:
                    parts.reverse()
                if len(parts) == 2 and _split(parts[1].strip()).scheme in ("http", "https"):
                    yield WebRow(number, parts[0], parts[1].strip())
                elif number == 0:
                    raise ConfigError(f"{path}, line 1: this should be {layout}")
                else:
                    yield Refused("line of another layout", f"line {number + 1}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error})") from error


def image_id_of(url: str) -> str:
    """Return a short name of the image behind a URL: 64 bits of its sha256."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _wanted(
    item: WebRow | Refused, source: str, rule: str | None, found: Originals, max_words: int
) -> SampleSpec | Refused:
    if isinstance(item, Refused):
        return item
    key = f"{source}-{item.row:08d}"
    caption = clean_caption(item.caption)
    reason = why_dropped(caption, max_words)
    if reason is not None:
        return Refused(reason, key)
    name = item.url
    if rule is not None:
        stem = _file_name(rule, item)
        names = (stem + extension for extension in _EXTENSIONS)
        name = next((name for name in names if found.find(name) is not None), stem)
    annotation = Annotation(
        caption=caption, source=source, image_id=image_id_of(item.url), url=item.url, **item.more
    )
    return SampleSpec(key, (name,), annotation)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # a host that is none
        return SplitResult("", "", url, "", "")


def _file_name(rule: str, item: WebRow) -> str:
    url = item.url.encode()
    fields = {
        "row": item.row,
        "md5": hashlib.md5(url, usedforsecurity=False).hexdigest(),
        "sha256": hashlib.sha256(url).hexdigest(),
        "crc32": zlib.crc32(url),
        "file": unquote(_split(item.url).path.rpartition("/")[2]),
    }
    try:
        return string.Formatter().vformat(rule, (), fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--names {rule!r}: only {', '.join(fields)} may stand in braces ({error})"
        ) from error


def _write_urls(
    arguments: argparse.Namespace, web: WebList, rows: Iterable[WebRow | Refused]
) -> int:
    take_down = TakeDown.read(arguments.take_down)
    out = arguments.out / URLS_NAME
    counts: dict[str, int] = {}
    written, nothing = 0, Originals(())
    with atomic_write(out, "w", durable=True, error=ConfigError) as file:
        # As img2dataset reads it: a header, and quotes around what holds quotes.
        lines = csv.writer(file, delimiter="\t", lineterminator="\n")
        lines.writerow(("url", "caption"))
        for item in tqdm(rows, unit=" lines", desc=str(out)):
            wanted = _wanted(item, web.source, None, nothing, arguments.max_words)
            if isinstance(wanted, Refused):
                counts[wanted.kind] = counts.get(wanted.kind, 0) + 1
            elif take_down.names(wanted.key, wanted.annotation):
                counts["taken down"] = counts.get("taken down", 0) + 1
            else:
                lines.writerow((wanted.images[0], wanted.annotation.caption))
                written += 1
    print(f"{out}: {written} URLs")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}")
    folder = shlex.quote(str(arguments.out / "downloaded"))
    print(
        "download them with (pip install img2dataset):\n"
        f"  img2dataset --url_list {shlex.quote(str(out))} --input_format tsv --url_col url "
        f"--caption_col caption --output_format webdataset --output_folder {folder} "
        "--image_size 512 --resize_only_if_bigger True --resize_mode keep_ratio\n"
        f"and convert what came with --img2dataset {folder}"
    )
    return 0 if written else 1


def _lines_of(path: Path) -> int | None:
    """Return how many lines a list has, for the time that is left."""
    if path.suffix in (".gz", ".json") or not path.is_file():
        return None
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")
