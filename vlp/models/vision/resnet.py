"""A timm ResNet as a feature map, with the norm that its training needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import timm
from pydantic import Field
from timm.layers import GroupNorm, freeze_batch_norm_2d
from torch import Tensor, nn

from vlp.config import Config, ConfigError

Norm = Literal["frozen", "batch", "group"]


class ResNetConfig(Config):
    """Configuration of a ResNet: its kind, its depth, and its trained parts."""

    name: str = Field("resnet50", description="a ResNet of timm")
    options: Mapping[str, Any] = Field({}, description="of timm.create_model: channels, ...")
    pretrained: bool = Field(False, description="timm's public weights, for `batch` and `frozen`")
    norm: Norm = Field(
        "frozen",
        description="frozen: batch norms as they were loaded (DETR); batch: batch norms that are "
        "trained, whose statistics depend on the ranks; group: group norm, for training from "
        "scratch",
    )
    stage: int = Field(4, ge=1, le=4, description="whose output is used: 4 has stride 32, 3 has 16")
    frozen_stages: int = Field(
        0, ge=0, le=4, description="the stem and so many stages keep their weights; DETR: 1"
    )


class ResNet(nn.Module):
    """Images (B, 3, height, width) to features (B, channels, rows, columns).

    Args:
        config: name, norm and depth.

    Raises:
        ConfigError: timm does not know the name or an option, it is no ResNet, or public weights
            of batch norms are asked for a group norm.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        options = dict(config.options)
        if config.norm == "group":
            if config.pretrained:
                raise ConfigError(
                    f"backbone {config.name}: public weights belong to batch norms, not to "
                    "norm: group"
                )
            options["norm_layer"] = _group_norm
        try:
            body: Any = timm.create_model(
                config.name,
                pretrained=config.pretrained,
                features_only=True,
                out_indices=(config.stage,),
                **options,
            )
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"backbone {config.name}: {error}") from error
        if not hasattr(body, "layer1"):
            raise ConfigError(
                f"backbone {config.name}: not a ResNet of timm, which has layer1 to 4"
            )
        self.body = freeze_batch_norm_2d(body) if config.norm == "frozen" else body
        self.channels: int = body.feature_info.channels()[0]
        self.stride: int = body.feature_info.reduction()[0]
        trained = tuple(f"layer{stage}." for stage in range(config.frozen_stages + 1, 5))
        if config.frozen_stages:
            for name, parameter in self.body.named_parameters():
                parameter.requires_grad_(name.startswith(trained))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the features of an image."""
        return math.ceil(height / self.stride), math.ceil(width / self.stride)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of the chosen stage."""
        features: Tensor = self.body(pixels)[0]
        return features


def _group_norm(channels: int, **options: Any) -> GroupNorm:
    """32 groups, or as many as divide both 32 and the channels."""
    return GroupNorm(channels, math.gcd(32, channels), **options)
