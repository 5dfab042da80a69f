"""`torch.compile` of a task: each transformer block, or each encoder as one graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, product
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vlp.compilation import compile_regions
from vlp.config import ConfigError
from vlp.models.cross_encoder import CrossEncoder
from vlp.models.image_encoder import ImageEncoder
from vlp.models.text_encoder import TextEncoder
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding
from vlp.tasks.task import Task
from vlp.training.config import Compile

Backend = str | Callable[..., Any]

# Graphs of one function that the compiler may keep (its default is 8). A cross-modal layer of
# layout `ace` has 12: two attentions of two streams, each for pairs of the batch, for image-text
# matching, and for the teacher without gradients.
MAX_GRAPHS = 32

# Options of Inductor.
FEW_LAUNCHES = {
    "combo_kernels": True,  # independent kernels run in one launch
    "triton.mix_order_reduction": False,  # its final sums are separate launches
}
# Options for blocks: row and column sums are separate kernels. A joint kernel has one block size,
# which suits one of them: 78 of 202 ms of kernels of base, 64 pairs, on an H200. Encoder graphs,
# which minimise launches, keep joint kernels.
SEPARATE_REDUCTIONS = {"combo_kernels_pointwise_only": True}
# Maximum share of activations that a compiled graph keeps. A value below 1 lets the backward pass
# recompute cheap operations such as GELU: 10.2 GiB instead of 14.4 for base, 32 pairs, blocks.
MEMORY_BUDGET = 0.99


def require_compiler(mode: str) -> None:
    """Require the C++ compiler that Inductor and Triton need."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # of any version of Inductor
        raise ConfigError(
            f"training.compile={mode} needs a C++ compiler, and none runs here (PATH, CXX): "
            "install g++, or set training.compile=none"
        ) from error


def resolve_compile(mode: Compile, device: torch.device) -> Compile:
    """Return `mode`, or for "auto" the mode of a device."""
    if mode == "auto":
        return "blocks" if device.type == "cuda" else "none"
    return mode


def compile_task(
    task: nn.Module, mode: Compile, device: torch.device, backend: Backend = "inductor"
) -> None:
    """Compile a task and its teacher in place, so that parameter names stay the same.

    Args:
        mode: `blocks` compiles each transformer block (one graph for the blocks of a tower); `step`
            compiles each encoder with its projections as one graph, and other blocks; both also
            compile losses and other regions (`vlp.compilation`). `auto` is `blocks` on a GPU, else
            `none`.
        backend: of `torch.compile`.
    """
    if (mode := resolve_compile(mode, device)) == "none":
        compile_regions(None)
        return
    require_compiler(mode)
    # Imported here, as both take a second or two.
    import torch._dynamo
    import torch._functorch.config

    options: dict[str, Any] = {"backend": backend}
    if backend == "inductor":
        options["options"] = FEW_LAUNCHES | (SEPARATE_REDUCTIONS if mode == "blocks" else {})
        torch._functorch.config.activation_memory_budget = MEMORY_BUDGET
    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    # DDP reduces the gradients of one graph while the next runs: no need to split graphs for it.
    torch._dynamo.config.optimize_ddp = False
    networks, dynamic = [task], None
    if isinstance(task, Task):
        task.is_compiled, networks = True, task.networks()
        # None: a size becomes symbolic at its first change, which costs another graph.
        dynamic = False if task.static_shapes else None
    compile_regions(options)
    for network in networks:
        compiled_ids = set[int]()
        if mode == "step":
            for encoder in list(_encoders(network)):
                encoder.compile(fullgraph=True, dynamic=dynamic, **options)
                compiled_ids |= {id(part) for part in encoder.modules()}
            models = [module for module in network.modules() if isinstance(module, VLPModel)]
            for model, name in product(models, ("encode_image", "encode_text", "cross")):
                method = getattr(model, name)
                compiled = torch.compile(method, fullgraph=True, dynamic=dynamic, **options)
                setattr(model, name, compiled)
        for block in chain.from_iterable(block_stacks(network)):
            if id(block) not in compiled_ids:
                block.compile(dynamic=dynamic, **options)


def force_eager() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run eagerly."""
    # For validations: each new batch size would be compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _encoders(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the encoders of a network; ConfigError if texts have several lengths."""
    for module in network.modules():
        if isinstance(module, TextEncoder) and module.length_groups > 1:
            raise ConfigError(
                "training.compile=step needs texts of one length; set model.text.length_groups=1 "
                "or training.compile=blocks"
            )
        if isinstance(module, ImageEncoder | TextEncoder | CrossEncoder):
            yield module


def block_stacks(module: nn.Module) -> list[list[nn.Module]]:
    """Return the innermost lists of transformer blocks, in module order.

    Blocks are modules of one class with at least two linear layers each, and no position encodings.
    """
    inner_stacks = [stack for child in module.children() for stack in block_stacks(child)]
    if inner_stacks or not isinstance(module, nn.ModuleList | nn.Sequential):
        return inner_stacks
    blocks = list(module)
    is_uniform = len({type(block) for block in blocks}) == 1
    return [blocks] if is_uniform and all(map(_is_block, blocks)) else []


def _is_block(module: nn.Module) -> bool:
    linear_layers = sum(isinstance(part, nn.Linear) for part in module.modules())
    return linear_layers > 1 and not isinstance(module, PositionEncoding)


def checkpoint_activations(module: nn.Module, blocks: Literal["none", "blocks"] | int) -> None:
    """Recompute blocks in the backward pass from their inputs (Chen et al., arXiv 1604.06174).

    blocks: "blocks" for all, or the number of lowest blocks of each encoder.
    """
    if blocks == "none":
        return
    stacks = block_stacks(module)
    lowest = None if blocks == "blocks" else blocks  # None: all
    selection = [block for stack in stacks for block in stack[:lowest]]
    if not selection:
        raise ConfigError("training.activation_checkpointing: this task has no transformer blocks")
    for block in selection:
        if any(isinstance(part, _BatchNorm) for part in block.modules()):
            raise ConfigError(
                "training.activation_checkpointing: a batch norm would count every batch twice; "
                "set none"
            )
        # `forward` alone, as hooks that gather a block's weights must run outside of it. Dropout,
        # losses and gradients keep every bit.
        block.forward = functools.wraps(block.forward)(
            functools.partial(checkpoint, block.forward, use_reentrant=False)
        )
