"""Limits of a sample's size; readers skip samples beyond them."""

from __future__ import annotations

import os
from functools import lru_cache

import yaml
from pydantic import Field

from vlp.config import Config, ConfigError, parse_yaml, validate

VARIABLE = "VLP_LIMITS"  # environment variable: `Limits` as a YAML mapping, {pixels: 2e8}

# Not configurable: public data sets stay far below, and larger samples take gigabytes or minutes.
MAX_IMAGE_BYTES = 2**27
MAX_SIDE = 2**16
MAX_ASPECT = 200  # a resize of a line to a square takes gigabytes
MAX_SCAN_PIXELS = 10 * 2**26  # pixels times scans of a JPEG, each of which rewrites all pixels
MAX_ANNOTATION_BYTES = 2**22  # of one KEY.json, and of one KEY.txt
MAX_MEMBERS = 2**20  # files in one shard
MAX_ARCHIVE_MEMBERS = 2**24  # files in one tar or zip of originals
MAX_UNPACKED_RATIO = 100  # unpacked bytes for each byte of a compressed file


class Limits(Config):
    """Size beyond which an image is refused before it is decoded."""

    pixels: int = Field(2**26, ge=1, description="of one image")


def limits() -> Limits:
    """Return the limits of `VLP_LIMITS`, else the defaults."""
    return _parse(os.environ.get(VARIABLE, ""))


def set_limits(values: Limits) -> None:
    """Set the limits of this process and its child processes."""
    os.environ[VARIABLE] = values.model_dump_json()


@lru_cache(maxsize=4)
def _parse(text: str) -> Limits:
    try:
        values = parse_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{VARIABLE}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{VARIABLE}: not a mapping such as {{pixels: 2e8}}: {values!r}")
    return validate(values, Limits, VARIABLE)
