"""What an engine leaves of the parameters on each rank."""

from __future__ import annotations

from vlp import distributed
from vlp.training.config import LoopConfig
from vlp.training.engines.deepspeed_config import deepspeed_config


def shards_parameters(training: LoopConfig) -> bool:
    """Return whether ranks hold parts of the parameters, as FSDP and ZeRO-3 have it.

    Raises:
        ConfigError: the ZeRO file cannot be used.
    """
    if training.engine != "deepspeed":
        return training.engine == "fsdp"
    settings = deepspeed_config(training, distributed.world_size())
    return bool(settings["zero_optimization"]["stage"] == 3)
