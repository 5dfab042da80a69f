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


def answer_likelihood(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    smoothing: float = 0.0,
) -> Likelihood:
    """log p(text) = sum of log p(token | tokens before it), in float32 or better.

    The output layer runs on real tokens alone.

    Args:
        decoder: in its mode.
        memory: what each row attends to.
        ids: (rows, L) int64, [CLS] ... [SEP] and padding.
        embedding: the text encoder's.
        pad_id: of padding.
        smoothing: share of each token's target that is spread over the vocabulary (label
            smoothing); what comes out is then minus that cross-entropy.
    """
    states = decoder(ids[:, :-1], memory, embedding)
    wanted = ids[:, 1:]
    real = wanted != pad_id
    logits = decoder.logits(states[real], embedding)
    if logits.dtype != torch.float64:
        logits = logits.float()
    each = -functional.cross_entropy(
        logits, wanted[real], reduction="none", label_smoothing=smoothing
    )
    spread = torch.zeros(real.shape, dtype=each.dtype, device=each.device)
    right = torch.zeros_like(real)
    right[real] = logits.argmax(-1) == wanted[real]
    return Likelihood(spread.masked_scatter(real, each).sum(1), right.sum(1), real.sum(1))
