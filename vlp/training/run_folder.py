"""A run's folder, its `run.json` (all starts) and `report.json` (its last end)."""

from __future__ import annotations

import logging
import math
import platform
import re
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

import vlp
from vlp import distributed
from vlp.config import Config, ConfigError, parse_yaml
from vlp.io import HIDDEN, parse_json, redact, redact_values, write_json, write_text
from vlp.lock import is_lock
from vlp.training.engines.engine import Engine
from vlp.training.progress import Progress


class Differences(NamedTuple):
    """Lines "key: saved X, now Y"; fatal ones forbid a resume, tolerated ones are warnings."""

    fatal: list[str]
    tolerated: list[str]


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], config: Config) -> Differences:
    """Compare the JSON values of a saved and the current configuration.

    The fields of `config` declare which differences are fatal ("fixed"), tolerated ("tolerated";
    "path": if both values are paths) or ignored ("free").
    """
    saved_leaves, current_leaves = dict(_leaves(saved)), dict(_leaves(current))
    differences = Differences([], [])
    for key in sorted(saved_leaves.keys() | current_leaves.keys()):
        rule, default = _rule_and_default(config, key)
        # A key that one side lacks, as an older checkpoint may, has its default there.
        if saved_leaves.get(key, default) == current_leaves.get(key, default) or rule == "free":
            continue
        values = saved_leaves.get(key), current_leaves.get(key)
        are_paths = all(isinstance(value, str) for value in values)  # not null, and not absent
        is_tolerated = rule == "tolerated" or (rule == "path" and are_paths)
        lines = differences.tolerated if is_tolerated else differences.fatal
        texts = [repr(leaves.get(key, "absent")) for leaves in (saved_leaves, current_leaves)]
        lines.append(redact(f"{key}: saved {texts[0]}, now {texts[1]}"))
    return differences


def require_same_on_all_ranks(config: Config, fingerprint: Mapping[str, str]) -> None:
    """Require the same configuration and data on all ranks; paths may differ. Collective."""
    leaves, parts = dict(_leaves(config.model_dump(mode="json"))), dict(fingerprint)
    rank_0_leaves, rank_0_parts = distributed.broadcast_object((leaves, parts))
    other_parts = {part for part, _ in rank_0_parts.items() ^ parts.items()}
    problems = [f"{part} of the data is not that of rank 0" for part in other_parts]
    for key in rank_0_leaves.keys() | leaves.keys():
        value, rank_0_value = leaves.get(key), rank_0_leaves.get(key)
        if value != rank_0_value and not _may_differ_by_node(config, key, value, rank_0_value):
            problems.append(redact(f"{key} is {value!r}, {rank_0_value!r} on rank 0"))
    with distributed.raise_on_all_ranks(ConfigError):
        if problems:
            raise ConfigError(f"{socket.gethostname()}: {'; '.join(sorted(problems))}")


def _may_differ_by_node(config: Config, key: str, *values: Any) -> bool:
    """Return whether a dotted key may have different `values` on different nodes."""
    # Free options of the data, such as workers. Texts outside of `training` are paths unless fixed.
    rule, _ = _rule_and_default(config, key)
    if rule == "free" and key.startswith(("data.", "task.data.")):
        return True
    are_texts = all(isinstance(value, str) for value in values)
    return are_texts and not key.startswith("training.") and rule != "fixed"


def _rule_and_default(config: Config, key: str) -> tuple[str, Any]:
    """Return a dotted key's rule at a resume, and its default value (None without a default).

    The innermost part of the key that declares a rule decides; without any it is "fixed".
    """
    rule = "fixed"
    node: Any = config  # the value of the key's parts so far; None below values without a schema
    for part in key.split("."):
        field = type(node).model_fields.get(part) if isinstance(node, Config) else None
        if isinstance(node, Config):
            rule = _declared_rule(node.model_config.get("json_schema_extra")) or rule
            rule = _declared_rule(field and field.json_schema_extra) or rule
            node = getattr(node, part, None)
        elif isinstance(node, Sequence) and part.isdigit():
            node = node[int(part)] if int(part) < len(node) else None
        else:
            node = None
    return rule, None if field is None or field.is_required() else field.get_default()


def _declared_rule(extra: Any) -> Any:
    return extra.get("resume") if isinstance(extra, Mapping) else None


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of the leaves of nested mappings and lists.

    An empty mapping or list is a leaf.
    """
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = iter(value.items())
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))


logger = logging.getLogger(__name__)

PACKAGES = (  # a run records their versions
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "deepspeed", "accelerate"),
    *("webdataset", "numpy", "pillow", "simplejpeg"),
)
# A quoted text after a name with key, token, secret or password; a token with a well-known prefix.
_SECRET = re.compile(
    r"""((?:key|token|secret|password|passwd)\w*["']?\s*[:=]\s*["'])[^"'\s]{8,}"""
    r"""|\b(?:hf_|ghp_|github_pat_|glpat-|sk-|AKIA)[\w-]{12,}""",
    re.IGNORECASE,
)
_LONGEST_DIFF = 1 << 20  # characters
_GIT_SECONDS = 10
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
_STATUS = ("status", "--porcelain", "--untracked-files=normal")


class RunFolder:
    """Paths of a run's files.

    Attributes:
        config: the resolved configuration.
        log: a JSON object per line, for each logged step and each validation.
        tensorboard: folder of event files.
        checkpoints: folders `step_N`.
        model: model folder of the finished run.
        best: model folder of the best validation.
        report: summary, written at every end.
        starts: `run.json`: all starts, and ids at trackers; the first file of a run.
        hang: stacks of hanging ranks.

    Raises ConfigError if the folder cannot be read, or without `resume` if it holds files other
    than locks.
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.best = self.path / "best"
        self.report = self.path / "report.json"
        self.starts = self.path / "run.json"
        self.hang = self.path / "hang"
        try:
            is_used = self.path.exists() and not all(map(is_lock, self.path.iterdir()))
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be used ({error.strerror})") from error
        if is_used and not resume:
            raise ConfigError(
                f"output: {self.path} is not empty; continue its run with --resume, or choose "
                "another folder with output=…"
            )

    def require_run(self) -> None:
        """Require a run, a new folder, or one with leftovers of a start that was killed."""
        try:
            if not self.path.exists() or self.holds_run():
                return
            others = sorted(
                path.name
                for path in self.path.iterdir()
                if not is_lock(path) and path.suffix != ".tmp" and path != self.checkpoints
            )
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be read ({error.strerror})") from error
        if others:
            raise ConfigError(
                f"output: {self.path} holds {', '.join(others[:4])} but no run ({self.starts.name}"
                "), so nothing can be resumed there; choose another folder with output=…"
            )

    def holds_run(self) -> bool:
        """Return whether the folder holds a run; OSError if it cannot be read."""
        if isinstance(_read_json(self.starts).get("starts"), list):
            return True
        # Other programs have folders `step_N`, too.
        return any((path / "SHA256SUMS").is_file() for path in self.checkpoints.glob("step_*"))

    def require_same_run(self, config: Config) -> None:
        """Require that the folder's `config.yaml`, if any, allows a resume with `config`."""
        try:
            saved = parse_yaml(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"output: {self.config} cannot be read ({error})") from error
        current = config.model_dump(mode="json")
        if fatal := compare(saved if isinstance(saved, dict) else {}, current, config).fatal:
            listed = "\n".join(f"  {line}" for line in fatal)
            raise ConfigError(
                f"output: {self.path} holds a run of another configuration:\n{listed}\n"
                "Restore these keys, or choose another folder with output=…"
            )

    def require_no_progress(self) -> None:
        """Require that a run without checkpoints has neither finished nor stopped before."""
        try:
            report = _read_json(self.report)
        except OSError as error:
            raise ConfigError(f"output: {self.report} cannot be read ({error})") from error
        ending = report.get("ended")
        if self.model.exists() or ending in ("finished", "stopped"):
            raise ConfigError(
                f"{self.path} holds a run that {ending or 'finished'} at step "
                f"{report.get('step', '?')}, but {self.checkpoints} holds no checkpoint to resume "
                "it from: bring the checkpoints back, or choose another folder with output=…"
            )

    def finished_step(self) -> int | None:
        """Return the last step of a finished run; None unless the run has finished."""
        with suppress(OSError):
            report = _read_json(self.report)
            if report.get("ended") == "finished" and self.model.is_dir():
                return report.get("step")
        return None


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object; {} if the file is missing, invalid or holds no object."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_log(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a log's records and the number of invalid lines; [] and 0 for a missing file."""
    # A line is invalid if a kill cut it, or while it is being written.
    records, invalid = [], 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    for line in filter(str.strip, lines):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            invalid += 1
    return records, invalid


def record_start(
    folder: RunFolder,
    step: int,
    total_steps: int,
    seed: int,
    devices: list[tuple[str, str]],
    data: Mapping[str, str],
) -> None:
    """Add a start to `run.json`, and write uncommitted changes to `git/step_N.diff`.

    devices: (host, device) of every rank; data: hashes of the data's parts by name.
    """
    repositories, changes = _repositories()
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "total_steps": total_steps,
        "command": redact_values(list(sys.orig_argv)),
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
    content = read_starts(folder.path)
    content["starts"].append(start)
    write_json(folder.starts, content, indent=1)
    if changes:
        (folder.path / "git").mkdir(exist_ok=True)
        diff = _SECRET.sub(rf"\1{HIDDEN}", redact(changes))
        write_text(folder.path / "git" / f"step_{step}.diff", diff)


def read_starts(folder: Path) -> dict[str, Any]:
    """Return the contents of `run.json` with its list `starts`; OSError if unreadable now."""
    content = _read_json(folder / "run.json")
    starts = content.get("starts")
    entries = starts if isinstance(starts, list) else []
    return content | {"starts": [start for start in entries if isinstance(start, dict)]}


def tracker_id(
    folder: RunFolder, tracker: str, create: Callable[[], str], renew: bool = False
) -> str:
    """Return the run's id at a tracker from `run.json`; create it if missing or with `renew`."""
    content = read_starts(folder.path)
    ids = content.setdefault("trackers", {})
    if renew or tracker not in ids:
        ids[tracker] = create()
        write_json(folder.starts, content, indent=1)
    return str(ids[tracker])


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return versions of Python, of this package and of installed `packages`, by name."""
    version_by_name = {"python": platform.python_version(), "vlp": vlp.__version__}
    for name in packages:
        try:
            version_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return version_by_name


def _repositories() -> tuple[list[dict[str, Any]], str]:
    """Return records of the package's and the working directory's repository, and their diffs."""
    repositories, changes = [], ""
    folders = (Path(vlp.__file__).parent, Path.cwd())
    roots = dict.fromkeys(_git(folder, "rev-parse", "--show-toplevel") for folder in folders)
    for root in (root.strip() for root in roots if root):
        commit, status = _git(Path(root), "rev-parse", "HEAD"), _git(Path(root), *_STATUS)
        diff = _git(Path(root), *_DIFF)
        repositories.append(
            {
                "repository": Path(root).name,
                "commit": (commit or "").strip(),
                "changed": status != "",  # also if git does not answer in time
            }
        )
        if diff and len(diff) > _LONGEST_DIFF:
            diff = f"# {Path(root).name}: more than {_LONGEST_DIFF} characters have changed\n"
        changes += diff or ""
    return repositories, changes


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None after an error, a timeout, or without git."""
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def write_report(
    folder: RunFolder | None,
    ending: str,
    progress: Progress,
    record: dict[str, Any],
    engine: Engine,
    total_steps: int,
) -> dict[str, Any]:
    """Return the summary of a run, and write it on rank 0 (`folder` is None on other ranks).

    ending: "finished", "stopped" (by a signal), "paused" or "failed"; record: last log record.
    """
    report: dict[str, Any] = {
        "ended": ending,
        "step": progress.step,
        "total_steps": total_steps,
        "samples": progress.samples,
        "trained_samples": progress.trained_samples,
        "seconds": progress.seconds,
        "samples_per_second": (
            progress.trained_samples / progress.seconds if progress.seconds else None
        ),
        "resumed_at_steps": progress.resume_steps,
        "non_finite_steps": progress.non_finite,
        "skipped_samples": progress.skipped,
        "skipped_examples": progress.skipped_examples,
        "best": None
        if progress.best_step is None
        else {"step": progress.best_step, **progress.best_metrics},
        "last_log": flatten(record),
        "ranks": engine.world_size,
        "device": device_name(engine.device),
        "peak_memory_bytes": _peak_memory(engine.device),
    }
    if folder is not None and folder.path.is_dir():
        try:
            write_json(folder.report, report, indent=1)
        except OSError as error:  # must not hide why the run ends
            logger.warning("cannot write %s: %s", folder.report, error)
    return report


def device_name(device: torch.device) -> str:
    """Return the name of a rank's device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank"


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, else of this rank's process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a flat dict, with nested names joined by `/`; inf and NaN become None, as in JSON."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, float) and not math.isfinite(value):
            flat[prefix + name] = None
        else:
            flat[prefix + name] = value
    return flat
