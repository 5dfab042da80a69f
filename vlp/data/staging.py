"""Commands on URLs: what lies there is worked on as a copy on a local disk.

A path of a command may be a URL that fsspec knows (`s3://bucket/shards`). What lies there is
fetched before the command works. When it has ended, the files that it has written are put there,
and those that it has removed are removed there. So every command reads and writes every store.

A copy needs room on the disk of `VLP_STAGING` (default: the system's folder for temporary files).
It goes when the command has ended well. After an interruption it stays, and the same command goes
on with it; nothing was put then.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vlp.config import ConfigError
from vlp.io import as_url, redacted
from vlp.process.lock import FolderLock, is_lock

STAGING = "VLP_STAGING"
"""Environment variable: the folder of local copies."""

OUTPUTS = ("out", "report", "sheet", "hashes", "markdown", "latex", "write", "plot")
"""Arguments of commands that name what is to be written, which need not be there before."""

_AT_ONCE = 64
_SILENCE, _PATIENCE = 60.0, 600.0  # seconds, as of `data.outages`
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")


class _State(NamedTuple):
    bytes: int
    time: int
    file: int


class StagedPlace:
    """A URL, and its local copy at `path`; `with FolderLock(place.room)` one command has it.

    Args:
        url: of a folder or a file.
        is_output: it may be missing, and files of an earlier start that was interrupted stay.

    Raises:
        ConfigError: its protocol is not known, needs a package, or cannot be written to.
    """

    def __init__(self, url: str, is_output: bool) -> None:
        from vlp.data.shards.remote import connected

        self.url, self._is_output = url, is_output
        self._files, place = connected(url, _SILENCE)
        self._place = place.rstrip("/")
        self._is_web = url.startswith(("http://", "https://"))
        if is_output and self._is_web:
            raise ConfigError(f"{url}: nothing can be written to a web server; name a folder here")
        digest = blake2b(f"{url} {os.environ.get('RANK', 0)}".encode(), digest_size=6).hexdigest()
        name = PurePosixPath(self._place.split("://")[-1]).name
        root = os.environ.get(STAGING) or Path(tempfile.gettempdir()) / "vlp-staging"
        self.room = Path(root) / f"{name}-{digest}"
        self.path = self.room / (name or "root")
        self._fetched: dict[str, _State] = {}

    def fetch(self) -> None:
        """Make the copy equal to what lies behind the URL.

        Raises:
            ConfigError: nothing lies there, or it cannot be had.
        """
        remote = self._try(self._list)
        if not remote and not self._is_output:
            raise ConfigError(f"{self.url}: nothing is there")
        wanted = {name: info for name, info in remote.items() if not self._is_here(name, info)}
        parts = list(wanted)
        for start in range(0, len(parts), _AT_ONCE):
            names = parts[start : start + _AT_ONCE]
            targets = [self._local(name) for name in names]
            for target in targets:
                target.parent.mkdir(parents=True, exist_ok=True)
            self._try(
                self._files.get, [self._remote(name) for name in names], list(map(str, targets))
            )
            for name, target in zip(names, targets):
                if time := _time_of(wanted[name]):
                    os.utime(target, (time, time))
        if not self._is_output:
            for name in self._states().keys() - remote.keys():
                self._local(name).unlink()
        self._fetched = {name: s for name, s in self._states().items() if name in remote}
        if parts:
            print(f"{redacted(self.url)}: {len(parts)} files fetched", file=sys.stderr)

    def put(self) -> None:
        """Put back what was written since `fetch`, remove what was removed, and drop the copy.

        Raises:
            ConfigError: the store does not take it; the copy stays then.
        """
        from vlp.data.shards.index import INDEX_NAME

        now = self._states()
        new = [name for name, state in now.items() if self._fetched.get(name) != state]
        gone = self._fetched.keys() - now.keys()
        if (new or gone) and self._is_web:
            raise ConfigError(
                f"{self.url}: nothing can be written to a web server; what was written is in "
                f"{self.path}"
            )
        # Whoever reads meanwhile finds no index of shards that are not there yet.
        for name in sorted(new, key=lambda name: (PurePosixPath(name).name == INDEX_NAME, name)):
            self._try(self._files.put_file, str(self._local(name)), self._remote(name))
        for name in gone:
            self._try(self._files.rm_file, self._remote(name))
        if new or gone:
            said = f"{len(new)} files put" + (f", {len(gone)} removed" if gone else "")
            print(f"{redacted(self.url)}: {said}", file=sys.stderr)
        if self.path.is_file():
            self.path.unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def _list(self) -> dict[str, Mapping[str, Any]]:
        """Return what the store says of each file by its name; of a single file by ""."""
        try:
            info = self._files.info(self._place)
        except FileNotFoundError:
            if not self._is_web:
                return {}
            info = {"type": "file", "mimetype": "text/html"}  # no page of its own
        if info["type"] == "file" and info.get("mimetype") != "text/html":
            return {"": info}
        if self._is_web and (named := self._indexed()):
            return {name: {} for name in named}
        found = self._files.find(self._place, detail=True)
        return {
            path.removeprefix(f"{self._place}/"): each
            for path, each in found.items()
            if path.startswith(f"{self._place}/") and not path.endswith("/")
        }

    def _indexed(self) -> list[str]:
        """Return the files that a folder's index of shards names; a web server lists none."""
        from vlp.data.shards.index import INDEX_NAME, read_table
        from vlp.data.shards.remote import MANIFEST_NAME

        try:
            content = self._files.cat_file(f"{self._place}/{INDEX_NAME}")
        except FileNotFoundError:
            return []
        table = read_table(BytesIO(content), f"{self.url}/{INDEX_NAME}", "index the folder again")
        beside = [name for name in (table.file, MANIFEST_NAME) if self._has(name)]
        return [INDEX_NAME, *beside, *(name.decode() for name in table.names.tolist())]

    def _has(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._place}/{name}"))

    def _is_here(self, name: str, info: Mapping[str, Any]) -> bool:
        path = self._local(name)
        if not path.is_file():
            return False
        if self._is_output:  # written by the start that was interrupted
            return True
        status, time = path.stat(), _time_of(info)
        return status.st_size == info.get("size") and time is not None and status.st_mtime == time

    def _states(self) -> dict[str, _State]:
        if self.path.is_file():
            return {"": _state(self.path)}
        return {
            str(path.relative_to(self.path)): _state(path)
            for path in self.path.rglob("*")
            if path.is_file() and not is_lock(path) and path.suffix != ".tmp"
        }

    def _local(self, name: str) -> Path:
        path = self.path / name if name else self.path
        if ".." in path.parts:
            raise ConfigError(f"{self.url}: {name!r} is outside of it")
        return path

    def _remote(self, name: str) -> str:
        return f"{self._place}/{name}" if name else self._place

    def _try(self, act: Callable[..., Any], *arguments: Any) -> Any:
        from vlp.data.shards.outages import Unreachable, patiently

        try:
            return patiently(lambda: act(*arguments), _PATIENCE, redacted(self.url))
        except (OSError, Unreachable) as error:
            raise ConfigError(f"{self.url}: {error}") from error


@contextmanager
def staged(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yield a command's values with local copies in place of URLs, and what puts them back.

    Args:
        values: paths, texts that name places, and lists of both by argument.

    Raises:
        ConfigError: see `StagedPlace`.
    """
    places: dict[str, StagedPlace] = {}

    def local(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(local(name, each) for each in value)
        if (url := as_url(value)) is None:
            return value
        if url.startswith("file://"):
            return type(value)(url.removeprefix("file://"))
        if url not in places:
            places[url] = StagedPlace(url, name in OUTPUTS)
        return type(value)(places[url].path)

    def put() -> None:
        for place in places.values():
            place.put()

    found = {name: local(name, value) for name, value in values.items()}
    with ExitStack() as held:
        for place in places.values():
            held.enter_context(FolderLock(place.room))
            place.fetch()
        yield found, put
    for place in places.values():
        with suppress(OSError):  # it holds a copy still
            place.room.rmdir()


def _state(path: Path) -> _State:
    status = path.stat()
    return _State(status.st_size, status.st_mtime_ns, status.st_ino)


def _time_of(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, in seconds, as far as its store says so."""
    found = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(found, str) and re.match(r"\d{4}-\d\d-\d\d", found):
        found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, int | float) else None
