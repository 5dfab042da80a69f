"""A public ALBEF checkpoint as the start of a model with ACE-RPE (the paper's first limitation).

ALBEF (Li et al. 2021) is a ViT-B/16, a BERT of text layers and cross-attending layers, two
contrastive projections, and an ITM head; layout `albef` holds each. ACE-RPE tables start at zero,
so the first outputs are ALBEF's. Files come from pretraining (`text_encoder.bert.*`, MLM head) or
retrieval fine-tuning (`text_encoder.*`); momentum copies and queues are not used.
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
    listed,
    resample_positions,
)
from vlp.models.vlp import VLPModel

# ALBEF normalises images with CLIP's mean and deviation of pixel values in [0, 1].
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# Channels of an attention head in BERT and ViT; no shape of the weights tells it.
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
    # Both sides order the classes alike: 0 = not matched, 1 = matched.
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
# Report of a name, by the name's first part; all other names belong to the heads.
_PARTS = {
    "image_encoder": "image encoder",
    "visual_encoder": "image encoder",
    "text_encoder": "text encoder",
    "cross_encoder": "cross-modal encoder",
}


def albef_config(state: Mapping[str, Tensor], image_size: int | None = None) -> ModelConfig:
    """Read sizes from the shapes of an ALBEF state dict (or meta tensors), with ACE-RPE on.

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
    layers, fusion = _layer_numbers(state)
    blocks = {block[1] for key in state if (block := _BLOCK.match(key))}
    expand = f"{bert}encoder.layer.{{}}.intermediate.dense.weight"
    return ModelConfig(
        text=TextConfig(
            vocab_size=vocab_size,
            width=width,
            layers=len(layers) - len(fusion),
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
            layers=len(fusion),
            heads=width // HEAD_WIDTH,
            intermediate=shape(expand.format(min(fusion)))[0],
            layout="albef",
            position=("anchor",),
        ),
        embed_dim=shape("text_proj.weight")[0],
        token_projection=False,
    )


def load_albef(model: VLPModel, state: Mapping[str, Tensor], source: str) -> list[LoadReport]:
    """Copy an ALBEF state dict into a model of layout `albef`; return a report for each part."""
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
            fitted = resample_positions(
                tensor, model.config.image.tower_grid, source, antialias=False
            )
            resized = [] if fitted is tensor else [name]
            tensor = fitted
        weights[name] = tensor
    if unknown:
        raise ValueError(
            f"{source}: no rule maps these keys of ALBEF to a model of {model.config.text.layers} "
            f"text, {model.config.cross.layers} fusion and {model.config.image.layers} image "
            f"layers: {listed(unknown)}"
        )
    report = copy_weights(model, weights, source, unused, _OPTIONAL)
    matched = [name for name in report.matched if name not in resized]
    notes = [*report.notes, *notes]
    return _by_part(report._replace(matched=matched, resized=resized, notes=tuple(notes)))


def _check_heads(config: ModelConfig, source: str) -> None:
    """Check the number of heads."""
    # The shapes of the weights fit any number.
    for part, width in (("text", config.text.width), ("image", config.image.width)):
        model_heads = {f"{part}.heads": getattr(config, part).heads}
        if part == "text":
            model_heads["cross.heads"] = config.cross.heads
        for key, heads in model_heads.items():
            if heads * HEAD_WIDTH != width:
                raise ConfigError(
                    f"{source}: ALBEF has a head for every {HEAD_WIDTH} of its {width} channels, "
                    f"{key} is {heads}; set {key}={width // HEAD_WIDTH}"
                )


def _layer_numbers(state: Mapping[str, Tensor]) -> tuple[set[int], set[int]]:
    """Return numbers of all BERT layers, and of cross-attending ones, which must come last."""
    layers: set[int] = set()
    fusion: set[int] = set()
    for key in state:
        if layer := _LAYER.fullmatch(key):
            layers.add(int(layer[1]))
            if layer[2].startswith("crossattention."):
                fusion.add(int(layer[1]))
    if (
        not fusion
        or layers != set(range(len(layers)))
        or fusion != set(range(len(layers) - len(fusion), len(layers)))
    ):
        raise ValueError(
            "not a state dict of ALBEF: its last BERT layers must have a cross-attention, but "
            f"of layers {sorted(layers)} these have one: {sorted(fusion)}"
        )
    return layers, fusion


def _target_name(key: str, text_layers: int) -> str | None:
    """Return our name of an ALBEF key; None without a rule."""
    for prefix, target in _PREFIXES.items():
        if key.startswith(prefix):
            return target + key.removeprefix(prefix)
    if layer := _LAYER.fullmatch(key):
        number, (part, _, kind) = int(layer[1]), layer[2].rpartition(".")
        if part not in _FUSION_LAYER:
            return None
        inner = f"{_FUSION_LAYER[part]}.{kind}"
        if number < text_layers:
            return f"text_encoder.layers.{number}.{inner}"
        return f"cross_encoder.layers.{number - text_layers}.{inner}"
    part, _, kind = key.removeprefix("text_encoder.").removeprefix("bert.").rpartition(".")
    if key.startswith("text_encoder.") and part in BERT_EMBEDDING:
        return f"text_encoder.{BERT_EMBEDDING[part]}.{kind}"
    return None


def _log_scale(temp: Tensor, model: VLPModel, source: str) -> tuple[Tensor, list[str]]:
    """Return the logarithm of the inverse temperature, clamped to the learned range."""
    value = float(temp)
    if not 0 < value < math.inf:
        raise ValueError(f"{source}: temp is {value}, not a positive temperature")
    low, high = model.temperature.low, model.temperature.high
    log_scale = -temp.double().log()
    clamped = log_scale.clamp(low, high)
    weight = clamped.to(model.temperature.log_scale.dtype)
    if torch.equal(clamped, log_scale):
        return weight, []
    return weight, [f"temperature {value:g} clamped to {math.exp(-float(clamped)):g}"]


def _by_part(report: LoadReport) -> list[LoadReport]:
    """Split a report into one for each of four parts."""

    def of_part(names: list[str], title: str) -> list[str]:
        parts = (name.partition(".")[0].removesuffix("_m") for name in names)
        return [n for n, part in zip(names, parts) if _PARTS.get(part, "heads") == title]

    return [
        LoadReport(
            source=f"{report.source} -> {title}",
            matched=of_part(report.matched, title),
            resized=of_part(report.resized, title),
            missing=of_part(report.missing, title),
            unused=of_part(report.unused, title),
            notes=report.notes if title == "heads" else (),
        )
        for title in (*dict.fromkeys(_PARTS.values()), "heads")
    ]
