"""Pictures of a raw data set by file name, wherever they lie: folders or tars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlp.config import ConfigError
from vlp.data.tar import Member, read_members


class Originals:
    """Finds pictures by name in folders and tars; the first place that has one wins.

    A folder that itself holds tars stands for those.

    Raises:
        ConfigError: a place does not exist, or a file is not a tar.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self.problems: list[str] = []
        self._folders: list[Path] = []
        self._members: dict[str, tuple[Path, Member]] = {}
        for place in places:
            if place.is_dir():
                tars = sorted(place.glob("*.tar"))
                self._folders.append(place)
            elif place.is_file():
                tars = [place]
            else:
                raise ConfigError(f"{place}: no such folder or tar of pictures")
            for tar in tars:
                members, problem = read_members(tar)
                if problem and not members:
                    raise ConfigError(f"{tar}: {problem}")
                if problem:
                    self.problems.append(f"{tar}: {problem}")
                for member in members:
                    name = member.name.removeprefix("./")
                    self._members.setdefault(name, (tar, member))
                    self._members.setdefault(Path(name).name, (tar, member))

    def read(self, name: str) -> bytes | None:
        """The bytes of a picture (a file name, perhaps with folders before it), or None."""
        for folder in self._folders:
            for candidate in (folder / name, folder / Path(name).name):
                if candidate.is_file():
                    return candidate.read_bytes()
        found = self._members.get(name) or self._members.get(Path(name).name)
        if found is None:
            return None
        tar, member = found
        with open(tar, "rb") as file:
            file.seek(member.offset)
            return file.read(member.size)
