"""Turn SBU captions into shards.

    python -m data_tools sbu --annotations sbu-captions-all.json --urls-only --out shards/sbu
    img2dataset ...   (the command above prints it whole)
    python -m data_tools sbu --annotations sbu-captions-all.json \\
        --img2dataset shards/sbu/downloaded --out shards/sbu

--annotations takes the official JSON: three lists `image_urls`, `captions` and `user_ids` of one
length, gzipped or not. Images that lie in folders, tars or zips are taken with --images and
--names instead ({file} is Flickr's own file name).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from data_tools.builder.sample_spec import Refused
from data_tools.converters.corpora.web import WebList, WebRow, add_web_arguments, run_web
from data_tools.sources.annotation_rows import Row, explained, read_json
from vlp.config import ConfigError


class _SbuFile(Row):
    image_urls: list[str]
    captions: list[str]
    user_ids: list[str] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_web_arguments(parser, "sbu-captions-all.json")


def run(arguments: argparse.Namespace) -> int:
    """Convert; what was left out is printed and named in the manifest."""
    return run_web(arguments, SBU)


def read_sbu(path: Path) -> Iterator[WebRow | Refused]:
    """Yield the rows of the official JSON; the photographer's `user_id` is kept for attribution.

    Raises:
        ConfigError: the file is missing, of another layout, or its lists differ in length.
    """
    try:
        file = _SbuFile.model_validate(read_json(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not SBU's JSON with image_urls and captions ({explained(error)})"
        ) from None
    users = file.user_ids if file.user_ids is not None else [None] * len(file.captions)
    if not len(file.image_urls) == len(file.captions) == len(users):
        raise ConfigError(
            f"{path}: {len(file.image_urls)} image_urls, {len(file.captions)} captions and "
            f"{len(users)} user_ids cannot belong together; download it again"
        )
    for number, (url, caption, user) in enumerate(zip(file.image_urls, file.captions, users)):
        yield WebRow(number, caption, url, {} if user is None else {"user_id": user})


SBU = WebList("sbu", "SBU captions", "images under Flickr's terms of use; research use", read_sbu)
