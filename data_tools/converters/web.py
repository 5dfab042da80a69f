"""Captions of images on the web to shards: CC3M, CC12M and SBU, with images found by URL."""

from __future__ import annotations

import csv
import hashlib
import shlex
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tqdm import tqdm
from typer import Option

from data_tools.builder.build import CorpusPart, Target, make_corpus
from data_tools.builder.samples import Fault, SampleSpec, TakeDown, clean_caption, drop_reason
from data_tools.executor import Executor
from data_tools.options import MAX_WORDS, BuildOptions, File, MaxWords, Out
from data_tools.originals import ImageLocation, Originals
from data_tools.rows import (
    Faults,
    LayoutCheck,
    Row,
    first_problem,
    line_count,
    raw_lines,
    read_json,
)
from data_tools.shards import ShardReader, hash_name
from vlp.config import ConfigError
from vlp.data import file_names
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import IMAGES
from vlp.io import atomic_write

URLS_NAME = "urls.tsv"
NAMES = "{row:08d}"  # default rule of image names
GOOGLE = (
    "the list: free for any purpose, with acknowledgement of Google LLC; the images are their "
    "owners'"
)
_EXTENSIONS = ("", *file_names.IMAGES)
_ENTRY = np.dtype([("url", "<u8"), ("tar", "<u4"), ("size", "<u4"), ("offset", "<u8")])


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """Options of a web corpus."""

    annotations: Annotated[Path, File(help="the official list, gzipped or not")]
    urls_only: Annotated[
        bool, Option("--urls-only", help=f"write OUT/{URLS_NAME} for img2dataset, and no shards")
    ] = False
    img2dataset: Annotated[
        list[Path] | None, Option(metavar="FOLDER", help="folders of img2dataset's tars")
    ] = None
    images: Annotated[
        list[Path] | None, Option(metavar="PLACE", help="folders, tars or zips; see --names")
    ] = None
    names: Annotated[
        str,
        Option(
            metavar="RULE",
            help="file names of --images, perhaps without extension: {row} counts lines from 0, "
            "{md5} {sha256} {crc32} are of the URL, {file} is its last part",
        ),
    ] = NAMES
    max_words: MaxWords = MAX_WORDS

    def __post_init__(self) -> None:
        if sum(map(bool, (self.urls_only, self.img2dataset, self.images))) != 1:
            raise ConfigError("give exactly one of --urls-only, --img2dataset and --images")


class WebRow(NamedTuple):
    """A row of a list; `extra`: further fields of the annotation."""

    row: int  # from 0
    caption: str
    url: str
    extra: Mapping[str, Any] = {}


class _SbuFile(Row):
    image_urls: list[Any]
    captions: list[Any]
    user_ids: list[Any] | None = None


class _SbuRow(Row):
    url: str
    caption: str | None
    user_id: str | None


class _Metadata(BaseModel):
    url: str


def cc3m(web: WebOptions, out: Out, build: BuildOptions) -> int:
    """Turn Conceptual Captions (CC3M) into shards.

        vlp data cc3m --annotations Train_GCC-training.tsv --urls-only --out shards/cc3m
        img2dataset ...   (the command above prints it whole)
        vlp data cc3m --annotations Train_GCC-training.tsv \\
            --img2dataset shards/cc3m/downloaded --out shards/cc3m

    --annotations takes the official file (`caption<TAB>url`), gzipped or not. For images in
    folders, tars or zips give --images and --names instead of --img2dataset.
    """
    rows = read_tsv(web.annotations, caption_first=True)
    return _convert("cc3m", rows, web, out, build, "Conceptual Captions (CC3M)", GOOGLE)


def cc12m(web: WebOptions, out: Out, build: BuildOptions) -> int:
    """Turn Conceptual 12M (CC12M) into shards, as `cc3m` does.

    --annotations takes the official cc12m.tsv (`url<TAB>caption`), gzipped or not; `<PERSON>` in a
    caption becomes `person`.
    """
    rows = read_tsv(web.annotations, caption_first=False)
    return _convert("cc12m", rows, web, out, build, "Conceptual 12M (CC12M)", GOOGLE)


def sbu(web: WebOptions, out: Out, build: BuildOptions) -> int:
    """Turn SBU captions into shards, as `cc3m` does.

    --annotations takes the official sbu-captions-all.json: three lists `image_urls`, `captions` and
    `user_ids` of one length, gzipped or not. In --names, {file} is Flickr's own file name.
    """
    licence = "images under Flickr's terms of use; research use"
    return _convert("sbu", read_sbu(web.annotations), web, out, build, "SBU captions", licence)


def read_tsv(path: Path, caption_first: bool) -> Iterator[WebRow | Fault]:
    """Yield the rows of `caption<TAB>url` or `url<TAB>caption` lines, perhaps below a header."""
    layout = "caption<TAB>url" if caption_first else "url<TAB>caption"
    check, header_lines = LayoutCheck(), 0
    for number, line in enumerate(raw_lines(path)):
        where = f"line {number + 1}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            check.add_bad_row(f"{path}, {where}: not UTF-8")
            yield Fault("line that is not UTF-8", where)
            continue
        parts = text.rstrip("\r\n").split("\t")
        column_names = [part.strip().lower() for part in parts]
        if not number and sorted(column_names) == ["caption", "url"]:
            header_lines, caption_first = 1, column_names[0] == "caption"
            continue
        if not caption_first:
            parts.reverse()
        if len(parts) == 2 and _split_url(parts[1].strip()).scheme in ("http", "https"):
            check.has_good_row = True
            yield WebRow(number - header_lines, parts[0], parts[1].strip())
        else:
            check.add_bad_row(f"{path}, {where}: this should be {layout}")
            yield Fault("line of another layout", where)
    check.finish()


def read_sbu(path: Path) -> Iterator[WebRow | Fault]:
    """Yield the rows of SBU's JSON, with the photographer's `user_id` for attribution."""
    faults: Faults = []
    try:
        file = _SbuFile.model_validate(read_json(path, faults))
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not SBU's JSON with image_urls and captions ({first_problem(error)})"
        ) from None
    users = file.user_ids if file.user_ids is not None else [None] * len(file.captions)
    if not len(file.image_urls) == len(file.captions) == len(users):
        raise ConfigError(
            f"{path}: {len(file.image_urls)} image_urls, {len(file.captions)} captions and "
            f"{len(users)} user_ids, but the numbers must be equal; download it again"
        )
    yield from faults
    for number, (url, caption, user) in enumerate(zip(file.image_urls, file.captions, users)):
        where = f"{path}, row {number + 1}"
        try:
            row = _SbuRow(url=url, caption=caption, user_id=user)
        except ValidationError as error:
            yield Fault("row of another layout", f"{where}: {first_problem(error)}")
            continue
        if _split_url(row.url).scheme not in ("http", "https"):
            yield Fault("row of another layout", f"{where}: no URL")
        else:
            extra = {} if row.user_id is None else {"user_id": row.user_id}
            yield WebRow(number, row.caption or "", row.url, extra)


def image_id_of(url: str) -> str:
    """Return the id of the image at a URL: 64 bits of the URL's sha256."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class Downloads(Originals):
    """Images by URL in folders of img2dataset's tars; the index has 24 bytes per image."""

    def __init__(self, folders: Sequence[Path], executor: Executor) -> None:
        super().__init__(())
        self._tars = [tar for folder in folders for tar in _list_tars(folder)]
        tables = []
        results = executor.map(list_images, self._tars)
        bar = tqdm(results, total=len(self._tars), desc="index of downloads", unit=" tars")
        for number, (entries, num_without_url, problem) in enumerate(bar):
            entries["tar"] = number
            tables.append(entries)
            tar = self._tars[number]
            if num_without_url:
                self.problems.append(f"{tar}: {num_without_url} images without a url")
            if problem:
                self.problems.append(f"{tar}: {problem}")
        entries = np.concatenate(tables)
        # Stable, so that `find` returns the first image of a URL.
        self._entries = entries[np.argsort(entries["url"], kind="stable")]

    def find(self, name: str) -> ImageLocation | None:
        """Find the image of a URL; None if missing."""
        url_hash = np.uint64(hash_name(name))
        position = int(np.searchsorted(self._entries["url"], url_hash))
        if position == len(self._entries) or self._entries["url"][position] != url_hash:
            return None
        _, tar, size, offset = self._entries[position].tolist()
        return ImageLocation(self._tars[tar], offset, size)


def list_images(path: Path) -> tuple[NDArray[Any], int, str | None]:
    """Return the entries of a tar's images, the number of images without a URL, and the damage."""
    entries, num_without_url = [], 0
    with ShardReader(path) as shard:
        for sample in shard.samples:
            extension = next((name for name in IMAGES if name in sample.files), None)
            metadata = sample.files.get("json")
            if extension is None:
                continue
            url = None
            if metadata is not None and metadata.size <= MAX_ANNOTATION_BYTES:
                with suppress(ValidationError):
                    url = _Metadata.model_validate_json(shard.content(metadata)).url
            if url is None:
                num_without_url += 1
                continue
            image = sample.files[extension]
            # The column has 32 bits; a size above the limit of images is refused anyway.
            entries.append((hash_name(url), 0, min(image.size, 2**32 - 1), image.offset))
        return np.array(entries, _ENTRY), num_without_url, shard.problem


def _list_tars(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise ConfigError(
            f"{folder}: holds no tars; img2dataset writes them with --output_format webdataset"
        )
    return tars


def _convert(
    source: str,
    rows: Iterator[WebRow | Fault],
    web: WebOptions,
    out: Path,
    build: BuildOptions,
    title: str,
    licence: str,
) -> int:
    # Read up to the first good row now, so that a wrong file fails before downloads are indexed.
    first: list[WebRow | Fault] = []
    for item in rows:
        first.append(item)
        if isinstance(item, WebRow):
            break
    else:
        raise ConfigError(f"{web.annotations}: no row can be used")
    rows = chain(first, rows)
    rule = web.names if web.images else None
    if rule is not None:
        _file_name(rule, WebRow(0, "", "http://x.org/a.jpg"))  # raises for a wrong rule

    def samples(images: Originals) -> Iterator[SampleSpec | Fault]:
        for item in rows:
            yield _sample(item, source, rule, images, web.max_words)

    if web.urls_only:
        return _write_urls(samples(Originals(())), out, TakeDown.read(build.take_down))
    originals: Callable[[Sequence[Path]], Originals] = Originals
    if web.img2dataset:
        originals = partial(Downloads, executor=build.workers())
    target = Target(out, build, title, licence, {"max_words": web.max_words})
    # For the progress bar; counting lines of a gzipped list would take too long.
    total = None if web.annotations.suffix in (".gz", ".json") else line_count([web.annotations])
    part = CorpusPart("", samples, total)
    return make_corpus(target, web.img2dataset or web.images or (), [part], originals)


def _sample(
    item: WebRow | Fault, source: str, rule: str | None, images: Originals, max_words: int
) -> SampleSpec | Fault:
    if isinstance(item, Fault):
        return item
    key = f"{source}-{item.row:08d}"
    caption = clean_caption(item.caption)
    reason = drop_reason(caption, max_words)
    if reason is not None:
        return Fault(reason, key)
    name = item.url
    if rule is not None:
        stem = _file_name(rule, item)
        names = (stem + extension for extension in _EXTENSIONS)
        name = next((name for name in names if images.find(name) is not None), stem)
    annotation = Annotation(
        caption=caption, source=source, image_id=image_id_of(item.url), url=item.url, **item.extra
    )
    return SampleSpec(key, (name,), annotation)


def _split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # of an invalid host
        return SplitResult("", "", url, "", "")


def _file_name(rule: str, item: WebRow) -> str:
    url = item.url.encode()
    fields = {
        "row": item.row,
        "md5": hashlib.md5(url, usedforsecurity=False).hexdigest(),
        "sha256": hashlib.sha256(url).hexdigest(),
        "crc32": zlib.crc32(url),
        "file": unquote(_split_url(item.url).path.rpartition("/")[2]),
    }
    try:
        return string.Formatter().vformat(rule, (), fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--names {rule!r}: use only {', '.join(fields)} in braces ({error})"
        ) from error


def _write_urls(samples: Iterator[SampleSpec | Fault], folder: Path, take_down: TakeDown) -> int:
    out = folder / URLS_NAME
    counts: dict[str, int] = {}
    written = 0
    with atomic_write(out, "w", durable=True, error=ConfigError) as file:
        # img2dataset needs a header, and quotes around fields with quotes.
        lines = csv.writer(file, delimiter="\t", lineterminator="\n")
        lines.writerow(("url", "caption"))
        for sample in tqdm(samples, unit=" lines", desc=str(out)):
            if isinstance(sample, Fault):
                counts[sample.kind] = counts.get(sample.kind, 0) + 1
            elif take_down.matches(sample.key, sample.annotation):
                counts["taken down"] = counts.get("taken down", 0) + 1
            else:
                lines.writerow((sample.images[0], sample.annotation.caption))
                written += 1
    print(f"{out}: {written} URLs")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}")
    downloaded = shlex.quote(str(folder / "downloaded"))
    print(
        "download them with (pip install img2dataset):\n"
        f"  img2dataset --url_list {shlex.quote(str(out))} --input_format tsv --url_col url "
        f"--caption_col caption --output_format webdataset --output_folder {downloaded} "
        "--image_size 512 --resize_only_if_bigger True --resize_mode keep_ratio\n"
        f"and convert the downloads with --img2dataset {downloaded}"
    )
    return 0 if written else 1
