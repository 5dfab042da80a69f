"""The likeliest of a list of answers, as ALBEF ranks them (section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.layers.text_embedding import TextEmbedding
from vlp.models.decoder.answer_decoder import AnswerDecoder, Memory
from vlp.models.decoder.answer_likelihood import answer_likelihood

CANDIDATES = 128
"""ALBEF's k for the 3,128 answers of VQA v2."""

LOGITS = 2**26
"""Most logits in memory at once: 256 MiB in float32."""

_STEP = 32
_ROUNDING = 1e-4


class Ranked(NamedTuple):
    """best (B,) int64 numbers of answers, and log_probability (B,) of each."""

    best: Tensor
    log_probability: Tensor


class AnswerRanking:
    """Ranks answers for each row of a memory.

    The probability of an answer's first token picks the candidates, and their full likelihood
    decides. Among equals, up to rounding (1e-4 nats), the answer that stands first in the list
    wins, of candidates too: many share their first token, so the list is best sorted with frequent
    answers first.

    Without a number of candidates, answers are tried in the order of their first token's
    probability until none that is left can win, as an answer is never likelier than its first
    token. That gives the best of all answers for a part of the work.

    Args:
        decoder: in evaluation mode.
        answers: (A, L) int64, [CLS] ... [SEP] and padding; no two the same.
        embedding: the text encoder's.
        pad_id: of padding.
        candidates: answers of each row whose full likelihood is computed, or None.
        logits: most in memory at once (tokens of several answers times the vocabulary); does not
            change what is found.

    Raises:
        ValueError: there is no answer, or no candidate.
    """

    def __init__(
        self,
        decoder: AnswerDecoder,
        answers: Tensor,
        embedding: TextEmbedding,
        pad_id: int,
        candidates: int | None = CANDIDATES,
        logits: int = LOGITS,
    ) -> None:
        if not len(answers) or (candidates is not None and candidates < 1):
            raise ValueError(
                f"ranking {len(answers)} answers by {candidates} candidates finds none"
            )
        self._decoder, self._embedding, self._pad_id = decoder, embedding, pad_id
        self._answers = answers
        self._tokens = (answers != pad_id).sum(1)
        self._exact = candidates is None
        self._wide = min(candidates or _STEP, len(answers))
        self._most = logits // embedding.word.num_embeddings

    @torch.no_grad()
    def __call__(self, memory: Memory) -> Ranked:
        """The best answer of each of the B rows."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_odds = self._first_tokens(memory, len(rows))
        first_odds, order = first_odds.sort(dim=1, descending=True, stable=True)
        best = torch.full_like(rows, len(self._answers))
        odds = torch.full_like(first_odds[:, 0], -torch.inf)
        for start in range(0, len(self._answers) if self._exact else self._wide, self._wide):
            undecided = rows[first_odds[:, start] + _ROUNDING >= odds]
            if not len(undecided):
                break
            tried = order[undecided, start : start + self._wide]
            found = self._likelihoods(memory, undecided, tried)
            # What was best so far is one more column.
            found = torch.cat([odds[undecided][:, None], found], 1)
            tried = torch.cat([best[undecided][:, None], tried], 1)
            top = found.amax(1)
            odds[undecided] = top
            behind = found + _ROUNDING < top[:, None]
            best[undecided] = tried.masked_fill(behind, len(self._answers)).amin(1)
        return Ranked(best, odds)

    @torch.no_grad()
    def likelihoods(self, memory: Memory) -> Tensor:
        """Compute the log-probability of every answer for B rows, (B, A); -inf: no candidate."""
        rows = torch.arange(len(memory.layers[0][0]), device=self._answers.device)
        first_odds = self._first_tokens(memory, len(rows))
        tried = first_odds.argsort(dim=1, descending=True, stable=True)
        if not self._exact:
            tried = tried[:, : self._wide]
        found = self._likelihoods(memory, rows, tried)
        return torch.full_like(first_odds, -torch.inf).scatter(1, tried, found)

    def _first_tokens(self, memory: Memory, rows: int) -> Tensor:
        """log p of each answer's first token, (B, A)."""
        start = self._answers[:1, :1].expand(rows, 1)
        states = self._decoder(start, memory, self._embedding)[:, 0]
        logits = self._decoder.logits(states, self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1)[:, self._answers[:, 1]]

    def _likelihoods(self, memory: Memory, rows: Tensor, tried: Tensor) -> Tensor:
        """log p of the answers `tried` (rows, K), computed in pieces of answers of like length."""
        number = tried.flatten()
        owner = rows.repeat_interleave(tried.shape[1])
        order = self._tokens[number].argsort(stable=True)
        parts = []
        for piece in _pieces(self._tokens[number[order]].tolist(), self._most):
            part = order[piece]
            ids = self._answers[number[part], : int(self._tokens[number[part[-1]]])]
            own = memory.select(owner[part])
            parts.append(
                answer_likelihood(
                    self._decoder, own, ids, self._embedding, self._pad_id
                ).log_probability
            )
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy(0, order, found).view(tried.shape)


def _pieces(lengths: list[int], most: int) -> Iterator[slice]:
    """Parts of an ascending list whose longest times number is at most `most`; one at least."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > most:
            yield slice(start, stop)
            start = stop
