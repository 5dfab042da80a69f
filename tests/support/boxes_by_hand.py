"""Random boxes, and their overlap and directions in plain Python."""

import torch


def slow_giou(one, other):
    a, b = (
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for x, y, w, h in (one.tolist(), other.tolist())
    )
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = wide * high
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return both / union - (hull - union) / hull


def random_boxes(*shape):
    return torch.cat([torch.rand(*shape, 2), 0.05 + 0.5 * torch.rand(*shape, 2)], -1).double()


def centre_distance(one, words, other):
    """How far a box (x, y, width, height) lies in the direction of the words, such as "left of"."""
    right, down = (other[a] + other[a + 2] / 2 - one[a] - one[a + 2] / 2 for a in (0, 1))
    distance = {"left": right, "right": -right, "above": down, "over": down}
    return distance.get(words.replace("to the ", "").removesuffix(" of"), -down)
