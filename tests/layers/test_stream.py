"""Residual streams and LayerNorms of half precision under autocast."""

from __future__ import annotations

import torch
from torch import nn

from vlp.layers.blocks import LayerNorm, set_half_streams


def test_a_norm_is_pytorchs_unless_it_is_told_to_round():
    norm, plain, x = LayerNorm(8), nn.LayerNorm(8), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), plain(x))
        set_half_streams(norm, True)
        assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), plain(x))  # without autocast nothing is rounded


def test_a_rounding_norm_computes_in_float32():
    norm, x = LayerNorm(64), (100 + torch.randn(4, 64)).bfloat16()
    set_half_streams(norm, True)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    wanted = nn.functional.layer_norm(x.float(), (64,))
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=2**-8)
