"""Sets of screens with captions: the generated corpus, and RICO with `widget_captions.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from pydantic import Field

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import stored_files
from vlp.data.stream.rng import make_rng
from vlp.data.vision.widgets.screens import generate_screen
from vlp.data.vision.widgets.view_hierarchy import Nodes, Screen, read_screen
from vlp.io import parse_json

Part = Literal["train", "test"]

_KEPT = 20_000  # generated screens that are kept in memory, about 10 KB each


class GeneratedScreensConfig(Config):
    """Generated screens (`widgets.screens`) with disjoint random numbers per split."""

    kind: Literal["generated"] = Field("generated", description="selects this class")
    train: int = Field(2000, ge=1, description="number of screens to train on")
    test: int = Field(300, ge=1, description="number of screens to evaluate on")
    seed: int = Field(0, ge=0, description="of the corpus; all runs of a comparison share it")
    nodes: Nodes = Field(
        "all",
        description="nodes of the view hierarchy that are read; those with captions are always "
        "read",
    )


class RicoScreensConfig(Config):
    """RICO's view hierarchies and the captions of Li et al. 2020 (google-research-datasets)."""

    kind: Literal["rico"] = Field("rico", description="selects this class")
    hierarchies: str = Field(description="folder or tar file of SCREEN.json")
    captions: str = Field(
        description="widget_captions.csv: screenId, nodeId, captions with | between"
    )
    train: str = Field(description="file of screen ids, one a line, such as split/train.txt")
    test: str = Field(description="the same for the screens that are evaluated on")
    nodes: Nodes = Field(
        "all",
        description="nodes of the view hierarchy that are read; those with captions are always "
        "read",
    )


AnyScreensConfig = GeneratedScreensConfig | RicoScreensConfig


class Screens(Protocol):
    """Numbered screens."""

    def __len__(self) -> int:
        """Return the number of screens."""

    def read(self, number: int) -> Screen:
        """One of them.

        Raises:
            BadSample: it cannot be used.
        """


def open_screens(config: AnyScreensConfig, part: Part) -> Screens:
    """The screens of one part.

    Raises:
        ConfigError: a file is missing or of another format, or no screen of the part has captions.
    """
    if isinstance(config, GeneratedScreensConfig):
        return _Generated(config, part)
    return _Rico(config, part)


class _Generated:
    def __init__(self, config: GeneratedScreensConfig, part: Part) -> None:
        self._config, self._part = config, part
        self._made: dict[int, Screen] = {}

    def __len__(self) -> int:
        return self._config.train if self._part == "train" else self._config.test

    def read(self, number: int) -> Screen:
        if number not in self._made:
            rng = make_rng(self._config.seed, 0, number, f"{self._part} screen")
            hierarchy, captions = generate_screen(rng)
            name = f"{self._part} {number}"
            screen = read_screen(hierarchy, name, captions, self._config.nodes)
            if len(self._made) == _KEPT:
                return screen
            self._made[number] = screen
        return self._made[number]


class _Rico:
    def __init__(self, config: RicoScreensConfig, part: Part) -> None:
        split = Path(config.train if part == "train" else config.test)
        captions = _captions(Path(config.captions))
        wanted = [line for line in _text(split).split("\n") if line.strip()]
        self._names = [name for one in wanted if (name := one.strip()) in captions]
        if not self._names:
            raise ConfigError(
                f"{config.captions}: names none of the {len(wanted)} screens of {split}"
            )
        self._captions = {name: captions[name] for name in self._names}
        self._place, self._nodes = Path(config.hierarchies), config.nodes
        self._held: Mapping[str, bytes] | None = None
        if self._place.is_file():
            self._held = _from_tar(self._place, set(self._names))
        elif not self._place.is_dir():
            raise ConfigError(f"{self._place}: there is neither a folder nor a tar file")

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> Screen:
        name = self._names[number]
        where = f"{self._place}, {name}"
        try:
            raw = (
                (self._place / f"{name}.json").read_bytes()
                if self._held is None
                else self._held[name]
            )
        except (OSError, KeyError) as error:
            raise BadSample("missing view hierarchy", where) from error
        try:
            hierarchy = parse_json(raw)
        except (ValueError, RecursionError) as error:
            raise BadSample("damaged view hierarchy", f"{where} ({error})") from error
        return read_screen(hierarchy, where, self._captions[name], self._nodes)


def _captions(file: Path) -> dict[str, dict[str, Sequence[str]]]:
    rows = csv.DictReader(io.StringIO(_text(file), newline=""))
    if missing := {"screenId", "nodeId", "captions"} - set(rows.fieldnames or ()):
        raise ConfigError(f"{file}: has no column {', '.join(sorted(missing))}")
    found: dict[str, dict[str, Sequence[str]]] = {}
    for row in rows:
        if row["captions"] is None:
            raise ConfigError(f"{file}, line {rows.line_num}: too few columns")
        found.setdefault(row["screenId"], {})[row["nodeId"]] = row["captions"].split("|")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error


def _from_tar(file: Path, names: set[str]) -> dict[str, bytes]:
    def wanted(name: PurePosixPath) -> bool:
        return name.suffix == ".json" and name.stem in names

    return {name.stem: content for name, content in stored_files(file, wanted)}
