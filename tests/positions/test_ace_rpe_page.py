"""The lines of the page on ACE-RPE that put it into a model of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-ace-rpe.md"


def test_the_pages_attention_starts_as_a_plain_one_and_follows_its_paths():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    attention, words, patches = names["attention"], names["words"], names["patches"]
    assert names["out"].shape == (2, 12, 256)
    plain = type(attention)(256, 8)
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if "position" not in k})
    assert_close(names["out"], plain(words, patches))
    torch.nn.init.normal_(names["ace"].tables["value"])
    context = names["PositionContext"](names["grid"], 1, anchors=names["paths"], text_queries=True)
    assert not torch.allclose(attention(words, patches, context=context), names["out"], atol=1e-3)
