"""Writing of samples to numbered shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from vlp.config import ConfigError
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.index import BLOCK, INDEX_NAME, SurveyedShard, rows_of, survey, write_index
from vlp.data.shards.sample_files import IMAGES
from vlp.data.shards.tar import append_member, close_tar
from vlp.io import AtomicFile
from vlp.lock import FolderLock


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:06d}.tar"


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writer of numbered shards: `with ShardWriter(folder) as writer: writer.write(...)`.

    A shard is renamed when complete, and the index is written on a clean exit. A later run resumes
    to the same bytes if its producer skips the keys in `done`.
    """

    def __init__(self, folder: str | Path, samples_per_shard: int = 1000) -> None:
        if samples_per_shard < 1:
            raise ValueError(f"samples_per_shard is {samples_per_shard}, it must be at least 1")
        self.folder = Path(folder)
        self.samples_per_shard = samples_per_shard
        self.done: set[str] = set()
        self._shards: list[SurveyedShard] = []
        self._ends: list[int] = []
        self._captions: list[int] = []
        self._number = 0
        self._output: AtomicFile | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        try:
            self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _resume(self) -> None:
        for leftover in self.folder.glob("shard-*.tar.tmp"):
            leftover.unlink()
        for path in sorted(self.folder.glob("shard-*.tar")):
            result = survey(path)
            if result.problem:
                raise ConfigError(f"{path}: {result.problem}; delete this shard and run again")
            self.done.update(result.keys)
            self._shards.append(result.shard)

    def write(
        self,
        key: str,
        image: bytes,
        extension: str,
        annotation: Annotation,
        second_image: bytes | None = None,
    ) -> None:
        """Append `KEY.EXTENSION`, `KEY.json` and, of a pair, `KEY.1.EXTENSION`.

        The key is unique in the folder, without dots or slashes; the extension is one of `IMAGES`.
        """
        if not key or "." in key or "/" in key:
            raise ValueError(f"{key!r} cannot be a key: it may hold neither dots nor slashes")
        if key in self.done:
            raise ValueError(f"the key {key!r} is already in {self.folder}")
        if extension not in IMAGES:
            raise ValueError(f"{key}: extension {extension!r} is not one of {', '.join(IMAGES)}")
        if self._output is None:
            # Shards that were deleted between two runs are rewritten, lowest number first.
            while self._path().exists():
                self._number += 1
        with _disk_errors(self._path()):
            if self._output is None:
                self._output = AtomicFile(self._path(), durable=True)
            file = self._output.file
            append_member(file, f"{key}.{extension}", image)
            if second_image is not None:
                append_member(file, f"{key}.1.{extension}", second_image)
            append_member(file, f"{key}.json", annotation.to_json())
        self.done.add(key)
        self._ends.append(file.tell() // BLOCK)
        self._captions.append(len(captions_of(annotation)))
        if len(self._captions) == self.samples_per_shard:
            self._finish_shard(self._output)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is not None:  # the next run resumes after the finished shards
                if self._output is not None:
                    self._output.abandon()
                return
            if self._output is not None:
                self._finish_shard(self._output)
            with _disk_errors(self.folder / INDEX_NAME):
                write_index(self.folder, sorted(self._shards, key=lambda shard: shard.name))
        finally:
            self._lock.release()

    def _path(self) -> Path:
        return self.folder / shard_name(self._number)

    def _finish_shard(self, output: AtomicFile) -> None:
        path = output.path
        if path.exists():
            raise ConfigError(f"{path}: was written by another process meanwhile; run again")
        with _disk_errors(path):
            close_tar(output.file)
            output.commit()
        self._output = None
        rows = rows_of(self._ends, self._captions)
        self._shards.append(SurveyedShard(path.name, path.stat().st_size, rows))
        self._ends, self._captions = [], []


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); solve this and run again: finished "
            "shards are kept"
        ) from error
