"""Encodings by configuration: sizes filled in, and none that sees later tokens."""

from __future__ import annotations

import pytest
import torch

from vlp.config import ConfigError
from vlp.layers.causal import CausalAttention
from vlp.models.vision.backbone import (
    attention_encodings,
    create_encoding,
    on_tokens,
)
from vlp.positions import CROSS_MODAL, causal_positions, list_positions
from vlp.positions.base import PositionContext
from vlp.positions.options import PositionConfig

WIDTH, HEADS, GRID = 8, 2, (3, 4)


def named(name, roles=None, **options):
    return PositionConfig(name=name, roles=roles, options=options)


def test_where_encodings_act_is_what_their_hooks_say():
    for name in list_positions():
        if name in CROSS_MODAL:
            continue
        made = create_encoding(named(name), width=WIDTH, heads=HEADS, grid=GRID)
        assert on_tokens(named(name)) == ("tokens" in made.hooks), name


def test_sizes_are_filled_in_and_options_win():
    encodings = attention_encodings(
        [named("learned-2d"), named("irpe-product", "qk"), named("alibi-2d", ratio="code")],
        WIDTH,
        HEADS,
        GRID,
    )
    assert [type(one).__name__ for one in encodings] == ["RelativePosition", "DirectionalDistance"]
    assert encodings[0].roles == ("query", "key")
    assert (encodings[1].heads, encodings[1].grid, encodings[1].ratio) == (HEADS, GRID, "code")


def later_tokens_matter(encodings):
    """Whether outputs at early places change with late tokens, tables drawn at random."""
    attention = CausalAttention(WIDTH, HEADS, encodings).double()
    for table in attention.positions.parameters():
        torch.nn.init.normal_(table)
    x = torch.randn(2, GRID[0] * GRID[1], WIDTH, dtype=torch.float64)
    context, first = PositionContext(grid=GRID), None
    for place in range(1, x.shape[1]):
        changed = torch.cat([x[:, :place], torch.randn_like(x[:, place:])], 1)
        first = attention(x, context) if first is None else first
        if not torch.allclose(first[:, :place], attention(changed, context)[:, :place]):
            return True
    return False


@pytest.mark.parametrize("name", causal_positions())
def test_encodings_called_causal_are(name):
    encodings = attention_encodings([named(name)], WIDTH, HEADS, GRID, causal=True)
    assert len(encodings) == 1
    assert not later_tokens_matter(encodings)


@pytest.mark.parametrize("position", [named("sape"), named("cope", causal=False)])
def test_encodings_that_see_later_tokens_are_refused_and_do(position):
    with pytest.raises(ConfigError, match=rf"{position.name} with .* sees later tokens"):
        attention_encodings([position], WIDTH, HEADS, GRID, causal=True)
    assert later_tokens_matter(attention_encodings([position], WIDTH, HEADS, GRID))


def test_bad_names_and_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="unknown position encoding 'sine'"):
        on_tokens(named("sine"))
    with pytest.raises(ConfigError, match="anchor lies between an image and a text"):
        on_tokens(named("anchor"))
    with pytest.raises(ConfigError, match=r"sine-2d: .*colour"):
        create_encoding(named("sine-2d", colour=1), width=WIDTH)
    with pytest.raises(ConfigError, match=r"rope-axial: .*on='q'"):
        create_encoding(named("rope-axial", "q"), width=WIDTH, heads=HEADS)
    with pytest.raises(ConfigError, match=r"sine-2d: .*width 6"):
        create_encoding(named("sine-2d"), width=6)
