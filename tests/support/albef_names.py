"""The names and shapes of an ALBEF state dict, as its authors' code stores them."""

from typing import NamedTuple

import torch
from torch import Tensor

NAMES = {
    "vit": """cls_token pos_embed patch_embed.proj.weight patch_embed.proj.bias
        norm.weight norm.bias""",
    "block": """norm1.weight norm1.bias attn.qkv.weight attn.qkv.bias attn.proj.weight
        attn.proj.bias norm2.weight norm2.bias mlp.fc1.weight mlp.fc1.bias mlp.fc2.weight
        mlp.fc2.bias""",
    "embeddings": """word_embeddings.weight position_embeddings.weight
        token_type_embeddings.weight LayerNorm.weight LayerNorm.bias""",
    "attention": """self.query.weight self.query.bias self.key.weight self.key.bias
        self.value.weight self.value.bias output.dense.weight output.dense.bias
        output.LayerNorm.weight output.LayerNorm.bias""",
    "feed_forward": """intermediate.dense.weight intermediate.dense.bias output.dense.weight
        output.dense.bias output.LayerNorm.weight output.LayerNorm.bias""",
    "mlm": """predictions.bias predictions.transform.dense.weight
        predictions.transform.dense.bias predictions.transform.LayerNorm.weight
        predictions.transform.LayerNorm.bias predictions.decoder.weight
        predictions.decoder.bias""",
}


class Sizes(NamedTuple):
    """What the shapes are made of; the defaults are the published checkpoint's."""

    width: int = 768
    intermediate: int = 3072
    embed: int = 256
    vocabulary: int = 30522
    tokens: int = 512
    patch: int = 16
    side: int = 16
    blocks: int = 12
    text_layers: int = 6
    fusion_layers: int = 6
    queue: int = 65536


TINY = Sizes(128, 64, 32, 50, 16, 4, 4, 2, 2, 2, 8)


def albef_shapes(sizes, kind="pretrain"):
    """Name -> shape of every tensor; `kind` is `pretrain` or `retrieval`."""
    student = _encoders(sizes, "text_encoder", "visual_encoder", kind)
    shapes = student | {"temp": ()}
    shapes |= _encoders(sizes, "text_encoder_m", "visual_encoder_m", kind)
    projections = ("vision_proj", "text_proj", "vision_proj_m", "text_proj_m")
    for name, out in (dict.fromkeys(projections, sizes.embed) | {"itm_head": 2}).items():
        shapes |= {f"{name}.weight": (out, sizes.width), f"{name}.bias": (out,)}
    shapes |= {f"{side}_queue": (sizes.embed, sizes.queue) for side in ("image", "text")}
    shapes["queue_ptr"] = (1,)
    if kind == "retrieval":
        shapes["idx_queue"] = (1, sizes.queue)
    return shapes


def albef_tensors(sizes=TINY, kind="pretrain", temp=0.02):
    state: dict[str, Tensor] = {}
    for name, shape in albef_shapes(sizes, kind).items():
        if name.endswith(("queue_ptr", "idx_queue")):
            state[name] = torch.zeros(shape, dtype=torch.long)
        elif name.endswith("position_ids"):
            state[name] = torch.arange(sizes.tokens)[None]
        else:
            state[name] = torch.randn(shape, dtype=torch.float64) * 0.1
            if "norm" in name.lower() and name.endswith("weight"):
                state[name] += 1
    state["temp"] = torch.tensor(temp, dtype=torch.float64)
    return state


def _encoders(sizes, text, image, kind):
    width, wide = sizes.width, sizes.intermediate
    square, expand, contract = (width, width), (wide, width), (width, wide)
    special = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + sizes.side**2, width),
        "patch_embed.proj.weight": (width, 3, sizes.patch, sizes.patch),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "mlp.fc1.weight": expand,
        "mlp.fc1.bias": (wide,),
        "mlp.fc2.weight": contract,
        "attn.proj.weight": square,
        "word_embeddings.weight": (sizes.vocabulary, width),
        "position_embeddings.weight": (sizes.tokens, width),
        "token_type_embeddings.weight": (2, width),
        "intermediate.dense.weight": expand,
        "intermediate.dense.bias": (wide,),
        "predictions.bias": (sizes.vocabulary,),
        "predictions.decoder.weight": (sizes.vocabulary, width),
        "predictions.decoder.bias": (sizes.vocabulary,),
        "predictions.transform.dense.weight": square,
    }
    bert = f"{text}.bert" if kind == "pretrain" else text
    groups = [(image, "vit"), (f"{bert}.embeddings", "embeddings")]
    groups += [(f"{image}.blocks.{number}", "block") for number in range(sizes.blocks)]
    for number in range(sizes.text_layers + sizes.fusion_layers):
        layer = f"{bert}.encoder.layer.{number}"
        groups += [(f"{layer}.attention", "attention"), (layer, "feed_forward")]
        if number >= sizes.text_layers:
            groups.append((f"{layer}.crossattention", "attention"))
    if kind == "pretrain":
        groups.append((f"{text}.cls", "mlm"))
    shapes: dict[str, tuple[int, ...]] = {f"{bert}.embeddings.position_ids": (1, sizes.tokens)}
    for prefix, group in groups:
        for name in NAMES[group].split():
            square_here = group == "attention" and name.endswith(("dense.weight", "y.weight"))
            shape = square if square_here or name == "self.value.weight" else special.get(name)
            if group == "feed_forward" and name == "output.dense.weight":
                shape = contract
            shapes[f"{prefix}.{name}"] = shape or (width,)
    return shapes
