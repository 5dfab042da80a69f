"""State of a run beside its tensors: how far it is, and what it was trained as and on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vlp import distributed
from vlp.io import parse_json
from vlp.training.checkpoints.places import STATE, Place
from vlp.training.config import RunConfig
from vlp.training.logging.progress import Progress
from vlp.training.resume_check import compare

logger = logging.getLogger(__name__)

VERSION = 1
_PROGRESS = TypeAdapter(Progress)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message is meant for the person."""


class States:
    """The `state.json` of a run's checkpoints.

    Args:
        config: of the run.
        fingerprint: hashes of the data's parts by name.
    """

    def __init__(self, config: RunConfig, fingerprint: Mapping[str, str]) -> None:
        self._config, self._fingerprint = config, dict(fingerprint)
        self._values = config.model_dump(mode="json")

    def of(self, progress: Progress) -> dict[str, Any]:
        """Return the values at this moment, which later progress does not reach."""
        return {
            "version": VERSION,
            "progress": asdict(progress),
            "world_size": distributed.world_size(),
            "config": self._values,
            "data": self._fingerprint,
        }

    def read(self, place: Place, name: str) -> Progress:
        """Return the progress of a checkpoint that this run can go on from.

        Raises:
            CheckpointError: it was written with another configuration or on other data (what
                differs is named), or it is no such file.
        """
        path = place / name
        try:
            state: dict[str, Any] = parse_json(place.read(name, STATE))
            version, saved = state["version"], state["config"]
            progress = _PROGRESS.validate_python(state["progress"])
            differences = compare(saved, self._values, self._config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{path}/{STATE}: not the state of a run ({reason}); move {name} away, and "
                "the checkpoint before it is used"
            ) from error
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format version {version!r}; this code reads {VERSION}"
            )
        if differences.fatal:
            listed = "\n".join(f"  {line}" for line in differences.fatal)
            raise CheckpointError(
                f"{path} was trained with another configuration:\n{listed}\n"
                "Restore these keys, or choose another `output`."
            )
        self._require_own(path, saved.get("output"), differences.tolerated)
        for line in differences.tolerated:
            logger.warning("resuming with a changed setting: %s", line)
        self._require_data(path, state.get("data", self._fingerprint))
        return progress

    def _require_own(self, path: str, output: Any, changes: Sequence[str]) -> None:
        """Refuse checkpoints of another run, as two outputs with one `checkpoint_folder` find them.

        A run that goes on elsewhere, under another `output`, has data at other places and perhaps
        another length, batch or engine there, but the optimiser that it had.
        """
        own = self._config.output
        changes = [line for line in changes if line.startswith("training.optimiser.")]
        if self._config.training.checkpoint_folder is None or output == own or not changes:
            return
        raise CheckpointError(
            f"{path} is of the run {output}, and {own} differs:\n  " + "\n  ".join(changes) + "\n"
            "Give this run a training.checkpoint_folder of its own, or that run's `output`."
        )

    def _require_data(self, path: str, saved: Mapping[str, str]) -> None:
        parts = sorted(dict(saved.items() ^ self._fingerprint.items()))
        if not parts:
            return
        changed = f"{path} was trained on other data: {', '.join(parts)} changed since"
        if not self._config.training.accept_changed_data:
            raise CheckpointError(
                f"{changed}; restore what changed, choose another `output`, or go on with "
                "training.accept_changed_data=true"
            )
        logger.warning("%s, which training.accept_changed_data accepts", changed)
