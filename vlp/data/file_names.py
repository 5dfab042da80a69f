"""Files by the names that lists give them, and splits by file name."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice

# Extensions of images that can be decoded.
IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")

SPLIT_NAMES = {
    "train": ("train", "training", "trainval", "restval", "trn"),
    "val": (
        *("val", "valid", "validation", "dev", "devel", "development", "eval", "evaluation"),
        *("minival", "validate", "vld"),
    ),
    "test": ("test", "tests", "testing", "testdev", "devtest", "heldout", "holdout", "tst"),
}

_SPLITS = {word: split for split, words in SPLIT_NAMES.items() for word in words}


def split_of(name: object) -> str | None:
    """Return train, val or test by the words of a name: `cc3m-train-0000.tar`, `valImages`."""
    spaced = re.sub("(?<=[a-z])(?=[A-Z])", " ", compose_accents(str(name))).lower()
    spaced = re.sub(r"(?<=held|hold)[\W_](?=out)", "", spaced)
    words = re.split(r"(?:set|data|images?|imgs?|split)?(?:[\W\d_]+|$)", spaced)
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


# Copies for the Mac's finder, thumbnails and bins of network disks and of Windows.
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN")


def is_hidden(path: str) -> bool:
    """Return whether a part of a path is hidden or a folder that a system made by itself."""
    return any(
        (part.startswith(".") and part not in (".", "..")) or part in _SYSTEM_FOLDERS
        for part in path.split("/")
    )


def fold_case(name: str) -> str:
    """Return a name for comparison regardless of case and of the form of its accents."""
    return compose_accents(name).casefold()


def ends_alike(path: str, name: str) -> bool:
    """Return whether one path ends with all parts of the other."""
    return f"/{path}".endswith(f"/{name}") or f"/{name}".endswith(f"/{path}")


def compose_accents(name: str) -> str:
    """Return a name with composed accents (NFC); file systems may decompose them."""
    return unicodedata.normalize("NFC", name)


def _last_parts(path: str) -> str:
    return "/".join(fold_case(path).split("/")[-2:])


def _ends(path: str) -> list[str]:
    """Return the suffixes of a path, longest first: `a/b/c`, `b/c`, `c`."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


class FileNames:
    """Look-up of files by the end of their path, or by a unique base name.

    `paths` maps a file's path in its archive or folder to the path with that archive or folder.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        # By base name, and by the last two parts, as thousands of folders may hold a `0.jpg`.
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        # File -> folder of the first name that found it, or its own folder after `claim`.
        self._first_folders: dict[str, str] = {}
        self.ambiguous: set[str] = set()  # files that names with different folders would find
        for path, full_path in paths.items():
            base = fold_case(path.rpartition("/")[2])
            for name in {base, _last_parts(path), _last_parts(full_path)}:
                self._by_name[name].append(path)
                if name.endswith(IMAGES):
                    self._by_stem[name.rpartition(".")[0]].append(path)
        self._folders = {fold_case(full_path.rpartition("/")[0]) for full_path in paths.values()}
        self._folder_ends = {end for folder in self._folders for end in _ends(folder)}

    def claim(self, path: str) -> None:
        """Reserve a file for names with its folder: other names no longer find it by base name."""
        folder = compose_accents(self._paths[path]).rpartition("/")[0]
        if not ends_alike(self._first_folders.setdefault(path, folder), folder):
            self.ambiguous.add(path)

    def find(self, name: str) -> str | None:
        """Return the path that ends with `name`, which may lack the extension; None if not unique.

        In a folder that no file has, the base name decides, but only for one such folder.
        """
        folder, _, base = fold_case(name).rpartition("/")
        for index, is_stem in ((self._by_name, False), (self._by_stem, True)):
            candidates = index.get(_last_parts(name), [])
            for fold in (str, fold_case):  # an exact match wins
                paths = (path for path in candidates if self._matches(path, fold, name, is_stem))
                if matches := list(islice(paths, 2)):
                    if len(matches) > 1:
                        return None
                    if folder:
                        self.claim(matches[0])
                    return matches[0]
            same_base = index.get(base, [])
            is_folder = folder in self._folder_ends or not self._folders.isdisjoint(_ends(folder))
            if len(same_base) == 1 and not is_folder:
                path, folder = same_base[0], compose_accents(name).rpartition("/")[0]
                first = self._first_folders.setdefault(path, folder)
                if ends_alike(first, folder):
                    return path
                if first != compose_accents(self._paths[path]).rpartition("/")[0]:  # not claimed
                    self.ambiguous.add(path)
                return None
        return None

    def _matches(self, path: str, fold: Callable[[str], str], name: str, is_stem: bool) -> bool:
        """Return whether the path ends with the name, or the name with the path and a folder."""
        full_path, path, name = fold(self._paths[path]), fold(path), fold(name)
        if is_stem:
            full_path, path = full_path.rpartition(".")[0], path.rpartition(".")[0]
        with_parent = "/".join(full_path.split("/")[-2 - path.count("/") :])
        suffixes = (suffix for suffix in (path, with_parent) if "/" in suffix)
        return f"/{full_path}".endswith(f"/{name}") or any(
            f"/{name}".endswith(f"/{suffix}") for suffix in suffixes
        )
