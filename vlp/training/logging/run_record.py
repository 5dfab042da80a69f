"""`run.json`: each start of a run, with what and where, so that its figures can be had again."""

from __future__ import annotations

import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import vlp
from vlp.io import HIDDEN, parse_json, redacted, redacted_values, write_json, write_text
from vlp.training.run_folder import RunFolder

PACKAGES = (
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "deepspeed", "accelerate"),
    *("webdataset", "numpy", "pillow", "simplejpeg"),
)
# A text that something called a key or password is set to, and keys that show by their beginning.
_SECRET = re.compile(
    r"""((?:key|token|secret|password|passwd)\w*["']?\s*[:=]\s*["'])[^"'\s]{8,}"""
    r"""|\b(?:hf_|ghp_|github_pat_|glpat-|sk-|AKIA)[\w-]{12,}""",
    re.IGNORECASE,
)
_LONGEST_DIFF = 1 << 20
_GIT_SECONDS = 10
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
_STATUS = ("status", "--porcelain", "--untracked-files=normal")


def record_start(
    folder: RunFolder,
    step: int,
    total: int,
    seed: int,
    devices: list[tuple[str, str]],
    data: Mapping[str, str],
) -> None:
    """Add a start to `run.json`, and write uncommitted changes to `git/step_N.diff`.

    Args:
        folder: of the run.
        step: steps done before.
        total: steps of the whole run.
        seed: of weights, order, augmentation and masks.
        devices: host and device of each rank.
        data: hashes of the data's parts.
    """
    repositories, changes = _repositories()
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "total_steps": total,
        "command": redacted_values(list(sys.orig_argv)),
        "directory": str(Path.cwd()),
        "devices": [
            {"host": host, "device": device, "ranks": ranks}
            for (host, device), ranks in Counter(devices).items()
        ],
        "git": repositories,
        "versions": versions(),
        "seed": seed,
        "data": dict(data),
    }
    record = read_record(folder.path)
    record["starts"] = [*record.get("starts", []), start]
    write_json(folder.record, record, indent=1)
    if changes:
        (folder.path / "git").mkdir(exist_ok=True)
        hidden = _SECRET.sub(rf"\1{HIDDEN}", redacted(changes))
        write_text(folder.path / "git" / f"step_{step}.diff", hidden)


def read_record(folder: Path) -> dict[str, Any]:
    """Return what `run.json` holds; empty without one.

    Raises:
        OSError: it cannot be read now, and is not to be replaced.
    """
    try:
        found = parse_json((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tracker_id(folder: RunFolder, tracker: str, make: Callable[[], str]) -> str:
    """Return the run's id at a tracker, which all its starts share; `make` gives the first."""
    record = read_record(folder.path)
    known = record.setdefault("trackers", {})
    if tracker not in known:
        known[tracker] = make()
        write_json(folder.record, record, indent=1)
    return str(known[tracker])


def this_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return versions of Python, of this package and of those packages that are installed."""
    found = {"python": platform.python_version(), "vlp": vlp.__version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _repositories() -> tuple[list[dict[str, Any]], str]:
    """Return commits of the package's and the user's own repository, and their changes."""
    found, changes = [], ""
    places = (Path(vlp.__file__).parent, Path.cwd())
    roots = dict.fromkeys(_git(place, "rev-parse", "--show-toplevel") for place in places)
    for root in (root.strip() for root in roots if root):
        commit, state = _git(Path(root), "rev-parse", "HEAD"), _git(Path(root), *_STATUS)
        diff = _git(Path(root), *_DIFF)
        found.append(
            {
                "repository": Path(root).name,
                "commit": (commit or "").strip(),
                "changed": state != "",  # also where git does not answer in time
            }
        )
        if diff and len(diff) > _LONGEST_DIFF:
            diff = f"# {Path(root).name}: more than {_LONGEST_DIFF} characters have changed\n"
        changes += diff or ""
    return found, changes


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says; None where there is no git, no repository, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
