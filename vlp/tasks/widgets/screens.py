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

# Sides of Rico's screens in the pixels of `bounds`; screenshots may have other sizes.
SHORT_SIDE, LONG_SIDE = 1440, 2560

# Kinds of widgets in the public widget captioning code, by Android class.
KINDS = (
    "unknown", "imageview", "button", "imagebutton", "view", "compoundbutton", "checkbox",
    "radiobutton", "floatingactionbutton", "togglebutton", "switch",
)  # fmt: skip

# Words of identifiers in camelCase and snake_case.
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


class Widget(NamedTuple):
    """A node of the view hierarchy."""

    # Child numbers from the root "0", joined by dots; `nodeId` of the widget captions.
    path: str
    # x0, y0, x1, y1 as shares of the screen's width and height
    box: tuple[float, float, float, float]
    # Index in `KINDS`.
    kind: int
    clickable: bool
    # The visible text, else the content description.
    text: str
    # Words of the resource id.
    resource: str
    # Depth, index in pre-order and index in post-order of the whole tree, all from 1.
    tree: tuple[int, int, int]


class Screen(NamedTuple):
    """Widgets in pre-order, and people's captions."""

    name: str
    widgets: tuple[Widget, ...]
    # By index of the widget.
    captions: dict[int, tuple[str, ...]]


class _Visit(NamedTuple):
    """A node with its `Widget.path` and `Widget.tree`."""

    node: Mapping[str, Any]
    path: str
    tree: tuple[int, int, int]
    is_leaf: bool


def read_screen(
    hierarchy: Any, name: str, captions: Mapping[str, Sequence[str]], nodes: Nodes = "all"
) -> Screen:
    """Read the widgets of a view hierarchy; raises BadSample.

    Nodes that are invisible or have no area on the screen are left out, unless they have a caption.
    Boxes are clipped to the screen, which is 2560 x 1440 if the root is wider than high.

    Args:
        hierarchy: parsed JSON: the root node, or an object with it in `activity.root`.
        name: of the screen, for messages.
        captions: by `Widget.path`; blank captions are dropped.
        nodes: "all" nodes or only "leaves"; nodes with captions are always read.
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
    captions_by_index: dict[int, tuple[str, ...]] = {}
    for visit in _walk(root, name):
        box = _relative_box(_bounds(visit.node, name, visit.path), size)
        texts = tuple(text for caption in captions.get(visit.path, ()) if (text := caption.strip()))
        is_visible = visit.node.get("visible-to-user", True) and box[2] > box[0] and box[3] > box[1]
        if texts:
            captions_by_index[len(widgets)] = texts
        elif not is_visible or (nodes == "leaves" and not visit.is_leaf):
            continue
        widgets.append(_widget(visit, box))
    paths = {widgets[index].path for index in captions_by_index}
    captioned = {path for path, texts in captions.items() if any(map(str.strip, texts))}
    if missing := sorted(captioned - paths):
        raise BadSample("captions without their widget", f"{name} (nodes {', '.join(missing[:5])})")
    return Screen(name, tuple(widgets), captions_by_index)


def _walk(root: Mapping[str, Any], name: str) -> Iterator[_Visit]:
    """Yield all nodes in pre-order; hierarchies may be too deep for recursion."""
    nodes: list[tuple[Mapping[str, Any], str, int, bool]] = []
    post_order: dict[str, int] = {}
    stack: list[tuple[Mapping[str, Any] | None, str, int]] = [(root, "0", 1)]
    while stack:
        node, path, depth = stack.pop()
        if node is None:  # marks the end of the subtree at `path`
            post_order[path] = len(post_order) + 1
            continue
        children = node.get("children") or []
        if not isinstance(children, Sequence):
            raise BadSample("bad children", f"{name}, node {path} ({children!r:.40})")
        nodes.append((node, path, depth, not any(isinstance(c, Mapping) for c in children)))
        stack.append((None, path, depth))
        for number, child in reversed(list(enumerate(children))):
            if isinstance(child, Mapping):  # Rico has null children, which count in `nodeId`
                stack.append((child, f"{path}.{number}", depth + 1))
    for pre_order, (node, path, depth, is_leaf) in enumerate(nodes, start=1):
        yield _Visit(node, path, (depth, pre_order, post_order[path]), is_leaf)


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
    """Return left, top, right and bottom of a node in pixels; raise BadSample without them."""
    bounds = node.get("bounds")
    match bounds:
        case [x0, y0, x1, y1] if all(
            isinstance(edge, int | float) and math.isfinite(edge) for edge in bounds
        ):
            return x0, y0, x1, y1
    raise BadSample("bad bounds", f"{name}, node {path} (bounds {bounds!r})")


def _relative_box(
    bounds: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return bounds as shares of the screen, clipped to it."""
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
    class_name: str
    box: Box
    text: str | None = None
    clickable: bool = False
    captions: tuple[str, ...] = ()
    children: list[_Node] = field(default_factory=list)


def generate_screen(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Draw a screen: a view hierarchy for `read_screen`, and two captions a widget, by path."""
    # A toolbar, a body and tabs of random sizes. Icons have no text and siblings a random order, so
    # that an icon's caption follows only from positions: from its own ("delete the second message")
    # or from the text next to it ("delete the message from anna").
    toolbar_height = tabs_height = 0
    parts = []
    if rng.random() < 0.8:
        toolbar_height = _between(rng, 150, 260)
        parts.append(_toolbar(rng, toolbar_height))
    if rng.random() < 0.7:
        tabs_height = _between(rng, 180, 300)
        parts.append(_tabs(rng, tabs_height))
    area = (
        _between(rng, 0, 160),
        toolbar_height + _between(rng, 20, 300),
        SHORT_SIDE - _between(rng, 0, 160),
        LONG_SIDE - tabs_height - _between(rng, 20, 300),
    )
    body = (_messages, _switches, _sliders, _photos)[rng.integers(4)]
    parts.append(body(rng, area))
    root = _Node(_GROUP, (0, 0, SHORT_SIDE, LONG_SIDE), children=parts)
    captions: dict[str, tuple[str, ...]] = {}
    return {"activity": {"root": _to_json(root, "0", rng, captions)}}, captions


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
    for number, (x0, x1) in enumerate(_intervals(0, SHORT_SIDE, count)):
        x, y = (x0 + x1 - side) // 2, top + 10
        tab = f"the {ORDINALS[number]} tab"
        if labels is not None:
            tab = f"the {labels[number]} tab"
            bar.children.append(_label((x0 + 20, y + side, x1 - 20, LONG_SIDE), labels[number]))
        bar.children.append(_icon((x, y, x + side, y + side), f"open {tab}", f"go to {tab}"))
    return bar


def _messages(rng: np.random.Generator, area: Box) -> _Node:
    """Draw rows of an image, a line, which may have no text, and a button that deletes."""
    count = _between(rng, 2, 6)
    names = rng.choice(NAMES, count, replace=False) if rng.random() < 0.5 else None
    is_flipped = rng.random() < 0.5

    def row(number: int, box: Box, side: int) -> list[_Node]:
        first, last = _ends(box, side, is_flipped)
        line = (box[0] + side + 80, box[1] + 10, box[2] - side - 80, box[3] - 10)
        if names is None:
            message = f"the {ORDINALS[number]} message"
            nodes = [_Node(_IMAGE, first), _Node(_VIEW, line)]
        else:
            message = f"the message from {names[number]}"
            profile = f"the profile of {names[number]}"
            captions = (f"open {profile}", f"show {profile}")
            nodes = [_Node(_IMAGE, first, None, True, captions), _label(line, names[number])]
        return [*nodes, _icon(last, f"delete {message}", f"remove {message}")]

    return _rows(rng, area, count, row)


def _switches(rng: np.random.Generator, area: Box) -> _Node:
    count = _between(rng, 2, 6)
    labels = rng.choice(SETTINGS, count, replace=False)
    is_flipped = rng.random() < 0.5

    def row(number: int, box: Box, side: int) -> list[_Node]:
        _, last = _ends(box, side, is_flipped)
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
    for row, (y0, y1) in enumerate(_intervals(area[1], area[3], rows)):
        for column, (x0, x1) in enumerate(_intervals(area[0], area[2], columns)):
            cell = f"row {NUMBERS[row]} column {NUMBERS[column]}"
            captions = (f"open the photo in {cell}", f"show photo {cell}")
            box = (x0 + gap, y0 + gap, x1 - gap, y1 - gap)
            table.children.append(_Node(_IMAGE, box, None, True, captions))
    return table


def _rows(
    rng: np.random.Generator, area: Box, count: int, row: Callable[[int, Box, int], list[_Node]]
) -> _Node:
    """Draw a list of rows of equal random height; `row` draws the nodes of one."""
    height = min((area[3] - area[1]) // count, _between(rng, 180, 420))
    side = _between(rng, 80, height - 60)
    rows = _Node(_GROUP, area)
    for number in range(count):
        top = area[1] + number * height
        box = (area[0] + 10, top, area[2] - 10, top + height)
        rows.children.append(_Node(_GROUP, box, children=row(number, box, side)))
    return rows


def _ends(box: Box, side: int, is_flipped: bool) -> tuple[Box, Box]:
    """Return squares at the first and the last end of a row: left and right, unless flipped."""
    y = (box[1] + box[3] - side) // 2
    left = (box[0] + 20, y, box[0] + 20 + side, y + side)
    right = (box[2] - 20 - side, y, box[2] - 20, y + side)
    return (right, left) if is_flipped else (left, right)


def _icon(box: Box, *captions: str) -> _Node:
    return _Node(_BUTTON, box, None, True, captions)


def _label(box: Box, text: str) -> _Node:
    return _Node(_VIEW, box, str(text))


def _intervals(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """Return the bounds of `count` adjacent intervals of about equal length."""
    edges = np.linspace(low, high, count + 1).round().astype(int).tolist()
    return list(pairwise(edges))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw an integer, both bounds included; `low` if `high` is lower."""
    return int(rng.integers(low, max(low, high) + 1))


def _to_json(
    node: _Node, path: str, rng: np.random.Generator, captions: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Return a node in Rico's JSON with shuffled children; add its captions to `captions`."""
    if node.captions:
        captions[path] = node.captions
    order: Sequence[int] = rng.permutation(len(node.children)).tolist()
    content: dict[str, Any] = {
        "class": node.class_name,
        "ancestors": ["android.view.View", "java.lang.Object"],
        "bounds": list(node.box),
        "clickable": node.clickable,
        "visible-to-user": True,
        "content-desc": [None],
    }
    if node.text is not None:
        content["text"] = node.text
    if node.children:
        content["children"] = [
            _to_json(node.children[old], f"{path}.{new}", rng, captions)
            for new, old in enumerate(order)
        ]
    return content
