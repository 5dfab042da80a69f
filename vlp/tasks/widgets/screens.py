"""Generated screens with captioned widgets, and the view hierarchies of Rico."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from vlp.data.shards.sample_files import BadSample

Nodes = Literal["all", "leaves"]

# Pixels of the space that bounds are given in, whatever the screenshot's size.
SHORT_SIDE, LONG_SIDE = 1440, 2560

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
    """One node of the tree."""

    # Child numbers from the root, which is "0", as in `nodeId` of the widget captions.
    path: str
    # x0, y0, x1, y1, shares of the screen's width and height
    box: tuple[float, float, float, float]
    # Number in `KINDS`.
    kind: int
    clickable: bool
    # The visible text, else the description.
    text: str
    # Words of its resource id.
    resource: str
    # Depth, number in pre-order and in post-order, all from 1.
    tree: tuple[int, int, int]


class Screen(NamedTuple):
    """Widgets in pre-order, and people's captions."""

    name: str
    widgets: tuple[Widget, ...]
    # By the number of a widget.
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

    Nodes that are invisible or have no area on the screen are left out unless they have a caption.
    Bounds are clipped to the screen; a landscape one is 2560 x 1440.

    Args:
        hierarchy: parsed JSON: `activity.root` is the tree, or the whole is.
        nodes: "all" nodes or "leaves" alone; nodes with captions always count.
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
    by_number: dict[int, tuple[str, ...]] = {}
    for visit in _walk(root, name):
        box = _share(_bounds(visit.node, name, visit.path), size)
        stripped = tuple(c for caption in captions.get(visit.path, ()) if (c := caption.strip()))
        visible = (
            bool(visit.node.get("visible-to-user", True)) and box[2] > box[0] and box[3] > box[1]
        )
        if stripped:
            by_number[len(widgets)] = stripped
        elif not visible or (nodes == "leaves" and not visit.leaf):
            continue
        widgets.append(_widget(visit, box))
    paths = {widgets[number].path for number in by_number}
    if missing := sorted(
        path for path, texts in captions.items() if any(texts) and path not in paths
    ):
        raise BadSample("captions without their widget", f"{name} (nodes {', '.join(missing[:5])})")
    return Screen(name, tuple(widgets), by_number)


def _walk(root: Mapping[str, Any], name: str) -> Iterator[_Visit]:
    """Return all nodes in pre-order, once both orders are known."""
    nodes: list[tuple[Mapping[str, Any], str, int]] = []
    finished: dict[str, int] = {}
    stack: list[tuple[Mapping[str, Any] | None, str, int]] = [(root, "0", 1)]
    while stack:
        node, path, depth = stack.pop()
        if node is None:  # all below it are done
            finished[path] = len(finished) + 1
            continue
        nodes.append((node, path, depth))
        stack.append((None, path, depth))
        children = node.get("children") or []
        if not isinstance(children, Sequence):
            raise BadSample("bad children", f"{name}, node {path} ({children!r:.40})")
        for number, child in reversed(list(enumerate(children))):
            if isinstance(child, Mapping):  # RICO has null children, which keep their number
                stack.append((child, f"{path}.{number}", depth + 1))
    for order, (node, path, depth) in enumerate(nodes, start=1):
        children = node.get("children") or []
        leaf = not any(isinstance(child, Mapping) for child in children)
        yield _Visit(node, path, (depth, order, finished[path]), leaf)


def _widget(visit: _Visit, box: tuple[float, float, float, float]) -> Widget:
    node = visit.node
    classes = [node.get("class"), *_as_list(node.get("ancestors"))]
    names = [str(name).rpartition(".")[2].lower() for name in classes]
    kind = next((KINDS.index(name) for name in names if name in KINDS), 0)
    texts = [node.get("text"), *_as_list(node.get("content-desc"))]
    text = next((" ".join(t.split()) for t in texts if isinstance(t, str) and t.strip()), "")
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


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


Box = tuple[int, int, int, int]

NUMBERS = ("one", "two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
NAMES = (
    "anna", "ben", "clara", "david", "emma", "felix", "grace", "henry", "iris", "jack", "kate",
    "leo", "mia", "noah", "olga", "paul", "rosa", "sam", "tina", "victor",
)  # fmt: skip
SETTINGS = (
    "airplane mode", "alarm", "backlight", "bluetooth", "calls", "contrast", "dark mode",
    "keyboard", "location", "media", "messages", "microphone", "music", "notifications",
    "ringtone", "roaming", "sound", "sync", "vibration", "wifi",
)  # fmt: skip
TABS = (
    "camera", "favorites", "friends", "home", "library", "news", "orders", "profile", "radio",
    "store",
)  # fmt: skip
TITLES = ("inbox", "settings", "my photos", "overview", "welcome", "control center")

_VIEW, _IMAGE = "android.widget.TextView", "android.widget.ImageView"
_BUTTON, _SWITCH = "android.widget.ImageButton", "android.widget.Switch"
_GROUP = "android.widget.LinearLayout"


@dataclass
class _Node:
    kind: str
    box: Box
    text: str | None = None
    clickable: bool = False
    captions: tuple[str, ...] = ()
    children: list[_Node] = field(default_factory=list)


def generate_screen(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Draw a screen: a view hierarchy for `read_screen`, and two right captions by path."""
    # A toolbar, a body and tabs at random places. Icons have no text, and siblings stand in random
    # order: an icon's caption follows from its place ("delete the second message") and from the
    # text next to it ("delete the message from anna").
    top = bottom = 0
    parts = []
    if rng.random() < 0.8:
        top = _between(rng, 150, 260)
        parts.append(_toolbar(rng, top))
    if rng.random() < 0.7:
        bottom = _between(rng, 180, 300)
        parts.append(_tabs(rng, bottom))
    area = (
        _between(rng, 0, 160),
        top + _between(rng, 20, 300),
        SHORT_SIDE - _between(rng, 0, 160),
        LONG_SIDE - bottom - _between(rng, 20, 300),
    )
    body = (_messages, _switches, _sliders, _photos)[rng.integers(4)]
    parts.append(body(rng, area))
    root = _Node(_GROUP, (0, 0, SHORT_SIDE, LONG_SIDE), children=parts)
    captions: dict[str, tuple[str, ...]] = {}
    hierarchy = _written(root, "0", rng, captions)
    return {"activity": {"root": hierarchy}}, captions


def _toolbar(rng: np.random.Generator, height: int) -> _Node:
    side = _between(rng, 80, height - 60)
    top = (height - side) // 2
    bar = _Node(_GROUP, (0, 0, SHORT_SIDE, height))
    left, right = _between(rng, 10, 60), SHORT_SIDE - _between(rng, 10, 60)
    if rng.random() < 0.7:
        bar.children.append(
            _icon((left, top, left + side, top + side), "go back", "return to the screen before")
        )
        left += side + _between(rng, 20, 60)
    buttons = (
        ("show more options", "open the menu of more options"),
        ("search", "search on this screen"),
        ("share", "share this page"),
    )
    for captions in buttons[: rng.integers(4)]:
        bar.children.append(_icon((right - side, top, right, top + side), *captions))
        right -= side + _between(rng, 10, 50)
    bar.children.append(_label((left, top, left + 400, top + side), str(rng.choice(TITLES))))
    return bar


def _tabs(rng: np.random.Generator, height: int) -> _Node:
    count = _between(rng, 3, 5)
    top = LONG_SIDE - height
    bar = _Node(_GROUP, (0, top, SHORT_SIDE, LONG_SIDE))
    labels = rng.choice(TABS, count, replace=False) if rng.random() < 0.5 else None
    side = _between(rng, 80, height - 80)
    for number, (x0, x1) in enumerate(_cuts(0, SHORT_SIDE, count)):
        x, y = (x0 + x1 - side) // 2, top + 10
        where = f"the {ORDINALS[number]} tab"
        if labels is not None:
            where = f"the {labels[number]} tab"
            bar.children.append(_label((x0 + 20, y + side, x1 - 20, LONG_SIDE), labels[number]))
        bar.children.append(_icon((x, y, x + side, y + side), f"open {where}", f"go to {where}"))
    return bar


def _messages(rng: np.random.Generator, area: Box) -> _Node:
    """Draw rows with an image, a line, and a button that deletes; the line may hold no text."""
    count = _between(rng, 2, 6)
    names = rng.choice(NAMES, count, replace=False) if rng.random() < 0.5 else None
    flipped = rng.random() < 0.5

    def row(number: int, box: Box, side: int) -> list[_Node]:
        first, last = _ends(box, side, flipped)
        line = (box[0] + side + 80, box[1] + 10, box[2] - side - 80, box[3] - 10)
        if names is None:
            which = f"the {ORDINALS[number]} message"
            return [_Node(_IMAGE, first), _Node(_VIEW, line), _delete(last, which)]
        image = _Node(_IMAGE, first, None, True, _two("open", "show", names[number], "profile of"))
        return [
            image,
            _label(line, names[number]),
            _delete(last, f"the message from {names[number]}"),
        ]

    return _rows(rng, area, count, row)


def _switches(rng: np.random.Generator, area: Box) -> _Node:
    count = _between(rng, 2, 6)
    labels = rng.choice(SETTINGS, count, replace=False)
    flipped = rng.random() < 0.5

    def row(number: int, box: Box, side: int) -> list[_Node]:
        _, last = _ends(box, side, flipped)
        line = (box[0] + side + 80, box[1] + 10, box[2] - side - 80, box[3] - 10)
        label = labels[number]
        captions = (f"turn {label} on or off", f"switch for {label}")
        return [_label(line, label), _Node(_SWITCH, last, None, True, captions)]

    return _rows(rng, area, count, row)


def _sliders(rng: np.random.Generator, area: Box) -> _Node:
    """Draw sliders, each under its label and as wide as the list."""
    count = _between(rng, 2, 5)
    labels = rng.choice(SETTINGS, count, replace=False)

    def row(number: int, box: Box, side: int) -> list[_Node]:
        middle = (box[1] + box[3]) // 2
        label = labels[number]
        captions = (f"set the volume of {label}", f"slider for {label}")
        edges = (box[0], middle, box[2], box[3] - 30)
        slider = _Node("android.view.View", edges, None, True, captions)
        return [_label((box[0], box[1], box[0] + 500, middle), label), slider]

    return _rows(rng, area, count, row)


def _photos(rng: np.random.Generator, area: Box) -> _Node:
    rows, columns = _between(rng, 2, 4), _between(rng, 2, 4)
    gap = _between(rng, 4, 40)
    table = _Node(_GROUP, area)
    for row, (y0, y1) in enumerate(_cuts(area[1], area[3], rows)):
        for column, (x0, x1) in enumerate(_cuts(area[0], area[2], columns)):
            where = f"row {NUMBERS[row]} column {NUMBERS[column]}"
            captions = (f"open the photo in {where}", f"show photo {where}")
            box = (x0 + gap, y0 + gap, x1 - gap, y1 - gap)
            table.children.append(_Node(_IMAGE, box, None, True, captions))
    return table


def _rows(
    rng: np.random.Generator, area: Box, count: int, row: Callable[[int, Box, int], list[_Node]]
) -> _Node:
    """Draw a list with rows of one random height."""
    height = min((area[3] - area[1]) // count, _between(rng, 180, 420))
    side = _between(rng, 80, height - 60)
    rows = _Node(_GROUP, area)
    for number in range(count):
        top = area[1] + number * height
        box = (area[0] + 10, top, area[2] - 10, top + height)
        rows.children.append(_Node(_GROUP, box, children=row(number, box, side)))
    return rows


def _ends(box: Box, side: int, flipped: bool) -> tuple[Box, Box]:
    """Return squares at both ends of a row: its beginning, and its place for actions."""
    y = (box[1] + box[3] - side) // 2
    ends = (
        (box[0] + 20, y, box[0] + 20 + side, y + side),
        (box[2] - 20 - side, y, box[2] - 20, y + side),
    )
    return (ends[1], ends[0]) if flipped else ends


def _delete(box: Box, which: str) -> _Node:
    return _icon(box, f"delete {which}", f"remove {which}")


def _two(first: str, second: str, name: str, what: str) -> tuple[str, str]:
    return f"{first} the {what} {name}", f"{second} the {what} {name}"


def _icon(box: Box, *captions: str) -> _Node:
    return _Node(_BUTTON, box, None, True, captions)


def _label(box: Box, text: str) -> _Node:
    return _Node(_VIEW, box, str(text))


def _cuts(low: int, high: int, count: int) -> list[tuple[int, int]]:
    edges = np.linspace(low, high, count + 1).round().astype(int).tolist()
    return list(pairwise(edges))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, max(low, high) + 1))


def _written(
    node: _Node, path: str, rng: np.random.Generator, captions: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Return a node of Rico's JSON with shuffled children, and add captions by path."""
    if node.captions:
        captions[path] = node.captions
    order: Sequence[int] = rng.permutation(len(node.children)).tolist()
    written: dict[str, Any] = {
        "class": node.kind,
        "ancestors": ["android.view.View", "java.lang.Object"],
        "bounds": list(node.box),
        "clickable": node.clickable,
        "visible-to-user": True,
        "content-desc": [None],
    }
    if node.text is not None:
        written["text"] = node.text
    if node.children:
        written["children"] = [
            _written(node.children[old], f"{path}.{new}", rng, captions)
            for new, old in enumerate(order)
        ]
    return written
