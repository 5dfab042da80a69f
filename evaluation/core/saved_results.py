"""Figures of results that were saved, whatever task they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from evaluation.core.results import Figure

_ARROWS = {"text_to_image": "text → image", "image_to_text": "image → text", "both": "both"}


class Saved(NamedTuple):
    """figures by name, and the name of the one that stands for all."""

    figures: dict[str, Figure]
    main: str


def saved_figures(content: Mapping[str, Any]) -> Saved:
    """Figures of what a result's `to_json` gave.

    Of retrieval those of the last stage; its `both mean` is the main one. Of swaps the group score
    of the cross-modal encoder over all kinds, of pointing that of colour words.

    Raises:
        ValueError: it is no such content.
    """
    try:
        if isinstance(content.get("figures"), list):
            return _retrieval(content)
        if content["task"] == "pointing":
            return _pointing(content)
        figures = {name: Figure(**figure) for name, figure in content["figures"].items()}
        main = "match/all/group" if content["task"] == "swaps" else next(iter(figures))
        return Saved(figures, main)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"not the figures of a result ({error!r})") from error


def _retrieval(content: Mapping[str, Any]) -> Saved:
    last = content["figures"][-1]["stage"]
    figures = {
        f"{_ARROWS[one['direction']]} {one['name']}": Figure(
            one["value"], one["low"], one["high"], one["chance"]
        )
        for one in content["figures"]
        if one["stage"] == last
    }
    return Saved(figures, "both mean")


def _pointing(content: Mapping[str, Any]) -> Saved:
    figures = {}
    for kind, own in content["kinds"].items():
        for name, said in (("pointing", "in its box"), ("any_object", "in any box")):
            figures[f"{kind} words {said}"] = Figure(**own[name])
        for name, figure in own.get("controls", {}).items():
            figures[f"{kind} words by {name}"] = Figure(**figure)
    return Saved(figures, next(iter(figures)))
