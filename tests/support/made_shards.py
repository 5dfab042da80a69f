"""Shards with images that can be told apart, and copies of them."""

import hashlib
import json
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.__main__ import main
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.shards.tar import read_members


def photo(seed, size=(96, 72)):
    """Soft blobs: like a photograph, most of it is in low frequencies."""
    rng = np.random.default_rng(seed)
    blobs = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    return blobs.resize(size, Image.Resampling.BICUBIC)


def encoded(image, kind="jpeg", **options):
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def jpeg(seed, **options):
    return encoded(photo(seed), **options)


def write(folder, samples, per_shard=4):
    """JPEG samples by key; the nth image of a folder is called n."""
    with ShardWriter(folder, per_shard) as writer:
        for number, (key, data) in enumerate(samples.items()):
            known = Annotation(
                captions=[f"number {number}"], source=folder.name, image_id=str(number)
            )
            writer.write(key, data, "jpg", known)
    return folder


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(content), 1_700_000_000, "somebody"
            archive.addfile(info, BytesIO(content))


def cut(path):
    members, _ = read_members(path)
    path.write_bytes(path.read_bytes()[: members[-1].offset + 1])


def write_manifest(folder):
    """As builders write it, as far as `verify` reads it."""
    shards = []
    for path in sorted(folder.glob("*.tar")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shards.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
    (folder / "manifest.json").write_text(json.dumps({"title": "made", "shards": shards}))


def run(*arguments):
    return main([*map(str, arguments), "--processes", "1"])


def images_of(tar, count):
    found: dict[str, bytes] = {}
    with tarfile.open(tar) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith(".jpg"):
                found[Path(member.name).stem] = content.read()
            if len(found) == count:
                break
    return found


def listed(path):
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
