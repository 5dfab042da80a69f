"""Turn Flickr8k (or any Karpathy-style JSON) and its pictures into shards, one folder a split.

Pictures are stored as they are, with all their captions. The command may be interrupted and run
again: finished shards stay. What is skipped is printed and written to OUT/report.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data_tools.originals import Originals
from vlp.config import ConfigError
from vlp.data.pictures import decode_picture
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards import PICTURES, BadSample, ShardWriter


class Entry(NamedTuple):
    """One picture of the JSON."""

    filename: str
    split: str
    captions: list[str]
    source: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations", type=Path, nargs="+", required=True, help="Karpathy-style JSON files"
    )
    parser.add_argument(
        "--images", type=Path, nargs="+", required=True, help="folders or tars with the pictures"
    )
    parser.add_argument("--out", type=Path, required=True, help="one folder a split is made here")
    parser.add_argument("--samples-per-shard", type=int, default=1000)
    parser.add_argument("--splits", nargs="+", help="only these (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Convert, print what was written and skipped, and write report.json."""
    entries = [entry for path in arguments.annotations for entry in read_karpathy(path)]
    splits = sorted({entry.split for entry in entries})
    if arguments.splits:
        unknown = sorted(set(arguments.splits) - set(splits))
        if unknown:
            raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(splits)}")
        splits = arguments.splits
        entries = [entry for entry in entries if entry.split in splits]
    originals = Originals(arguments.images)
    report = convert(entries, originals, arguments.out, arguments.samples_per_shard)
    path = arguments.out / "report.json"
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_report(report)
    print(f"{path} names every one of them")
    return 0


def read_karpathy(path: Path) -> list[Entry]:
    """Read `{"dataset", "images": [{"filename", "split", "sentences": [{"raw"}]}]}`.

    Raises:
        ConfigError: the file is missing or has another layout.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        source = str(content.get("dataset", path.stem))
        return [_entry(image, source) for image in content["images"]]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a Karpathy-style JSON with images, filename, split and sentences/raw "
            f"({error!r})"
        ) from error


def convert(
    entries: Sequence[Entry], originals: Originals, out: Path, samples_per_shard: int
) -> dict[str, Any]:
    """Write the shards of every split.

    Returns:
        The report: `written` by split, `skipped` by reason, `duplicates` (groups of pictures with
        the same bytes, all of them kept) and `problems` of the tars.
    """
    skipped: dict[str, list[str]] = defaultdict(list)
    by_bytes: dict[str, list[str]] = defaultdict(list)
    written: dict[str, int] = {}
    seen: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(out / split, samples_per_shard))
            for split in sorted({entry.split for entry in entries})
        }
        written = dict.fromkeys(writers, 0)
        for entry in tqdm(entries, unit="picture", desc=str(out)):
            writer, key = writers[entry.split], _key(entry.filename)
            name = f"{entry.split}/{entry.filename}"
            if (entry.split, key) in seen:
                skipped["listed twice"].append(name)
                continue
            seen.add((entry.split, key))
            image = originals.read(entry.filename)
            if image is None:
                skipped["missing picture"].append(name)
                continue
            # Pictures already written are counted again, so that a run after an interruption
            # reports the same as one without.
            if key not in writer.done:
                reason = _write(writer, key, image, entry)
                if reason is not None:
                    skipped[reason].append(name)
                    continue
            by_bytes[hashlib.sha256(image).hexdigest()].append(name)
            written[entry.split] += 1
    return {
        "written": written,
        "skipped": dict(sorted(skipped.items())),
        "duplicates": [names for names in by_bytes.values() if len(names) > 1],
        "problems": originals.problems,
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the report's counts with an example of each."""
    for split, count in report["written"].items():
        print(f"{split}: {count} samples")
    for reason, names in report["skipped"].items():
        print(f"skipped, {reason}: {len(names)} (first: {names[0]})")
    if report["duplicates"]:
        print(
            f"kept, but the same bytes: {len(report['duplicates'])} groups (first: "
            f"{', '.join(report['duplicates'][0])})"
        )
    for problem in report["problems"]:
        print(f"damaged: {problem}")


def _write(writer: ShardWriter, key: str, image: bytes, entry: Entry) -> str | None:
    """Write one sample; the reason why not, if it is not written."""
    annotation = Annotation(
        captions=entry.captions, source=entry.source, image_id=Path(entry.filename).stem
    )
    if not captions_of(annotation):
        return "no caption"
    extension = Path(entry.filename).suffix.lower().removeprefix(".")
    if extension not in PICTURES:
        return "unknown kind of picture"
    try:
        decode_picture(image, entry.filename)
    except BadSample as bad:
        return bad.kind
    writer.write(key, image, extension, annotation)
    return None


def _entry(image: dict[str, Any], source: str) -> Entry:
    folder = image.get("filepath")
    filename = f"{folder}/{image['filename']}" if folder else image["filename"]
    captions = [sentence["raw"].strip() for sentence in image["sentences"]]
    return Entry(filename, image["split"], captions, source)


def _key(filename: str) -> str:
    # A dot would end the key early for every WebDataset reader.
    return Path(filename).stem.replace(".", "_")
