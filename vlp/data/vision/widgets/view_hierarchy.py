"""A screen as its widgets, read from a view hierarchy in RICO's format (Deka et al. 2017)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vlp.data.shards.sample_files import BadSample

Nodes = Literal["all", "leaves"]

SHORT_SIDE, LONG_SIDE = 1440, 2560
"""Pixels of the space that bounds are given in, whatever the screenshot's size."""

# Classes that the public widget captioning code tells apart; what has none of them is unknown.
KINDS = (
    "unknown",
    "imageview",
    "button",
    "imagebutton",
    "view",
    "compoundbutton",
    "checkbox",
    "radiobutton",
    "floatingactionbutton",
    "togglebutton",
    "switch",
)

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


class Widget(NamedTuple):
    """One node of the tree.

    path: child numbers from the root, which is "0", as in `nodeId` of the widget captions. box: x0,
    y0, x1, y1, shares of the screen's width and height. kind: number in `KINDS`. text: what it
    shows, else its description. resource: words of its resource id. tree: depth, place in pre-order
    and in post-order, all from 1.
    """

    path: str
    box: tuple[float, float, float, float]
    kind: int
    clickable: bool
    text: str
    resource: str
    tree: tuple[int, int, int]


class Screen(NamedTuple):
    """Widgets in pre-order; captions: number of a widget to what people call it."""

    name: str
    widgets: tuple[Widget, ...]
    captions: dict[int, tuple[str, ...]]


class _Visit(NamedTuple):
    node: Mapping[str, Any]
    path: str
    tree: tuple[int, int, int]
    leaf: bool


def read_screen(
    hierarchy: Any,
    name: str,
    captions: Mapping[str, Sequence[str]],
    nodes: Nodes = "all",
) -> Screen:
    """Return the widgets of a view hierarchy.

    Nodes that are not visible to the user, or have no area on the screen, are left out unless they
    have a caption. Bounds are clipped to the screen; one that is wider than tall is 2560 x 1440.

    Args:
        hierarchy: parsed JSON: `activity.root` is the tree, or the whole is.
        name: of the screen, for errors.
        captions: by path.
        nodes: "all" nodes or "leaves" alone; those with captions always count.

    Raises:
        BadSample: there is no tree, bounds are no four numbers, or a caption's widget is missing.
    """
    root = hierarchy
    if isinstance(hierarchy, Mapping) and "activity" in hierarchy:
        activity = hierarchy["activity"]
        root = activity.get("root") if isinstance(activity, Mapping) else None
    if not isinstance(root, Mapping):
        raise BadSample("no view hierarchy", name)
    left, top, right, bottom = _bounds(root, name, "0")
    size = (SHORT_SIDE, LONG_SIDE)
    if right - left > bottom - top:
        size = (LONG_SIDE, SHORT_SIDE)
    widgets: list[Widget] = []
    named: dict[int, tuple[str, ...]] = {}
    for visit in _walk(root, name):
        box = _share(_bounds(visit.node, name, visit.path), size)
        spoken = tuple(c for caption in captions.get(visit.path, ()) if (c := caption.strip()))
        shown = (
            bool(visit.node.get("visible-to-user", True)) and box[2] > box[0] and box[3] > box[1]
        )
        if spoken:
            named[len(widgets)] = spoken
        elif not shown or (nodes == "leaves" and not visit.leaf):
            continue
        widgets.append(_widget(visit, box))
    paths = {widgets[number].path for number in named}
    if lost := sorted(path for path, said in captions.items() if any(said) and path not in paths):
        raise BadSample("captions without their widget", f"{name} (nodes {', '.join(lost[:5])})")
    return Screen(name, tuple(widgets), named)


def _walk(root: Mapping[str, Any], name: str) -> Iterator[_Visit]:
    """Return all nodes in pre-order, once both orders are known."""
    found: list[tuple[Mapping[str, Any], str, int]] = []
    finished: dict[str, int] = {}
    left: list[tuple[Mapping[str, Any] | None, str, int]] = [(root, "0", 1)]
    while left:
        node, path, depth = left.pop()
        if node is None:  # all below it are done
            finished[path] = len(finished) + 1
            continue
        found.append((node, path, depth))
        left.append((None, path, depth))
        children = node.get("children") or []
        if not isinstance(children, Sequence):
            raise BadSample("bad children", f"{name}, node {path} ({children!r:.40})")
        for number, child in reversed(list(enumerate(children))):
            if isinstance(child, Mapping):  # RICO has null children, which keep their number
                left.append((child, f"{path}.{number}", depth + 1))
    for order, (node, path, depth) in enumerate(found, start=1):
        children = node.get("children") or []
        leaf = not any(isinstance(child, Mapping) for child in children)
        yield _Visit(node, path, (depth, order, finished[path]), leaf)


def _widget(visit: _Visit, box: tuple[float, float, float, float]) -> Widget:
    node = visit.node
    classes = [node.get("class"), *_several(node.get("ancestors"))]
    short = [str(one).rpartition(".")[2].lower() for one in classes]
    kind = next((KINDS.index(one) for one in short if one in KINDS), 0)
    said = [node.get("text"), *_several(node.get("content-desc"))]
    text = next((" ".join(one.split()) for one in said if isinstance(one, str) and one.strip()), "")
    resource = str(node.get("resource-id") or "").rpartition("/")[2]
    words = " ".join(word.lower() for word in _WORDS.findall(resource))
    return Widget(
        visit.path, box, kind, bool(node.get("clickable", False)), text, words, visit.tree
    )


def _bounds(node: Mapping[str, Any], name: str, path: str) -> tuple[float, float, float, float]:
    bounds = node.get("bounds")
    match bounds:
        case [x0, y0, x1, y1] if all(
            isinstance(edge, int | float) and math.isfinite(edge) for edge in bounds
        ):
            return x0, y0, x1, y1
    raise BadSample("bad bounds", f"{name}, node {path} (bounds {bounds!r})")


def _share(
    bounds: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (min(max(edge / side, 0.0), 1.0) for edge, side in zip(bounds, (*size, *size)))
    return x0, y0, max(x0, x1), max(y0, y1)


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
