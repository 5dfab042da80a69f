"""Numbers of ranks that can train a configuration."""

from __future__ import annotations

from vlp.config import ConfigError
from vlp.data.stream.sampler import own_streams
from vlp.objectives.contrastive.sample_groups import require_whole_groups
from vlp.training.config import PretrainConfig


def require_world_size(config: PretrainConfig, ranks: int) -> None:
    """Require that ranks share batch and streams equally and hold whole sample groups.

    Raises:
        ConfigError: they do not; the key and the numbers are named.
    """
    training = config.training
    require_whole_groups(config.objectives, training.batch, ranks, chunk=training.grad_cache)
    if config.data.sampler == "indexed":  # a resampled stream is cut up for any number of ranks
        own_streams(config.data.canonical_streams, 0, ranks)
    training.require_equal_shares(ranks)


def world_sizes(config: PretrainConfig) -> list[int]:
    """Return all numbers of ranks that `require_world_size` lets through, in rising order."""
    batch = config.training.batch
    return [ranks for ranks in range(1, batch + 1) if batch % ranks == 0 and _fits(config, ranks)]


def nearest_sizes(sizes: list[int], ranks: int) -> list[int]:
    """Return the largest of some numbers below `ranks` and the smallest above, where there are."""
    return [*[n for n in sizes if n < ranks][-1:], *[n for n in sizes if n > ranks][:1]]


def _fits(config: PretrainConfig, ranks: int) -> bool:
    try:
        require_world_size(config, ranks)
    except ConfigError:
        return False
    return True
