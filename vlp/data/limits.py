"""Limits on what a sample may cost, in force for every reader of a process and its workers."""

from __future__ import annotations

import os
from functools import lru_cache

import yaml
from pydantic import Field

from vlp.config import Config, ConfigError, parse_yaml, validated

VARIABLE = "VLP_LIMITS"
"""Of the environment: keys of `Limits` as a mapping in YAML, `{pixels: 2e8, aspect: 500}`."""


class Limits(Config):
    """Sizes beyond which a file is refused before it is decoded; a bad sample is counted and named.

    Together they bound what one image costs: with the defaults less than 5 s of a core and 1.5 GB.
    """

    image_bytes: int = Field(2**27, ge=1, description="of one image as it is stored")
    pixels: int = Field(
        2**26,
        ge=1,
        description="of one image; three quarters of it of a WebP, which takes more copies",
    )
    side: int = Field(2**16, ge=1, description="longest side of an image in pixels")
    aspect: float = Field(
        200.0,
        ge=1,
        description="longer side of an image by the shorter one: a resize of a line "
        "to a square takes gigabytes",
    )
    scan_pixels: int = Field(
        10 * 2**26,
        ge=1,
        description="pixels of a JPEG times its scans, for each goes over all of them; ordinary "
        "progressive ones have 10",
    )
    annotation_bytes: int = Field(2**22, ge=1, description="of one KEY.json, and of one KEY.txt")
    members: int = Field(2**20, ge=1, description="files in one shard")
    archive_members: int = Field(2**24, ge=1, description="files in one tar or zip of originals")
    unpacked_ratio: float = Field(
        100.0, ge=1, description="bytes that come out of a compressed file for each of its own"
    )


def limits() -> Limits:
    """Return the limits in force: those of `VLP_LIMITS`, else the defaults.

    Raises:
        ConfigError: the variable holds something else.
    """
    return _parsed(os.environ.get(VARIABLE, ""))


def beyond(key: str) -> str:
    """Return what a message says of a value above the limit of that key."""
    return f"more than limits.{key} {getattr(limits(), key)}"


def put_in_force(wanted: Limits) -> None:
    """Set the limits of this process and of those that it starts."""
    os.environ[VARIABLE] = wanted.model_dump_json()


@lru_cache(maxsize=4)
def _parsed(text: str) -> Limits:
    try:
        values = parse_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{VARIABLE}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{VARIABLE}: a mapping such as {{pixels: 2e8}}, not {values!r}")
    return validated(values, Limits, VARIABLE)
