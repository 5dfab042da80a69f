"""Likelihood of given texts under a decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.data.text.tokenizer import predicted_places
from vlp.layers.text_embedding import TextEmbedding
from vlp.models.decoder.answer_decoder import AnswerDecoder, Memory


class Likelihood(NamedTuple):
    """log_probability (rows,) of each text, its end included; right (rows,): tokens the decoder
    would have said itself; tokens (rows,): their number."""

    log_probability: Tensor
    right: Tensor
    tokens: Tensor


def answer_logits(
    decoder: AnswerDecoder,
    memory: Memory,
    ids: Tensor,
    embedding: TextEmbedding,
    pad_id: int,
    places: Tensor | None = None,
) -> Tensor:
    """Compute (R, vocabulary) logits of the R real tokens of all texts, in float32 or better.

    The output layer runs on real tokens alone; arguments are those of `answer_likelihood`.
    """
    places = predicted_places(ids, pad_id) if places is None else places
    states = decoder(ids[:, :-1], memory, embedding)
    logits: Tensor = decoder.logits(states.flatten(0, 1)[places], embedding)
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
    places: Tensor | None = None,
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
        places: (R,) `predicted_places`; None finds them, for which a GPU is waited for.
    """
    places = predicted_places(ids, pad_id) if places is None else places
    logits = answer_logits(decoder, memory, ids, embedding, pad_id, places)
    tokens = ids[:, 1:]
    wanted = tokens.flatten()[places]
    each = -functional.cross_entropy(logits, wanted, reduction="none", label_smoothing=smoothing)
    if soft is not None:
        each = (1 - alpha) * each - alpha * functional.cross_entropy(logits, soft, reduction="none")

    def by_text(values: Tensor) -> Tensor:
        spread = values.new_zeros(tokens.numel()).index_copy(0, places, values)
        return spread.view_as(tokens).sum(1)

    right = logits.argmax(-1) == wanted
    return Likelihood(by_text(each), by_text(right), (tokens != pad_id).sum(1))
