"""Writing of files: whole or not at all, on the disk where a crash must not lose them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def sync(file: Any) -> None:
    """Have what was written to an open file on the disk, before it gets its name."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Have a written file, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk."""
    sync_path(folder)


class AtomicFile:
    """A file written beside its place, which gets its name at `commit`.

    Args:
        path: its place; the folder is made.
        mode: "wb", or "w" for UTF-8 text.
        durable: bring the file to the disk before it gets its name, and then the name.
        suffix: of the temporary name.

    Raises:
        OSError: of every method but `abandon`; the disk is full, say.
    """

    def __init__(
        self, path: Path, mode: str = "wb", durable: bool = False, suffix: str = ".tmp"
    ) -> None:
        self.path = path
        self._partial = path.with_name(path.name + suffix)
        self._durable = durable
        path.parent.mkdir(parents=True, exist_ok=True)
        text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        self.file: IO[Any] = open(self._partial, mode, **text)  # type: ignore[call-overload]  # noqa: SIM115

    def commit(self) -> None:
        """Close the file and give it its name; what was there before is replaced."""
        if self._durable:
            sync(self.file)
        self.file.close()
        self._partial.rename(self.path)
        if self._durable:
            sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Remove the file; what was there before stays."""
        with suppress(OSError):  # on a full disk, what was still to be written
            self.file.close()
        self._partial.unlink(missing_ok=True)


@contextmanager
def atomic_write(
    path: Path,
    mode: str = "wb",
    *,
    durable: bool = False,
    suffix: str = ".tmp",
    error: type[Exception] | None = None,
) -> Iterator[IO[Any]]:
    """Open a file to write, which gets its name when the block ends well, and else is removed.

    Args:
        path, mode, durable, suffix: see `AtomicFile`.
        error: raised in place of an OSError, with a message that names the file.
    """
    try:
        output = AtomicFile(path, mode, durable, suffix)
        try:
            yield output.file
            output.commit()
        except BaseException:
            output.abandon()
            raise
    except OSError as problem:
        if error is None:
            raise
        raise error(f"{path}: cannot be written ({problem.strerror or problem})") from problem


def write_text(
    path: Path, text: str, durable: bool = False, error: type[Exception] | None = None
) -> None:
    """Replace a file in one step; arguments as of `atomic_write`."""
    with atomic_write(path, "w", durable=durable, error=error) as file:
        file.write(text)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to be made, which replaces `folder` when the block ends well.

    When the block fails, what it made is removed, and `folder` stays as it was.
    """
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file and bring it to the disk.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    # Imported here: whoever writes shards or text needs no torch.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    sync_path(path)
