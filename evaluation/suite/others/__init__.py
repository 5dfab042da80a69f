"""Models of other libraries, evaluated as own ones: `open_clip:NAME/TAG`, `transformers:DIR`."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.core.samples import EvaluationError
from evaluation.suite.others.adapter import AdaptedModel, Towers
from vlp.models.folder import Loaded

LIBRARIES = ("open_clip", "transformers")
"""Each is a module `X_models` of this package with `towers(name)` and `files(name)`."""


class OtherModel(NamedTuple):
    """A model of another library, and its name there."""

    library: str
    name: str

    def __str__(self) -> str:
        """Return what names it on the command line."""
        return f"{self.library}:{self.name}"

    def load(self) -> Loaded:
        """Load model, tokenizer and image preparation, in evaluation mode on the CPU.

        Raises:
            EvaluationError: the library is not installed, or has no such dual encoder.
        """
        towers: Towers = self._module().towers(self.name)
        model = AdaptedModel(towers)
        # Evaluations by features alone need no more of a model than the adapter has.
        return Loaded(model, model.tokenize, model.preprocess)  # type: ignore[arg-type]

    def checksum(self) -> str:
        """Hash its name, and the files that it is read from where they are on this machine."""
        whole = hashlib.sha256(f"{self}\n".encode())
        for file in self._module().files(self.name):
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def _module(self) -> Any:
        return import_module(f"evaluation.suite.others.{self.library}_models")


def other_model(name: str | Path) -> OtherModel | None:
    """Return the model of another library that a name means; None for a folder or hub name.

    Raises:
        EvaluationError: it names a library alone.
    """
    library, separator, rest = str(name).partition(":")
    if not separator or library not in LIBRARIES:
        return None
    if not rest:
        raise EvaluationError(f"{name}: name a model behind the colon, as in {EXAMPLES[library]}")
    return OtherModel(library, rest)


EXAMPLES = {
    "open_clip": "open_clip:ViT-B-32/laion2b_s34b_b79k",
    "transformers": "transformers:openai/clip-vit-base-patch32",
}
