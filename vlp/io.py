"""Atomic and durable writing of files, reading of JSON, and redaction of secrets in URLs."""

from __future__ import annotations

import ctypes
import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = "***"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of renameat2(2)

REFERENCE = re.compile(r"\$\{(\w+)\}")  # environment variable in a URL; no secret itself

# `Path` drops one of a URL's two slashes. Letters before http may be `git+` or the end of a word.
# In other schemes `?` is a wildcard unless a key and `=` follow.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}"
# USER:PASSWORD@: the password may contain slashes and blanks. Digits are a port instead: of http
# (group 2 of `_URL`) before any mark, else unless an @ follows as in `s3://KEY:7/SECRET@bucket`.
_PORT = r"\d{1,5}(?:(?(2)\W|(?:[^\w/+=@]|/(?![^@\s?#\"'<>]{0,256}@)))|$)"
_PASSWORD = rf"[^\s/:@?#\[]+:(?!{_PORT})(?=\S)(?:(?!{_SCHEME})[^@\n\"'<>]){{1,256}}@"
_URL = re.compile(
    rf"((?:[A-Za-z][A-Za-z0-9+.-]{{0,25}})?(https?|ftps?):/{{1,2}}|{_SCHEME})"
    rf"((?:{_PASSWORD})?(?:[^\s/?#]*@)?)"
    rf"((?:(?!{_SCHEME})[^\s?#\"<>]|(?(2)(?!)|[?#](?![^\s?#\"<>,:/]*=)))*)"
    r"([?#][^\s\"<>]+)?"
)
# One letter is a drive of Windows; `simplecache::s3` is a chain of fsspec. `hf-hub:` and the like
# are prefixes of timm and datasets, with names or local paths behind them.
_URI = re.compile(r"(?!(?:hub|local-dir|hf[-_]hub):)([A-Za-z][A-Za-z0-9+.:-]+):/+(.*)", re.DOTALL)
_PARAMETER = re.compile(r";[\w.~-]+=(?!\$\{\w+\})[^;/\s]+")
_USER_REFERENCES = re.compile(r"(\$\{\w+\}:?)+@")
_QUERY_REFERENCES = re.compile(r"\?([\w.~-]+=\$\{\w+\}(&|$))+")
_LONG = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"\\u[dD]")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)"
)


def parse_json(content: str | bytes, errors: str = "strict") -> Any:
    """Parse untrusted JSON; JSONDecodeError or UnicodeDecodeError for anything invalid.

    Deep nesting, integers beyond 64 bits and lone surrogates are invalid, too.

    Args:
        errors: as of `open`; any but "strict" also replaces escapes of lone surrogates by U+FFFD.
    """
    try:
        if isinstance(content, bytes):
            content = content.decode(json.detect_encoding(content), errors)
        # The checks of integers and surrogates cost time: run them only where one may occur.
        has_surrogate = bool(_SURROGATE.search(content))
        if has_surrogate and errors != "strict":
            content = _ESCAPE.sub(lambda m: r"\ufffd" if m[1] else m[0], content)
        value = json.loads(content, parse_int=_int64 if _LONG.search(content) else None)
        if has_surrogate and errors == "strict":
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def as_url(path: object) -> str | None:
    """Return a path or text as a URL, with the slash that `Path` drops; None for a local path."""
    match = _URI.fullmatch(str(path)) if isinstance(path, str | Path) else None
    return match and f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2]}"


def require_local(path: Path) -> None:
    """Raise OSError for a URL or ~: writing would make a local folder `s3:` or `~`."""
    if (url := as_url(path)) is not None:
        raise OSError(errno.EINVAL, "it is a URL; name a folder on a disk", url)
    expanded = expand_home(path)
    if expanded or path.parts[:1] == ("~",):  # without a home folder, ~ stays
        hint = f"the shell has not replaced ~; write {expanded or '$HOME'}"
        raise OSError(errno.EINVAL, hint, str(path))


def expand_home(path: str | Path) -> str | None:
    """Return a path that starts with ~ or ~USER with the user's home folder; None for others."""
    expanded = os.path.expanduser(path)
    return expanded if expanded != str(path) else None


def similar_path(path: str | Path) -> str:
    """Return "; did you mean X?" with the path most similar to a missing path; "" without one."""
    missing = Path(path)
    while not os.path.isdir(missing.parent):  # Path.is_dir raises for a folder without access
        missing = missing.parent
    with suppress(OSError):
        names = [] if missing.exists() else os.listdir(missing.parent)
        if matches := difflib.get_close_matches(missing.name, names, n=1):
            return f"; did you mean {missing.with_name(matches[0])}?"
    return ""


def may_be_on_hub(name: str) -> bool:
    """Return whether a name without a local folder may be a hub id: NAME or OWNER/NAME."""
    owner, slash, repository = name.partition("/")
    if "/" in repository or name.startswith((".", "/", "~")):
        return False
    # If there is a local folder OWNER, a path was mistyped: do not load a stranger's repository.
    is_mistyped = Path(owner).is_dir() and not Path(name).is_dir()
    return not (slash and (owner == "runs" or is_mistyped))


@cache
def check_hub() -> None:
    """Switch to the hub's offline mode if it is unreachable; a download would retry for 40 s."""
    import huggingface_hub.constants as hub

    url = urlsplit(hub.ENDPOINT)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    if hub.HF_HUB_OFFLINE or getproxies():
        return
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        print(f"{host} cannot be reached: only what is in the hub's cache is used", file=sys.stderr)
        hub.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes


def sync(file: Any) -> None:
    """Write an open file's buffers through to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Write a closed file, or the names in a folder, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_nofollow(path: str, flags: int) -> int:
    """Open a file, but no symbolic link: the `opener` of `open(path, mode, opener=...)`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class AtomicFile:
    """A file written under a temporary name and renamed at `commit`; missing folders are made.

    mode: "wb", or "w" for UTF-8 text; durable: sync the file before the renaming, its folder after.
    """

    def __init__(
        self, path: Path, mode: str = "wb", durable: bool = False, suffix: str = ".tmp"
    ) -> None:
        self.path = path
        self._partial = path.with_name(path.name + suffix)
        self._durable = durable
        require_local(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        self.file: IO[Any] = open(self._partial, mode, opener=open_nofollow, **text)  # type: ignore[call-overload]  # noqa: SIM115

    def commit(self) -> None:
        """Close the file and rename it, replacing an earlier one."""
        if self._durable:
            sync(self.file)
        self.file.close()
        self._partial.rename(self.path)
        if self._durable:
            sync_path(self.path.parent)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        with suppress(OSError):  # closing flushes, which fails on a full disk
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
    """Open an `AtomicFile`; commit it after the block, or remove it if the block raises.

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


def lines_of(path: Path, errors: str = "strict") -> list[str]:
    """Return the non-blank lines of a text file, without byte order marks.

    Raises OSError, and UnicodeDecodeError unless `errors` (as of `open`) prevents it.
    """
    text = path.read_text(encoding="utf-8", errors=errors).replace("\ufeff", "")
    return [line for line in text.split("\n") if line.strip()]


def write_text(
    path: Path, text: str, durable: bool = False, error: type[Exception] | None = None
) -> None:
    """Replace a file in one step; arguments as of `atomic_write`."""
    with atomic_write(path, "w", durable=durable, error=error) as file:
        file.write(text)


def write_json(
    path: Path,
    value: Any,
    indent: int = 2,
    *,
    durable: bool = False,
    error: type[Exception] | None = None,
    **form: Any,
) -> None:
    """Replace a file by a value as JSON; arguments as of `atomic_write`, `form` of `json.dumps`."""
    text = json.dumps(value, indent=indent, **form) + "\n"
    write_text(path, text, durable=durable, error=error)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a path at which to make a folder; it replaces `folder` unless the block raises."""
    require_local(folder)
    folder = Path(os.path.realpath(folder))  # a link keeps naming it
    if folder.is_file():
        raise FileExistsError(errno.EEXIST, "it is a file", str(folder))
    partial = folder.with_name(folder.name + ".tmp")
    remove(partial)
    try:
        yield partial
    except BaseException:
        remove(partial)
        raise
    replace_folder(partial, folder)


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file or a link, if it exists; ignore errors."""
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, _, _ in os.walk(path):  # write-protected folders could not be emptied
            with suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace_folder(new: Path, target: Path) -> None:
    """Replace `target`, if it exists, by the folder `new`; atomic on Linux."""
    restore_folder(target)
    former = new
    if not _exchange(new, target):
        former = _backup_path(target)
        if target.exists():
            target.rename(former)
        new.rename(target)
    sync_path(target.parent)
    remove(former)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two folders; False if one is missing or the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # only on Linux
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def restore_folder(folder: Path) -> None:
    """Undo a `replace_folder` that was killed between its renamings, or remove its leftovers."""
    backup = _backup_path(folder)
    if folder.exists():
        remove(backup)
    elif backup.exists():
        backup.rename(folder)


def _backup_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def link_missing(source: Path, target: Path) -> None:
    """Hard-link those entries of a folder `source` that `target` lacks; `source` may be missing."""
    if not source.is_dir():
        return
    names = {path.name for path in target.iterdir()}
    for path in source.iterdir():
        if path.name in names:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, target / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it on a disk without links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors atomically and durably to a safetensors file."""
    # Imported here, as writers of shards and text need no torch.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        cpu_tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        with atomic_write(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            save_file(cpu_tensors, file.name, metadata)
            # The library replaces the file by one that only its owner may read.
            os.chmod(file.name, mode)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    sync_path(path)


def redact(text: str) -> str:
    """Replace user, parameters, query and fragment of every URL in a text by `***`.

    In schemes other than http, https and ftp, a user without a password (`hf://model@main`) and a
    query without `=` (a wildcard) stay.
    """
    return _URL.sub(_redact_url, text)


def redact_values(values: Any) -> Any:
    """Return JSON values with `redact` applied to every text but keys."""
    if isinstance(values, str):
        return redact(values)
    if isinstance(values, Mapping):
        return {key: redact_values(value) for key, value in values.items()}
    if isinstance(values, list):
        return [redact_values(value) for value in values]
    return values


class Redacted:
    """Mixin of exceptions that redacts their messages; first in the list of bases."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*map(redact_values, arguments))


def _redact_url(url: re.Match[str]) -> str:
    scheme, web, user, path, query = (part or "" for part in url.groups())
    if user and (web or ":" in user) and not _USER_REFERENCES.fullmatch(user):
        user = f"{HIDDEN}@"
    path = _PARAMETER.sub(f";{HIDDEN}", path)
    if query and not _QUERY_REFERENCES.fullmatch(query):
        query = query[0] + HIDDEN
    return f"{scheme}{user}{path}{query}"
