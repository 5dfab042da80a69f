"""The likeliest sequences of a decoder that says one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


def beam_search(
    step: Step,
    rows: int,
    start: int,
    end: int,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The best sequence of every row, as far as the beams see.

    Scores are log-probabilities over ((5 + tokens) / 6) ^ penalty (Wu et al. 2016, Eq. 14), where
    the end counts as a token; while beams grow they compete by plain log-probability. One beam is
    greedy decoding.

    Args:
        step: (rows * beams, t) ids of which the first is `start`, and for each the row of the call
            before that it continues (itself in the first call), for decoders that remember what
            came before -> log-probabilities (rows * beams, vocabulary) of the next one; row r's
            beams lie side by side, in any number that divides the rows.
        rows: sequences.
        start: first id of each.
        end: id after which a sequence is over.
        length: most ids after the first.
        beams: sequences that are kept for each row.
        penalty: of length; 0 favours short ones.
        device: of the ids.

    Returns:
        (rows, at most `length`) ids without the first; after `end` there are only ends.

    Raises:
        ValueError: there is no beam, or no length.
    """
    if beams < 1 or length < 1:
        raise ValueError(f"a search of {beams} beams and {length} tokens finds nothing")
    ids = torch.full((rows, 1, 1), start, device=device)
    parent = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(rows, 1, device=device)
    over = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    before = 1
    for _ in range(length):
        if bool(over.all()):
            break
        continued = parent + before * torch.arange(rows, device=device)[:, None]
        before = ids.shape[1]
        next_scores = step(ids.flatten(0, 1), continued.flatten())
        next_scores = next_scores.unflatten(0, (rows, -1)).to(scores.dtype)
        vocabulary = next_scores.shape[-1]
        # A sequence that is over goes on in one way, which costs nothing.
        only_end = torch.full((vocabulary,), -torch.inf, device=device)
        only_end[end] = 0
        next_scores = torch.where(over[..., None], only_end, next_scores)
        total = (scores[..., None] + next_scores).flatten(1)
        scores, best = total.topk(min(beams, total.shape[1]), dim=1)
        parent, token = best // vocabulary, best % vocabulary
        ids = torch.cat([ids.take_along_dim(parent[..., None], 1), token[..., None]], -1)
        over = over.take_along_dim(parent, 1) | (token == end)
    tokens = ids.shape[-1] - 1 - (ids[..., 1:] == end).sum(-1) + over
    chosen = (scores / ((5 + tokens) / 6) ** penalty).argmax(1)
    return ids.take_along_dim(chosen[:, None, None], 1)[:, 0, 1:]
