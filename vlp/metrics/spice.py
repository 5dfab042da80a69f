"""SPICE of captions, by the code of the COCO caption evaluation, where its files are there.

pycocoevalcap fetches a parser of some hundred megabytes when SPICE is first used; here nothing is
fetched.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp.metrics.captions import CaptionToolError, require_caption_tools

PARSER = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


def require_spice() -> None:
    """Say what is missing.

    Raises:
        CaptionToolError: pycocoevalcap, Java, or the parser.
    """
    require_caption_tools()
    folder = Path(_module("spice").__file__).parent / "lib"
    missing = [name for name in PARSER if not (folder / name).is_file()]
    if missing:
        raise CaptionToolError(
            f"SPICE needs Stanford CoreNLP 3.6.0: put {' and '.join(missing)} into {folder}, or "
            "let `python -m pycocoevalcap.spice.get_stanford_models` fetch them"
        )


def spice_scores(
    candidates: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """F-score over scene-graph tuples of each caption, between 0 and 1; SPICE is their mean.

    Args:
        candidates: one caption each.
        references: as many, with one caption or more each.

    Raises:
        ValueError: other numbers of candidates and references.
        CaptionToolError: see `require_spice`.
    """
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} captions against references of {len(references)}")
    require_spice()
    found = {n: [" ".join(one.split())] for n, one in enumerate(candidates)}
    wanted = {n: [" ".join(one.split()) for one in said] for n, said in enumerate(references)}
    _, each = _module("spice").Spice().compute_score(wanted, found)
    # Nothing said and nothing to say gives 0 / 0.
    return np.nan_to_num(np.array([scores["All"]["f"] for scores in each], dtype=np.float64))


def _module(name: str) -> Any:
    return importlib.import_module(f"pycocoevalcap.spice.{name}")
