"""Encodings in vision transformers of `transformers`, by its attention interface.

A layer with encodings gets a copy of its configuration that selects the attention function of this
module; its class, weights and names stay.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from vlp.layers.attention import attend, mask_bias
from vlp.layers.backbones.adapters import Adapter, Grid
from vlp.layers.backbones.attention import ContextStore
from vlp.positions.base import PositionEncoding

INTERFACE = "vlp_positions"
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


class TransformersContextStore(ContextStore):
    """Contexts of a transformers model's tokens."""

    # Loading a pickle imports this module for the class, which registers the attention function.


class TransformersAdapter(Adapter):
    """A ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP or SigLIP 2 of transformers."""

    positioned: ClassVar[dict[type, type]] = {}

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the embeddings and the layers of attention."""
        super().__init__(model)
        name = type(model).__name__
        embeddings = {
            path: module
            for path, module in model.named_modules()
            if type(module).__name__.endswith("Embeddings") and _projection(module) is not None
        }
        if hasattr(model.config, "text_config"):
            raise ValueError(f"{name} has a text encoder, too; attach to its vision_model alone")
        # The outermost: ViTPatchEmbeddings, inside of ViTEmbeddings, output no prefix.
        paths = [
            path
            for path in embeddings
            if not any(path.startswith(f"{outer_path}.") for outer_path in embeddings)
        ]
        self._layers = [part for part in model.modules() if _is_attention(part)]
        if len(paths) != 1 or not self._layers:
            missing = "attention layers" if len(paths) == 1 else "exactly one embedding of patches"
            raise ValueError(
                f"encodings cannot be attached to {name} of transformers: it needs {missing} of a "
                "supported class"
            )
        self._path, self._embeddings = paths[0], embeddings[paths[0]]
        self._projection = _projection(self._embeddings)

    @property
    def token_module(self) -> str:  # type: ignore[override]
        """Return the name of the module that outputs the embedded tokens."""
        return self._path

    @property
    def width(self) -> int:
        """Return the channels of the embedded tokens."""
        return int(self._projection.weight.shape[0])  # type: ignore[union-attr]

    @property
    def grid(self) -> Grid:
        """Return the grid (rows, columns) of patches of an image of the model's size."""
        config = getattr(self._embeddings, "config", None) or self.model.config
        # SigLIP 2 has no image size, and positions of a square grid.
        if not isinstance(self._projection, nn.Conv2d):
            side = int(config.num_patches**0.5)
            return side, side
        image_size, patch_size = to_2tuple(config.image_size), to_2tuple(config.patch_size)
        return int(image_size[0] // patch_size[0]), int(image_size[1] // patch_size[1])

    @property
    def prefix_tokens(self) -> int:
        """Count the leading tokens without a position: [CLS], the distillation token, registers."""
        parameters = {name.rpartition(".")[2]: x for name, x in self._embeddings.named_parameters()}
        single_tokens = {"cls_token", "class_embedding", "distillation_token"} & parameters.keys()
        registers = parameters.get("register_tokens")
        return len(single_tokens) + (0 if registers is None else int(registers.shape[1]))

    def layers(self) -> list[Any]:
        """Return the layers of attention in order."""
        return self._layers

    def prepare(self) -> None:
        """Record the grid whenever the model embeds an image."""
        if not hasattr(self.model, "context_store"):
            store = self.model.context_store = TransformersContextStore(self.prefix_tokens)
            if isinstance(self._projection, nn.Conv2d):
                self._projection.register_forward_hook(store.record_grid)
            else:
                self._embeddings.register_forward_pre_hook(store.record_sizes)

    def add_attention_encoding(self, layer: Any, encoding: PositionEncoding) -> None:
        """Add an encoding to a layer of attention."""
        if not hasattr(layer, "positions"):
            layer.config = copy.copy(layer.config)
            layer.config._attn_implementation = INTERFACE
            layer.positions = nn.ModuleList().train(layer.training)
            layer.context_store, layer.fused = self.model.context_store, None
        layer.positions.append(encoding)

    def drop(self) -> None:
        """Remove the model's own positions; the frequencies of RoPE become 0."""
        super().drop()
        for name, buffer in self.model.named_buffers():
            if name.endswith("rope_embeddings.inv_freq"):
                buffer.zero_()


def attend_with_positions(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with the layer's encodings, as a function of transformers' AttentionInterface.

    Returns (B, T, heads, head width), and None in place of the attention weights.

    Args:
        query, key, value: (B, heads, T, head width).
        attention_mask: bool, True = may be attended to, or float, added to the logits; broadcasts
            to (B, heads, T, T).
        scaling: of the products of queries and keys; None: 1 / sqrt(head width).
    """
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = mask_bias(bias, query.dtype)
    out = attend(
        query,
        key,
        value,
        module.positions,
        module.context_store.read(int(query.shape[-2])),
        bias,
        module.fused,
        dropout,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(INTERFACE, attend_with_positions)


def _projection(module: nn.Module) -> nn.Conv2d | nn.Linear | None:
    """Return the projection of patches in a module, or None if it does not embed patches."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("projection", "patch_embedding", "patch_embeddings") and isinstance(
            part, nn.Conv2d | nn.Linear
        ):
            return part
    return None


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module projects states, and its configuration selects its attention."""
    # Encodings have no effect in other layers.
    children = module._modules.keys()
    if not hasattr(module, "config") or not any(children >= set(names) for names in PROJECTIONS):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
