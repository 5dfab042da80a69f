"""Differences between the configuration of a checkpoint and the one at hand.

A run may be moved, sped up, prolonged or evaluated otherwise; what it trains, on what, and in which
order may not change. Fields say so by `json_schema_extra={"resume": ...}`, configurations by the
same in their `model_config`, for what lies below them: "free" may differ, "tolerated" may with a
warning, "path" may where both values are texts, with a warning, as a folder elsewhere may hold the
same; "fixed", which is the default, may not. Batch and ranks are not fixed: the place in the data
is a number of samples.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlp import distributed
from vlp.config import Config, ConfigError
from vlp.io import redacted


class Differences(NamedTuple):
    """Lines 'key: saved X, now Y', apart for what forbids resuming and what deserves a warning."""

    fatal: list[str]
    tolerated: list[str]


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], config: Config) -> Differences:
    """Compare two configurations as JSON values, key by dotted key.

    Args:
        saved: that of the checkpoint.
        current: that of the run at hand.
        config: the run's, whose fields say what may differ.
    """
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    differences = Differences([], [])
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, "absent"), now.get(key, "absent")
        rule = resume_rule(config, key)
        # What one of them does not tell, as a checkpoint older than a key, has its default.
        was, is_now = (
            told[key] if key in told else _default(config, key) for told in (before, now)
        )
        if was == is_now or rule == "free":
            continue
        moved = isinstance(before.get(key), str) and isinstance(now.get(key), str)
        tolerated = rule == "tolerated" or (rule == "path" and moved)
        chosen = differences.tolerated if tolerated else differences.fatal
        chosen.append(redacted(f"{key}: saved {old!r}, now {new!r}"))
    return differences


def require_same_on_all_ranks(config: Config, fingerprint: Mapping[str, str]) -> None:
    """Require that all ranks train the same on the same data; collective.

    A node may have files of its own. Paths may differ, and what of `data` may at a resume.

    Args:
        config: of this rank.
        fingerprint: hashes of the data's parts by name.
    """
    own = dict(_leaves(config.model_dump(mode="json"))), dict(fingerprint)
    values, parts = distributed.from_rank_0(own)
    problems = [
        f"{part} of the data is not that of rank 0" for part, _ in parts.items() ^ own[1].items()
    ]
    for key in values.keys() | own[0].keys():
        ours, theirs = own[0].get(key), values.get(key)
        if ours != theirs and not _is_of_node(config, key, ours, theirs):
            problems.append(redacted(f"{key} is {ours!r}, {theirs!r} on rank 0"))
    with distributed.agreed(ConfigError):
        if problems:
            raise ConfigError(f"{socket.gethostname()}: {'; '.join(sorted(set(problems)))}")


def _is_of_node(config: Config, key: str, *values: Any) -> bool:
    """Return whether each node may have its own value of a dotted key."""
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
            rule = _declared(node.model_config.get("json_schema_extra")) or rule
            rule = _declared(field and field.json_schema_extra) or rule
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


def _declared(extra: Any) -> Any:
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
