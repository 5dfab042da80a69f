"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(
    step: int, total_steps: int, peak: float, final: float, warmup_steps: int
) -> float:
    """Return the rate of a linear warm-up, then half a cosine from `peak` to `final`.

    Args:
        step: optimiser steps done before this one, from 0.
        total_steps: optimiser steps of the whole run; later steps stay at `final`.
        peak: rate reached after `warmup_steps` steps.
        final: rate of the last step.
        warmup_steps: the first step already moves, with `peak / warmup_steps`. A run shorter
            than its warm-up only warms up.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decaying = max(total_steps - 1 - warmup_steps, 1)
    share = min((step - warmup_steps) / decaying, 1.0)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * share))
