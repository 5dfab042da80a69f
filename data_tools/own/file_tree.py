"""All files of a place by path: a folder at any depth, the archives in it, or an archive alone."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from posixpath import join, normpath
from typing import IO

from data_tools.originals import (
    IMAGE_SUFFIXES,
    IN_FOLDER,
    SUFFIXES,
    TOO_MUCH,
    FileEntry,
    ImageLocation,
    Originals,
    plain_file,
    shown,
    temporary_file,
)
from vlp.config import ConfigError
from vlp.data.file_names import FileNames
from vlp.data.limits import (
    MAX_ANNOTATION_BYTES,
    MAX_ARCHIVE_MEMBERS,
    MAX_IMAGE_BYTES,
    MAX_UNPACKED_RATIO,
)
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import append_member

ARCHIVES = (".tar", ".zip", *SUFFIXES)
_AT_ONCE = 1 << 20


class FileTree(Originals):
    """Files by path, such as `train/a.jpg`, or `00000.tar/a.jpg` for an archive in a folder.

    Hidden files and the folder `left_out` are skipped; a place inside another is listed once.
    """

    def __init__(self, roots: Sequence[Path], room: Path, left_out: Path | None = None) -> None:
        super().__init__(())
        self._room = room
        self._left_out = None if left_out is None else left_out.resolve()
        self._files: dict[str, FileEntry] = {}
        self._roots: dict[int, Path] = {}
        self._in_both: set[str] = set()
        self._claims: set[str] = set()  # paths that rows name with a folder
        self._placed: set[str] = set()
        self._prefix = ""
        self._tops: dict[str, str] = {}
        self._other_tops: list[tuple[str, str]] = []
        self._embedded: IO[bytes] | None = None
        self._digests: dict[bytes, str] = {}
        for root in roots:
            self._root = root.resolve()
            if root.is_file():
                self._root = self._root.with_name(root.name.partition(".")[0])
            if root.is_dir():
                self._add_folder(root)
            elif not root.is_file():
                raise ConfigError(f"{root}: there is no such file or folder")
            elif self._is_duplicate(root, ""):
                continue
            elif is_archive(path := self._plain(root)):
                self._add_archive(path)
            else:
                self.add_file(path, without_gz(root.name))

    @property
    def files(self) -> Sequence[str]:
        """Return the paths of all files, in the order they were found."""
        return list(self._files)

    @property
    def images(self) -> list[str]:
        """Return the paths of the images, by their extension."""
        return [path for path in self._files if path.lower().endswith(IMAGE_SUFFIXES)]

    def whole(self, path: str) -> str:
        """Return a path of `files` with the place before it, as far as that is known."""
        entry = self._files.get(path)
        if entry is not None and entry.offset == _ALONE:
            return self._containers[entry.container].resolve().as_posix()
        root = None if entry is None else self._roots.get(entry.container)
        if root is None:
            return path
        return f"{root.parent if path in self._placed else root}/{path}"

    def find(self, name: str) -> ImageLocation | None:
        """Return the location of a path of `files`; None if missing."""
        entry = self._files.get(name)
        return None if entry is None else self._location(PurePosixPath(name).name, entry)

    def path_of(self, name: str, folder: str = "") -> str | None:
        """Return the path of a file that a table in `folder` names; None if unclear."""
        # Tables of other machines have backslashes, or paths from the top of a nested place.
        name = name.strip().replace("\\", "/").removeprefix("./")
        alternatives = [
            top + name.removeprefix(other)
            for other, top in self._other_tops
            if name.startswith(other)
        ]
        for path in (normpath(join(folder, name)), name, *alternatives):
            if path in self._files:
                if "/" in name and "_names" in vars(self):
                    self._names.claim(path)
                elif "/" in name:
                    self._claims.add(path)
                return path
        return self._names.find(name)

    @cached_property
    def _names(self) -> FileNames:
        names = FileNames({path: self.whole(path) for path in self._files})
        for path in self._claims:
            names.claim(path)
        return names

    @property
    def shared(self) -> set[str]:
        """Return paths that rows with other folders have named, as in `FileNames`."""
        return self._names.ambiguous if "_names" in vars(self) else set()

    def read_text(self, path: str) -> str:
        """Return a small text in UTF-8; raises BadSample."""
        location = self.find(path)
        assert location is not None
        try:
            data = location.read()
            if len(data) > MAX_ANNOTATION_BYTES:
                raise BadSample(
                    "bad annotation", f"{path} (more than {MAX_ANNOTATION_BYTES} bytes)"
                )
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadSample("bad annotation", f"{path}: not UTF-8") from error

    def on_disk(self, path: str) -> Path:
        """Return a file on disk with the uncompressed content of `path`."""
        location = self.find(path)
        assert location is not None
        # Names in archives never become paths on disk.
        name = without_gz(PurePosixPath(path).name).lower()
        suffix = next((end for end in _TABLES if name.endswith(end)), ".txt")
        if location.member is None and location.size is None:
            return plain_file(location.path, self._room, f"table{suffix}")
        entry = self._files[path]
        archive = shown(self._containers[entry.container])
        member = f"{entry.folder}/{PurePosixPath(path).name}".lstrip("/")
        target = self._room / f"table-{len(list(self._room.iterdir())):06d}{suffix}"
        temporary_file(target, f"{archive}: {member}")
        with open(target, "wb") as file:
            for block in _blocks(location, path):
                file.write(block)
        return plain_file(target, self._room, f"table{suffix}")

    def add_file(self, path: Path, name: str | None = None) -> str:
        """Add a file of the disk under a name; returns the name."""
        name = name or path.name
        if name not in self._files:
            folder = str(path.parent)
            self._containers.append(path)
            self._files[name] = FileEntry(len(self._containers) - 1, folder, _ALONE, 0)
        return name

    def add_bytes(self, name: str, data: bytes) -> str:
        """Add an image from a table's bytes; returns its name, one for equal bytes."""
        if len(data) > MAX_IMAGE_BYTES:
            raise BadSample("image too large", f"{name} (more than {MAX_IMAGE_BYTES} bytes)")
        digest = hashlib.sha256(data).digest()[:16]
        if digest in self._digests:
            return self._digests[digest]
        if self._embedded is None:
            path = self._room / "embedded.tar"
            self._embedded = open(path, "ab", buffering=_AT_ONCE)  # noqa: SIM115 (see flush)
            self._containers.append(path)
            self._embedded_number = len(self._containers) - 1
        if name in self._files:
            whole = PurePosixPath(name)
            name = f"{whole.stem}-{digest.hex()[:12]}{whole.suffix}"
        append_member(self._embedded, "image", data)
        # A tar fills its last block.
        end = self._embedded.tell()
        start = end - len(data) - -len(data) % 512
        self._files[name] = FileEntry(self._embedded_number, "", start, len(data))
        self._digests[digest] = name
        return name

    def flush(self) -> None:
        """Flush the added images to disk, to be read."""
        if self._embedded is not None:
            self._embedded.flush()

    def __len__(self) -> int:
        return len(self._files)

    def _location(self, name: str, entry: FileEntry) -> ImageLocation:
        if entry.offset == _ALONE:
            return ImageLocation(self._containers[entry.container])
        return super()._location(name, entry)

    def _add(self, name: str, entry: FileEntry) -> None:
        path = "/".join(part for part in (self._prefix, entry.folder, name) if part)
        # A zip may hold `./a.jpg`.
        parts = [part for part in path.split("/") if part != "."]
        path = "/".join(parts)
        if any(part.startswith(".") for part in parts if part != "..") or "__MACOSX" in parts:
            return
        if len(self._files) >= MAX_ARCHIVE_MEMBERS:
            raise ConfigError(f"{path}: more than {MAX_ARCHIVE_MEMBERS} files")
        self._roots[entry.container] = self._root
        previous = self._files.get(path)
        root = self._root if previous is None else self._roots.get(previous.container)
        if root != self._root:
            # Files of two places have one path: the name of each place goes before it.
            self._in_both.add(path)
            if root is not None:
                self._placed.add(moved := f"{root.name}/{path}")
                self._files[moved] = self._files.pop(path)
        if path in self._in_both:
            self._placed.add(path := f"{self._root.name}/{path}")
        self._files[path] = entry

    def _add_folder(self, folder: Path) -> None:
        archives = []
        self._containers.append(folder)
        number = len(self._containers) - 1
        for inside, name in self._walked(folder):
            if name.lower().endswith(ARCHIVES):
                archives.append((inside, name))
            else:
                self._add(name, FileEntry(number, inside, IN_FOLDER, 0))
        for inside, name in archives:
            self._prefix = f"{inside}/{name}" if inside else name
            if not self._is_duplicate(folder / inside / name, f"{self._prefix}/"):
                self._add_archive(self._plain(folder / inside / name))
        self._prefix = ""

    def _walked(self, folder: Path) -> Iterator[tuple[str, str]]:
        # Links in a circle end, as each folder is listed once.
        for root, folders, names in os.walk(folder, followlinks=True):
            inside = Path(root).relative_to(folder).as_posix().removeprefix(".")
            left_out = self._left_out is not None and Path(root).resolve() == self._left_out
            if left_out or self._is_duplicate(Path(root), f"{inside}/" if inside else ""):
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                yield inside, name

    def _is_duplicate(self, path: Path, top: str) -> bool:
        # A table may name files from the top of either place.
        real_path = os.path.realpath(path)
        if real_path in self._tops:
            self._other_tops.append((top, self._tops[real_path]))
            return True
        self._tops[real_path] = top
        return False

    def _plain(self, path: Path) -> Path:
        name = path.name.lower()
        ending = ".tar" if name.endswith(SUFFIXES) else Path(without_gz(name)).suffix
        return plain_file(path, self._room, f"unpacked{ending}")


_TABLES = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".token")
# As an offset: the container itself.
_ALONE = -3


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar or a zip, by its content."""
    if path.suffix.lower() == ".tar" or zipfile.is_zipfile(path):
        return True
    with open(path, "rb") as file:
        file.seek(257)
        return file.read(5) == b"ustar"


def without_gz(name: str) -> str:
    """Return a file's name without its compression suffix."""
    return name[:-3] if name.lower().endswith(".gz") else name


def _blocks(location: ImageLocation, path: str) -> Iterator[bytes]:
    if location.member is None:
        remaining = location.size or 0
        with open(location.path, "rb") as file:
            file.seek(location.offset)
            while remaining and (block := file.read(min(remaining, _AT_ONCE))):
                remaining -= len(block)
                yield block
        return
    try:
        with zipfile.ZipFile(location.path) as archive:
            info = archive.getinfo(location.member)
            remaining = max(2**26, MAX_UNPACKED_RATIO * info.compress_size)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ConfigError(f"{path}: compressed by method {info.compress_type}")
            with archive.open(info) as file:
                while block := file.read(_AT_ONCE):
                    remaining -= len(block)
                    if remaining < 0:
                        raise ConfigError(f"{path}: {TOO_MUCH}")
                    yield block
    except ConfigError:
        raise
    # zipfile raises a dozen kinds for damaged members.
    except Exception as error:
        raise ConfigError(f"{path}: damaged ({error})") from error
