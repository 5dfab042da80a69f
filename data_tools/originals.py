"""Images of a raw data set by file name, in folders, tars and zips."""

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
from vlp.data.file_names import IMAGES, compose_accents, ends_alike, fold_case, is_hidden
from vlp.data.limits import MAX_ARCHIVE_MEMBERS, MAX_IMAGE_BYTES, MAX_UNPACKED_RATIO
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import read_members
from vlp.lock import FolderLock

TOO_MUCH = f"unpacks to more than {MAX_UNPACKED_RATIO} times its size; unpack it yourself"
COMPRESSED_TARS = (".tar.xz", ".tar.gz", ".tar.bz2", ".txz", ".tgz", ".tbz2")
_PREFIX, _LOCK = ".unpacked-", ".unpacking-"
_MAGIC = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}


@contextmanager
def unpack_archives(paths: Sequence[Path], parent: Path) -> Iterator[list[Path]]:
    """Yield the paths; compressed tars, also in the folders, are unpacked below `parent`."""
    with scratch_folder(parent) as scratch:
        unpacked: list[Path] = []
        for path in paths:
            tars = [path]
            if path.is_dir():
                unpacked.append(path)
                tars = sorted(tar for tar in path.iterdir() if tar.name.endswith(COMPRESSED_TARS))
            unpacked += [plain_file(tar, scratch, f"{tar.name}.tar") for tar in tars]
        yield unpacked


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder in a locked `parent`; folders that a killed run left are removed."""
    with FolderLock(parent, _LOCK):
        for leftover in parent.glob(f"{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as folder:
            yield Path(folder)


_SOURCES: dict[Path, str] = {}  # of temporary files


def display_path(path: Path) -> str:
    """Return a path for messages: a temporary file's source (`register_temporary`), else itself."""
    return _SOURCES.get(path, str(path))


def register_temporary(path: Path, source: str) -> Path:
    """Let messages show `source`, an archive's member, for a temporary file; returns its path."""
    _SOURCES[path] = source
    return path


def plain_file(path: Path, scratch: Path, name: str) -> Path:
    """Return the path unless it is a compressed file; else unpack it to `name` below `scratch`."""
    if not path.is_file():
        return path
    # By content, as files from the web often have a wrong suffix.
    with open(path, "rb") as file:
        start = file.read(8)
    opener = next((opener for magic, opener in _MAGIC.items() if start.startswith(magic)), None)
    if opener is None:
        return path
    # In a new folder, as several files may have one name.
    target = register_temporary(Path(tempfile.mkdtemp(dir=scratch), name), display_path(path))
    _unpack(path, opener, target)
    return target


def max_unpacked_bytes(archive: Path) -> int:
    """Return the limit of a compressed file's content in bytes, at least 64 MiB."""
    return max(2**26, MAX_UNPACKED_RATIO * archive.stat().st_size)


def _unpack(archive: Path, opener: Any, target: Path) -> None:
    try:
        source: IO[bytes]
        with opener(archive, "rb") as source, open(target, "wb") as file:
            remaining = max_unpacked_bytes(archive)
            while block := source.read(1 << 20):
                remaining -= file.write(block)
                if remaining < 0:
                    raise ConfigError(f"{display_path(archive)}: {TOO_MUCH}")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{display_path(archive)}: a damaged archive ({error}); download it again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{display_path(archive)}: cannot be unpacked into {target.parents[2]} ({error}); if "
            "the disk is too small, unpack it elsewhere and name the folder"
        ) from error


DEPTH = 2  # levels of subfolders (`ab/cd/image.jpg`)

# Formats that cannot be decoded count as unreadable images, not as other files.
UNREAD_IMAGE_SUFFIXES = (".tif", ".tiff", ".heic", ".avif")
IMAGE_SUFFIXES = (*IMAGES, *UNREAD_IMAGE_SUFFIXES)


class ImageLocation(NamedTuple):
    """Location of an image's bytes: a file, a range of bytes in a tar, or a member of a zip."""

    path: Path
    offset: int = 0
    size: int | None = None
    member: str | None = None

    def read(self) -> bytes:
        """Return the bytes; raises BadSample."""
        try:
            if self.member is not None:
                archive = _zip(self.path)
                info = archive.getinfo(self.member)
                # Other decompressors have no limit: one block may unpack to gigabytes.
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
        except Exception as error:  # zipfile raises a dozen classes for damaged members
            raise BadSample("unreadable image", f"{self} ({error})") from error
        if self.size is not None and len(data) != self.size:
            raise BadSample("unreadable image", f"{self}: truncated at byte {self.offset}")
        return data

    def __str__(self) -> str:
        return display_path(self.path)

    def _require_small(self, size: int) -> None:
        if size > MAX_IMAGE_BYTES:
            raise BadSample("image too large", f"{self} (more than {MAX_IMAGE_BYTES} bytes)")


class FileEntry(NamedTuple):
    """Location of a file: index of its folder or archive, folder within it, and bytes in a tar."""

    container: int
    folder: str
    offset: int  # or IN_FOLDER, _IN_ZIP
    size: int


_Match = tuple[str, FileEntry]  # base name, location


class Originals:
    """Images by name in folders (two levels deep) and the tars and zips in them.

    A path matches the same path in the first of the `roots` that has it, else a path with the same
    end. A base name alone matches if it is unique and the folder in the name does not exist.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.problems: list[str] = []
        self._containers: list[Path] = []  # folders and archives
        self._by_name: dict[str, FileEntry] = {}  # the first file of a base name
        # Further files of a base name, by container and folder.
        self._duplicates: dict[str, dict[tuple[int, str], FileEntry]] = {}
        # By base name and folder part: see `_index_by_folder`.
        self._by_part: dict[str, dict[str, list[_Match]]] = {}
        # The folder that the annotations name, by match that was found by base name alone.
        self._folder_of_match: dict[_Match, str] = {}
        # Matches that the annotations name with their folder; hashes, as there may be millions.
        self._match_hashes: set[int] = set()
        self._folded_names: dict[str, list[str]] | None = None
        self._folders: set[tuple[int, str]] = set()  # with images, by container
        self._has_folder: dict[str, bool] = {}  # cache of `_contains_folder`
        for root in roots:
            if root.is_dir():
                self._add_folder(root)
            elif root.is_file():
                self._add_archive(root)
            else:
                raise ConfigError(f"{root}: no such folder, tar or zip of images")

    def find(self, name: str) -> ImageLocation | None:
        """Find an image by file name, perhaps with folders; None if missing or ambiguous."""
        name = name.replace("\\", "/").removeprefix("./")
        folder, _, base = name.rpartition("/")
        if folder and (entry := self._find_exact(base, folder)) is not None:
            return self._location(*self._claim((base, entry)))
        # Ignore case and accents only without an exact match.
        match = self._select([base], folder, str)
        match = match or self._select(self._variants(base), folder, fold_case)
        return None if match is None else self._location(*match)

    def _find_exact(self, base: str, folder: str) -> FileEntry | None:
        """Return the file of exactly this path in the first container with the path."""
        first, more = self._by_name.get(base), self._duplicates.get(base, {})
        if first is not None and first.folder == folder:
            return first
        keys = ((number, folder) for number in range(len(self._containers)) if more)
        return next((more[key] for key in keys if key in more), None)

    def _select(self, names: list[str], folder: str, fold: Callable[[str], str]) -> _Match | None:
        """Return the file in a folder with the same end, else the only file of the base names."""
        if folder:
            candidates = (match for name in names for match in self._candidates(name, folder))
            same_end = [match for match in candidates if self._is_in(match[1], fold(folder), fold)]
            if same_end:
                match = self._only_match(same_end)
                return None if match is None else self._claim(match)
            if not names or self._contains_folder(folder):
                return None
        matches = [match for name in names for match in self._matches_of(name)]
        if not folder:
            return self._only_match([match for match in matches if not match[1].folder] or matches)
        # a/1.jpg and b/1.jpg in a list are two files: if only one 1.jpg exists, it is taken for the
        # first of these names.
        match, folder = self._only_match(matches), compose_accents(folder)
        if match is None or hash(match) in self._match_hashes:
            return None
        if not ends_alike(self._folder_of_match.setdefault(match, folder), folder):
            return None
        return match

    def _claim(self, match: _Match) -> _Match:
        """Return a match by folder and name; the file is then taken for no other folder."""
        if hash(match) not in self._match_hashes:
            self._match_hashes.add(hash(match))
            if (folder := self._folder_of_match.get(match)) is not None:
                self._add_problem(f"{self._location(*match)} was taken for {folder}/{match[0]}")
        return match

    def _only_match(self, matches: list[_Match]) -> _Match | None:
        """Return the first match if all are the same image, by their bytes; else None."""
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
        if len(self.problems) < _MAX_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)

    def _matches_of(self, base: str) -> list[_Match]:
        first, more = self._by_name.get(base), self._duplicates.get(base, {})
        return [] if first is None else [(base, entry) for entry in (first, *more.values())]

    def _candidates(self, base: str, folder: str) -> list[_Match]:
        """Return the files of a base name that may lie in a folder."""
        # With an index, as thousands of folders may have a `0.jpg`.
        if len(self._duplicates.get(base, ())) < _MIN_INDEXED:
            return self._matches_of(base)
        if base not in self._by_part:
            self._by_part[base] = self._index_by_folder(self._matches_of(base))
        return self._with_last_part(self._by_part[base], folder)

    def _index_by_folder(self, matches: Iterable[_Match]) -> dict[str, list[_Match]]:
        """Return files by each folded part of their folder, and all files under `""`."""
        index = defaultdict(list)
        for match in matches:
            folder = match[1].folder or self._containers[match[1].container].stem
            for part in {"", *fold_case(folder).split("/")}:
                index[part].append(match)
        return index

    def _with_last_part(self, index: dict[str, list[_Match]], folder: str) -> list[_Match]:
        last = fold_case(folder).rpartition("/")[2]
        # A folder may also match a part of a container's path, which the index does not have.
        return index.get("" if last in self._container_parts else last, [])

    @cached_property
    def _container_parts(self) -> set[str]:
        paths = (fold_case(container.as_posix()) for container in self._containers)
        return {part for path in paths for part in path.split("/")}

    @cached_property
    def _folder_index(self) -> dict[str, list[_Match]]:
        """Return the folders with images by each of their parts, with an empty base name."""
        return self._index_by_folder(("", FileEntry(*pair, 0, 0)) for pair in self._folders)

    def _variants(self, base: str) -> list[str]:
        """Return the base names that differ from `base` in case and accents at most."""
        # Names that equal their folded form, which most do, need no entry.
        if self._folded_names is None:
            self._folded_names = defaultdict(list)
            for name in self._by_name:
                if (folded := fold_case(name)) != name:
                    self._folded_names[folded].append(name)
        folded = fold_case(base)
        return [*self._folded_names.get(folded, ()), *([folded] if folded in self._by_name else ())]

    def _is_in(self, entry: FileEntry, target: str, fold: Callable[[str], str]) -> bool:
        """Return whether a file's folder ends like the folder `target`, or lies below it."""
        folder, container = fold(entry.folder), self._containers[entry.container]
        with_container = fold(f"{container.stem}/{entry.folder}".rstrip("/"))
        return (
            ends_alike(folder, target)
            or f"/{target}".endswith(f"/{with_container}")
            or f"/{target}/" in f"/{fold(container.as_posix())}/{folder}/"
        )

    def _contains_folder(self, folder: str) -> bool:
        """Return whether a folder with images has this name, but for case and accents."""
        if folder not in self._has_folder:
            target, matches = fold_case(folder), self._with_last_part(self._folder_index, folder)
            self._has_folder[folder] = any(self._is_in(e, target, fold_case) for _, e in matches)
        return self._has_folder[folder]

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
        for subfolder, name in _list_files(folder, "", DEPTH):
            if name.lower().endswith(_ARCHIVES):
                archives.append(folder / subfolder / name)
            else:
                self._add(name, FileEntry(number, subfolder, IN_FOLDER, 0))
        for archive in archives:
            self._add_archive(archive)

    def _add_archive(self, path: Path) -> None:
        self._containers.append(path)
        number = len(self._containers) - 1
        if zipfile.is_zipfile(path):
            try:
                infos = _zip(path).infolist()
            except Exception as error:  # zipfile raises a dozen classes for a damaged directory
                raise ConfigError(
                    f"{display_path(path)}: a damaged zip ({error}); download it again"
                ) from error
            if len(infos) > MAX_ARCHIVE_MEMBERS:
                raise ConfigError(
                    f"{display_path(path)}: {len(infos)} files, more than {MAX_ARCHIVE_MEMBERS}"
                )
            for info in infos:
                if info.filename and not info.is_dir():
                    folder, _, name = info.filename.rpartition("/")
                    self._add(name, FileEntry(number, sys.intern(folder), _IN_ZIP, 0))
            return
        members, problem = read_members(path, MAX_ARCHIVE_MEMBERS)
        if problem and not members:
            raise ConfigError(f"{display_path(path)}: neither a readable tar nor a zip ({problem})")
        if problem:
            self.problems.append(f"{display_path(path)}: {problem}")
        for member in members:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            self._add(name, FileEntry(number, sys.intern(folder), member.offset, member.size))

    def _add(self, name: str, entry: FileEntry) -> None:
        if name.lower().endswith(_SIDE_FILES) or is_hidden(f"{entry.folder}/{name}"):
            return
        if name.lower().endswith(IMAGE_SUFFIXES):
            self._folders.add((entry.container, entry.folder))
        # Of two members of a tar with one path, the later replaces the earlier, as in unpacking.
        if name not in self._by_name or self._by_name[name][:2] == entry[:2]:
            self._by_name[name] = entry
        else:
            self._duplicates.setdefault(name, {})[entry[:2]] = entry


_MAX_PROBLEMS = 20
_MIN_INDEXED = 16  # files of one base name

# In place of an offset.
IN_FOLDER, _IN_ZIP = -1, -2
_ARCHIVES = (".tar", ".zip")
_SIDE_FILES = (".txt", ".json", ".parquet", ".csv")  # ignored, to save memory


def _list_files(folder: Path, subfolder: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (subfolder, name) of the files of a folder, in order of names, then of its folders."""
    folders = []
    for entry in sorted(os.scandir(folder / subfolder), key=lambda entry: entry.name):
        if entry.is_dir():
            if not is_hidden(entry.name):
                folders.append(entry.name)
        else:
            yield sys.intern(subfolder), entry.name
    for name in folders if depth else ():
        yield from _list_files(folder, f"{subfolder}/{name}" if subfolder else name, depth - 1)


@lru_cache(maxsize=8)
def _zip(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)
