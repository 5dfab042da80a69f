"""Query-bank normalisation: lower scores of hubs, the candidates near to most queries.

A candidate's score is lowered by the log-mass of nearby queries of a bank, such as training pairs
(inverted softmax, Smith et al. 2017, section 3.3; QB-Norm, Bogolin et al. 2022, section 3.2). The
evaluated gallery's queries are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evaluation.retrieval.rerank import similarity

# Chunk sizes, which bound the memory.
_CANDIDATE_CHUNK, _QUERY_CHUNK = 1024, 8192


def log_mass(candidate: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """Return temperature * log mean over queries q of exp(cos(q, candidate) / temperature).

    candidate, bank: unit features (., d) of the candidates and of the bank's queries q. A small
    temperature weights the nearest queries. Returns (candidates,) float32, in units of similarity.
    """
    # Of the mean, not the sum, so that the log-mass does not grow with the bank.
    log_count = torch.tensor(float(len(bank))).log()
    masses = []
    for chunk in candidate.split(_CANDIDATE_CHUNK):
        parts = [
            (similarity(chunk, queries).double() / temperature).logsumexp(1)
            for queries in bank.split(_QUERY_CHUNK)
        ]
        masses.append(temperature * (torch.stack(parts).logsumexp(0) - log_count))
    return torch.cat(masses).float()


def normalised_features(
    query: Tensor, candidate: Tensor, bank: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return query and candidate features (., d + 1), with products of similarity - log-mass."""
    # The additional channel subtracts the log-mass, so that `search` needs no change.
    ones = query.new_ones(len(query), 1)
    masses = log_mass(candidate, bank, temperature).to(candidate)
    return torch.cat([query, ones], dim=1), torch.cat([candidate, -masses[:, None]], dim=1)
