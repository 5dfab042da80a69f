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
    "train": ("train", "training", "trainset", "trainval", "restval"),
    "val": ("val", "valid", "validation", "valset", "dev", "eval"),
    "test": ("test", "testing", "testset"),
}

_SPLITS = {word: split for split, words in SPLIT_NAMES.items() for word in words}


def split_of(name: object) -> str | None:
    """Return train, val or test if a word of a name says so: `cc3m-train-0000.tar`, `val2017`."""
    words = re.split(r"[-_./\\\s()\d]+", str(name).strip().lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def folded(name: str) -> str:
    """Return a name with composed accents and in lower case, as some systems compare names."""
    return composed(name).casefold()


def agree(there: str, wanted: str) -> bool:
    """Return whether two paths end alike, as far as the shorter one goes."""
    return f"/{there}".endswith(f"/{wanted}") or f"/{wanted}".endswith(f"/{there}")


def composed(name: str) -> str:
    """Return a name with composed accents (NFC); file systems and lists write either form."""
    return unicodedata.normalize("NFC", name)


def _last_parts(path: str) -> str:
    return "/".join(folded(path).split("/")[-2:])


def _ends(path: str) -> list[str]:
    """Return a path and what is left of it without its first folders."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


class FileNames:
    """Files by path, or by base name alone if unique."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        # By the base name, and by the last two parts: thousands of folders may hold a `0.jpg`.
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        self._alone: dict[str, str] = {}
        self.shared: set[str] = set()  # paths with an ambiguous base name
        for path, whole in paths.items():
            base = folded(path.rpartition("/")[2])
            for name in {base, _last_parts(path), _last_parts(whole)}:
                self._by_name[name].append(path)
                if name.endswith(IMAGES):
                    self._by_stem[name.rpartition(".")[0]].append(path)
        self._folders = {folded(whole.rpartition("/")[0]) for whole in paths.values()}
        self._folder_ends = {end for folder in self._folders for end in _ends(folder)}

    def find(self, name: str) -> str | None:
        """Return the path that ends like a name, perhaps without extension; None if ambiguous."""
        folder, _, base = folded(name).rpartition("/")
        for index, extension in ((self._by_name, ""), (self._by_stem, ".")):
            candidates = index.get(_last_parts(name), [])
            for form in (str, folded):
                fitting = (path for path in candidates if self._fits(path, form, name, extension))
                if matches := list(islice(fitting, 2)):
                    return matches[0] if len(matches) == 1 else None
            alike = index.get(base, [])
            if len(alike) == 1 and not self._is_known(folder):
                name = composed(name)
                if agree(self._alone.setdefault(alike[0], name), name):
                    return alike[0]
                self.shared.add(alike[0])
                return None
        return None

    def _fits(self, path: str, form: Callable[[str], str], name: str, extension: str) -> bool:
        """Return whether path and name end alike, beyond the base name if both have folders."""
        whole, path, name = form(self._paths[path]), form(path), form(name)
        if extension:
            whole, path = whole.rpartition(extension)[0], path.rpartition(extension)[0]
        placed = "/".join(whole.split("/")[-2 - path.count("/") :])
        longer = (one for one in (path, placed) if "/" in one)
        return f"/{whole}".endswith(f"/{name}") or any(
            f"/{name}".endswith(f"/{one}") for one in longer
        )

    def _is_known(self, folder: str) -> bool:
        """Return whether a folder agrees with that of some file."""
        return folder in self._folder_ends or not self._folders.isdisjoint(_ends(folder))
