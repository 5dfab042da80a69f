"""Comparison of `index.npz` and `manifest.json` with the contents of the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from vlp.config import ConfigError
from vlp.data.shards.index import INDEX_NAME, ShardTable, map_samples, read_table, sample_rows
from vlp.data.shards.sample_files import SampleFiles

MANIFEST_NAME = "manifest.json"
INDEX_KINDS = ("missing index", "unusable index", "index differs")
"""Kinds of damage that a new index repairs."""


class Damage(NamedTuple):
    """Kind of damage (one of few) and its location."""

    kind: str
    where: str


class ShardContents(NamedTuple):
    """Contents found in a shard; None for what was not looked for.

    `rows` and `places` are digests of the index rows of its samples, with captions and without.
    """

    samples: int
    bytes: int
    places: str
    captions: int | None = None
    rows: str | None = None
    sha256: str | None = None


class ManifestShard(BaseModel):
    """A shard as its builder wrote it; what a manifest does not say is not compared."""

    name: str
    samples: int | None = None
    bytes: int | None = None
    sha256: str | None = None


class _Manifest(BaseModel):
    shards: list[ManifestShard]


def found_rows(samples: Sequence[SampleFiles], captions: Sequence[int]) -> tuple[str, str]:
    """Return `places` and `rows` of `ShardContents`."""
    return _digests(sample_rows(samples, captions))


def against_index(folder: Path, found: Mapping[str, ShardContents]) -> list[Damage]:
    """Find the places where the index and the shards differ.

    Args:
        folder: of the shards.
        found: by name, every shard that is there.
    """
    path = folder / INDEX_NAME
    remedy = "--fix writes a new one"
    try:
        with path.open("rb") as file:
            shards = read_table(file, str(path), remedy)
        rows = map_samples(folder / shards.file, shards, check=False)
    except FileNotFoundError:
        return [Damage("missing index", f"{path} ({remedy})")]
    except OSError as error:
        return [Damage("unusable index", f"{path} ({error.strerror})")]
    except ConfigError as error:
        return [Damage("unusable index", str(error))]
    listed = {entry.name for entry in shards}
    damage = [
        Damage("index differs", f"{folder / name}: is not in {INDEX_NAME}")
        for name in sorted(found.keys() - listed)
    ]
    if rows is None:
        damage.append(Damage("unusable index", f"{folder / shards.file}: is not there"))
    for entry, start in zip(shards, _starts(shards)):
        there = found.get(entry.name)
        if there is None:
            damage.append(Damage("index differs", f"{folder / entry.name}: is not there"))
            continue
        difference = _difference(entry, there, ("samples", "bytes", "captions"))
        if difference is None and rows is not None:
            places, whole = _digests(rows[start : start + entry.samples])
            if places != there.places or there.rows not in (None, whole):
                difference = "its samples lie elsewhere, or have other captions"
        if difference is not None:
            damage.append(Damage("index differs", f"{folder / entry.name}: {difference}"))
    return damage


def read_manifest(folder: Path) -> tuple[list[ManifestShard] | None, list[Damage]]:
    """Return the shards of `manifest.json` (None without one) and damage to it."""
    path = folder / MANIFEST_NAME
    try:
        return _Manifest.model_validate_json(path.read_bytes()).shards, []
    except FileNotFoundError:
        return None, []
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        return None, [Damage("unusable manifest", f"{path} ({reason})")]


def against_manifest(
    folder: Path, manifest: Sequence[ManifestShard], found: Mapping[str, ShardContents]
) -> list[Damage]:
    """Find the places where manifest and shards differ; arguments as in `against_index`."""
    damage = []
    for entry in manifest:
        there = found.get(entry.name)
        difference = "is not there"
        if there is not None:
            difference = _difference(entry, there, ("samples", "bytes", "sha256")) or ""
        if difference:
            damage.append(Damage("manifest differs", f"{folder / entry.name}: {difference}"))
    for name in sorted(found.keys() - {entry.name for entry in manifest}):
        damage.append(Damage("manifest differs", f"{folder / name}: is not in {MANIFEST_NAME}"))
    return damage


def _difference(said: object, there: ShardContents, fields: Sequence[str]) -> str | None:
    """Return the first field that is known of both and not the same."""
    for field in fields:
        expected, is_there = getattr(said, field), getattr(there, field)
        if expected is not None and is_there is not None and expected != is_there:
            return f"{field}: {is_there}, {expected} is written"
    return None


def _starts(shards: ShardTable) -> list[int]:
    """Return the number of each shard's first row."""
    starts: list[int] = (np.cumsum(shards.samples) - shards.samples).tolist()
    return starts


def _digests(rows: NDArray[np.void]) -> tuple[str, str]:
    places = np.stack((rows["start"], rows["blocks"]))
    return tuple(blake2b(part.tobytes(), digest_size=8).hexdigest() for part in (places, rows))  # type: ignore[return-value]
