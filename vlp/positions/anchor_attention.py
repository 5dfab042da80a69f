"""Cross-attention with ACE-RPE in one kernel forward and one backward (Eqs 8-12), on a GPU.

Everything is linear in the paths: with S = W_role W^T the projections of x + mean(P) W_role are the
projections of x plus mean(P) S. So one pass over the keys adds G channels a token to queries, keys
and values, sums a_ij P_ij by group next to a_ij V_j, and embeds the sums once (contextual mode); in
bias mode it adds P slopes to the logits. The operators are opaque to `torch.compile`, drop no
weights, and are differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlp.positions.anchor import kernels
from vlp.positions.kernel_operator import KernelOperator

# Most queries and keys of a block.
BLOCK = 32
# Keys side by side in memory of which loads are wide.
_ALIGNED = 16


def block_sizes(
    queries: int, keys: int, groups: int, channels: int, forward: bool
) -> dict[str, int]:
    """Return tokens of a block and compiler options, chosen so that numbers stay in registers."""
    largest = {"BLOCK_Q": BLOCK if groups <= 8 else BLOCK // 2, "BLOCK_K": BLOCK}
    options = {
        name: min(largest[name], max(16, power_of_two(tokens)))
        for name, tokens in (("BLOCK_Q", queries), ("BLOCK_K", keys))
    }
    # In blocks of 32 by 32 tokens eight warps hold the same numbers twice, and half as many
    # programs run at a time; wider heads need them for their registers. Blocks that load ahead
    # would leave room for fewer programs, too.
    options |= {"num_warps": 4 if forward or channels <= 64 else 8, "num_stages": 1}
    # With fewer registers three forward programs run at a time, not two, with little spilling.
    return options | ({"maxnreg": 168} if forward and channels <= 64 else {})


def readable_keys(path: Tensor) -> int:
    """Return the keys that loads of paths (B, Q, K, G) may read: `aligned_length` or K."""
    # The kernels ignore paths beyond K, but must not read beyond the storage.
    keys, start = path.shape[2], path.storage_offset()
    alignments = (path.stride(0), path.stride(1), path.stride(3), start)
    aligned = aligned_length(keys)
    last = sum((size - 1) * stride for size, stride in zip(path.shape, path.stride()))
    end = (start + last + 1 + aligned - keys) * path.itemsize
    is_aligned = path.stride(2) == 1 and not any(stride % _ALIGNED for stride in alignments)
    return aligned if is_aligned and end <= path.untyped_storage().nbytes() else keys


def aligned_length(keys: int) -> int:
    """Return the length of a row of keys that lets loads of the next row be wide."""
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

    A mean path of 1 in a group adds them to the projections of query, key and value; the last is W
    of the value.

    Args:
        query: W of the role, (G, width); `key` and `value` alike.
        query_weight: of the role's projection, (width, width), as in `nn.Linear`; the others alike.
        pooled: False adds nothing to the values' projection (papers.md#ace-a22).
    """
    tables, weights = (query, key, value), (query_weight, key_weight, value_weight)
    terms: Tensor = _terms(*tables, *weights, pooled)
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
    """Return softmax(scale q k^T + bias) v with the terms of ACE-RPE.

    Args:
        query: (B, Q, width), projected, heads side by side.
        key: (B, K, width).
        value: (B, K, width).
        path: (B, Q, K, G), of any strides.
        terms: `contextual_terms`, or slopes of the paths (G, heads) in bias mode.
        means: mean paths of queries (B, Q, G) and keys (B, K, G); None is bias mode.
        mask: (B, K) bool, True = may be attended to; a row without keys gives a mean.
        scale: of the products; None: 1 / sqrt(head width).

    Returns:
        (B, Q, width).
    """
    scale = (query.shape[-1] // heads) ** -0.5 if scale is None else scale
    query_mean, key_mean = (None, None) if means is None else means
    inputs = query, key, value, path, mask, query_mean, key_mean, terms, heads, scale
    out: Tensor = _attention(*inputs)[0]
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Tensor,
    mask: Tensor | None,
    query_mean: Tensor | None,
    key_mean: Tensor | None,
    terms: Tensor,
    heads: int,
    scale: float,
) -> Results:
    inputs = _Inputs(query, key, value, path, mask, query_mean, key_mean, terms, heads, True)
    results = _results(query, key, heads)
    inputs.launch("forward", inputs.query_blocks * heads, scale, *results)
    return results


def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Tensor,
    mask: Tensor | None,
    query_mean: Tensor | None,
    key_mean: Tensor | None,
    terms: Tensor,
    out: Tensor,
    residual: Tensor,
    statistics: Tensor,
    out_grad: Tensor,
    heads: int,
    scale: float,
) -> Gradients:
    inputs = _Inputs(query, key, value, path, mask, query_mean, key_mean, terms, heads)
    gradients = [x.new_empty(x.shape) for x in (query, key, value)]
    single_block = inputs.key_blocks == 1
    query_sum = out if single_block else torch.empty_like(gradients[0], dtype=torch.float32)
    term_grads = query.new_empty(len(query), *terms.shape, dtype=torch.float32)
    results = residual, statistics, out_grad.contiguous(), *gradients, query_sum, term_grads
    inputs.launch("backward", heads, scale, out, *results, SINGLE_BLOCK=single_block)
    return (*gradients, term_grads.sum(0))  # type: ignore[return-value]


def _differentiate_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Tensor,
    mask: Tensor | None,
    query_mean: Tensor | None,
    key_mean: Tensor | None,
    terms: Tensor,
    out: Tensor,
    residual: Tensor,
    statistics: Tensor,
    out_grad: Tensor,
    heads: int,
    scale: float,
) -> Tensor:
    inputs = _Inputs(query, key, value, path, mask, query_mean, key_mean, terms, heads)
    gradient = path.new_empty(path.shape)
    programs = inputs.query_blocks * inputs.key_blocks * path.shape[3]
    results = residual, statistics, out_grad.contiguous(), gradient
    single_block = inputs.key_blocks == 1
    inputs.launch("path", programs, scale, out, *results, SINGLE_BLOCK=single_block)
    return gradient


def _project_tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    pooled: bool,
) -> Tensor:
    terms = query.new_empty(4, *query.shape, dtype=torch.float32)
    inputs = [query, key, value, query_weight, key_weight, value_weight]
    _launch_shifts("shift", inputs, pooled, terms)
    return terms


def _project_tables_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    out_grad: Tensor,
    pooled: bool,
) -> list[Tensor]:
    inputs = [query, key, value, query_weight, key_weight, value_weight]
    gradients = [x.new_empty(x.shape) for x in inputs]
    _launch_shifts("shift_backward", inputs, pooled, out_grad.contiguous(), *gradients)
    return gradients


def _results(query: Tensor, key: Tensor, heads: int) -> Results:
    """Make the output, its rounding residual, both (B, Q, width), and statistics of rows."""
    # Where keys fill several blocks, the backward pass takes the mean gradient of a row's weights
    # from the output. Rounding to half precision would make its error several times the explicit
    # path's, so the residual is saved there. Float32 rounds only products in TF32.
    has_residual = query.dtype != torch.float32 and key.shape[1] > BLOCK
    residual = query.new_empty(query.shape if has_residual else 0)
    statistics = query.new_empty(query.shape[0], heads, 2, query.shape[1], dtype=torch.float32)
    return query.new_empty(query.shape), residual, statistics


class _Inputs:
    """Arguments of all kernels of one attention, in their order."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        path: Tensor,
        mask: Tensor | None,
        query_mean: Tensor | None,
        key_mean: Tensor | None,
        terms: Tensor,
        heads: int,
        forward: bool = False,
    ) -> None:
        states = [_contiguous_rows(x) for x in (query, key, value)]
        mask, *means = [None if x is None else x.contiguous() for x in (mask, query_mean, key_mean)]
        # A kernel without mask or means never reads the tensor that stands in for them.
        placeholder = states[0]
        (self.pairs, queries, width), keys, groups = query.shape, key.shape[1], path.shape[3]
        self.tensors = [
            *states,
            path,
            placeholder if mask is None else mask.view(torch.uint8),
            *(placeholder if x is None else x for x in means),
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
        """Run a kernel, with `programs` programs for each pair."""
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


def _launch_shifts(kernel: str, inputs: list[Tensor], pooled: bool, *results: Tensor) -> None:
    groups, width = inputs[0].shape
    inputs = [x.contiguous() for x in inputs]
    with torch.cuda.device(results[0].get_device()):
        getattr(kernels(), f"{kernel}_kernel")[(3 * -(-width // 32),)](
            *inputs,
            *results,
            width,
            GROUPS=groups,
            DOT_G=max(16, power_of_two(groups)),
            BLOCK=32,
            POOLED=pooled,
        )


def _contiguous_rows(x: Tensor) -> Tensor:
    # Pairs may lie anywhere in memory: an expanded batch is not copied.
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, heads, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.heads, ctx.scale = heads, scale
    ctx.mark_non_differentiable(*output[1:])
    # Without it zeros are made for results that have no gradient.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, out_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    query_mean, key_mean, terms = tensors[5:8]
    arguments = (*tensors, out_grad, ctx.heads, ctx.scale)
    *states, term_grads = _attention_backward(*arguments)
    # The gradient of the paths is a kernel of its own, which runs only where autograd needs it.
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


def _empty_results(query: Tensor, key: Tensor, *arguments: Any) -> Results:
    return _results(query, key, heads=arguments[-2])


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Gradients:
    term_grads = query.new_empty(arguments[4].shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (query, key, value)), term_grads  # type: ignore[return-value]


def _empty_path(query: Tensor, key: Tensor, value: Tensor, path: Tensor, *_: Any) -> Tensor:
    return path.new_empty(path.shape)


def _empty_terms(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(4, *query.shape, dtype=torch.float32)


def _empty_tables(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[:6]]


_attention = KernelOperator(
    "anchor_attention", _attend, _empty_results, _setup_context, _differentiate
)
_attention_backward = KernelOperator(
    "anchor_attention_backward", _attend_backward, _empty_gradients
)
_path_gradient = KernelOperator("anchor_path_gradient", _differentiate_path, _empty_path)
_terms = KernelOperator(
    "anchor_terms", _project_tables, _empty_terms, _setup_tables_context, _differentiate_tables
)
_terms_backward = KernelOperator("anchor_terms_backward", _project_tables_backward, _empty_tables)
