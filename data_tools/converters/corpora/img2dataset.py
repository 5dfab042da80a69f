"""Images that img2dataset has downloaded into WebDataset tars, found by their URL.

Its tars hold KEY.jpg, KEY.txt and KEY.json, and the JSON says from which `url` the image came.
The key depends on how the list was cut into tars, so it is no safe way back to a row of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tqdm import tqdm

from data_tools.executor.executor import Executor
from data_tools.executor.local import LocalExecutor
from data_tools.sources.image_sources import ImageLocation, Originals
from vlp.config import ConfigError
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.shards.sample_files import IMAGES, contents

_ENTRY = np.dtype([("url", "<u8"), ("tar", "<u4"), ("size", "<u4"), ("offset", "<u8")])


class _Said(BaseModel):
    url: str


class Downloads(Originals):
    """Finds images by URL in folders of img2dataset's tars.

    24 bytes an image are kept: URLs are told apart by 64 bits of a hash, at 12 million images a
    chance of one in 250,000 that any two of them are taken for one.

    Raises:
        ConfigError: a folder does not exist or holds no tars.
    """

    def __init__(self, places: Sequence[Path], executor: Executor | None = None) -> None:
        super().__init__(())
        self._tars = [tar for place in places for tar in _tars(place)]
        found = []
        bar = tqdm(total=len(self._tars), desc="reading what was downloaded", unit=" tars")
        found_in = (executor or LocalExecutor(1)).map(survey, self._tars)
        with bar:
            for number, (entries, without, problem) in enumerate(found_in):
                entries["tar"] = number
                found.append(entries)
                if without:
                    self.problems.append(f"{self._tars[number]}: {without} images without a url")
                if problem:
                    self.problems.append(f"{self._tars[number]}: {problem}")
                bar.update()
        entries = np.concatenate(found)
        # A stable sort: of equal URLs the first one stays in front.
        self._entries = entries[np.argsort(entries["url"], kind="stable")]

    def find(self, name: str) -> ImageLocation | None:
        """Find the image of a URL; None where there is none."""
        wanted = _number(name)
        place = int(np.searchsorted(self._entries["url"], wanted))
        if place == len(self._entries) or self._entries["url"][place] != wanted:
            return None
        _, tar, size, offset = self._entries[place].tolist()
        return ImageLocation(self._tars[tar], offset, size)

    def __len__(self) -> int:
        return len(self._entries)


def survey(path: Path) -> tuple[NDArray[Any], int, str | None]:
    """Return one tar's images (URL, size, offset), how many have no URL, and the damage."""
    found = contents(path)
    entries, without = [], 0
    if found.missing:
        return np.empty(0, _ENTRY), 0, found.problem
    with open(path, "rb") as file:
        for sample in found.samples:
            extension = next((name for name in IMAGES if name in sample.files), None)
            said = sample.files.get("json")
            if extension is None:
                continue
            if said is None or said.size > MAX_ANNOTATION_BYTES:
                without += 1
                continue
            file.seek(said.offset)
            try:
                url = _Said.model_validate_json(file.read(said.size)).url
            except ValidationError:
                without += 1
                continue
            image = sample.files[extension]
            entries.append((_number(url), 0, min(image.size, 2**32 - 1), image.offset))
    return np.array(entries, _ENTRY), without, found.problem


def _tars(place: Path) -> list[Path]:
    if not place.is_dir():
        raise ConfigError(f"{place}: no such folder")
    tars = sorted(place.glob("*.tar"))
    if not tars:
        raise ConfigError(
            f"{place}: holds no tars; img2dataset writes them with --output_format webdataset"
        )
    return tars


def _number(url: str) -> np.uint64:
    return np.frombuffer(blake2b(url.encode(), digest_size=8).digest(), "<u8")[0]
