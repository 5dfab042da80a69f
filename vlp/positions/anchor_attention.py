"""Cross-attention with ACE-RPE on a GPU, in one kernel forward and one backward (Eqs 8-12).

ACE-RPE is linear in the paths P. Contextual mode: with T = W U^T, for a role's table W and its
projection's weight U, the projection of x + mean(P) W is that of x plus mean(P) T. The kernel adds
these terms to queries, keys and values, sums a_ij P_ij over the keys along with a_ij V_j, and
multiplies the sum by the value table once. Bias mode: the kernel adds P times `slopes` to the
logits. There is no dropout, and no second derivative.
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
    largest = {"BLOCK_Q": BLOCK if groups <= 8 else BLOCK // 2, "BLOCK_K": BLOCK}
    options = {
        name: min(largest[name], max(16, power_of_two(tokens)))
        for name, tokens in (("BLOCK_Q", queries), ("BLOCK_K", keys))
    }
    # Eight warps would duplicate blocks of 32 x 32 tokens and halve occupancy; backward, wider
    # heads need their registers. More pipeline stages would lower occupancy, too.
    options |= {"num_warps": 4 if forward or channels <= 64 else 8, "num_stages": 1}
    # At 168 registers three forward programs fit on a multiprocessor, not two, with few spills.
    return options | ({"maxnreg": 168} if forward and channels <= 64 else {})


def readable_keys(path: Tensor) -> int:
    """Return how many keys of a row of paths (B, Q, K, G) may be read: `aligned_length` or K."""
    # Kernels discard what lies beyond K, but must not read beyond the storage.
    keys, start = path.shape[2], path.storage_offset()
    alignments = (path.stride(0), path.stride(1), path.stride(3), start)
    aligned = aligned_length(keys)
    last = sum((size - 1) * stride for size, stride in zip(path.shape, path.stride()))
    end = (start + last + 1 + aligned - keys) * path.itemsize
    is_aligned = path.stride(2) == 1 and not any(stride % _ALIGNED for stride in alignments)
    return aligned if is_aligned and end <= path.untyped_storage().nbytes() else keys


def aligned_length(keys: int) -> int:
    """Return the length of a row of keys, padded so that the next row allows vectorised loads."""
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


# Schemas of the operators. Arguments are the inputs, for gradients also the results of the forward
# pass and the gradient of its output, then heads and scale.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor path, Tensor? mask, Tensor? query_mean, "
    "Tensor? key_mean, Tensor terms"
)
_RESULTS = "Tensor out, Tensor residual, Tensor row_statistics, Tensor out_grad"


def _attend(*arguments: Any) -> Results:
    *tensors, heads, scale = arguments
    inputs = _Inputs(tensors, heads, forward=True)
    results = _empty_results(*arguments)
    inputs.launch("forward", inputs.query_blocks * heads, scale, *results)
    return results


def _attend_backward(*arguments: Any) -> Gradients:
    *tensors, out, residual, row_statistics, out_grad, heads, scale = arguments
    inputs = _Inputs(tensors, heads)
    *gradients, terms_grad = _empty_gradients(*arguments)
    single_block = inputs.key_blocks == 1
    query_sum = out if single_block else torch.empty_like(gradients[0], dtype=torch.float32)
    term_grads = terms_grad.new_empty(inputs.pairs, *terms_grad.shape)
    results = residual, row_statistics, out_grad.contiguous(), *gradients, query_sum, term_grads
    inputs.launch("backward", heads, scale, out, *results, SINGLE_BLOCK=single_block)
    return (*gradients, term_grads.sum(0))  # type: ignore[return-value]


def _differentiate_path(*arguments: Any) -> Tensor:
    *tensors, out, residual, row_statistics, out_grad, heads, scale = arguments
    inputs = _Inputs(tensors, heads)
    gradient = _empty_path(*arguments)
    programs = inputs.query_blocks * inputs.key_blocks * gradient.shape[3]
    results = residual, row_statistics, out_grad.contiguous(), gradient
    single_block = inputs.key_blocks == 1
    inputs.launch("path", programs, scale, out, *results, SINGLE_BLOCK=single_block)
    return gradient


_TABLES = (
    "Tensor query, Tensor key, Tensor value, Tensor query_weight, Tensor key_weight, "
    "Tensor value_weight"
)


def _project_tables(*arguments: Any) -> Tensor:
    *tables, pooled = arguments
    terms = _empty_terms(*tables)
    _launch_projection("shift", tables, pooled, terms)
    return terms


def _project_tables_backward(*arguments: Any) -> list[Tensor]:
    *tables, terms_grad, pooled = arguments
    gradients = _empty_tables(*tables)
    _launch_projection("shift_backward", tables, pooled, terms_grad.contiguous(), *gradients)
    return gradients


def _empty_results(query: Tensor, key: Tensor, *arguments: Any) -> Results:
    """Allocate the output, its rounding residual, both (B, Q, width), and the row statistics."""
    # With several blocks of keys the backward pass computes sum_j a_ij da_ij of a row from the
    # output. Rounded to half precision, its error would be several times the explicit path's: the
    # residual corrects it. In float32 only products are rounded, to TF32.
    has_residual = query.dtype != torch.float32 and key.shape[1] > BLOCK
    residual = query.new_empty(query.shape if has_residual else 0)
    pairs, queries, _ = query.shape
    row_statistics = query.new_empty(pairs, arguments[-2], 2, queries, dtype=torch.float32)
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


def _launch_projection(kernel: str, tables: list[Tensor], pooled: bool, *results: Tensor) -> None:
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


def _differentiate(ctx: Any, out_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    query_mean, key_mean, terms = tensors[5:8]
    arguments = (*tensors, out_grad, ctx.heads, ctx.scale)
    *states, term_grads = _attention_backward(*arguments)
    # The gradient of the paths has a separate kernel, which runs only if autograd needs it.
    needs_gradient = ctx.needs_input_grad
    path_grad = query_mean_grad = key_mean_grad = None
    if needs_gradient[3]:
        path_grad = _path_gradient(*arguments)
    if needs_gradient[5]:
        query_mean_grad = (states[0].float() @ terms[0].mT).to(query_mean.dtype)
    if needs_gradient[6]:
        key_part = states[1].float() @ terms[1].mT
        key_mean_grad = (key_part + states[2].float() @ terms[2].mT).to(key_mean.dtype)
    terms_grad = term_grads.to(terms.dtype)
    return *states, path_grad, None, query_mean_grad, key_mean_grad, terms_grad, None, None


def _setup_tables_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.pooled = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_tables(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _terms_backward(*ctx.saved_tensors, out_grad, ctx.pooled)
    return *gradients, None


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Gradients:
    terms_grad = query.new_empty(arguments[4].shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (query, key, value)), terms_grad  # type: ignore[return-value]


def _empty_path(query: Tensor, key: Tensor, value: Tensor, path: Tensor, *_: Any) -> Tensor:
    return path.new_empty(path.shape)


def _empty_terms(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(4, *query.shape, dtype=torch.float32)


def _empty_tables(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[:6]]


_attention = KernelOperator(
    "anchor_attention",
    _attend,
    _empty_results,
    _setup_context,
    _differentiate,
    schema=f"({_INPUTS}, SymInt heads, float scale) -> (Tensor, Tensor, Tensor)",
)
_BACKWARD = f"({_INPUTS}, {_RESULTS}, SymInt heads, float scale)"
_attention_backward = KernelOperator(
    "anchor_attention_backward",
    _attend_backward,
    _empty_gradients,
    schema=f"{_BACKWARD} -> (Tensor, Tensor, Tensor, Tensor)",
)
_path_gradient = KernelOperator(
    "anchor_path_gradient", _differentiate_path, _empty_path, schema=f"{_BACKWARD} -> Tensor"
)
_terms = KernelOperator(
    "anchor_terms",
    _project_tables,
    _empty_terms,
    _setup_tables_context,
    _differentiate_tables,
    schema=f"({_TABLES}, bool pooled) -> Tensor",
)
_terms_backward = KernelOperator(
    "anchor_terms_backward",
    _project_tables_backward,
    _empty_tables,
    schema=f"({_TABLES}, Tensor terms_grad, bool pooled) -> Tensor[]",
)
