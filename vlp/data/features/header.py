"""The header of a folder of stored features: which tower made them, of what, and how."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.shards.index import ShardTable
from vlp.io import write_json

HEADER_NAME = "features.json"
_ROWS_AT_ONCE = 2**13
MAKE = "vlp data features --config FILE --out FOLDER"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TowerKey(NamedTuple):
    """What an image tower computes: its settings, and the SHA-256 of its weights."""

    settings: dict[str, Any]
    weights: str


class _HeaderPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FeatureSource(_HeaderPart):
    """One folder of shards; `index` is what `shards_sha256` gives for it."""

    name: str
    shards: PositiveInt
    samples: NonNegativeInt
    index: Sha256


class FeatureHeader(_HeaderPart):
    """All that features depend on, and their shape.

    Attributes:
        tower: settings of the image tower.
        weights: SHA-256 of its weights.
        image_size: side in pixels.
        mean, std: of the preprocessing.
        augment: of views from the second on; None where there is one view.
        views: of each image; the first is that of evaluation.
        seed: of the augmentation.
        precision: of the tower's pass.
        dtype: of the files; bfloat16 stands in them as its 16 bits.
        tokens, width: of one view, `[CLS]` first.
        kinds: of bad samples, in the order of their codes.
        sources: the folders of shards, in the order of their numbers.
    """

    version: Literal[1] = 1
    tower: dict[str, Any]
    weights: Sha256
    image_size: PositiveInt
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: AugmentConfig | None
    views: PositiveInt
    seed: int
    precision: Literal["float32", "bf16"]
    dtype: Literal["float16", "bfloat16"]
    tokens: PositiveInt
    width: PositiveInt
    kinds: tuple[str, ...]
    sources: tuple[FeatureSource, ...]

    def write(self, folder: Path) -> None:
        """Write `features.json`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        plain = self.model_dump(mode="json")
        write_json(folder / HEADER_NAME, plain, durable=True, error=ConfigError)

    @classmethod
    def read(cls, folder: Path) -> FeatureHeader:
        """Read `features.json`.

        Raises:
            ConfigError: it is not there, or no such header.
        """
        path = folder / HEADER_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); make the folder with: {MAKE}"
            ) from error
        except ValidationError as error:
            problem = error.errors()[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            raise ConfigError(
                f"{path}: no header of features ({place}{problem['msg']}); delete the folder and "
                f"make it again with: {MAKE}"
            ) from error

    def require_tower(self, folder: Path, tower: TowerKey) -> None:
        """Require that the features are those of a tower; a setting that is missing here is empty.

        Raises:
            ConfigError: they are another one's.
        """
        known = {name: self.tower.get(name, {}) for name in tower.settings}
        self._refuse(folder, _difference("tower", known, tower.settings))
        self.require(folder, {"weights": tower.weights})

    def require(self, folder: Path, wanted: dict[str, Any]) -> None:
        """Require values of some fields, given as JSON has them.

        Raises:
            ConfigError: one differs; the first is named, with both values.
        """
        own = self.model_dump(mode="json")
        for name, value in wanted.items():
            self._refuse(folder, _difference(name, own[name], value))

    def _refuse(self, folder: Path, difference: str | None) -> None:
        if difference is not None:
            raise ConfigError(
                f"{folder}: holds features of another kind: {difference}; make a folder that fits "
                f"with: {MAKE}"
            )


def shards_sha256(shards: ShardTable) -> str:
    """Return the SHA-256 of an index: shards' names, sizes and samples, in their order."""
    # That of one JSON text, which would be long for a million shards: [file, [[name, ...], ...]].
    digest = hashlib.sha256(f"[{json.dumps(shards.file)}, [".encode())
    rows, comma = iter(shards), ""
    while some := [entry[:3] for entry in islice(rows, _ROWS_AT_ONCE)]:
        digest.update(f"{comma}{json.dumps(some)[1:-1]}".encode())
        comma = ", "
    digest.update(b"]]")
    return digest.hexdigest()


def _difference(name: str, stored: Any, wanted: Any) -> str | None:
    """Return 'key: there X, here Y' of the first leaf that differs."""
    if stored == wanted:
        return None
    if isinstance(stored, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*stored, *wanted])
        found = (
            _difference(f"{name}.{key}", stored.get(key, "absent"), wanted.get(key, "absent"))
            for key in keys
        )
        return next(part for part in found if part)
    return f"{name} is {stored!r} there, {wanted!r} here"
