"""One job of `vlp evaluate all`: a model on one set; base of every task's options."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import Field, model_validator

from vlp.config import Config, Precision

NAME = r"^[\w][\w.+@-]*$"


class Job(Config):
    """One model on one set."""

    task: str = Field(description="what is evaluated")
    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    name: str | None = Field(
        None, pattern=NAME, description="of its table; null: the task's. Needed for a second set"
    )
    model: str | None = Field(
        None, description="folder, where the task has one of its own; null: the entry's"
    )
    limit: int | None = Field(None, ge=1, description="only the first so many items")
    batch: int = Field(64, ge=1, description="samples computed at once")
    precision: Precision | None = Field(
        None, description="of computation; null: bf16 on a GPU, float32 elsewhere"
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(cls.fields())}"
                raise ValueError(f"task {values.get('task')} has no option {key!r}; {hint}")
        return values

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(cls.model_fields)

    @property
    def label(self) -> str:
        """Return the name of its table, and of the folder of its result."""
        return self.name or self.task
