"""All files below a folder or in an archive by path, also files in archives inside."""

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
    COMPRESSED_TARS,
    IMAGE_SUFFIXES,
    IN_FOLDER,
    TOO_MUCH,
    FileEntry,
    ImageLocation,
    Originals,
    display_path,
    plain_file,
    register_temporary,
)
from data_tools.own.tables import TABLE_SUFFIXES
from vlp.config import ConfigError
from vlp.data.file_names import FileNames, is_hidden
from vlp.data.limits import (
    MAX_ANNOTATION_BYTES,
    MAX_ARCHIVE_MEMBERS,
    MAX_IMAGE_BYTES,
    MAX_UNPACKED_RATIO,
)
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import append_member

ARCHIVES = (".tar", ".zip", *COMPRESSED_TARS)
_BLOCK = 1 << 20  # bytes read or written at once


class FileTree(Originals):
    """Files by path, such as `train/a.jpg`, or `00000.tar/a.jpg` for an archive in a folder.

    Hidden files and the folder `exclude` are skipped. A root inside another is listed once; a path
    that two roots have starts with the root's name. `scratch` gets unpacked and embedded files.
    """

    def __init__(self, roots: Sequence[Path], scratch: Path, exclude: Path | None = None) -> None:
        super().__init__(())
        self._scratch = scratch
        self._exclude = None if exclude is None else exclude.resolve()
        self._files: dict[str, FileEntry] = {}
        self._roots: dict[int, Path] = {}  # by container
        self._common_paths: set[str] = set()  # of several roots
        self._claims: set[str] = set()  # paths that rows name with a folder
        self._paths_with_root: set[str] = set()
        self._prefix = ""  # of paths in the archive that is being added
        self._prefixes: dict[str, str] = {}  # of paths in a folder or archive, by its real path
        self._other_prefixes: list[tuple[str, str]] = []  # of a duplicate, and of its listed files
        self._embedded: IO[bytes] | None = None
        self._digests: dict[bytes, str] = {}  # names of embedded images
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
            elif is_archive(path := self._decompress(root)):
                self._add_archive(path)
            else:
                self.add_file(path, without_gz(root.name))

    @property
    def files(self) -> list[str]:
        """Return the paths of all files, by root and container."""
        return list(self._files)

    @property
    def images(self) -> list[str]:
        """Return the paths of the images, by their extension."""
        return [path for path in self._files if path.lower().endswith(IMAGE_SUFFIXES)]

    def full_path(self, path: str) -> str:
        """Return a path of `files` after its root; an embedded or missing file's path unchanged."""
        entry = self._files.get(path)
        if entry is not None and entry.offset == _SINGLE:
            return self._containers[entry.container].resolve().as_posix()
        root = None if entry is None else self._roots.get(entry.container)
        if root is None:
            return path
        return f"{root.parent if path in self._paths_with_root else root}/{path}"

    def find(self, name: str) -> ImageLocation | None:
        """Return the location of a path of `files`; None if missing."""
        if self._embedded is not None:
            self._embedded.flush()
        entry = self._files.get(name)
        return None if entry is None else self._location(PurePosixPath(name).name, entry)

    def path_of(self, name: str, folder: str = "") -> str | None:
        """Return the path of a file named in a table of `folder`; None if missing or ambiguous."""
        name = name.strip().replace("\\", "/").removeprefix("./")
        # A file of a root inside another may be named by either root.
        alternatives = [
            prefix + name.removeprefix(other)
            for other, prefix in self._other_prefixes
            if name.startswith(other)
        ]
        for path in (normpath(join(folder, name)), name, *alternatives):
            if path in self._files:
                # Claims wait until `_names` is needed, as building it takes much time.
                if "/" in name and "_names" in vars(self):
                    self._names.claim(path)
                elif "/" in name:
                    self._claims.add(path)
                return path
        match = self._names.find(name)
        if match is None or match.startswith(f"{folder}/"):
            return match
        # A table in a folder with images refers to them, or to another root (`--images`). An equal
        # base name elsewhere in the table's root belongs to another image.
        return None if (self._root_of(match), folder) in self._image_folders else match

    @cached_property
    def _image_folders(self) -> set[tuple[Path | None, str]]:
        """Return (root, folder) of folders with images, in them or in their subfolders."""
        folders = {(self._root_of(path), path.rpartition("/")[0]) for path in self.images}
        return {
            (root, str(parent))
            for root, folder in folders
            for parent in (PurePosixPath(folder), *PurePosixPath(folder).parents)
        }

    def _root_of(self, path: str) -> Path | None:
        return self._roots.get(self._files[path].container)

    @cached_property
    def _names(self) -> FileNames:
        names = FileNames({path: self.full_path(path) for path in self._files})
        for path in self._claims:
            names.claim(path)
        return names

    @property
    def ambiguous_paths(self) -> set[str]:
        """Return paths that were found by names with different folders (see `FileNames`)."""
        return self._names.ambiguous if "_names" in vars(self) else set()

    def read_text(self, path: str) -> str:
        """Return the text of a small UTF-8 file; raises BadSample."""
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
        """Return a file on disk with the uncompressed content of a table."""
        location = self.find(path)
        assert location is not None
        # A generated name: a name in a stranger's archive must not become a path on disk.
        name = without_gz(PurePosixPath(path).name).lower()
        suffix = next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), ".txt")
        if location.member is None and location.size is None:
            return plain_file(location.path, self._scratch, f"table{suffix}")
        entry = self._files[path]
        archive = display_path(self._containers[entry.container])
        member = f"{entry.folder}/{PurePosixPath(path).name}".lstrip("/")
        target = self._scratch / f"table-{len(list(self._scratch.iterdir())):06d}{suffix}"
        register_temporary(target, f"{archive}: {member}")
        with open(target, "wb") as file:
            for block in _read_blocks(location, path):
                file.write(block)
        return plain_file(target, self._scratch, f"table{suffix}")

    def add_file(self, path: Path, name: str) -> str:
        """Add a file on disk under a name, unless the tree has the name; returns the name."""
        if name not in self._files:
            folder = str(path.parent)
            self._containers.append(path)
            self._files[name] = FileEntry(len(self._containers) - 1, folder, _SINGLE, 0)
        return name

    def add_bytes(self, name: str, data: bytes) -> str:
        """Add an embedded image; returns its name, the same for equal bytes."""
        if len(data) > MAX_IMAGE_BYTES:
            raise BadSample("image too large", f"{name} (more than {MAX_IMAGE_BYTES} bytes)")
        digest = hashlib.sha256(data).digest()[:16]
        if digest in self._digests:
            return self._digests[digest]
        if self._embedded is None:
            path = self._scratch / "embedded.tar"
            self._embedded = open(path, "ab", buffering=_BLOCK)  # noqa: SIM115 (see `find`)
            self._containers.append(path)
            self._embedded_number = len(self._containers) - 1
        if name in self._files:
            parts = PurePosixPath(name)
            name = f"{parts.stem}-{digest.hex()[:12]}{parts.suffix}"
        append_member(self._embedded, "image", data)
        # The content lies before the padding to whole blocks of 512 bytes.
        start = self._embedded.tell() - len(data) - -len(data) % 512
        self._files[name] = FileEntry(self._embedded_number, "", start, len(data))
        self._digests[digest] = name
        return name

    def _location(self, name: str, entry: FileEntry) -> ImageLocation:
        if entry.offset == _SINGLE:
            return ImageLocation(self._containers[entry.container])
        return super()._location(name, entry)

    def _add(self, name: str, entry: FileEntry) -> None:
        path = "/".join(part for part in (self._prefix, entry.folder, name) if part)
        # A zip may hold `./a.jpg`.
        path = "/".join(part for part in path.split("/") if part != ".")
        if is_hidden(path):
            return
        if len(self._files) >= MAX_ARCHIVE_MEMBERS:
            raise ConfigError(f"{path}: more than {MAX_ARCHIVE_MEMBERS} files")
        self._roots[entry.container] = self._root
        previous = self._files.get(path)
        root = self._root if previous is None else self._roots.get(previous.container)
        if root != self._root:
            # The path is in two roots: put each root's name before it.
            self._common_paths.add(path)
            if root is not None:
                self._paths_with_root.add(f"{root.name}/{path}")
                self._files[f"{root.name}/{path}"] = self._files.pop(path)
        if path in self._common_paths:
            path = f"{self._root.name}/{path}"
            self._paths_with_root.add(path)
        self._files[path] = entry

    def _add_folder(self, folder: Path) -> None:
        archives = []
        self._containers.append(folder)
        number = len(self._containers) - 1
        for subfolder, name in self._walk(folder):
            if name.lower().endswith(ARCHIVES):
                archives.append((subfolder, name))
            else:
                self._add(name, FileEntry(number, subfolder, IN_FOLDER, 0))
        for subfolder, name in archives:
            self._prefix = f"{subfolder}/{name}" if subfolder else name
            if not self._is_duplicate(folder / subfolder / name, f"{self._prefix}/"):
                self._add_archive(self._decompress(folder / subfolder / name))
        self._prefix = ""

    def _walk(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Yield (subfolder, name) of all files; links are followed, but no folder is read twice."""
        for root, folders, names in os.walk(folder, followlinks=True):
            subfolder = Path(root).relative_to(folder).as_posix().removeprefix(".")
            is_excluded = self._exclude is not None and Path(root).resolve() == self._exclude
            if is_excluded or self._is_duplicate(Path(root), f"{subfolder}/" if subfolder else ""):
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            for name in sorted(names):
                yield subfolder, name

    def _is_duplicate(self, path: Path, prefix: str) -> bool:
        """Return whether a folder or file was added before; record the prefix of its paths."""
        real_path = os.path.realpath(path)
        if real_path in self._prefixes:
            self._other_prefixes.append((prefix, self._prefixes[real_path]))
            return True
        self._prefixes[real_path] = prefix
        return False

    def _decompress(self, path: Path) -> Path:
        name = path.name.lower()
        suffix = ".tar" if name.endswith(COMPRESSED_TARS) else Path(without_gz(name)).suffix
        return plain_file(path, self._scratch, f"unpacked{suffix}")


_SINGLE = -3  # an offset's value if the container is the file itself


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar or a zip, by its content."""
    if path.suffix.lower() == ".tar" or zipfile.is_zipfile(path):
        return True
    with open(path, "rb") as file:
        file.seek(257)
        return file.read(5) == b"ustar"


def without_gz(name: str) -> str:
    """Return a file's name without `.gz`."""
    return name[:-3] if name.lower().endswith(".gz") else name


def _read_blocks(location: ImageLocation, path: str) -> Iterator[bytes]:
    """Yield the content of a file in a tar or zip, of any size; errors name its `path`."""
    if location.member is None:
        remaining = location.size or 0
        with open(location.path, "rb") as file:
            file.seek(location.offset)
            while remaining and (block := file.read(min(remaining, _BLOCK))):
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
                while block := file.read(_BLOCK):
                    remaining -= len(block)
                    if remaining < 0:
                        raise ConfigError(f"{path}: {TOO_MUCH}")
                    yield block
    except ConfigError:
        raise
    except Exception as error:  # zipfile raises a dozen classes for damaged members
        raise ConfigError(f"{path}: damaged ({error})") from error
