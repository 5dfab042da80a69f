"""Images of a raw data set by file name, wherever they lie: folders, tars or zips."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from vlp.config import ConfigError
from vlp.data.file_names import IMAGES, composed, ends_alike, fold_case
from vlp.data.limits import MAX_ARCHIVE_MEMBERS, MAX_IMAGE_BYTES, MAX_UNPACKED_RATIO
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import read_members
from vlp.lock import FolderLock

TOO_MUCH = f"unpacks to more than {MAX_UNPACKED_RATIO} times its size; unpack it yourself"
SUFFIXES = (".tar.xz", ".tar.gz", ".tar.bz2", ".txz", ".tgz", ".tbz2")
_PREFIX, _LOCK = ".unpacked-", ".unpacking-"
_STARTS = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}


@contextmanager
def unpacked(paths: Sequence[Path], room: Path) -> Iterator[list[Path]]:
    """Yield the places with compressed tars replaced by plain ones, unpacked into `room`."""
    with unpacking_room(room) as folder:
        yield list(_plain(paths, folder))


@contextmanager
def unpacking_room(room: Path) -> Iterator[Path]:
    """Yield a temporary folder in `room`, as `unpacked` uses it."""
    with FolderLock(room, _LOCK):
        # A killed run could not remove its own.
        for leftover in room.glob(f"{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=room) as folder:
            yield Path(folder)


def _plain(paths: Sequence[Path], folder: Path) -> Iterator[Path]:
    for path in paths:
        candidates = [path]
        if path.is_dir():
            yield path
            candidates = sorted(entry for entry in path.iterdir() if entry.name.endswith(SUFFIXES))
        for candidate in candidates:
            yield plain_file(candidate, folder, f"{candidate.name}.tar")


_SOURCES: dict[Path, str] = {}  # of temporary files


def shown(path: Path) -> str:
    """Return a path for messages; of a temporary file that of the archive it comes from."""
    return _SOURCES.get(path, str(path))


def temporary_file(path: Path, source: str) -> Path:
    """Return the path of a temporary file, for which messages show its source."""
    _SOURCES[path] = source
    return path


def plain_file(path: Path, folder: Path, name: str) -> Path:
    """Return a file itself, or its uncompressed content as a file of that name in `folder`."""
    opener = _opener(path)
    if opener is None:
        return path
    # Two files may have one name; a folder of its own keeps each apart.
    target = temporary_file(Path(tempfile.mkdtemp(dir=folder), name), shown(path))
    _unpack(path, opener, target)
    return target


def most_unpacked(archive: Path) -> int:
    """Return how many bytes may come out of a compressed file, at least 64 MiB."""
    return max(2**26, MAX_UNPACKED_RATIO * archive.stat().st_size)


def _opener(path: Path) -> Any:
    # By its first bytes, as files of the web often have another suffix.
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        start = file.read(8)
    return next((opener for magic, opener in _STARTS.items() if start.startswith(magic)), None)


def _unpack(archive: Path, opener: Any, target: Path) -> None:
    try:
        source: IO[bytes]
        with opener(archive, "rb") as source, open(target, "wb") as file:
            most = most_unpacked(archive)
            while block := source.read(1 << 20):
                most -= file.write(block)
                if most < 0:
                    raise ConfigError(f"{shown(archive)}: {TOO_MUCH}")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{shown(archive)}: a damaged archive ({error}); download it again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{shown(archive)}: cannot be unpacked into {target.parents[2]} ({error}); where it is "
            "too large, unpack it elsewhere and name the folder"
        ) from error


DEPTH = 2  # levels of subfolders (`ab/cd/image.jpg`)

# Those that are not decoded are counted as unreadable.
IMAGE_SUFFIXES = (*IMAGES, ".tif", ".tiff", ".heic", ".avif")


class ImageLocation(NamedTuple):
    """Location of the bytes of one image: a file, a part of a tar, or a member of a zip."""

    path: Path
    offset: int = 0
    size: int | None = None
    member: str | None = None

    def read(self) -> bytes:
        """Return the bytes; BadSample if they can no longer be read."""
        try:
            if self.member is not None:
                archive = _zip(self.path)
                info = archive.getinfo(self.member)
                # The others give out all that a block holds, whatever is asked for.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{self.member} is compressed by method {info.compress_type}")
                self._require_small(info.file_size)
                return archive.read(info)
            with open(self.path, "rb") as file:
                self._require_small(self.size or 0)
                file.seek(self.offset)
                data = file.read(MAX_IMAGE_BYTES + 1 if self.size is None else self.size)
                self._require_small(len(data))
        except BadSample:
            raise
        # zipfile raises a dozen kinds for damaged members.
        except Exception as error:
            raise BadSample("unreadable image", f"{self} ({error})") from error
        if self.size is not None and len(data) != self.size:
            raise BadSample("unreadable image", f"{self}: cut off at byte {self.offset}")
        return data

    def __str__(self) -> str:
        return shown(self.path)

    def _require_small(self, size: int) -> None:
        if size > MAX_IMAGE_BYTES:
            raise BadSample("image too large", f"{self} (more than {MAX_IMAGE_BYTES} bytes)")


class FileEntry(NamedTuple):
    """Place of a file in a container: its folder in there, and its bytes in a tar."""

    container: int
    folder: str
    offset: int
    size: int


_Match = tuple[str, FileEntry]  # name, place


class Originals:
    """Images by name in folders (two levels deep) and the tars and zips in them.

    A whole path counts, in the first place that has it; a base name only if it is unique and its
    folder is nowhere.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.problems: list[str] = []
        self._containers: list[Path] = []
        self._by_name: dict[str, FileEntry] = {}
        self._duplicates: dict[str, dict[tuple[int, str], FileEntry]] = {}
        self._by_part: dict[str, dict[str, list[_Match]]] = {}
        self._alone: dict[_Match, str] = {}
        self._folded: dict[str, list[str]] | None = None
        self._folders: set[tuple[int, str]] = set()
        self._held: dict[str, bool] = {}
        for root in roots:
            if root.is_dir():
                self._add_folder(root)
            elif root.is_file():
                self._add_archive(root)
            else:
                raise ConfigError(f"{root}: no such folder, tar or zip of images")

    def find(self, name: str) -> ImageLocation | None:
        """Find an image by file name, perhaps with folders; None if missing."""
        name = name.replace("\\", "/").removeprefix("./")
        folder, _, base = name.rpartition("/")
        if folder and (entry := self._exact(base, folder)) is not None:
            return self._location(*self._claimed((base, entry), folder))
        # Case and accents count where they distinguish files.
        located = self._select([base], folder, str)
        located = located or self._select(self._variants(base), folder, fold_case)
        return None if located is None else self._location(*located)

    def _exact(self, base: str, folder: str) -> FileEntry | None:
        """Return the file of a whole path in the first place that has it."""
        first, more = self._by_name.get(base), self._duplicates.get(base, {})
        if first is not None and first.folder == folder:
            return first
        positions = ((number, folder) for number in range(len(self._containers)) if more)
        return next((more[position] for position in positions if position in more), None)

    def _select(self, names: list[str], folder: str, form: Callable[[str], str]) -> _Match | None:
        """Return the place with the same end of its folder, else the only one."""
        if folder:
            near = (match for name in names for match in self._of_folder(name, folder))
            agreeing = [match for match in near if self._agrees(match[1], form(folder), form)]
            if agreeing:
                match = self._unique(agreeing)
                return None if match is None else self._claimed(match, folder)
            if not names or self._holds_folder(folder):
                return None
        matches = [match for name in names for match in self._of_name(name)]
        if not folder:
            return self._unique([match for match in matches if not match[1].folder] or matches)
        # Two names with folders of their own are two files, of which one alone is there.
        match, folder = self._unique(matches), composed(folder)
        if match is None or not ends_alike(self._alone.setdefault(match, folder), folder):
            return None
        return match

    def _claimed(self, match: _Match, folder: str) -> _Match:
        """Reserve a file for rows that name its folder: other folders' rows mean other files."""
        folder = composed(folder)
        previous = self._alone.get(match, folder)
        self._alone[match] = folder
        if not ends_alike(previous, folder):
            self._add_problem(f"{self._location(*match)} was taken for {previous}/{match[0]}")
        return match

    def _unique(self, matches: list[_Match]) -> _Match | None:
        # Copies of one image may lie in several folders.
        if len(matches) < 2:
            return matches[0] if matches else None
        first = self._location(*matches[0])
        with suppress(BadSample):
            if all(first.read() == self._location(*other).read() for other in matches[1:]):
                return matches[0]
        problem = f"{first}: the list does not tell which of several {matches[0][0]} it means"
        self._add_problem(problem)
        return None

    def _add_problem(self, problem: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)

    def _of_name(self, base: str) -> list[_Match]:
        first, more = self._by_name.get(base), self._duplicates.get(base, {})
        return [] if first is None else [(base, entry) for entry in (first, *more.values())]

    def _of_folder(self, base: str, folder: str) -> list[_Match]:
        # A data set of thousands of folders may have a `0.jpg` in each.
        if len(self._duplicates.get(base, ())) < _MANY:
            return self._of_name(base)
        if base not in self._by_part:
            self._by_part[base] = self._index(self._of_name(base))
        return self._with_last_part(self._by_part[base], folder)

    def _index(self, matches: Iterable[_Match]) -> dict[str, list[_Match]]:
        """Return places by each folded part of their folder, and all of them under `""`."""
        index = defaultdict(list)
        for match in matches:
            folder = match[1].folder or self._containers[match[1].container].stem
            for part in {"", *fold_case(folder).split("/")}:
                index[part].append(match)
        return index

    def _with_last_part(self, index: dict[str, list[_Match]], folder: str) -> list[_Match]:
        # A folder may also agree with parts of the container's own path.
        last = fold_case(folder).rpartition("/")[2]
        return index.get("" if last in self._container_parts else last, [])

    @cached_property
    def _container_parts(self) -> set[str]:
        paths = (fold_case(container.as_posix()) for container in self._containers)
        return {part for path in paths for part in path.split("/")}

    @cached_property
    def _folder_index(self) -> dict[str, list[_Match]]:
        return self._index(("", FileEntry(*pair, 0, 0)) for pair in self._folders)

    def _variants(self, base: str) -> list[str]:
        # Most names are in lower case, and need no entry.
        if self._folded is None:
            self._folded = defaultdict(list)
            for name in self._by_name:
                if (form := fold_case(name)) != name:
                    self._folded[form].append(name)
        form = fold_case(base)
        return [*self._folded.get(form, ()), *([form] if form in self._by_name else ())]

    def _agrees(self, entry: FileEntry, target: str, form: Callable[[str], str]) -> bool:
        folder, container = form(entry.folder), self._containers[entry.container]
        qualified = form(f"{container.stem}/{entry.folder}".rstrip("/"))
        return (
            ends_alike(folder, target)
            or f"/{target}".endswith(f"/{qualified}")
            or f"/{target}/" in f"/{form(container.as_posix())}/{folder}/"
        )

    def _holds_folder(self, folder: str) -> bool:
        # However its case and accents: a folder that lacks the image is not another one.
        if folder not in self._held:
            target, matches = fold_case(folder), self._with_last_part(self._folder_index, folder)
            self._held[folder] = any(self._agrees(e, target, fold_case) for _, e in matches)
        return self._held[folder]

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an image, None if missing; raises BadSample."""
        location = self.find(name)
        return None if location is None else location.read()

    def __len__(self) -> int:
        return len(self._by_name) + sum(map(len, self._duplicates.values()))

    def _location(self, name: str, entry: FileEntry) -> ImageLocation:
        path = self._containers[entry.container]
        full = f"{entry.folder}/{name}" if entry.folder else name
        if entry.offset == IN_FOLDER:
            return ImageLocation(path / full)
        if entry.offset == _IN_ZIP:
            return ImageLocation(path, member=full)
        return ImageLocation(path, entry.offset, entry.size)

    def _add_folder(self, folder: Path) -> None:
        archives = []
        self._containers.append(folder)
        number = len(self._containers) - 1
        for inside, name in _listed(folder, "", DEPTH):
            if name.lower().endswith(_ARCHIVES):
                archives.append(folder / inside / name)
            else:
                self._add(name, FileEntry(number, inside, IN_FOLDER, 0))
        for archive in archives:
            self._add_archive(archive)

    def _add_archive(self, path: Path) -> None:
        self._containers.append(path)
        number = len(self._containers) - 1
        if zipfile.is_zipfile(path):
            for info in self._infos(path):
                if info.filename and not info.is_dir():
                    folder, _, name = info.filename.rpartition("/")
                    self._add(name, FileEntry(number, sys.intern(folder), _IN_ZIP, 0))
            return
        members, problem = read_members(path, MAX_ARCHIVE_MEMBERS)
        if problem and not members:
            raise ConfigError(f"{shown(path)}: neither a readable tar nor a zip ({problem})")
        if problem:
            self.problems.append(f"{shown(path)}: {problem}")
        for member in members:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            self._add(name, FileEntry(number, sys.intern(folder), member.offset, member.size))

    def _infos(self, path: Path) -> list[zipfile.ZipInfo]:
        try:
            infos = _zip(path).infolist()
        # Of any field of its directory.
        except Exception as error:
            raise ConfigError(
                f"{shown(path)}: a damaged zip ({error}); download it again"
            ) from error
        if len(infos) > MAX_ARCHIVE_MEMBERS:
            raise ConfigError(f"{shown(path)}: {len(infos)} files, more than {MAX_ARCHIVE_MEMBERS}")
        return infos

    def _add(self, name: str, entry: FileEntry) -> None:
        if name.lower().endswith(_BESIDE):
            return
        # A folder of other files says nothing about where an image should be.
        if name.lower().endswith(IMAGE_SUFFIXES):
            self._folders.add((entry.container, entry.folder))
        # Of two members of a tar with one name the later one counts, as when it is unpacked.
        if name not in self._by_name or self._by_name[name][:2] == entry[:2]:
            self._by_name[name] = entry
        else:
            self._duplicates.setdefault(name, {})[entry[:2]] = entry


_MOST_PROBLEMS = 20
_MANY = 16  # files of one name, which are indexed

# In place of an offset.
IN_FOLDER, _IN_ZIP = -1, -2
_ARCHIVES = (".tar", ".zip")
# Other files are skipped, as remembering them would take memory.
_BESIDE = (".txt", ".json", ".parquet", ".csv")


def _listed(folder: Path, inside: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield files below a folder in order of names: the folders in between, and the name."""
    deeper = []
    for entry in sorted(os.scandir(folder / inside), key=lambda entry: entry.name):
        if entry.is_dir():
            deeper.append(entry.name)
        elif not entry.name.startswith("."):
            yield sys.intern(inside), entry.name
    for name in deeper if depth else ():
        yield from _listed(folder, f"{inside}/{name}" if inside else name, depth - 1)


@lru_cache(maxsize=8)
def _zip(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)
