"""`vlp data import`: own images and captions, in any usual form, to shards."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

from typer import Argument, Option

from data_tools.builder.build import CorpusPart, Target, build_parts
from data_tools.builder.samples import Fault, SampleSpec, clean_captions
from data_tools.converters.captions import key_of_image
from data_tools.options import MAX_WORDS, BuildOptions, MaxWords, Out
from data_tools.originals import scratch_folder
from data_tools.own.content import SPLITS, Splitting, UserSample, merge_rows, split_images
from data_tools.own.file_tree import FileTree
from data_tools.own.forms import (
    BAD_ANNOTATION,
    PREFIX,
    Form,
    UserImage,
    hub_form,
    is_numeric,
    other_files,
    recognise,
    splits_by_name,
)
from data_tools.own.tables import ColumnOverrides
from data_tools.rows import Faults
from vlp.config import ConfigError
from vlp.data.file_names import split_of
from vlp.data.image.decode import decoder_errors, open_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import escape_name
from vlp.io import atomic_write

SHARES = (0.9, 0.05, 0.05)  # of train, val and test
MIN_VAL = 100  # images; with fewer, recall is rough


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Place and columns of own data."""

    place: Annotated[str, Argument(metavar="PLACE", help="folder, file, archive or hub:OWNER/NAME")]
    out: Out
    images: Annotated[
        list[Path] | None, Option(metavar="PLACE", help="more folders or archives of images")
    ] = None
    image: Annotated[
        str | None, Option(metavar="COLUMN", help="of the images (default: found by name)")
    ] = None
    caption: Annotated[
        list[str] | None, Option(metavar="COLUMN", help="of the captions (default: found by name)")
    ] = None
    split_column: Annotated[
        str | None, Option(metavar="COLUMN", help="of train, val or test (default: found by name)")
    ] = None
    splits: Annotated[
        list[str] | None, Option(help="of hub:OWNER/NAME: only these (default: all)")
    ] = None
    split: Annotated[
        tuple[float, float, float], Option(metavar="TRAIN VAL TEST", help="shares of new splits")
    ] = SHARES
    exact: Annotated[bool, Option("--exact", help="ignore near-duplicates")] = False
    name: Annotated[str | None, Option(help="of the data set (default: the place's)")] = None
    allow_missing_captions: Annotated[
        bool, Option("--allow-missing-captions", help="leave out images without a caption")
    ] = False
    allow_missing_images: Annotated[
        bool, Option("--allow-missing-images", help="even most images of a table")
    ] = False
    max_words: MaxWords = MAX_WORDS

    def __post_init__(self) -> None:
        shares = self.split
        is_valid = all(math.isfinite(share) and share >= 0 for share in shares) and shares[0] > 0
        if not is_valid or abs(sum(shares) - 1) > 1e-6:
            values = " ".join(f"{share:g}" for share in shares)
            raise ConfigError(
                f"--split {values}: give shares of train, val and test that add up to 1, as in "
                "0.9 0.05 0.05"
            )
        if self.place.startswith(PREFIX):
            return
        if self.splits:
            raise ConfigError(f"--splits: {self.place} is not hub:OWNER/NAME; leave out --splits")
        if not Path(self.place).exists():
            raise ConfigError(f"{self.place}: there is no such file or folder")
        if Path(self.place).resolve() == self.out.resolve():
            raise ConfigError(f"--out {self.out} is the folder of the images; choose another")

    @property
    def title(self) -> str:
        """Return the name of the data set: --name, or that of the place."""
        if self.name or self.place.startswith(PREFIX):
            return self.name or self.place.removeprefix(PREFIX).rpartition("/")[2]
        path = Path(self.place).resolve()
        return path.name.partition(".")[0] if path.is_file() else path.name


def import_data(options: ImportOptions, build: BuildOptions) -> int:
    """Turn own images and captions, in whatever form they come, into shards of train, val and test.

        vlp data import photos/ --out shards/mine
        vlp data import captions.csv --images photos/ --image file --caption text --out shards/mine
        vlp data import hub:OWNER/NAME --out shards/mine

    PLACE is a folder, a file, an archive, or a data set of the hub. These forms are recognised:
      NAME.jpg (png, webp, gif, bmp) with NAME.txt, one caption a line, or NAME.json beside it
      an imagefolder of Hugging Face, with metadata.jsonl, .csv or .parquet
      CSV, TSV, JSON, JSON Lines, Parquet with columns of images (names or bytes) and of captions
      a data set that `datasets` saved to disk (save_to_disk), or streams from the hub
      Karpathy's JSON; img2dataset's output; other tars, sorted or not
      a tar, .tar.gz, .tar.xz, .tar.bz2 or zip of one of these

    Several rows of one image, lists of captions and several lines of a .txt are several captions.
    Images of equal bytes become one sample. The data's own splits are kept, from a column
    (--split-column) or from names of folders or files; images without a split go into train. Data
    without splits is divided by the images' bytes, and near-duplicates stay in one split. After an
    interruption the same command continues; images added later follow the existing samples.
    """
    faults: Faults = []
    with scratch_folder(options.out) as scratch:
        try:
            tree, form = _open_place(options, scratch, faults)
            print(escape_name(f"{options.place}: {form.title}"))
            for line in filter(None, (*form.notes, *other_files(tree))):
                print(f"  {escape_name(line)}")
            images, dropped = _clean_images(form, tree, faults, options)
            if not options.split_column and not any(split_of(image.split) for image in images):
                # The folder of a missing image is unknown.
                paths = {
                    image.path: tree.full_path(image.path)
                    for image in images
                    if tree.find(image.path) is not None
                }
                folders = {name for image in images for name in image.path.split("/")[:-1]}
                if splits := splits_by_name(paths, options.place):
                    images = [image._replace(split=splits.get(image.path)) for image in images]
                elif unused := sorted(filter(split_of, folders)):
                    print(f"  not used as splits: folders {', '.join(map(repr, unused[:3]))}")
            _require_images_and_captions(images, form, tree, faults, options)
            _print_examples(images, tree)
            return _build(images, [*faults, *dropped], tree, options, build)
        except OSError as error:
            path = error.filename or options.place
            raise ConfigError(f"{path}: {error.strerror or error}") from error


def _open_place(options: ImportOptions, scratch: Path, faults: Faults) -> tuple[FileTree, Form]:
    captions = tuple(options.caption) if options.caption else None
    overrides = ColumnOverrides(options.image, captions, options.split_column)
    images = options.images or []
    if options.place.startswith(PREFIX):
        tree = FileTree(images, scratch, options.out)
        return tree, hub_form(options.place, tree, overrides, faults, options.splits)
    path = Path(options.place)
    tree = FileTree([path, *images], scratch, options.out)
    is_single = path.is_file() and len(tree.files) == 1 and not images
    return tree, recognise(tree, overrides, faults, path, path.parent if is_single else None)


def _clean_images(
    form: Form, tree: FileTree, faults: Faults, options: ImportOptions
) -> tuple[list[UserImage], list[Fault]]:
    """Return each image once with cleaned captions, and the dropped captions."""
    dropped: list[Fault] = []
    images = []
    for image in form.images:
        captions, image_faults = clean_captions(image.captions, image.path, options.max_words)
        dropped += image_faults
        images.append(image._replace(captions=captions))
    ambiguous = tree.ambiguous_paths
    faults += [
        Fault("image of several names", image.path) for image in images if image.path in ambiguous
    ]
    images = [image for image in images if image.path not in ambiguous]
    if not images:
        first = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{options.place}: no row can be used{first}")
    return merge_rows(images), dropped


def _require_images_and_captions(
    images: Sequence[UserImage], form: Form, tree: FileTree, faults: Faults, options: ImportOptions
) -> None:
    """Refuse data without most of its images, or with images without captions, unless allowed."""
    missing = [image.path for image in images if tree.find(image.path) is None]
    present, first = len(images) - len(missing), escape_name(next(iter(missing), ""))
    allowed = options.allow_missing_images and present
    if len(missing) > present and not allowed:
        remedy = "name their folder with --images"
        if first.startswith(("http://", "https://")):
            remedy = "download the URLs with img2dataset, and import its output"
        elif present:
            remedy += ", or take the others with --allow-missing-images"
        raise ConfigError(
            f"{options.place}: {len(missing)} of {len(images)} images are missing (first: {first})"
            f"; {remedy}"
        )
    captions = [caption for image in images for caption in image.captions]
    print(f"  {present} images, {len(captions)} captions")
    if captions and all(map(is_numeric, captions)):
        print("  careful: every caption is a number; write the names of the classes instead")
    if missing:
        print(f"  {len(missing)} images are missing (first: {first})")
    without = [image.path for image in images if not image.captions]
    total = len(images)
    if form.covers_all_images:
        described = {image.path for image in images}
        others = [path for path in tree.images if path not in described]
        without, total = without + others, total + len(others)
    if not without:
        return
    counts = (
        f"{total} images, and {len(without)} of them have no caption (first: "
        f"{escape_name(without[0])})"
    )
    # Captions may be missing because of unreadable rows or side files, which are faults already.
    allowed = options.allow_missing_captions or len(without) <= len(faults)
    if len(without) == total or not allowed:
        unread = [fault.id for fault in faults if fault.kind == BAD_ANNOTATION]
        hint = ""
        if unread:
            hint = f"; {len(unread)} annotations cannot be read (first: {escape_name(unread[0])})"
        raise ConfigError(
            f"{options.place}: {counts}; write them, or leave these images out with "
            f"--allow-missing-captions{hint}"
        )
    print(f"  {counts}: left out")


def _print_examples(images: Sequence[UserImage], tree: FileTree) -> None:
    # Also from the middle and the end: columns may be shifted after a few good rows.
    examples = [image for image in images if image.captions and tree.find(image.path)]
    for position in sorted({0, len(examples) // 2, len(examples) - 1}) if examples else ():
        image = examples[position]
        try:
            location = tree.find(image.path)
            assert location is not None
            with decoder_errors(image.path), open_image(location.read(), image.path) as opened:
                size = f"{opened.width} x {opened.height}"
        except BadSample as bad:
            size = bad.kind
        more = f" (and {len(image.captions) - 1} more)" if len(image.captions) > 1 else ""
        print(f"    {escape_name(image.path)}, {size}: {image.captions[0]!r}{more}")


def _build(
    images: Sequence[UserImage],
    faults: Sequence[Fault],
    tree: FileTree,
    options: ImportOptions,
    build: BuildOptions,
) -> int:
    earlier = EarlierImport({}, {}) if build.replace else EarlierImport.read(options.out)
    splitting = split_images(
        earlier.sort([image for image in images if image.captions]),
        tree,
        options.split,
        build.workers(),
        earlier.splits,
        options.split_column is not None,
        options.exact,
    )
    paths = [sample.image.path for sample in splitting.samples]
    keys = keys_of(paths, earlier.keys)
    if earlier.keys and (new := sum(path not in earlier.keys for path in paths)):
        print(f"  {new} images are new; the others keep key and split of the earlier run")
    _print_splits(splitting, options)
    faults = [*faults, *(Fault("no text", image.path) for image in images if not image.captions)]
    parts: list[CorpusPart] = []
    for split in SPLITS:
        specs = [
            _spec(sample, key, options.title)
            for sample, key in zip(splitting.samples, keys)
            if sample.split == split
        ]
        if specs or (options.out / split).exists():
            # The first part's manifest counts all faults.
            parts.append(CorpusPart(split, specs if parts else [*specs, *faults]))
    settings = {
        "max_words": options.max_words,
        "name": options.title,
        "split": None if splitting.from_data else list(options.split),
    }
    rows = [(path, key, s.split) for path, key, s in zip(paths, keys, splitting.samples)]
    target = Target(options.out, build, options.title, "unknown", settings)
    code = build_parts(target, parts, tree, lambda: EarlierImport.write(options.out, rows))
    if code == 0:
        val = sum(sample.split == "val" for sample in splitting.samples)
        if 0 < val < MIN_VAL:
            can_grow = not splitting.from_data and options.split[1] < 0.3
            remedy = "; --split 0.6 0.3 0.1 --replace makes it larger" if can_grow else ""
            print(f"careful: val has {val} images, each {100 / val:.1f} points of recall{remedy}")
        print(next_steps(options.out, [part.name for part in parts]))
    return code


def _spec(sample: UserSample, key: str, source: str) -> SampleSpec:
    image = sample.image
    annotation = Annotation(
        captions=image.captions,
        source=source,
        image_id=sample.digest or None,
        file=escape_name(image.path),
        **({"url": image.url} if image.url else {}),
    )
    return SampleSpec(key, (image.path,), annotation)


def _print_splits(splitting: Splitting, options: ImportOptions) -> None:
    counts = Counter(sample.split for sample in splitting.samples)
    origin = "as in the data" if splitting.from_data else "by the images' bytes"
    listing = ", ".join(f"{split} {count}" for split, count in sorted(counts.items(), reverse=True))
    print(f"  split {origin}: {listing}")
    names = {sample.image.split for sample in splitting.samples} - {None}
    if names and not splitting.from_data:
        unused = ", ".join(repr(name) for name in sorted(map(str, names))[:3])
        print(f"  split names of the data that are not used: {unused}")
    if splitting.num_unsplit:
        print(
            f"  {splitting.num_unsplit} images have no split in the data: they go into the split "
            "of a near-duplicate, or into train"
        )
    if splitting.num_merged:
        print(f"  {splitting.num_merged} images are merged into images of equal bytes")
    num_groups = sum(count > 1 for count in Counter(splitting.groups).values())
    group_splits = {(group, s.split) for group, s in zip(splitting.groups, splitting.samples)}
    num_divided = sum(n > 1 for n in Counter(group for group, _ in group_splits).values())
    if num_divided:
        owner = "data" if splitting.from_data else "first run"
        print(
            f"  careful: {num_divided} groups of near-duplicates are in two splits of the {owner}; "
            "vlp data overlap lists them"
        )
    elif num_groups and not options.exact:
        print(f"  {num_groups} groups of near-duplicates, each in one split")


VOCABULARY = 4000  # as in configs/pretrain/flickr8k_small.yaml


def next_steps(out: Path, splits: Sequence[str]) -> str:
    """Return commands that train on the data, with an evaluation on val, else test, else train."""
    quote = shlex.quote
    train, vocabulary = quote(f"{out}/train"), quote(f"{out}/vocabulary")
    sources = quote(f"data.sources=[{{path: {out}/train}}]")
    aligned, run = quote(f"runs/{out.name}_aligned"), quote(f"runs/{out.name}")
    split = next((split for split in ("val", "test") if split in splits), "train")
    evaluate = f"vlp evaluate retrieval --shards {quote(f'{out}/{split}')} --model"
    return (
        "next, from public towers:\n"
        f"  vlp align --config configs/pretrain/from_towers.yaml --out {aligned} {sources}\n"
        f"  {evaluate} {aligned}\n"
        "or from random weights:\n"
        f"  vlp data vocabulary --shards {train} --size {VOCABULARY} --out {vocabulary}\n"
        f"  vlp train --config configs/pretrain/flickr8k_small.yaml {sources} "
        f"data.vocabulary={vocabulary} output={run}\n"
        f"  {evaluate} {quote(f'runs/{out.name}/model')}"
    )


IMPORT_NAME = "imported.jsonl"


class EarlierImport(NamedTuple):
    """Keys and splits of an earlier run's samples by image path, in the order of its samples."""

    keys: dict[str, str]
    splits: dict[str, str]

    @classmethod
    def read(cls, out: Path) -> EarlierImport:
        """Return the earlier import into a folder; empty without one."""
        path, earlier = out / IMPORT_NAME, cls({}, {})
        if not path.exists():
            return earlier
        try:
            with open(path, encoding="utf-8") as file:
                for line in file:
                    image, key, split = json.loads(line)
                    earlier.keys[image], earlier.splits[image] = key, split
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({error}); delete it, or --replace") from error
        return earlier

    def sort(self, images: Sequence[UserImage]) -> list[UserImage]:
        """Return images of the earlier run in its order, then the others in the given order."""
        positions = {image: number for number, image in enumerate(self.keys)}
        return sorted(images, key=lambda image: positions.get(image.path, len(positions)))

    @staticmethod
    def write(out: Path, samples: Iterable[tuple[str, str, str]]) -> None:
        """Store (image path, key, split) of each sample."""
        with atomic_write(out / IMPORT_NAME, "w", durable=True, error=ConfigError) as file:
            file.writelines(json.dumps(sample) + "\n" for sample in samples)


def keys_of(paths: Sequence[str], existing: Mapping[str, str]) -> list[str]:
    """Return unique keys, made from paths without their common folders; `existing` keys stay."""
    parts = [PurePosixPath(path).parts for path in paths]
    common = 0
    while all(
        len(path_parts) > common + 1 and path_parts[common] == parts[0][common]
        for path_parts in parts
    ):
        common += 1
    stems = [
        "/".join(path_parts[common:]).rpartition(".")[0] or path_parts[-1] for path_parts in parts
    ]
    keys = [existing.get(path) or key_of_image(stem) for path, stem in zip(paths, stems)]
    counts = Counter(keys)
    numbers: Counter[str] = Counter()
    for position, key in enumerate(keys):
        while counts[key] > 1 and paths[position] not in existing:
            numbers[key] += 1
            if (numbered := f"{key}-{numbers[key]}") not in counts:
                keys[position] = numbered
                counts[numbered] += 1
                break
    return keys
