"""Texts that a decoder writes by itself: the likeliest ones that beams find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.layers.causal import Past
from vlp.layers.text_embedding import TextEmbedding
from vlp.models.decoder.answer_decoder import AnswerDecoder, Memory
from vlp.models.decoder.beam_search import beam_search


class Marks(NamedTuple):
    """Ids that frame a text, and `silent`, those that are never said."""

    start: int
    end: int
    silent: tuple[int, ...] = ()


@torch.no_grad()
def generate(
    decoder: AnswerDecoder,
    memory: Memory,
    embedding: TextEmbedding,
    marks: Marks,
    length: int,
    beams: int = 1,
    penalty: float = 0.6,
    cached: bool = True,
) -> Tensor:
    """A text for every row of the memory.

    Args:
        decoder: in evaluation mode.
        memory: of B rows.
        embedding: the text encoder's.
        marks: [CLS], [SEP], and the other special tokens.
        length: most tokens, the end included.
        beams: see `beam_search`; 1 is greedy.
        penalty: of length, likewise.
        cached: keep keys and values of what was said; False computes the whole text at every
            token, for comparison.

    Returns:
        (B, at most `length`) ids without the start; after the end there are only ends.
    """
    step = _Step(decoder, memory, embedding, marks.silent, cached)
    rows = len(memory.layers[0][0])
    device = memory.layers[0][0].device
    return beam_search(step, rows, marks.start, marks.end, length, beams, penalty, device)


class _Step:
    """Log-probabilities of the next token, with keys and values that follow their beams."""

    def __init__(
        self,
        decoder: AnswerDecoder,
        memory: Memory,
        embedding: TextEmbedding,
        silent: Sequence[int],
        cached: bool,
    ) -> None:
        self._decoder, self._embedding, self._silent = decoder, embedding, list(silent)
        self._memory, self._own = memory, memory
        self._pasts = [Past() for _ in decoder.layers] if cached else None

    def __call__(self, ids: Tensor, parents: Tensor) -> Tensor:
        rows = len(self._memory.layers[0][0])
        if len(ids) != len(self._own.layers[0][0]):
            owner = torch.arange(rows, device=ids.device).repeat_interleave(len(ids) // rows)
            self._own = self._memory.select(owner)
        if self._pasts is not None and ids.shape[1] > 1:
            self._pasts = [_continued(past, parents) for past in self._pasts]
        states = self._decoder(ids, self._own, self._embedding, self._pasts)
        logits = self._decoder.logits(states[:, -1], self._embedding)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[:, self._silent] = -torch.inf
        return logits.log_softmax(-1)


def _continued(past: Past, parents: Tensor) -> Past:
    assert past.key is not None
    assert past.value is not None
    return Past(past.key[parents], past.value[parents])
