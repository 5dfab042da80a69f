"""The decoder on a pretrained model, which question answering and captioning share."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.decoder import (
    AnswerDecoder,
    AnswerDecoderConfig,
    Marks,
    Memory,
    answer_likelihood,
    start_decoder,
)
from vlp.models.folder import Loaded
from vlp.objectives.mlm import MLMHead
from vlp.tasks.downstream.task import Downstream

logger = logging.getLogger(__name__)

_PRETRAINED = "mlm_head."


def create_decoder(config: AnswerDecoderConfig, parts: Loaded, max_tokens: int) -> AnswerDecoder:
    """Create a decoder for a model."""
    text = parts.model.config.text
    if max_tokens > text.max_positions:
        raise ConfigError(
            f"task.data: texts of {max_tokens} tokens are to be written, and the model has "
            f"{text.max_positions} positions"
        )
    return AnswerDecoder(config, parts.model.config, MLMHead(text.width, text.vocab_size))


def start(decoder: AnswerDecoder, parts: Loaded) -> None:
    """Initialise layers as configured, and with them the output, from pretraining's MLM head."""
    try:
        reports = start_decoder(decoder, parts.model)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"task.decoder: {error}") from error
    for report in reports:
        logger.info("%s", report)
    if decoder.config.start == "none" and decoder.config.weights is None:
        return
    head = decoder.head.state_dict()
    found = {name: parts.heads.get(f"{_PRETRAINED}{name}") for name in head}
    fits = [own for name, own in found.items() if own is not None and own.shape == head[name].shape]
    if len(fits) == len(head):
        with torch.no_grad():
            for here, own in zip(head.values(), fits):
                here.copy_(own)
        logger.info("the head of masked words -> answer decoder")


def trained_decoder_starts(config: AnswerDecoderConfig) -> bool:
    """Return whether a decoder may start as the one of a folder that was fine-tuned before."""
    return config.start != "none" and config.weights is None


def marks(text: TextProcessor) -> Marks:
    """Return what starts a text ([CLS]), ends it ([SEP]) and is never said (special tokens)."""
    silent = tuple(one for one in text.special_ids if one != text.sep_id)
    return Marks(text.cls_id, text.sep_id, silent)


class Sentences:
    """Decoder of rows of ids to texts, up to the first [SEP]."""

    def __init__(self, text: TextProcessor) -> None:
        self._tokenizer, self._end = text.tokenizer, text.sep_id

    def __call__(self, ids: Tensor) -> list[str]:
        """Decode (rows, L) ids to a text each."""
        return [self._sentence(row) for row in ids.tolist()]

    def _sentence(self, ids: Sequence[int]) -> str:
        kept = list(ids)
        kept = kept[: kept.index(self._end)] if self._end in kept else kept
        said: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return said


def text_probability(
    task: Downstream, decoder: AnswerDecoder, memory: Memory, words: TextProcessor, text: str
) -> float:
    """Compute the probability of all word pieces of a text and of its end.

    Args:
        task: whose model embeds the word pieces.
        decoder: of the task.
        memory: what the decoder attends to, of one item.
        words: tokenizer of the text.
        text: whose probability it is.
    """
    embedding = task.model.text_encoder.embedding
    ids = words([text]).text_ids.to(next(task.parameters()).device)
    found = answer_likelihood(decoder, memory, ids, embedding, task.text.pad_id)
    return float(found.log_probability.exp())
