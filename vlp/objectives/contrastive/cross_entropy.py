"""Cross-entropy over candidates of which several may be right and some may be missing."""

from __future__ import annotations

import torch
from torch import Tensor


def candidate_cross_entropy(
    logits: Tensor,
    positive: Tensor,
    candidate_valid: Tensor,
    soft: Tensor | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of each row over its candidates, (..., R, K) -> (..., R).

    The positives of a row share its target equally; `soft` (..., R, K), rows that sum to 1, takes
    the share `alpha` of it. Candidates with `candidate_valid` (..., K) or (..., R, K) False are
    neither right nor wrong. A row without a valid positive is 0.
    """
    candidate_valid = torch.broadcast_to(
        candidate_valid if candidate_valid.dim() == logits.dim() else candidate_valid[..., None, :],
        logits.shape,
    )
    positive = positive & candidate_valid
    number = positive.sum(-1, keepdim=True)
    target = positive.to(logits.dtype) / number.clamp(min=1)
    if soft is not None and alpha > 0:
        mixed = (1 - alpha) * target + alpha * soft.to(logits.dtype)
        target = torch.where((number > 0) & candidate_valid, mixed, 0)
    # The lowest finite number instead of -inf: a row of nothing else has NaN gradients under -inf.
    log_sum = logits.masked_fill(~candidate_valid, torch.finfo(logits.dtype).min).logsumexp(-1)
    return target.sum(-1) * log_sum - (target * logits).sum(-1)
