"""Encodings in vision transformers of `transformers`, by its attention interface.

A layer with encodings has a copy of its configuration, in which the attention function is the one
of this module; its class, weights and names stay.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from vlp.layers.attention import attend, mask_bias
from vlp.layers.backbones.adapters import Adapter, Grid
from vlp.layers.backbones.attention import ContextStore
from vlp.positions.base import PositionEncoding

INTERFACE = "vlp_positions"
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


class TransformersContextStore(ContextStore):
    """Contexts of such a model's tokens."""

    # A pickle names this class, so that loading it registers the attention function below.


class TransformersAdapter(Adapter):
    """A ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP or SigLIP 2 of transformers."""

    positioned: ClassVar[dict[type, type]] = {}

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the embeddings and the layers."""
        super().__init__(model)
        name = type(model).__name__
        candidates = [
            (path, module)
            for path, module in model.named_modules()
            if type(module).__name__.endswith("Embeddings") and _patches(module) is not None
        ]
        if hasattr(model.config, "text_config"):
            raise ValueError(f"{name} has a text encoder, too; attach to its vision_model alone")
        paths = [path for path, _ in candidates]
        inner = [x for x in candidates if not any(x[0].startswith(f"{path}.") for path in paths)]
        self._layers = [part for part in model.modules() if _is_attention(part)]
        if len(inner) != 1 or not self._layers:
            missing = "layers of attention" if len(inner) == 1 else "one embedding of patches"
            raise ValueError(f"{name} of transformers has not {missing} that encodings could enter")
        self._path, self._embeddings = inner[0]
        self._projection = _patches(self._embeddings)

    @property
    def embedded(self) -> str:  # type: ignore[override]
        """Return the module that outputs the embedded tokens."""
        return self._path

    @property
    def width(self) -> int:
        """Return the channels of the embedded tokens."""
        return int(self._projection.weight.shape[0])  # type: ignore[union-attr]

    @property
    def grid(self) -> Grid:
        """Return the grid of patches of an image of the model's size."""
        config = self._embeddings.config if hasattr(self._embeddings, "config") else None
        config = self.model.config if config is None else config
        if not isinstance(self._projection, nn.Conv2d):
            side = int(config.num_patches**0.5)
            return side, side
        sizes = (config.image_size, config.patch_size)
        image, patch = (size if isinstance(size, list | tuple) else (size, size) for size in sizes)
        return int(image[0] // patch[0]), int(image[1] // patch[1])

    @property
    def prefix_tokens(self) -> int:
        """Count the tokens in front of the patches: [CLS], the distillation token, registers."""
        parameters = {name.rpartition(".")[2]: x for name, x in self._embeddings.named_parameters()}
        single = {"cls_token", "class_embedding", "distillation_token"} & parameters.keys()
        registers = parameters.get("register_tokens")
        return len(single) + (0 if registers is None else int(registers.shape[1]))

    @property
    def dropped(self) -> float:
        """Return 0, as these models leave no patches out."""
        return 0.0

    def layers(self) -> list[Any]:
        """Return the layers of attention in order."""
        return self._layers

    def prepare(self) -> None:
        """Make the model write the grid of its tokens."""
        if not hasattr(self.model, "context_store"):
            store = self.model.context_store = TransformersContextStore(self.prefix_tokens)
            if isinstance(self._projection, nn.Conv2d):
                self._projection.register_forward_hook(store.record_grid)
            else:
                self._embeddings.register_forward_pre_hook(store.record_sizes)

    def add(self, layer: Any, encoding: PositionEncoding) -> None:
        """Add an encoding of attention to a layer."""
        if not hasattr(layer, "positions"):
            layer.config = copy.copy(layer.config)
            layer.config._attn_implementation = INTERFACE
            layer.positions = nn.ModuleList().train(layer.training)
            layer.context_store, layer.fused = self.model.context_store, None
        layer.positions.append(encoding)

    def drop(self) -> None:
        """Remove the model's own positions; angles of its RoPE become 0."""
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
    """Attend as a function of transformers' AttentionInterface, with the layer's encodings.

    Args:
        module: the layer.
        query: (B, heads, T, head width).
        key: as the queries.
        value: as the queries.
        attention_mask: True = may be attended to, or added to the logits; broadcasts to (B, heads,
            T, T).
        scaling: of the products; None: 1 / sqrt(head width).

    Returns:
        (B, T, heads, head width), and None for the probabilities.
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


def _patches(module: nn.Module) -> nn.Conv2d | nn.Linear | None:
    """Return the projection of the patches, or None where a module does not embed them."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("projection", "patch_embedding", "patch_embeddings") and isinstance(
            part, nn.Conv2d | nn.Linear
        ):
            return part
    return None


def _is_attention(module: nn.Module) -> bool:
    """Tell whether a module projects states and takes its attention from its configuration."""
    # An encoding would have no effect in other layers.
    children = module._modules.keys()
    if not hasattr(module, "config") or not any(children >= set(names) for names in PROJECTIONS):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
