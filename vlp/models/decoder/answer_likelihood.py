"""Likelihood of given texts under a decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.layers.text_embedding import TextEmbedding
from vlp.models.decoder.answer_decoder import AnswerDecoder, Memory


class Likelihood(NamedTuple):
    """log_probability (rows,) of each text, its end included; right (rows,): tokens the decoder
    would have said itself; tokens (rows,): their number."""

    log_probability: Tensor
    right: Tensor
    tokens: Tensor


def answer_logits(
    decoder: AnswerDecoder, memory: Memory, ids: Tensor, embedding: TextEmbedding, pad_id: int
) -> Tensor:
    """Compute (R, vocabulary) logits of the R real tokens of all texts, in float32 or better.

    The output layer runs on real tokens alone; arguments are those of `answer_likelihood`.
    """
    states = decoder(ids[:, :-1], memory, embedding)
    logits: Tensor = decoder.logits(states[ids[:, 1:] != pad_id], embedding)
    return logits if logits.dtype == torch.float64 else logits.float()


def answer_likelihood(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    smoothing: float = 0.0,
    soft: Tensor | None = None,
    alpha: float = 0.0,
) -> Likelihood:
    """log p(text) = sum of log p(token | tokens before it), in float32 or better.

    Args:
        decoder: in its mode.
        memory: what each row attends to.
        ids: (rows, L) int64, [CLS] ... [SEP] and padding.
        embedding: the text encoder's.
        pad_id: of padding.
        smoothing: share of each token's target that is spread over the vocabulary (label
            smoothing); what comes out is then minus that cross-entropy.
        soft: (R, vocabulary) predictions of a teacher for the R real tokens, rows that sum to 1.
        alpha: share of `soft` in each token's target, likewise.
    """
    logits = answer_logits(decoder, memory, ids, embedding, pad_id)
    wanted = ids[:, 1:]
    real = wanted != pad_id
    each = -functional.cross_entropy(
        logits, wanted[real], reduction="none", label_smoothing=smoothing
    )
    if soft is not None:
        each = (1 - alpha) * each - alpha * functional.cross_entropy(logits, soft, reduction="none")
    spread = torch.zeros(real.shape, dtype=each.dtype, device=each.device)
    right = torch.zeros_like(real)
    right[real] = logits.argmax(-1) == wanted[real]
    return Likelihood(spread.masked_scatter(real, each).sum(1), right.sum(1), real.sum(1))
