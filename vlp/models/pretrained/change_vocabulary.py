"""A trained model that reads other word pieces: what it knows of words goes over to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.text.tokenizer import UNK, TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel

_WORDS, _BIAS = "text_encoder.embedding.word.weight", "mlm_head.bias"
_CONTINUED = "##"


class TransferredTokens(NamedTuple):
    """Numbers of the new word pieces: known as they are, put together from others, unknown."""

    known: int
    composed: int
    unknown: int


def with_vocabulary(loaded: Loaded, vocabulary: Tokenizer) -> tuple[Loaded, TransferredTokens]:
    """The same model for another vocabulary.

    A piece that both know keeps its embedding; another starts as the mean of the pieces that the
    old vocabulary makes of it, made as long as they are, or, if there are none, as the unknown
    word. Texts of pieces that both know, cut alike, mean to the new model exactly what they meant
    to the old one. The bias of the masked-word head is the plain mean.

    Args:
        loaded: the model; it is left as it is.
        vocabulary: a WordPiece tokenizer with BERT's special tokens.

    Raises:
        ConfigError: a special token is missing in the vocabulary, or the text encoder is a tower
            from outside.
    """
    if loaded.model.config.text.architecture:
        raise ConfigError("text.architecture: a tower from outside keeps its own vocabulary")
    text = TextProcessor(vocabulary, loaded.text.max_tokens)
    before, pieces = loaded.text.tokenizer, text.tokenizer.get_vocab(with_added_tokens=True)
    sources: list[list[int]] = [[]] * text.vocab_size  # numbers that name nothing get a row too
    for piece, number in pieces.items():
        sources[number] = _sources(piece, before)
    unknown = loaded.text.unk_id
    known = sum(before.token_to_id(piece) is not None for piece in pieces)
    lost = sum(not sources[number] for number in pieces.values())

    parts = [source or [unknown] for source in sources]
    config = loaded.model.config.model_dump()
    config["text"]["vocab_size"] = text.vocab_size
    model = VLPModel(ModelConfig.model_validate(config))
    state = loaded.model.state_dict()
    model.load_state_dict(
        state | {_WORDS: torch.stack([_together(state[_WORDS][part]) for part in parts])}
    )
    heads = dict(loaded.heads)
    if _BIAS in heads:
        heads[_BIAS] = torch.stack([heads[_BIAS][part].mean() for part in parts])
    counts = TransferredTokens(known, composed=len(pieces) - known - lost, unknown=lost)
    return Loaded(model.eval(), text, loaded.preprocess, heads), counts


def _together(rows: Tensor) -> Tensor:
    """The direction of the mean, as long as the (pieces, width) rows are.

    A mean of many pieces is short, and short words are not heard beside their positions.
    """
    mean = rows.mean(0)
    longer = rows.norm(dim=-1).mean() / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny)
    return mean if len(rows) == 1 else mean * longer


def _sources(piece: str, before: Tokenizer) -> list[int]:
    """Ids of the old pieces that a new one is made of."""
    own = before.token_to_id(piece)
    if own is not None:
        return [own]
    ids = before.encode(piece.removeprefix(_CONTINUED), add_special_tokens=False).ids
    return [number for number in ids if number != before.token_to_id(UNK)]
