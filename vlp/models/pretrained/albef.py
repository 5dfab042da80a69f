"""Initialisation from a public ALBEF checkpoint, with ACE-RPE (the paper's first limitation).

ALBEF (Li et al. 2021) is a ViT-B/16, a BERT of text layers and fusion layers with cross-attention,
two contrastive projections, and an ITM head; a model of layout `albef` has the same parts. ACE-RPE
tables start at zero, so the first outputs are ALBEF's. Files come from pretraining
(`text_encoder.bert.*`, MLM head) or retrieval fine-tuning (`text_encoder.*`); momentum copies and
queues are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vlp.config import ConfigError
from vlp.models.config import CrossConfig, ImageConfig, ModelConfig, TextConfig
from vlp.models.pretrained.load import (
    BERT_EMBEDDING,
    BERT_LAYER,
    POSITION_TABLES,
    LoadReport,
    copy_weights,
    join_names,
    resample_positions,
)
from vlp.models.vlp import VLPModel

# ALBEF normalises images with CLIP's mean and deviation of pixel values in [0, 1].
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# Channels of an attention head in BERT and ViT, which no shape of the weights shows.
HEAD_WIDTH = 64

_FUSION_LAYER = BERT_LAYER | {
    "crossattention.self.query": "cross_attention.query",
    "crossattention.self.key": "cross_attention.key",
    "crossattention.self.value": "cross_attention.value",
    "crossattention.output.dense": "cross_attention.output",
    "crossattention.output.LayerNorm": "cross_norm",
}
_PREFIXES = {
    "visual_encoder.": "image_encoder.vit.",
    "vision_proj.": "image_encoder.projection.",
    "text_proj.": "text_encoder.projection.",
    # Classes have the same order: 0 = not matched, 1 = matched.
    "itm_head.": "match_head.",
}
_POSITIONS = "image_encoder.vit.pos_embed"
_TEMPERATURE = "temperature.log_scale"
_UNUSED = re.compile(
    r"(visual_encoder|text_encoder|vision_proj|text_proj)_m\.|(image|text|idx)_queue$|queue_ptr$"
    # The MLM head belongs to an objective, not to the model.
    r"|text_encoder\.cls\.|text_encoder\.(bert\.)?embeddings\.position_ids$"
)
_LAYER = re.compile(r"text_encoder\.(?:bert\.)?encoder\.layer\.(\d+)\.(.+)")
_BLOCK = re.compile(r"visual_encoder\.blocks\.(\d+)\.")
# Parts that ALBEF lacks and that keep their initialisation.
_OPTIONAL = (POSITION_TABLES, r"(text|image)_tokens\.", "anchor_threshold")


def albef_config(state: Mapping[str, Tensor], image_size: int | None = None) -> ModelConfig:
    """Read sizes from the shapes of an ALBEF state dict (or meta tensors), with ACE-RPE added.

    Anchors use ALBEF's trained contrastive projections (`token_projection` off). image_size is the
    side in pixels; None keeps the checkpoint's.
    """

    def shape(key: str) -> torch.Size:
        for name in (key, key.replace("text_encoder.bert.", "text_encoder.")):
            if name in state:
                return state[name].shape
        raise ValueError(
            f"not a state dict of ALBEF for pretraining or retrieval: {key} is missing"
        )

    bert = "text_encoder.bert."
    vocab_size, width = shape(f"{bert}embeddings.word_embeddings.weight")
    max_positions = shape(f"{bert}embeddings.position_embeddings.weight")[0]
    image_width, _, patch_size, _ = shape("visual_encoder.patch_embed.proj.weight")
    patches = shape("visual_encoder.pos_embed")[1] - 1
    side = math.isqrt(patches)
    if side * side != patches:
        raise ValueError(f"visual_encoder.pos_embed: {patches} patches are not a square grid")
    for name, channels in (("text", width), ("image", image_width)):
        if channels % HEAD_WIDTH:
            raise ValueError(
                f"the {name} encoder's width {channels} is not a multiple of {HEAD_WIDTH}, the "
                "width of a head"
            )
    layers, fusion_layers = _layer_numbers(state)
    blocks = {block[1] for key in state if (block := _BLOCK.match(key))}
    expand = f"{bert}encoder.layer.{{}}.intermediate.dense.weight"
    return ModelConfig(
        text=TextConfig(
            vocab_size=vocab_size,
            width=width,
            layers=len(layers) - len(fusion_layers),
            heads=width // HEAD_WIDTH,
            intermediate=shape(expand.format(0))[0],
            max_positions=max_positions,
            max_tokens=min(TextConfig().max_tokens, max_positions),
        ),
        image=ImageConfig(
            image_size=image_size or side * patch_size,
            patch_size=patch_size,
            width=image_width,
            layers=len(blocks),
            heads=image_width // HEAD_WIDTH,
            intermediate=shape("visual_encoder.blocks.0.mlp.fc1.weight")[0],
            normalisation=(MEAN, STD),
        ),
        cross=CrossConfig(
            layers=len(fusion_layers),
            heads=width // HEAD_WIDTH,
            intermediate=shape(expand.format(min(fusion_layers)))[0],
            layout="albef",
            position=("anchor",),
        ),
        embed_dim=shape("text_proj.weight")[0],
        token_projection=False,
    )


def load_albef(model: VLPModel, state: Mapping[str, Tensor], source: str) -> LoadReport:
    """Copy an ALBEF state dict into a model of layout `albef`."""
    layout = model.config.cross.layout
    if layout != "albef":
        raise ValueError(f"{source}: ALBEF's weights fit cross.layout albef, not {layout}")
    _check_heads(model.config, source)
    target = model.state_dict()
    weights: dict[str, Tensor] = {}
    unused: list[str] = []
    unknown: list[str] = []
    resized: list[str] = []
    notes: list[str] = []
    for key, tensor in state.items():
        if _UNUSED.match(key):
            unused.append(key)
            continue
        name = _TEMPERATURE if key == "temp" else _target_name(key, model.config.text.layers)
        if name not in target or name in weights:
            unknown.append(key)
            continue
        if name == _TEMPERATURE:
            tensor, notes = _log_scale(tensor, model, source)
        if name == _POSITIONS:
            # ALBEF's code resamples without antialiasing, and the outputs should equal its own.
            positions = resample_positions(
                tensor, model.config.image.tower_grid, source, antialias=False
            )
            resized = [] if positions is tensor else [name]
            tensor = positions
        weights[name] = tensor
    if unknown:
        raise ValueError(
            f"{source}: no rule maps these keys of ALBEF to a model of {model.config.text.layers} "
            f"text, {model.config.cross.layers} fusion and {model.config.image.layers} image "
            f"layers: {join_names(unknown)}"
        )
    return copy_weights(model, weights, source, unused, _OPTIONAL, resized, notes)


def _check_heads(config: ModelConfig, source: str) -> None:
    """Require ALBEF's number of heads, which no shape of its weights shows."""
    width = config.text.width
    for part in ("text", "image", "cross"):
        heads = getattr(config, part).heads
        if heads * HEAD_WIDTH != width:
            raise ConfigError(
                f"{source}: ALBEF's heads have {HEAD_WIDTH} of {width} channels each, and "
                f"{part}.heads is {heads}; set {part}.heads={width // HEAD_WIDTH}"
            )


def _layer_numbers(state: Mapping[str, Tensor]) -> tuple[set[int], set[int]]:
    """Return the numbers of all BERT layers and of fusion layers, which must come last."""
    matches = [match for key in state if (match := _LAYER.fullmatch(key))]
    layers = {int(match[1]) for match in matches}
    fusion_layers = {int(match[1]) for match in matches if match[2].startswith("crossattention.")}
    last_layers = set(sorted(layers)[len(layers) - len(fusion_layers) :])
    if not fusion_layers or layers != {*range(len(layers))} or fusion_layers != last_layers:
        raise ValueError(
            "not a state dict of ALBEF: its last BERT layers must have a cross-attention, but "
            f"of layers {sorted(layers)} it is in {sorted(fusion_layers)}"
        )
    return layers, fusion_layers


def _target_name(key: str, text_layers: int) -> str | None:
    """Return this model's name for an ALBEF key; None without a rule."""
    for prefix, target in _PREFIXES.items():
        if key.startswith(prefix):
            return target + key.removeprefix(prefix)
    if layer := _LAYER.fullmatch(key):
        number, (part, _, parameter) = int(layer[1]), layer[2].rpartition(".")
        if part not in _FUSION_LAYER:
            return None
        name = f"{_FUSION_LAYER[part]}.{parameter}"
        if number < text_layers:
            return f"text_encoder.layers.{number}.{name}"
        return f"cross_encoder.layers.{number - text_layers}.{name}"
    part, _, parameter = key.removeprefix("text_encoder.").removeprefix("bert.").rpartition(".")
    if key.startswith("text_encoder.") and part in BERT_EMBEDDING:
        return f"text_encoder.{BERT_EMBEDDING[part]}.{parameter}"
    return None


def _log_scale(temp: Tensor, model: VLPModel, source: str) -> tuple[Tensor, list[str]]:
    """Return log(1 / temp), clamped to the range of `Temperature`, and notes for the report."""
    value = float(temp)
    if not 0 < value < math.inf:
        raise ValueError(f"{source}: temp is {value}, not a positive temperature")
    unclamped = -temp.double().log()
    log_scale = unclamped.clamp(model.temperature.low, model.temperature.high)
    notes = []
    if not torch.equal(log_scale, unclamped):
        notes = [f"temperature {value:g} clamped to {math.exp(-float(log_scale)):g}"]
    return log_scale.to(model.temperature.log_scale.dtype), notes
