"""Cross-attention with ACE-RPE on a GPU, in one kernel forward and one backward (Eqs 8-12).

ACE-RPE is linear in the paths P. In contextual mode a role has a table W and a projection with
weight U: with T = W U^T, the projection of x + mean(P) W is x U^T + mean(P) T. The kernel adds
mean(P) T to queries, keys and values, sums a_ij P_ij over the keys along with a_ij V_j, and
multiplies the sum of paths by the value table once. In bias mode the kernel adds P times slopes to
the logits. There is no dropout, and no second derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlp.positions.anchor import kernels
from vlp.positions.kernel_operator import KernelOperator

# Maximum number of queries and of keys in a block.
BLOCK = 32
# Rows of keys that start at multiples of this many elements allow vectorised loads.
_ALIGNED = 16


def block_sizes(
    queries: int, keys: int, groups: int, channels: int, forward: bool
) -> dict[str, int]:
    """Return the block sizes and Triton's launch options, chosen so that registers suffice."""
    max_queries = BLOCK if groups <= 8 else BLOCK // 2
    options = {
        "BLOCK_Q": min(max_queries, max(16, power_of_two(queries))),
        "BLOCK_K": min(BLOCK, max(16, power_of_two(keys))),
    }
    # Eight warps would duplicate blocks of 32 x 32 tokens and halve occupancy; backward, wider
    # heads need their registers. More pipeline stages would lower occupancy, too.
    options |= {"num_warps": 4 if forward or channels <= 64 else 8, "num_stages": 1}
    # At 168 registers three forward programs fit on a multiprocessor, not two, with few spills.
    return options | ({"maxnreg": 168} if forward and channels <= 64 else {})


def readable_keys(path: Tensor) -> int:
    """Return how many keys of a row of paths (B, Q, K, G) may be read: `aligned_length` or K."""
    # Kernels discard values beyond K, but must not read beyond the storage.
    keys, start = path.shape[2], path.storage_offset()
    row_starts = (path.stride(0), path.stride(1), path.stride(3), start)
    is_aligned = path.stride(2) == 1 and not any(step % _ALIGNED for step in row_starts)
    padded_keys = aligned_length(keys)
    last_entry = start + sum((size - 1) * stride for size, stride in zip(path.shape, path.stride()))
    end_byte = (last_entry + 1 + padded_keys - keys) * path.itemsize
    return padded_keys if is_aligned and end_byte <= path.untyped_storage().nbytes() else keys


def aligned_length(keys: int) -> int:
    """Return the length of a row of keys with padding, after which the next row is aligned."""
    return -(-keys // _ALIGNED) * _ALIGNED


def power_of_two(number: int) -> int:
    """Round a number up to a power of two."""
    return 1 << (number - 1).bit_length()


Results = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def contextual_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    pooled: bool = True,
) -> Tensor:
    """Return the terms of `anchor_attention` in contextual mode: (4, G, width), float32.

    The first three are the projected tables of query, key and value; the last is the value table.

    Args:
        query, key, value: tables, (G, width).
        query_weight, key_weight, value_weight: of the projections, (width, width).
        pooled: False sets the value's projected table to 0 (papers.md#ace-a22).
    """
    terms: Tensor = _terms(query, key, value, query_weight, key_weight, value_weight, pooled)
    return terms


def anchor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Tensor,
    terms: Tensor,
    heads: int,
    means: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute cross-attention with ACE-RPE, (B, Q, width), in one kernel.

    Args:
        query: (B, Q, width), projected.
        key, value: (B, K, width), projected.
        path: (B, Q, K, G), of any strides.
        terms: `contextual_terms`, or slopes of the paths (G, heads) in bias mode.
        heads: attention heads, consecutive blocks of channels.
        means: mean paths of queries (B, Q, G) and keys (B, K, G); None selects bias mode.
        mask: (B, K) bool, True = may be attended to; without any such key the values are averaged.
        scale: of the products of queries and keys; None: 1 / sqrt(head width).
    """
    scale = (query.shape[-1] // heads) ** -0.5 if scale is None else scale
    query_mean, key_mean = (None, None) if means is None else means
    inputs = query, key, value, path, mask, query_mean, key_mean, terms, heads, scale
    out: Tensor = _attention(*inputs)[0]
    return out


# Schemas of the operators. Arguments are the inputs; for gradients also the results of the forward
# pass and the gradient of its output; last, heads and scale.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor path, Tensor? mask, Tensor? query_mean, "
    "Tensor? key_mean, Tensor terms"
)
_RESULTS = "Tensor out, Tensor residual, Tensor row_statistics, Tensor out_grad"


def _launch_forward(*arguments: Any) -> Results:
    *tensors, heads, scale = arguments
    inputs = _Inputs(tensors, heads, forward=True)
    results = _empty_results(*arguments)
    inputs.launch("attention_forward", inputs.query_blocks * heads, scale, *results)
    return results


def _launch_backward(*arguments: Any) -> Gradients:
    *tensors, out, residual, row_statistics, out_grad, heads, scale = arguments
    inputs = _Inputs(tensors, heads)
    query_grad, key_grad, value_grad, terms_grad = _empty_gradients(*arguments)
    single_block = inputs.key_blocks == 1
    # The kernel sums the queries' gradient over blocks of keys in float32; with a single block any
    # tensor stands in.
    query_grad_sum = out if single_block else torch.empty_like(query_grad, dtype=torch.float32)
    pair_terms_grad = terms_grad.new_empty(inputs.pairs, *terms_grad.shape)
    inputs.launch(
        "attention_backward",
        heads,
        scale,
        *(out, residual, row_statistics, out_grad.contiguous()),
        *(query_grad, key_grad, value_grad, query_grad_sum, pair_terms_grad),
        SINGLE_BLOCK=single_block,
    )
    return query_grad, key_grad, value_grad, pair_terms_grad.sum(0)


def _launch_path_gradient(*arguments: Any) -> Tensor:
    *tensors, out, residual, row_statistics, out_grad, heads, scale = arguments
    inputs = _Inputs(tensors, heads)
    path_grad = _empty_path(*arguments)
    programs = inputs.query_blocks * inputs.key_blocks * path_grad.shape[3]
    results = residual, row_statistics, out_grad.contiguous(), path_grad
    single_block = inputs.key_blocks == 1
    inputs.launch("path_grad", programs, scale, out, *results, SINGLE_BLOCK=single_block)
    return path_grad


_TABLES = (
    "Tensor query, Tensor key, Tensor value, Tensor query_weight, Tensor key_weight, "
    "Tensor value_weight"
)


def _project_tables(*arguments: Any) -> Tensor:
    *tables, pooled = arguments
    terms = _empty_terms(*tables)
    _launch_terms("terms", tables, pooled, terms)
    return terms


def _project_tables_backward(*arguments: Any) -> list[Tensor]:
    *tables, terms_grad, pooled = arguments
    gradients = _empty_tables(*tables)
    _launch_terms("terms_backward", tables, pooled, terms_grad.contiguous(), *gradients)
    return gradients


def _empty_results(query: Tensor, key: Tensor, *arguments: Any) -> Results:
    """Allocate the output, its rounding residual, both (B, Q, width), and the row statistics."""
    # With several blocks of keys the backward pass computes sum_j a_ij da_ij of a row from the
    # output. If that is rounded to half precision, its error is several times the explicit path's:
    # the residual corrects it. In float32 only products are rounded, to TF32.
    has_residual = query.dtype != torch.float32 and key.shape[1] > BLOCK
    residual = query.new_empty(query.shape if has_residual else 0)
    (pairs, queries, _), heads = query.shape, arguments[-2]
    # Each query's largest logit, then its sum of exponentials.
    row_statistics = query.new_empty(pairs, heads, 2, queries, dtype=torch.float32)
    return query.new_empty(query.shape), residual, row_statistics


class _Inputs:
    """Inputs and options of all kernels of one attention, in the kernels' order."""

    def __init__(self, tensors: Sequence[Any], heads: int, forward: bool = False) -> None:
        # In the order of the schemas.
        query, key, value, path, mask, query_mean, key_mean, terms = tensors
        states = [_contiguous_rows(x) for x in (query, key, value)]
        # A kernel without mask or means never reads the tensor that stands in for them.
        placeholder = states[0]
        (self.pairs, queries, width), keys, groups = query.shape, key.shape[1], path.shape[3]
        self.tensors = [
            *states,
            path,
            placeholder if mask is None else mask.contiguous().view(torch.uint8),
            *(
                placeholder if mean is None else mean.contiguous()
                for mean in (query_mean, key_mean)
            ),
            terms.contiguous(),
        ]
        strides = [*(x.stride(0) for x in states), *path.stride()]
        self.sizes = [*strides, readable_keys(path), queries, keys, heads]
        channels = width // heads
        blocks = block_sizes(queries, keys, groups, channels, forward)
        self.query_blocks = -(-queries // blocks["BLOCK_Q"])
        self.key_blocks = -(-keys // blocks["BLOCK_K"])
        exact = torch.get_float32_matmul_precision() == "highest"
        self.options = {
            "GROUPS": groups,
            "BLOCK_G": max(8, power_of_two(groups)),
            "DOT_G": max(16, power_of_two(groups)),
            "HEAD_DIM": channels,
            "BLOCK_C": max(16, power_of_two(channels)),
            "CONTEXTUAL": query_mean is not None,
            "MASKED": mask is not None,
            "PRECISION": "ieee" if exact else "tf32",
            **blocks,
        }

    def launch(
        self,
        kernel: str,
        programs: int,
        scale: float,
        out: Tensor,
        residual: Tensor,
        *results: Tensor,
        **options: bool,
    ) -> None:
        """Launch a kernel with `programs` programs for each pair."""
        if not self.pairs * programs:
            return
        with torch.cuda.device(out.get_device()):
            getattr(kernels(), f"{kernel}_kernel")[(self.pairs * programs,)](
                *self.tensors,
                *(out, residual, *results),
                *self.sizes,
                scale,
                HAS_RESIDUAL=residual.numel() > 0,
                **self.options,
                **options,
            )


def _launch_terms(kernel: str, tables: list[Tensor], pooled: bool, *results: Tensor) -> None:
    groups, width = tables[0].shape
    with torch.cuda.device(results[0].get_device()):
        # A program for each of the three roles and each block of 32 channels.
        getattr(kernels(), f"{kernel}_kernel")[(3 * -(-width // 32),)](
            *(x.contiguous() for x in tables),
            *results,
            width,
            GROUPS=groups,
            DOT_G=max(16, power_of_two(groups)),
            BLOCK=32,
            POOLED=pooled,
        )


def _contiguous_rows(x: Tensor) -> Tensor:
    # Kernels take any stride between pairs, so that an expanded batch is not copied.
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, heads, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.heads, ctx.scale = heads, scale
    ctx.mark_non_differentiable(*output[1:])
    # Otherwise autograd allocates zeros as gradients of the other results.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, out_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    query_mean, key_mean, terms = tensors[5:8]
    arguments = (*tensors, out_grad, ctx.heads, ctx.scale)
    query_grad, key_grad, value_grad, terms_grad = _attention_backward(*arguments)
    # The gradient of the paths has a separate kernel, which runs only if autograd needs it.
    path_grad = query_mean_grad = key_mean_grad = None
    _, _, _, needs_path, _, needs_query_mean, needs_key_mean, *_ = ctx.needs_input_grad
    if needs_path:
        path_grad = _path_gradient(*arguments)
    if needs_query_mean:
        query_mean_grad = (query_grad.float() @ terms[0].mT).to(query_mean.dtype)
    if needs_key_mean:
        key_mean_grad = key_grad.float() @ terms[1].mT + value_grad.float() @ terms[2].mT
        key_mean_grad = key_mean_grad.to(key_mean.dtype)
    # In the order of the inputs; mask, heads and scale have no gradient.
    return (
        *(query_grad, key_grad, value_grad, path_grad, None),
        *(query_mean_grad, key_mean_grad, terms_grad.to(terms.dtype), None, None),
    )


def _setup_tables_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.pooled = inputs
    ctx.save_for_backward(*tensors)


def _tables_backward(ctx: Any, terms_grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _terms_backward(*ctx.saved_tensors, terms_grad, ctx.pooled)
    return *gradients, None


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Gradients:
    _path, _mask, _query_mean, _key_mean, terms, *_ = arguments
    terms_grad = query.new_empty(terms.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (query, key, value)), terms_grad  # type: ignore[return-value]


def _empty_path(query: Tensor, key: Tensor, value: Tensor, path: Tensor, *_: Any) -> Tensor:
    return path.new_empty(path.shape)


def _empty_terms(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(4, *query.shape, dtype=torch.float32)


def _empty_tables(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[:6]]


_attention = KernelOperator(
    "anchor_attention",
    _launch_forward,
    _empty_results,
    _setup_context,
    _backward,
    schema=f"({_INPUTS}, SymInt heads, float scale) -> (Tensor, Tensor, Tensor)",
)
_BACKWARD = f"({_INPUTS}, {_RESULTS}, SymInt heads, float scale)"
_attention_backward = KernelOperator(
    "anchor_attention_backward",
    _launch_backward,
    _empty_gradients,
    schema=f"{_BACKWARD} -> (Tensor, Tensor, Tensor, Tensor)",
)
_path_gradient = KernelOperator(
    "anchor_path_gradient", _launch_path_gradient, _empty_path, schema=f"{_BACKWARD} -> Tensor"
)
_terms = KernelOperator(
    "anchor_terms",
    _project_tables,
    _empty_terms,
    _setup_tables_context,
    _tables_backward,
    schema=f"({_TABLES}, bool pooled) -> Tensor",
)
_terms_backward = KernelOperator(
    "anchor_terms_backward",
    _project_tables_backward,
    _empty_tables,
    schema=f"({_TABLES}, Tensor terms_grad, bool pooled) -> Tensor[]",
)
