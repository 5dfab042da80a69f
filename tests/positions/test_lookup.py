"""Lookups per pair against einsums over the (T, T, channels) tensor, and their sums of buckets."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlp.positions.lookup import attended_rows, dense, products, scalars

BATCH, HEADS, TOKENS, CHANNELS, ROWS = 2, 3, 5, 4, 6


def ids(tables):
    return torch.randint(0, ROWS, (tables, TOKENS, TOKENS))


def rows(table, ids):
    """Sum over tables of table[ids_ij], (1 or heads, T, T, ...)."""
    return sum(table[:, pairs] for pairs in ids)


@pytest.mark.parametrize("first", [1, HEADS])
@pytest.mark.parametrize("tables", [1, 2])
def test_products_scalars_and_sums_are_those_of_the_pairs(tables, first):
    states = torch.randn(BATCH, HEADS, TOKENS, CHANNELS).double()
    table = torch.randn(first, ROWS, CHANNELS).double()
    attention = torch.randn(BATCH, HEADS, TOKENS, TOKENS).double().softmax(-1)
    pairs = ids(tables)
    vectors = rows(table, pairs).expand(HEADS, -1, -1, -1)
    torch.testing.assert_close(
        products(states, table, pairs, 0.3).dense(),
        0.3 * torch.einsum("bhid,hijd->bhij", states, vectors),
        rtol=0,
        atol=1e-12,
    )
    torch.testing.assert_close(
        products(states, table, pairs, of_keys=True).dense(),
        torch.einsum("bhjd,hijd->bhij", states, vectors),
        rtol=0,
        atol=1e-12,
    )
    torch.testing.assert_close(
        scalars(table[..., 0], pairs, 0.3).dense(), 0.3 * rows(table[..., 0], pairs)[None]
    )
    torch.testing.assert_close(
        attended_rows(attention, table, pairs),
        torch.einsum("bhij,hijd->bhid", attention, vectors),
        rtol=0,
        atol=1e-12,
    )


def test_gradients():
    states = torch.randn(1, 2, 3, 2).double().requires_grad_()
    attention = torch.rand(1, 2, 3, 3).double().requires_grad_()
    table = torch.randn(2, 4, 2).double().requires_grad_()
    pairs = torch.randint(0, 4, (2, 3, 3))

    def run(states, attention, table):
        terms = [products(states, table, pairs, 0.5), scalars(table[..., 1], pairs, 0.5)]
        return dense(terms), attended_rows(attention, table, pairs)

    assert torch.autograd.gradcheck(run, (states, attention, table))


class Largest(TorchDispatchMode):
    """Entries of the largest tensor made, and number types in which rows are summed."""

    def __init__(self):
        super().__init__()
        self.entries, self.kinds = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if isinstance(out, torch.Tensor):
            self.entries = max(self.entries, out.untyped_storage().nbytes() // out.element_size())
        if "scatter_add" in str(function):
            self.kinds.append(arguments[0].dtype)
        return out


def test_no_vector_per_pair_is_built_and_rows_are_summed_in_float32():
    tokens, channels = 24, 16
    pairs = torch.randint(0, ROWS, (1, tokens, tokens))
    states = torch.randn(1, 1, tokens, channels, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(1, ROWS, channels, dtype=torch.bfloat16, requires_grad=True)
    attention = torch.full((1, 1, tokens, tokens), 1 / tokens, dtype=torch.bfloat16)
    attention.requires_grad_()
    with Largest() as seen:
        logits = products(states, table, pairs).dense()
        values = attended_rows(attention, table, pairs)
        (logits.sum() + values.sum()).backward()
    assert logits.dtype == torch.float32
    assert values.dtype == torch.bfloat16
    assert seen.entries == tokens * tokens
    assert seen.kinds == [torch.float32] * 2  # the values, and the gradient of the products
