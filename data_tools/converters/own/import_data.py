"""Turn own images and captions, in whatever form they come, into shards of train, val and test.

    vlp data import photos/ --out shards/mine
    vlp data import captions.csv --images photos/ --image file --caption text --out shards/mine
    vlp data import hub:OWNER/NAME --out shards/mine

PLACE is a folder, a file, an archive, or a data set of the hub. These forms are recognised:
  NAME.jpg (png, webp, gif, bmp) with NAME.txt, one caption a line, or NAME.json beside it
  an imagefolder of Hugging Face, with metadata.jsonl, .csv or .parquet
  CSV, TSV, JSON, JSON Lines and Parquet with a column of images (names or bytes) and of captions
  a data set that `datasets` saved to disk (save_to_disk), or streams from the hub
  img2dataset's output, as tars, files or Parquet; other tars, sorted or not
  Karpathy's JSON
  a tar, .tar.gz, .tar.xz, .tar.bz2 or zip of one of these

Several rows of one image, lists of captions and several lines of a .txt are several captions. An
image is named by its bytes: equal ones become one sample. Splits of the data's own are kept, in a
column (--split-column) or as names of folders or files, and images without one go into train. Where
there are none the bytes decide, and images that look alike stay on one side. The command may be
interrupted and run again: finished shards stay. After images were added it writes the new ones
behind those that are there.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.builder.build_corpus import CorpusPart, build_parts
from data_tools.builder.caption_cleaning import add_caption_arguments, clean_captions
from data_tools.builder.options import add_build_arguments, build_options
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.converters.own.columns import Named
from data_tools.converters.own.earlier import Earlier, keys_of
from data_tools.converters.own.file_tree import FileTree
from data_tools.converters.own.forms import BAD_ANNOTATION, Form, OwnImage, other_files, recognise
from data_tools.converters.own.hub import PREFIX, hub_form
from data_tools.converters.own.next_steps import next_steps
from data_tools.executor.options import executor_of
from data_tools.sources.annotation_rows import Faults
from data_tools.sources.archives import unpacking_room
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import readable

if TYPE_CHECKING:
    from data_tools.converters.own.content import Dealt, OwnSample

SHARES = (0.9, 0.05, 0.05)
_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("place", metavar="PLACE", help="folder, file, archive or hub:OWNER/NAME")
    parser.add_argument(
        "--images",
        type=Path,
        nargs="+",
        metavar="PLACE",
        help="folders or archives of the images that a table names (default: beside the table)",
    )
    parser.add_argument("--image", metavar="COLUMN", help="of the images (default: found by name)")
    parser.add_argument(
        "--caption", nargs="+", metavar="COLUMN", help="of the captions (default: found by name)"
    )
    parser.add_argument(
        "--split-column", metavar="COLUMN", help="of train, val or test (default: found by name)"
    )
    parser.add_argument("--splits", nargs="+", help="of hub:OWNER/NAME: only these (default: all)")
    parser.add_argument(
        "--split",
        type=float,
        nargs=3,
        default=SHARES,
        metavar=("TRAIN", "VAL", "TEST"),
        help="shares of the splits where the data has none (default 0.9 0.05 0.05)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="keep images of equal bytes alone on one side, not those that look alike",
    )
    parser.add_argument("--name", help="of the data set (default: the folder's or file's)")
    parser.add_argument(
        "--allow-missing-captions",
        action="store_true",
        help="leave out images without a caption (default: they are an error)",
    )
    parser.add_argument(
        "--allow-missing-images",
        action="store_true",
        help="go on where more than half of the images that a table names are nowhere",
    )
    add_caption_arguments(parser)
    add_build_arguments(parser, images=False)


def run(arguments: argparse.Namespace) -> int:
    """Recognise, show, split and convert; the next commands are printed at the end."""
    _check(arguments)
    faults: Faults = []
    with unpacking_room(arguments.out) as room:
        try:
            tree, form = _opened(arguments, room, faults)
            name = arguments.name or _name_of(arguments.place)
            print(readable(f"{arguments.place}: {form.title}"))
            for line in filter(None, (*form.took, other_files(tree))):
                print(f"  {readable(line)}")
            images, dropped = _cleaned(form, faults, arguments)
            tree.flush()
            _require_captions(images, form, tree, faults, arguments)
            _show(images, tree)
            return _build(images, [*faults, *dropped], tree, name, arguments)
        except OSError as error:
            where = error.filename or arguments.place
            raise ConfigError(f"{where}: {error.strerror or error}") from error


def _check(arguments: argparse.Namespace) -> None:
    build_options(arguments)
    shares = arguments.split
    sound = all(math.isfinite(share) and share >= 0 for share in shares) and shares[0] > 0
    if not sound or abs(sum(shares) - 1) > 1e-6:
        shown = " ".join(f"{share:g}" for share in shares)
        raise ConfigError(
            f"--split {shown}: shares of train, val and test that add up to 1, as in 0.9 0.05 0.05"
        )
    place, out = arguments.place, arguments.out
    if not place.startswith(PREFIX):
        if arguments.splits:
            raise ConfigError(f"--splits: {place} is no data set of the hub; leave it out")
        if not Path(place).exists():
            raise ConfigError(f"{place}: there is no such file or folder")
        if Path(place).resolve() == out.resolve():
            raise ConfigError(f"--out {out} is the folder of the images; choose another")


def _opened(arguments: argparse.Namespace, room: Path, faults: Faults) -> tuple[FileTree, Form]:
    captions = tuple(arguments.caption) if arguments.caption else None
    named = Named(arguments.image, captions, arguments.split_column)
    images = arguments.images or []
    if arguments.place.startswith(PREFIX):
        tree = FileTree(images, room, arguments.out)
        return tree, hub_form(arguments.place, tree, named, faults, arguments.splits)
    place = Path(arguments.place)
    tree = FileTree([place, *images], room, arguments.out)
    single = place.is_file() and len(tree) == 1 and not images
    return tree, recognise(tree, named, faults, place, place.parent if single else None)


def _name_of(place: str) -> str:
    if place.startswith(PREFIX):
        return place.removeprefix(PREFIX).rpartition("/")[2]
    path = Path(place).resolve()
    return path.name.partition(".")[0] if path.is_file() else path.name


def _cleaned(
    form: Form, faults: Faults, arguments: argparse.Namespace
) -> tuple[list[OwnImage], list[Refused]]:
    """Return each image once with its cleaned captions, and the captions that were dropped."""
    from data_tools.converters.own.content import joined

    dropped: list[Refused] = []
    images = []
    for image in form.images:
        captions, lost = clean_captions(image.captions, image.image, arguments.max_words)
        dropped += lost
        images.append(image._replace(captions=captions))
    if not images:
        first = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{arguments.place}: no row can be used{first}")
    return joined(images), dropped


def _require_captions(
    images: Sequence[OwnImage],
    form: Form,
    tree: FileTree,
    faults: Faults,
    arguments: argparse.Namespace,
) -> None:
    """Refuse images without captions, and a table most of whose images are nowhere.

    Raises:
        ConfigError: there are such, and the command line does not allow them.
    """
    missing = [image.image for image in images if tree.find(image.image) is None]
    there, first = len(images) - len(missing), readable(next(iter(missing), ""))
    allowed = arguments.allow_missing_images and there
    if len(missing) > there and not allowed:
        help = "name their folder with --images"
        if first.startswith(("http://", "https://")):
            help = "download the URLs with img2dataset, and import its output"
        elif there:
            help += ", or take the others with --allow-missing-images"
        raise ConfigError(
            f"{arguments.place}: {there or 'none'} of its {len(images)} images "
            f"{'is' if there < 2 else 'are'} there (the first that is not: {first}); {help}"
        )
    without = [image.image for image in images if not image.captions]
    if form.every_image:
        said = {image.image for image in images}
        without += [path for path in tree.images if path not in said]
    captions = sum(len(image.captions) for image in images)
    print(f"  {there} images, {captions} captions")
    if missing:
        print(f"  {len(missing)} images are nowhere (first: {first})")
    if not without:
        return
    total = len(images) + len(without) - sum(not image.captions for image in images)
    counts = (
        f"{total} images, and {len(without)} of them have no caption (first: "
        f"{readable(without[0])})"
    )
    if len(without) == total or not arguments.allow_missing_captions:
        raise ConfigError(
            f"{arguments.place}: {counts}; write them, or leave these images out with "
            f"--allow-missing-captions{_unread(faults)}"
        )
    print(f"  {counts}: left out")


def _unread(faults: Faults) -> str:
    """Return how many annotations cannot be read, and the first one, as the end of a message."""
    bad = [fault.id for fault in faults if fault.kind == BAD_ANNOTATION]
    if not bad:
        return ""
    return f"; {len(bad)} annotations cannot be read (first: {readable(bad[0])})"


def _show(images: Sequence[OwnImage], tree: FileTree) -> None:
    """Print samples from the start, the middle and the end."""
    from vlp.data.image.decode import open_image, reading

    shown = [image for image in images if image.captions and tree.find(image.image)]
    for place in sorted({0, len(shown) // 2, len(shown) - 1})[:_SHOWN] if shown else ():
        image = shown[place]
        try:
            location = tree.find(image.image)
            assert location is not None
            with reading(image.image), open_image(location.read(), image.image) as opened:
                size = f"{opened.width} x {opened.height}"
        except BadSample as bad:
            size = bad.kind
        more = f" (and {len(image.captions) - 1} more)" if len(image.captions) > 1 else ""
        print(f"    {readable(image.image)}, {size}: {image.captions[0]!r}{more}")


def _build(
    images: Sequence[OwnImage],
    faults: Sequence[Refused],
    tree: FileTree,
    name: str,
    arguments: argparse.Namespace,
) -> int:
    from data_tools.converters.own.content import SPLITS, deal

    earlier = Earlier({}, {}) if arguments.replace else Earlier.read(arguments.out)
    dealt = deal(
        earlier.first([image for image in images if image.captions]),
        tree,
        arguments.split,
        executor_of(arguments),
        earlier.splits,
        arguments.split_column is not None,
        arguments.exact,
    )
    taken = [sample.image.image for sample in dealt.samples]
    keys = keys_of(taken, earlier.keys)
    if earlier.keys and (new := sum(image not in earlier.keys for image in taken)):
        print(f"  {new} images are new; those of the run before keep their key and split")
    _say_split(dealt, arguments)
    lost = [*faults, *(Refused("no text", image.image) for image in images if not image.captions)]
    parts: list[CorpusPart] = []
    for split in SPLITS:
        chosen = [place for place, one in enumerate(dealt.samples) if one.split == split]
        if not chosen and not (arguments.out / split).exists():
            continue
        specs = (_spec(dealt.samples[place], keys[place], name) for place in chosen)
        parts.append(CorpusPart(split, [*specs, *(() if parts else lost)]))
    settings = {
        "max_words": arguments.max_words,
        "name": name,
        "split": None if dealt.given else list(arguments.split),
    }
    splits = [sample.split for sample in dealt.samples]
    code = build_parts(
        arguments,
        parts,
        tree,
        title=name,
        licence="unknown",
        settings=settings,
        accepted=lambda: Earlier.write(arguments.out, zip(taken, keys, splits)),
    )
    if code == 0:
        print(next_steps(arguments.out, [part.name for part in parts]))
    return code


def _spec(sample: OwnSample, key: str, source: str) -> SampleSpec:
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


def _say_split(dealt: Dealt, arguments: argparse.Namespace) -> None:
    counts = Counter(sample.split for sample in dealt.samples)
    how = "as the data has it" if dealt.given else "by the images' bytes"
    shown = ", ".join(f"{split} {count}" for split, count in sorted(counts.items(), reverse=True))
    print(f"  split {how}: {shown}")
    if dealt.unsplit:
        print(
            f"  {dealt.unsplit} images have no split there: they go into train, or where an image "
            "is that looks alike"
        )
    if dealt.same:
        print(f"  {dealt.same} images have the bytes of another one, which got their captions")
    if dealt.torn:
        print(
            f"  careful: {dealt.torn} groups of images that look alike are on two sides of the "
            f"{'data' if dealt.given else 'first run'}'s own split; vlp data overlap lists them"
        )
    elif dealt.alike and not arguments.exact:
        print(f"  {dealt.alike} groups of images that look alike, each on one side")
