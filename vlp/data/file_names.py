"""Look-up of files by their names in lists, and splits by file name."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice

# extensions that can be decoded
IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")

SPLIT_NAMES = {
    "train": ("train", "training", "trainval", "restval"),
    "val": ("val", "valid", "validation", "dev", "eval", "minival"),
    "test": ("test", "testing", "testdev", "devtest"),
}

_SPLITS = {word: split for split, words in SPLIT_NAMES.items() for word in words}


def split_of(name: object) -> str | None:
    """Return train, val or test if a word of a name says so: `cc3m-train-0000.tar`, `valImages`."""
    spaced = re.sub("(?<=[a-z])(?=[A-Z])", " ", str(name).strip())
    words = re.split(r"(?:set|data|images)?(?:[-+=,&_./\\\s()\d]+|$)", spaced.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def fold_case(name: str) -> str:
    """Return a name with composed accents and in lower case, as some systems compare names."""
    return composed(name).casefold()


def ends_alike(path: str, name: str) -> bool:
    """Return whether two paths end alike, as far as the shorter one goes."""
    return f"/{path}".endswith(f"/{name}") or f"/{name}".endswith(f"/{path}")


def composed(name: str) -> str:
    """Return a name with composed accents (NFC); file systems and lists write either form."""
    return unicodedata.normalize("NFC", name)


def _last_parts(path: str) -> str:
    return "/".join(fold_case(path).split("/")[-2:])


def _ends(path: str) -> list[str]:
    """Return the ends of a path: itself, then without its first folder, and so on."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


class FileNames:
    """Files by path, or by base name alone if unique."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        # By the base name, and by the last two parts: thousands of folders may hold a `0.jpg`.
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        self._unique_names: dict[str, str] = {}
        self.shared: set[str] = set()  # paths with an ambiguous base name
        for path, whole in paths.items():
            base = fold_case(path.rpartition("/")[2])
            for name in {base, _last_parts(path), _last_parts(whole)}:
                self._by_name[name].append(path)
                if name.endswith(IMAGES):
                    self._by_stem[name.rpartition(".")[0]].append(path)
        self._folders = {fold_case(whole.rpartition("/")[0]) for whole in paths.values()}
        self._folder_ends = {end for folder in self._folders for end in _ends(folder)}

    def claim(self, path: str) -> None:
        """Reserve a file for rows that name its folder; its base name alone finds it no more."""
        whole = composed(self._paths[path])
        if not ends_alike(self._unique_names.setdefault(path, whole), whole):
            self.shared.add(path)

    def find(self, name: str) -> str | None:
        """Return the path that ends like a name, perhaps without extension; None if ambiguous."""
        folder, _, base = fold_case(name).rpartition("/")
        for index, extension in ((self._by_name, ""), (self._by_stem, ".")):
            candidates = index.get(_last_parts(name), [])
            for form in (str, fold_case):
                fitting = (path for path in candidates if self._fits(path, form, name, extension))
                if matches := list(islice(fitting, 2)):
                    if len(matches) > 1:
                        return None
                    if folder:
                        self.claim(matches[0])
                    return matches[0]
            same_base = index.get(base, [])
            if len(same_base) == 1 and not self._has_folder(folder):
                path, name = same_base[0], composed(name)
                first = self._unique_names.setdefault(path, name)
                if ends_alike(first, name):
                    return path
                if first != composed(self._paths[path]):  # not claimed
                    self.shared.add(path)
                return None
        return None

    def _fits(self, path: str, form: Callable[[str], str], name: str, extension: str) -> bool:
        """Return whether path and name end alike, beyond the base name if both have folders."""
        whole, path, name = form(self._paths[path]), form(path), form(name)
        if extension:
            whole, path = whole.rpartition(extension)[0], path.rpartition(extension)[0]
        tail = "/".join(whole.split("/")[-2 - path.count("/") :])
        suffixes = (suffix for suffix in (path, tail) if "/" in suffix)
        return f"/{whole}".endswith(f"/{name}") or any(
            f"/{name}".endswith(f"/{suffix}") for suffix in suffixes
        )

    def _has_folder(self, folder: str) -> bool:
        """Return whether a folder agrees with that of some file."""
        return folder in self._folder_ends or not self._folders.isdisjoint(_ends(folder))
