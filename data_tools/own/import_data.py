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
from data_tools.builder.samples import Refused, SampleSpec, clean_captions
from data_tools.options import MAX_WORDS, BuildOptions, MaxWords, Out
from data_tools.originals import unpacking_room
from data_tools.own.content import SPLITS, Dealt, UserSample, deal, joined
from data_tools.own.file_tree import FileTree
from data_tools.own.forms import (
    BAD_ANNOTATION,
    PREFIX,
    Form,
    UserImage,
    hub_form,
    is_number,
    other_files,
    recognise,
    splits_by_name,
)
from data_tools.own.tables import ColumnOverrides
from data_tools.rows import Faults
from vlp.config import ConfigError
from vlp.data.image.decode import decoder_errors, open_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import readable
from vlp.io import atomic_write

SHARES = (0.9, 0.05, 0.05)
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Place and columns of own data."""

    place: Annotated[str, Argument(metavar="PLACE", help="folder, file, archive or hub:OWNER/NAME")]
    out: Out
    images: Annotated[
        list[Path] | None,
        Option(metavar="PLACE", help="folders or archives of images (default: beside the table)"),
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
        tuple[float, float, float],
        Option(metavar="TRAIN VAL TEST", help="shares of the splits where the data has none"),
    ] = SHARES
    exact: Annotated[
        bool, Option("--exact", help="images that look alike may be in different splits")
    ] = False
    name: Annotated[
        str | None, Option(help="of the data set (default: the folder's or file's)")
    ] = None
    allow_missing_captions: Annotated[
        bool, Option("--allow-missing-captions", help="leave out images without a caption")
    ] = False
    allow_missing_images: Annotated[
        bool,
        Option("--allow-missing-images", help="go on where most images of a table are missing"),
    ] = False
    max_words: MaxWords = MAX_WORDS

    def __post_init__(self) -> None:
        shares = self.split
        sound = all(math.isfinite(share) and share >= 0 for share in shares) and shares[0] > 0
        if not sound or abs(sum(shares) - 1) > 1e-6:
            shown = " ".join(f"{share:g}" for share in shares)
            raise ConfigError(
                f"--split {shown}: shares of train, val and test that add up to 1, as in "
                "0.9 0.05 0.05"
            )
        if self.place.startswith(PREFIX):
            return
        if self.splits:
            raise ConfigError(f"--splits: {self.place} is no data set of the hub; leave it out")
        if not Path(self.place).exists():
            raise ConfigError(f"{self.place}: there is no such file or folder")
        if Path(self.place).resolve() == self.out.resolve():
            raise ConfigError(f"--out {self.out} is the folder of the images; choose another")

    @property
    def title(self) -> str:
        """Return the name of the data set."""
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
    An image is named by its bytes: equal ones become one sample. Splits of the data's own are kept,
    in a column (--split-column) or as names of folders or files, and images without one go into
    train. Where there are none the bytes decide, and images that look alike stay on one side. An
    interrupted command goes on where it was; later images follow those that are there.
    """
    faults: Faults = []
    with unpacking_room(options.out) as room:
        try:
            tree, form = _opened(options, room, faults)
            print(readable(f"{options.place}: {form.title}"))
            for line in filter(None, (*form.took, other_files(tree))):
                print(f"  {readable(line)}")
            images, dropped = _cleaned(form, tree, faults, options)
            tree.flush()
            if not options.split_column and not any(image.split for image in images):
                # A missing image has no folder to compare with the others' folders.
                present = [image.image for image in images if tree.find(image.image) is not None]
                splits = splits_by_name({name: tree.whole(name) for name in present}, options.place)
                images = [image._replace(split=splits.get(image.image)) for image in images]
            _require_captions(images, form, tree, faults, options)
            _show(images, tree)
            return _build(images, [*faults, *dropped], tree, options, build)
        except OSError as error:
            path = error.filename or options.place
            raise ConfigError(f"{path}: {error.strerror or error}") from error


def _opened(options: ImportOptions, room: Path, faults: Faults) -> tuple[FileTree, Form]:
    captions = tuple(options.caption) if options.caption else None
    overrides = ColumnOverrides(options.image, captions, options.split_column)
    images = options.images or []
    if options.place.startswith(PREFIX):
        tree = FileTree(images, room, options.out)
        return tree, hub_form(options.place, tree, overrides, faults, options.splits)
    path = Path(options.place)
    tree = FileTree([path, *images], room, options.out)
    is_single = path.is_file() and len(tree) == 1 and not images
    return tree, recognise(tree, overrides, faults, path, path.parent if is_single else None)


def _cleaned(
    form: Form, tree: FileTree, faults: Faults, options: ImportOptions
) -> tuple[list[UserImage], list[Refused]]:
    # Captions are cleaned here already, as images without any are an error.
    dropped: list[Refused] = []
    images = []
    for image in form.images:
        captions, lost = clean_captions(image.captions, image.image, options.max_words)
        dropped += lost
        images.append(image._replace(captions=captions))
    unclear = [image for image in images if image.image in tree.shared]
    faults += [Refused("image of several names", image.image) for image in unclear]
    images = [image for image in images if image.image not in tree.shared]
    if not images:
        first = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{options.place}: no row can be used{first}")
    return joined(images), dropped


def _require_captions(
    images: Sequence[UserImage], form: Form, tree: FileTree, faults: Faults, options: ImportOptions
) -> None:
    # A table with most images missing is one whose folder was not named.
    missing = [image.image for image in images if tree.find(image.image) is None]
    present, first = len(images) - len(missing), readable(next(iter(missing), ""))
    allowed = options.allow_missing_images and present
    if len(missing) > present and not allowed:
        remedy = "name their folder with --images"
        if first.startswith(("http://", "https://")):
            remedy = "download the URLs with img2dataset, and import its output"
        elif present:
            remedy += ", or take the others with --allow-missing-images"
        raise ConfigError(
            f"{options.place}: {present or 'none'} of its {len(images)} images "
            f"{'is' if present < 2 else 'are'} there (the first that is not: {first}); {remedy}"
        )
    without = [image.image for image in images if not image.captions]
    if form.every_image:
        described = {image.image for image in images}
        without += [path for path in tree.images if path not in described]
    captions = sum(len(image.captions) for image in images)
    print(f"  {present} images, {captions} captions")
    if captions and all(is_number(text) for image in images for text in image.captions):
        print("  careful: every caption is a number; write the names of the classes instead")
    if missing:
        print(f"  {len(missing)} images are nowhere (first: {first})")
    if not without:
        return
    total = len(images) + len(without) - sum(not image.captions for image in images)
    counts = (
        f"{total} images, and {len(without)} of them have no caption (first: "
        f"{readable(without[0])})"
    )
    # A row or file that cannot be read costs its image, and is counted.
    allowed = options.allow_missing_captions or len(without) <= len(faults)
    if len(without) == total or not allowed:
        raise ConfigError(
            f"{options.place}: {counts}; write them, or leave these images out with "
            f"--allow-missing-captions{_unread(faults)}"
        )
    print(f"  {counts}: left out")


def _unread(faults: Faults) -> str:
    # A caption may be missing only because its file cannot be read.
    bad = [fault.id for fault in faults if fault.kind == BAD_ANNOTATION]
    if not bad:
        return ""
    return f"; {len(bad)} annotations cannot be read (first: {readable(bad[0])})"


def _show(images: Sequence[UserImage], tree: FileTree) -> None:
    # The start alone may look right where columns slip.
    shown = [image for image in images if image.captions and tree.find(image.image)]
    for position in sorted({0, len(shown) // 2, len(shown) - 1})[:_SHOWN] if shown else ():
        image = shown[position]
        try:
            location = tree.find(image.image)
            assert location is not None
            with decoder_errors(image.image), open_image(location.read(), image.image) as opened:
                size = f"{opened.width} x {opened.height}"
        except BadSample as bad:
            size = bad.kind
        more = f" (and {len(image.captions) - 1} more)" if len(image.captions) > 1 else ""
        print(f"    {readable(image.image)}, {size}: {image.captions[0]!r}{more}")


def _build(
    images: Sequence[UserImage],
    faults: Sequence[Refused],
    tree: FileTree,
    options: ImportOptions,
    build: BuildOptions,
) -> int:
    earlier = Earlier({}, {}) if build.replace else Earlier.read(options.out)
    dealt = deal(
        earlier.first([image for image in images if image.captions]),
        tree,
        options.split,
        build.workers(),
        earlier.splits,
        options.split_column is not None,
        options.exact,
    )
    paths = [sample.image.image for sample in dealt.samples]
    keys = keys_of(paths, earlier.keys)
    if earlier.keys and (new := sum(image not in earlier.keys for image in paths)):
        print(f"  {new} images are new; those of the run before keep their key and split")
    _say_split(dealt, options)
    refused = [
        *faults,
        *(Refused("no text", image.image) for image in images if not image.captions),
    ]
    parts: list[CorpusPart] = []
    for split in SPLITS:
        positions = [
            position for position, sample in enumerate(dealt.samples) if sample.split == split
        ]
        if not positions and not (options.out / split).exists():
            continue
        specs = (
            _spec(dealt.samples[position], keys[position], options.title) for position in positions
        )
        parts.append(CorpusPart(split, [*specs, *(() if parts else refused)]))
    settings = {
        "max_words": options.max_words,
        "name": options.title,
        "split": None if dealt.from_data else list(options.split),
    }
    splits = [sample.split for sample in dealt.samples]
    target = Target(options.out, build, options.title, "unknown", settings)
    code = build_parts(
        target, parts, tree, lambda: Earlier.write(options.out, zip(paths, keys, splits))
    )
    if code == 0:
        print(next_steps(options.out, [part.name for part in parts]))
    return code


def _spec(sample: UserSample, key: str, source: str) -> SampleSpec:
    image = sample.image
    more = {"url": image.url} if image.url else {}
    annotation = Annotation(
        captions=image.captions,
        source=source,
        image_id=sample.digest or None,
        file=readable(image.image),
        **more,
    )
    return SampleSpec(key, (image.image,), annotation)


def _say_split(dealt: Dealt, options: ImportOptions) -> None:
    counts = Counter(sample.split for sample in dealt.samples)
    how = "as the data has it" if dealt.from_data else "by the images' bytes"
    shown = ", ".join(f"{split} {count}" for split, count in sorted(counts.items(), reverse=True))
    print(f"  split {how}: {shown}")
    names = {sample.image.split for sample in dealt.samples} - {None}
    if names and not dealt.from_data:
        unused = ", ".join(repr(name) for name in sorted(map(str, names))[:3])
        print(f"  split names of the data that are not used: {unused}")
    if dealt.unsplit:
        print(
            f"  {dealt.unsplit} images have no split there: they go into train, or where an image "
            "is that looks alike"
        )
    if dealt.merged:
        print(f"  {dealt.merged} images have the bytes of another one, which got their captions")
    if dealt.torn:
        print(
            f"  careful: {dealt.torn} groups of images that look alike are on two sides of the "
            f"{'data' if dealt.from_data else 'first run'}'s own split; vlp data overlap lists them"
        )
    elif dealt.alike and not options.exact:
        print(f"  {dealt.alike} groups of images that look alike, each on one side")


VOCABULARY = 4000  # as in configs/pretrain/flickr8k_small.yaml


def next_steps(out: Path, splits: Sequence[str]) -> str:
    """Return the commands that train on the splits that were written and evaluate the model."""
    train = out / "train"
    aligned, run = Path("runs") / f"{out.name}_aligned", Path("runs") / out.name
    sources = _quoted(f"data.sources=[{{path: {train}}}]")
    vocabulary = _quoted(f"{out / 'vocabulary'}")
    evaluated = next((split for split in ("val", "test") if split in splits), "train")
    align = f"vlp align --config configs/pretrain/from_towers.yaml --out {_quoted(aligned)}"
    config = "--config configs/pretrain/flickr8k_small.yaml"
    options = f"data.vocabulary={vocabulary} output={_quoted(run)}"
    evaluate = f"vlp evaluate retrieval --shards {_quoted(out / evaluated)} --model"
    return (
        "next, from public towers:\n"
        f"  {align} {sources}\n"
        f"  {evaluate} {_quoted(aligned)}\n"
        "or from nothing:\n"
        f"  vlp data vocabulary --shards {_quoted(train)} --size {VOCABULARY} --out {vocabulary}\n"
        f"  vlp train {config} {sources} {options}\n"
        f"  {evaluate} {_quoted(run / 'model')}"
    )


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


NAME = "imported.jsonl"


class Earlier(NamedTuple):
    """Samples of the run before: key and split by the image's path, in the order of the list."""

    keys: dict[str, str]
    splits: dict[str, str]

    @classmethod
    def read(cls, out: Path) -> Earlier:
        """Return the earlier import of a folder; empty without one."""
        path, earlier = out / NAME, cls({}, {})
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

    def first(self, images: Sequence[UserImage]) -> list[UserImage]:
        """Return the images of the run before in its order, then the others in theirs."""
        positions = {image: number for number, image in enumerate(self.keys)}
        return sorted(images, key=lambda image: positions.get(image.image, len(positions)))

    @staticmethod
    def write(out: Path, samples: Iterable[tuple[str, str, str]]) -> None:
        """Remember image, key and split of each sample."""
        with atomic_write(out / NAME, "w", durable=True, error=ConfigError) as file:
            file.writelines(json.dumps(sample) + "\n" for sample in samples)


def keys_of(paths: Sequence[str], existing: Mapping[str, str]) -> list[str]:
    """Return unique keys of paths without their common folder; `existing` keys stay."""
    parts = [PurePosixPath(path).parts for path in paths]
    shared = 0
    while all(
        len(path_parts) > shared + 1 and path_parts[shared] == parts[0][shared]
        for path_parts in parts
    ):
        shared += 1
    stems = [
        "/".join(path_parts[shared:]).rpartition(".")[0] or path_parts[-1] for path_parts in parts
    ]
    keys = [existing.get(path) or _key(stem) for path, stem in zip(paths, stems)]
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


def _key(stem: str) -> str:
    # An emoji's joiners are no printable characters.
    joined = "_".join(stem.split())
    return "".join("_" if sign in "./" or not sign.isprintable() else sign for sign in joined)
