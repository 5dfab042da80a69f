"""The folder of a run: its files, `run.json` (each start) and `report.json` (how it went)."""

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
    """Lines 'key: saved X, now Y': fatal ones forbid resuming, tolerated ones are warnings."""

    fatal: list[str]
    tolerated: list[str]


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], config: Config) -> Differences:
    """Compare two configurations as JSON values, key by dotted key."""
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    differences = Differences([], [])
    for key in sorted(before.keys() | now.keys()):
        saved_text, current_text = before.get(key, "absent"), now.get(key, "absent")
        rule = resume_rule(config, key)
        # What one of them does not tell, as a checkpoint older than a key, has its default.
        saved_value, current_value = (
            values[key] if key in values else _default(config, key) for values in (before, now)
        )
        if saved_value == current_value or rule == "free":
            continue
        are_texts = isinstance(before.get(key), str) and isinstance(now.get(key), str)
        tolerated = rule == "tolerated" or (rule == "path" and are_texts)
        lines = differences.tolerated if tolerated else differences.fatal
        lines.append(redact(f"{key}: saved {saved_text!r}, now {current_text!r}"))
    return differences


def require_same_on_all_ranks(config: Config, fingerprint: Mapping[str, str]) -> None:
    """Require equal training and data on all ranks; collective."""
    # Nodes may have other paths, and other keys of `data` that may change at a resume.
    local = dict(_leaves(config.model_dump(mode="json"))), dict(fingerprint)
    values, parts = distributed.from_rank_0(local)
    problems = [
        f"{part} of the data is not that of rank 0" for part, _ in parts.items() ^ local[1].items()
    ]
    for key in values.keys() | local[0].keys():
        local_value, value = local[0].get(key), values.get(key)
        if local_value != value and not _may_differ_by_node(config, key, local_value, value):
            problems.append(redact(f"{key} is {local_value!r}, {value!r} on rank 0"))
    with distributed.raise_on_all_ranks(ConfigError):
        if problems:
            raise ConfigError(f"{socket.gethostname()}: {'; '.join(sorted(set(problems)))}")


def _may_differ_by_node(config: Config, key: str, *values: Any) -> bool:
    """Return whether a dotted key may differ between nodes."""
    rule = resume_rule(config, key)
    if rule == "free" and key.startswith(("data.", "task.data.")):
        return True
    texts = all(isinstance(value, str) for value in values)
    return texts and not key.startswith("training.") and rule != "fixed"


def resume_rule(config: Config, key: str) -> str:
    """Return the rule of a dotted key: that of its innermost part that declares one."""
    rule = "fixed"
    node: Any = config
    for part in key.split("."):
        if isinstance(node, Config):
            field = type(node).model_fields.get(part)
            rule = _field_rule(node.model_config.get("json_schema_extra")) or rule
            rule = _field_rule(field and field.json_schema_extra) or rule
            node = getattr(node, part, None)
        elif isinstance(node, Sequence) and part.isdigit():
            node = node[int(part)] if int(part) < len(node) else None
        else:
            node = None
    return rule


def _default(config: Config, key: str) -> Any:
    """Return the default of a dotted key; None without any."""
    node: Any = config
    *parents, leaf = key.split(".")
    for part in parents:
        node = getattr(node, part, None)
    field = type(node).model_fields.get(leaf) if isinstance(node, Config) else None
    return None if field is None or field.is_required() else field.get_default()


def _field_rule(extra: Any) -> Any:
    return extra.get("resume") if isinstance(extra, Mapping) else None


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
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


class RunFolder:
    """Paths of a run's files.

    config: the resolved configuration; log: a JSON object per logged step; tensorboard: event
    files; checkpoints: folders `step_N`; model: public folder of the finished model; best: best
    validated one; report: summary, written at every end; record: the starts, first file of a run;
    hang: stacks of hanging ranks.
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
        self.record = self.path / "run.json"
        self.hang = self.path / "hang"
        try:
            used = self.path.exists() and not all(map(is_lock, self.path.iterdir()))
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be used ({error.strerror})") from error
        if used and not resume:
            raise ConfigError(
                f"output: {self.path} is not empty; continue its run with --resume, or choose "
                "another folder with output=…"
            )

    def require_run(self) -> None:
        """Require that the folder of a resumed run is a run's, or holds nothing to be lost."""
        try:
            if not self.path.exists() or self.holds_run():
                return
            # What a start that was killed at once leaves.
            others = sorted(
                path.name
                for path in self.path.iterdir()
                if not is_lock(path) and path.suffix != ".tmp" and path != self.checkpoints
            )
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be read ({error.strerror})") from error
        if others:
            raise ConfigError(
                f"output: {self.path} holds {', '.join(others[:4])} but no run ({self.record.name}"
                "), so nothing can be resumed there; choose another folder with output=…"
            )

    def holds_run(self) -> bool:
        """Return whether a run has been started in the folder; OSError if it cannot be read."""
        # Other programs name their checkpoints alike.
        if any((path / "SHA256SUMS").is_file() for path in self.checkpoints.glob("step_*")):
            return True
        return isinstance(_json(self.record).get("starts"), list)

    def require_same_run(self, config: Config) -> None:
        """Require that the folder's configuration, where there is one, is that of this run."""
        try:
            saved = parse_yaml(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"output: {self.config} cannot be read ({error})") from error
        now = redact_values(config.model_dump(mode="json"))
        saved = saved if isinstance(saved, dict) else {}
        if fatal := compare(saved, now, config).fatal:
            listed = "\n".join(f"  {line}" for line in fatal)
            raise ConfigError(
                f"output: {self.path} holds a run of another configuration:\n{listed}\n"
                "Restore these keys, or choose another folder with output=…"
            )

    def require_no_progress(self, location: str) -> None:
        """Refuse to resume without checkpoints a run that finished, stopped or left a model."""
        try:
            report = _json(self.report)
        except OSError as error:
            raise ConfigError(f"output: {self.report} cannot be read ({error})") from error
        ended = report.get("ended")
        if self.model.exists() or ended in ("finished", "stopped"):
            raise ConfigError(
                f"{self.path} holds a run that {ended or 'finished'} at step "
                f"{report.get('step', '?')}, but {location} holds no checkpoint to resume it from: "
                "bring the checkpoints back, or choose another folder with output=…"
            )

    def finished_at(self) -> int | None:
        """Return the step of the finished model in the folder; None without one."""
        with suppress(OSError):
            report = _json(self.report)
            if report.get("ended") == "finished" and self.model.is_dir():
                return report.get("step")
        return None


def _json(file: Path) -> dict[str, Any]:
    """Return a JSON file's contents; empty if it is missing or invalid."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_log(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the step lines of a run's log, empty if missing, and the number of invalid ones."""
    # Invalid lines were cut off by a kill or are still being written.
    rows, invalid = [], 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    for line in filter(str.strip, lines):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            invalid += 1
    return rows, invalid


def record_start(
    folder: RunFolder,
    step: int,
    total: int,
    seed: int,
    devices: list[tuple[str, str]],
    data: Mapping[str, str],
) -> None:
    """Add a start to `run.json`, and write uncommitted changes to `git/step_N.diff`."""
    repositories, changes = _repositories()
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "total_steps": total,
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
    record = read_record(folder.path)
    record["starts"] = [*record.get("starts", []), start]
    write_json(folder.record, record, indent=1)
    if changes:
        (folder.path / "git").mkdir(exist_ok=True)
        hidden = _SECRET.sub(rf"\1{HIDDEN}", redact(changes))
        write_text(folder.path / "git" / f"step_{step}.diff", hidden)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of `run.json`, empty without it; OSError if unreadable now."""
    return _json(folder / "run.json")


def tracker_id(
    folder: RunFolder, tracker: str, create: Callable[[], str], renew: bool = False
) -> str:
    """Return the run's id at a tracker, which all its starts share; `create` gives a new one."""
    record = read_record(folder.path)
    ids = record.setdefault("trackers", {})
    if renew or tracker not in ids:
        ids[tracker] = create()
        write_json(folder.record, record, indent=1)
    return str(ids[tracker])


def this_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return versions of Python, of this package and of those packages that are installed."""
    installed = {"python": platform.python_version(), "vlp": vlp.__version__}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _repositories() -> tuple[list[dict[str, Any]], str]:
    """Return commits and changes of the package's and the user's repository."""
    repositories, changes = [], ""
    folders = (Path(vlp.__file__).parent, Path.cwd())
    roots = dict.fromkeys(_git(folder, "rev-parse", "--show-toplevel") for folder in folders)
    for root in (root.strip() for root in roots if root):
        commit, state = _git(Path(root), "rev-parse", "HEAD"), _git(Path(root), *_STATUS)
        diff = _git(Path(root), *_DIFF)
        repositories.append(
            {
                "repository": Path(root).name,
                "commit": (commit or "").strip(),
                "changed": state != "",  # also where git does not answer in time
            }
        )
        if diff and len(diff) > _LONGEST_DIFF:
            diff = f"# {Path(root).name}: more than {_LONGEST_DIFF} characters have changed\n"
        changes += diff or ""
    return repositories, changes


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None without git, a repository, or an answer in time."""
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
    ended: str,
    progress: Progress,
    record: dict[str, Any],
    engine: Engine,
    total: int,
) -> dict[str, Any]:
    """Summarise a run that ended as `finished`, `stopped` (by a signal), `paused` or `failed`."""
    report: dict[str, Any] = {
        "ended": ended,
        "step": progress.step,
        "total_steps": total,
        "samples": progress.samples,
        "trained_samples": progress.trained_samples,
        "seconds": progress.seconds,
        "samples_per_second": (
            progress.trained_samples / progress.seconds if progress.seconds else None
        ),
        "resumed_at_steps": progress.resumed,
        "non_finite_steps": progress.non_finite,
        "skipped_samples": progress.skipped,
        "skipped_examples": progress.examples,
        "best": None
        if progress.best_step is None
        else {"step": progress.best_step, **progress.best_figures},
        "last_log": flatten(record),
        "ranks": engine.world_size,
        "device": device_name(engine.device),
        "peak_memory_bytes": _peak_memory(engine.device),
    }
    if folder is not None and folder.path.is_dir():
        try:
            write_json(folder.report, report, indent=1)
        # A full disk, for example; the run itself ends as it was ending.
        except OSError as error:
            logger.warning("cannot write %s: %s", folder.report, error)
    return report


def device_name(device: torch.device) -> str:
    """Return the name of a rank's device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank"


def _peak_memory(device: torch.device) -> int:
    """Return peak bytes: of tensors on a GPU, else of this rank's process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested names by `/`; numbers that JSON cannot write become None."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, float) and not math.isfinite(value):
            flat[prefix + name] = None
        else:
            flat[prefix + name] = value
    return flat
