"""Models with position encodings under timm names: `timm.create_model("vlp_deit_small_...")`.

timm's classes with `vlp.positions.attach` and two more options: `absolute`, "keep" or "drop", for
the model's absolute positions, and `position_options`, such as `{"shared_heads": False}`.

- `vlp_deit_{tiny,small,base}_patch16_irpe_{k,qk,qkv}_224`: iRPE's final models (section 4.3):
  product, contextual, 50 buckets, one table for all heads, with absolute positions;
  `absolute="drop"` is rows 3-7 of Table 4.
- `vlp_swin_tiny_patch4_window7_irpe_{k,qk,qkv}_224`: the same within windows, added to Swin's bias
  (papers.md#irpe-i18); `absolute="drop"` removes the bias.
- `vlp_vit_small_patch4_<variant>_32`: SaPE's models (section 5.1), ViT-S with patches of 4 on
  images of 32 pixels. The encoding replaces absolute positions (Table 1); `absolute="keep"` is the
  paper's "+ APE". `learned` has absolute positions only, and `none` no positions.

The first two families take public DeiT and Swin weights; encodings start at zero effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    register_model,
    swin_transformer,
    vision_transformer,
)
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.positions import attach

Convert = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class _Model:
    """Definition of a registered model: `timm_class` with `options`, and a position encoding.

    position: name of the encoding, or None; on: roles as of `attach`; absolute: default for the
    model's absolute positions; weights: name of a timm model with public weights that fit.
    """

    timm_class: type[VisionTransformer] | type[SwinTransformer]
    options: Mapping[str, Any]
    position: str | None = None
    on: str | None = None
    position_options: Mapping[str, Any] = field(default_factory=dict)
    absolute: str = "keep"
    weights: str | None = None


def _irpe(on: str) -> dict[str, Any]:
    """Return fields of `_Model` for iRPE's final encoding."""
    options = {"mode": "contextual", "shared_heads": True, "ratio": 1.9}
    return {"position": "irpe-product", "on": on, "position_options": options}


def _models() -> dict[str, _Model]:
    models = {}
    for on in ("k", "qk", "qkv"):
        for size, width, heads in (("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12)):
            models[f"vlp_deit_{size}_patch16_irpe_{on}_224"] = _Model(
                VisionTransformer,
                {"patch_size": 16, "embed_dim": width, "depth": 12, "num_heads": heads},
                weights=f"deit_{size}_patch16_224",
                **_irpe(on),
            )
        models[f"vlp_swin_tiny_patch4_window7_irpe_{on}_224"] = _Model(
            SwinTransformer,
            {
                "patch_size": 4,
                "window_size": 7,
                "embed_dim": 96,
                "depths": (2, 2, 6, 2),
                "num_heads": (3, 6, 12, 24),
            },
            weights="swin_tiny_patch4_window7_224",
            **_irpe(on),
        )
    small = {"patch_size": 4, "embed_dim": 384, "depth": 12, "num_heads": 6}
    variants: dict[str, dict[str, Any]] = {
        "none": {},
        "learned": {"absolute": "keep"},
        "sine": {"position": "sine-2d"},
        "rope_axial": {"position": "rope-axial"},
        "rope_mixed": {"position": "rope-mixed"},
        "cope": {"position": "cope"},
        "sape_q": {"position": "sape", "on": "q"},
        "sape_k": {"position": "sape", "on": "k"},
        "sape_qk": {"position": "sape", "on": "qk"},
        "irpe_k": _irpe("k"),
    }
    for variant, position in variants.items():
        options = {"absolute": "drop", **position}
        models[f"vlp_vit_small_patch4_{variant}_32"] = _Model(VisionTransformer, small, **options)
    return models


def _build(
    model: _Model, absolute: str, position_options: Mapping[str, Any], **options: Any
) -> nn.Module:
    if absolute not in ("keep", "drop"):
        raise ValueError(f"absolute is 'keep' or 'drop', not {absolute!r}")
    if model.timm_class is VisionTransformer:
        options.setdefault("pos_embed", "learn" if absolute == "keep" else "none")
        # The option `pos_embed` has the effect already: `attach` has nothing to drop.
        absolute = "keep"
    network: nn.Module = model.timm_class(**options)
    if model.position is None:
        if position_options:
            raise ValueError(f"no encoding to take position_options {dict(position_options)}")
        return network
    encoding_options = {**model.position_options, **position_options}
    return attach(network, model.position, model.on, absolute, **encoding_options)


def _weights(convert: Convert, state: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Convert a checkpoint to the model's state dict; missing encodings stay initial."""
    state = state.get("state_dict", state.get("model", state))
    model_state = model.state_dict()
    # Absolute positions, which `absolute="drop"` removes.
    absolute = ("pos_embed", "relative_position_bias_table")
    state = {
        name: weight
        for name, weight in state.items()
        if name in model_state or name.rpartition(".")[2] not in absolute
    }
    state = convert(state, model)
    tables = {name: weight for name, weight in model_state.items() if "positions." in name}
    loaded = {name for name in state if "positions." in name}
    # Public weights have no encodings at all.
    if loaded and loaded != tables.keys():
        different = ", ".join(sorted(loaded ^ tables.keys())[:3])
        raise ValueError(f"encodings of checkpoint and model differ, for example in {different}")
    return {**tables, **state}


def _configurations() -> Mapping[str, Any]:
    """Return timm's configuration of every model: image size, pixel statistics, weights."""
    records: dict[str, Any] = {}
    for name, model in _MODELS.items():
        if model.weights is None:
            records[name] = {
                "num_classes": 10,
                "input_size": (3, 32, 32),
                "crop_pct": 1.0,
                "interpolation": "bicubic",
                "fixed_input_size": True,
                "mean": IMAGENET_DEFAULT_MEAN,
                "std": IMAGENET_DEFAULT_STD,
                "first_conv": "patch_embed.proj",
                "classifier": "head",
            }
        else:
            public = get_pretrained_cfg(model.weights)
            assert public is not None
            records[f"{name}.{public.tag}"] = replace(public)
    return generate_default_cfgs(records)


def _entry_point(name: str) -> Callable[..., nn.Module]:
    model = _MODELS[name]

    def create(
        pretrained: bool = False,
        absolute: str = model.absolute,
        position_options: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> nn.Module:
        convert: Convert
        features: dict[str, Any]
        if model.timm_class is VisionTransformer:
            convert = vision_transformer.checkpoint_filter_fn
            features = {"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"}
        else:
            convert = swin_transformer.checkpoint_filter_fn
            stages = tuple(range(len(options.get("depths", model.options["depths"]))))
            out_indices = options.pop("out_indices", stages)
            features = {"out_indices": out_indices, "flatten_sequential": True}
        return build_model_with_cfg(
            partial(_build, model, absolute, position_options),
            name,
            pretrained,
            pretrained_filter_fn=partial(_weights, convert),
            feature_cfg=features,
            **{**model.options, **options},
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{model.timm_class.__name__} with {model.position or 'no encoding attached'}."
    return create


_MODELS = _models()
default_cfgs = _configurations()  # timm reads the module's `default_cfgs`
__all__: list[str] = []  # `register_model` appends names

for _name in _MODELS:
    globals()[_name] = register_model(_entry_point(_name))
