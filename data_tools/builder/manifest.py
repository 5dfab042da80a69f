"""Manifest of a build, OUT/manifest.json, and the lines printed at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL
from PIL import features

from data_tools.builder.plan import Pieces
from vlp.data.limits import limits
from vlp.io import atomic_write

MANIFEST_NAME = "manifest.json"


def make_manifest(pieces: Pieces, title: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a finished build; equal shards and failures give equal ones."""
    records = [pieces.journal.records[number] for number in range(pieces.shards)]
    failures = {kind: list(ids) for kind, ids in pieces.refused.items()}
    for record in records:
        for kind, ids in record.failures.items():
            failures.setdefault(kind, []).extend(ids)
        if record.taken_down:
            failures.setdefault("taken down", []).extend(record.taken_down)
    unmet = sorted(pieces.take_down.lines - pieces.take_down.met)
    return {
        "title": title,
        "licence": pieces.options.licence,
        "arguments": {**arguments, "limits": limits().model_dump()},
        "samples": sum(record.samples for record in records),
        "captions": sum(record.captions for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": [
            {
                "name": record.name,
                "samples": record.samples,
                "bytes": record.bytes,
                "sha256": record.sha256,
            }
            for record in records
            if record.samples
        ],
        "failures": {
            kind: {"count": len(ids), "ids": ids} for kind, ids in sorted(failures.items())
        },
        "take_down_without_a_sample": unmet,
        "problems": pieces.originals.problems,
        "versions": {
            "pillow": PIL.__version__,
            "libjpeg_turbo": features.version("libjpeg_turbo"),
        },
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    with atomic_write(path, "w", durable=True) as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
        file.write("\n")


def print_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    """Print what was written, what was not, and where every one of those is named."""
    print(
        f"{out}: {manifest['samples']} samples, {manifest['captions']} captions in "
        f"{len(manifest['shards'])} shards, {manifest['bytes'] / 1e6:.1f} MB"
    )
    for kind, failed in manifest["failures"].items():
        print(f"  {kind}: {failed['count']} (first: {failed['ids'][0]})")
    unmet = manifest["take_down_without_a_sample"]
    if unmet:
        print(f"  take-down lines that name no sample here: {len(unmet)} (first: {unmet[0]})")
    for problem in manifest["problems"]:
        print(f"  damaged: {problem}")
    if manifest["failures"]:
        print(f"  {out / MANIFEST_NAME} names every one of them")
