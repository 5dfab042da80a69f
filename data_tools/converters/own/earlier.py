"""Images of earlier runs of an import, which keep key, split and place when others come.

`OUT/imported.jsonl` has a line for each sample in the order of the list: image, key and split.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_tools.converters.own.forms import OwnImage
from vlp.config import ConfigError
from vlp.io import atomic_write

NAME = "imported.jsonl"


class Earlier(NamedTuple):
    """Samples of the run before: key and split by the image's path, in the order of the list."""

    keys: dict[str, str]
    splits: dict[str, str]

    @classmethod
    def read(cls, out: Path) -> Earlier:
        """Return what a folder of shards was imported from; nothing where none was.

        Raises:
            ConfigError: the file is damaged.
        """
        path, found = out / NAME, cls({}, {})
        if not path.exists():
            return found
        try:
            with open(path, encoding="utf-8") as file:
                for line in file:
                    image, key, split = json.loads(line)
                    found.keys[image], found.splits[image] = key, split
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({error}); delete it, or --replace") from error
        return found

    def first(self, images: Sequence[OwnImage]) -> list[OwnImage]:
        """Return the images of the run before in its order, then the others in theirs."""
        place = {image: number for number, image in enumerate(self.keys)}
        return sorted(images, key=lambda image: place.get(image.image, len(place)))

    @staticmethod
    def write(out: Path, samples: Iterable[tuple[str, str, str]]) -> None:
        """Remember image, key and split of each sample."""
        with atomic_write(out / NAME, "w", durable=True, error=ConfigError) as file:
            file.writelines(json.dumps(sample) + "\n" for sample in samples)


def keys_of(paths: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return a key for each path: without the folders that all share; of equal ones a number.

    Args:
        paths: of images.
        known: keys by path, which stay.
    """
    parts = [PurePosixPath(path).parts for path in paths]
    shared = 0
    while all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    stems = ["/".join(one[shared:]).rpartition(".")[0] or one[-1] for one in parts]
    keys = [known.get(path) or _key(stem) for path, stem in zip(paths, stems)]
    counts = Counter(keys)
    seen: Counter[str] = Counter()
    for place, key in enumerate(keys):
        while counts[key] > 1 and paths[place] not in known:
            seen[key] += 1
            if (numbered := f"{key}-{seen[key]}") not in counts:
                keys[place] = numbered
                counts[numbered] += 1
                break
    return keys


def _key(stem: str) -> str:
    """Return a name with `_` for what a key cannot hold, such as the joiners of an emoji."""
    joined = "_".join(stem.split())
    return "".join("_" if sign in "./" or not sign.isprintable() else sign for sign in joined)
