"""timm models as a configuration names them."""

from __future__ import annotations

import timm
from torch import nn

from vlp.config import ConfigError
from vlp.models.vision.config import BackboneConfig
from vlp.positions import attach, drop_absolute


def create_backbone(config: BackboneConfig, **options: object) -> nn.Module:
    """Return a timm model with its encodings.

    Args:
        config: name, options and encodings.
        options: of `timm.create_model`, such as num_classes; those of the configuration win.

    Raises:
        ConfigError: timm does not know the name or an option, an encoding does not fit, or the
            model has no absolute positions to drop.
    """
    import vlp.models.vision  # noqa: F401  # registers our names with timm

    try:
        model: nn.Module = timm.create_model(
            config.name, pretrained=config.pretrained, **{**options, **config.options}
        )
        absolute = config.absolute
        for position in config.positions:
            attach(model, position.name, position.roles, absolute, **position.options)
            absolute = "keep"  # it is gone already
        if config.absolute == "drop" and not config.positions:
            drop_absolute(model)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"model {config.name}: {error}") from error
    return model
