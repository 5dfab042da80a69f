"""Low-rank adaptation (LoRA) of frozen towers by peft, merged when saved."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from torch import Tensor

from vlp.config import ConfigError
from vlp.models.config import ModelConfig, lora_rank
from vlp.models.vlp import VLPModel

# Suffixes of the names of query and value layers in ViT- and BERT-like models (LoRA, 4.2).
TARGETS = [
    "query",
    "value",
    "qkv",
    "q_proj",
    "v_proj",
    "q_lin",
    "v_lin",
    "attn.q",
    "attn.v",
    "Wqkv",
]
# LoRA's alpha / rank, which multiplies the product of both matrices.
SCALE = 2
# Parts of peft's parameter names: the frozen layer, A (rank, inputs) and B (outputs, rank).
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_lora(model: VLPModel) -> None:
    """Add low-rank matrices with a product of zero to loaded towers of `trainable: lora-RANK`."""
    for section, encoder, rank in (
        ("text", model.text_encoder, lora_rank(model.config.text.trainable)),
        ("image", model.image_encoder, lora_rank(model.config.image.trainable)),
    ):
        if rank is None:
            continue
        if find_spec("peft") is None:
            raise ConfigError(
                f"{section}.trainable lora-{rank} needs peft: pip install 'vlp[lora]'"
            )
        from peft import LoraConfig, inject_adapter_in_model

        # Layers after the tower and attached encodings stay trainable.
        extra_parameters = [
            parameter
            for name, parameter in encoder.named_parameters()
            if name.startswith(encoder.AFTER) or "positions." in name
        ]
        lora_config = LoraConfig(
            r=rank,
            lora_alpha=SCALE * rank,
            target_modules=TARGETS,
            exclude_modules=list(encoder.AFTER),
        )
        try:
            inject_adapter_in_model(lora_config, encoder)
        except ValueError as error:
            raise ConfigError(f"{section}.trainable lora-{rank}: {error}") from error
        for parameter in extra_parameters:
            parameter.requires_grad_(True)
        for layer in encoder.modules():
            # With a common bias, BEiT and EVA read `qkv.weight` and skip peft's module around it.
            if hasattr(layer, "qkv_bias_separate"):
                layer.qkv_bias_separate = True  # type: ignore[assignment]


def merge_lora(
    state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Return state and configuration of the equivalent model without LoRA: matrices merged."""
    ranks = {
        "text_encoder.": lora_rank(config.text.trainable),
        "image_encoder.": lora_rank(config.image.trainable),
    }
    plain_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((_A, _B)):
            continue
        module, base, parameter = name.rpartition(_BASE)
        rank = next((ranks[prefix] for prefix in ranks if name.startswith(prefix)), None)
        if base and parameter == "weight" and rank is not None:
            # `flatten`: A of a convolution is (rank, channels, rows, columns).
            a, b = state[module + _A].float(), state[module + _B].float()
            product = (b.flatten(1) @ a.flatten(1)).view_as(tensor)
            tensor = tensor + (SCALE * product).to(tensor)
        plain_state[f"{module}.{parameter}" if base else name] = tensor
    sections = {
        name: section.model_copy(update={"trainable": "all"})
        for name, section in (("text", config.text), ("image", config.image))
        if lora_rank(section.trainable)
    }
    return plain_state, config.model_copy(update=sections)
