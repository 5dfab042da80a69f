"""Captions to token ids: a BERT WordPiece tokenizer, padded to one length."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from vlp.config import ConfigError
from vlp.io import check_hub, may_be_on_hub, parse_json, write_json

# Ids 0 to 4 of vocabularies of `train_wordpiece`.
PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_TOKENS = 2**24  # rows of an embedding table

# Names of the special tokens in RoBERTa, XLM-R and MPNet.
_ROBERTA_NAMES = dict(zip(SPECIALS, ("<pad>", "<unk>", "<s>", "</s>", "<mask>")))


class TextTokens(NamedTuple):
    """Captions as tensors (captions, tokens)."""

    text_ids: Tensor
    attention_mask: Tensor  # False for padding
    # Tokens that MLM may mask and that may be anchors: False for padding, [CLS], [SEP] and [MASK].
    word_mask: Tensor


class TextProcessor:
    """BERT-like tokenizer; ids are padded or cut to `max_tokens`, which counts [CLS] and [SEP].

    Special tokens have BERT's or RoBERTa's names.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._names = _special_names(vocabulary)
        self.max_tokens = max_tokens
        # Ids of [PAD], [UNK], [CLS], [SEP], [MASK], which MLM never draws as random tokens.
        self.special_ids: tuple[int, ...] = tuple(vocabulary[name] for name in self._names.values())
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        # Rows of an embedding table. Stored, as `Tokenizer.get_vocab` copies the whole vocabulary.
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_TOKENS:
            raise ConfigError(
                f"the vocabulary has a token of id {self.vocab_size - 1}, more than {MAX_TOKENS:,}"
            )
        # By id, as the tokenizer's `special_tokens_mask` misses a "[SEP]" in the caption itself.
        self._is_word = np.ones(self.vocab_size, dtype=np.bool_)
        self._is_word[[self.pad_id, self.cls_id, self.sep_id, self.mask_id]] = False
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.no_truncation()
        self._plain.no_padding()
        ends = self._plain.encode("").ids
        if (ends[:1], ends[-1:]) != ([self.cls_id], [self.sep_id]):
            raise ConfigError(
                f"the tokenizer puts no {self._names[CLS]} before and no {self._names[SEP]} behind "
                "a text, which the encoders read: it lacks its post_processor"
            )
        self._tokenizer = Tokenizer.from_str(self._plain.to_str())
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.enable_padding(
            length=max_tokens, pad_id=self.pad_id, pad_token=self._names[PAD]
        )

    def sha256(self) -> str:
        """Return a hash of the vocabulary and of all settings that affect ids."""
        return hashlib.sha256(self._plain.to_str().encode()).hexdigest()

    @property
    def tokenizer(self) -> Tokenizer:
        """A copy of the tokenizer without truncation and padding."""
        return Tokenizer.from_str(self._plain.to_str())

    def __call__(self, texts: str | Sequence[str]) -> TextTokens:
        """Tokenise one caption or several into (captions, max_tokens) tensors."""
        texts = as_texts(texts)
        # Loader workers tokenise one caption at a time: encode_batch starts threads, which are not
        # safe in a forked process.
        encodings = (
            [self._tokenizer.encode(texts[0])]
            if len(texts) == 1
            else self._tokenizer.encode_batch(texts)
        )
        shape = len(texts), self.max_tokens  # explicit, as there may be no texts
        text_ids = np.array([encoding.ids for encoding in encodings], np.int64).reshape(shape)
        masks = [encoding.attention_mask for encoding in encodings]
        attention_mask = np.array(masks, np.bool_).reshape(shape)
        word_mask = attention_mask & self._is_word[text_ids]
        return TextTokens(*map(torch.from_numpy, (text_ids, attention_mask, word_mask)))

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Count the texts of more than `max_tokens` tokens."""
        encodings = self._plain.encode_batch(list(texts))
        return sum(len(encoding.ids) > self.max_tokens for encoding in encodings)

    def pieces(self, text: str) -> list[str]:
        """Return the tokens of a caption's ids without padding: [CLS], word pieces, [SEP]."""
        encoding = self._tokenizer.encode(text)
        return encoding.tokens[: sum(encoding.attention_mask)]

    def visible_text(self, text: str) -> str:
        """Return the part of a text that `max_tokens` covers, with [UNK] for unknown words."""
        encoding, parts, last = self._tokenizer.encode(text), [], 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets):
            # Special tokens have no text, and several pieces of one character the same offsets.
            if end > last:
                word = text[start:end]
                # Unknown punctuation stays: it does not count in comparisons of captions.
                is_word = any(unicodedata.category(character)[0] != "P" for character in word)
                parts += [text[last:start], UNK if token == self.unk_id and is_word else word]
                last = end
        return "".join(parts)

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` and transformers' `AutoTokenizer` read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._plain.to_str(pretty=True), encoding="utf-8")
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        # transformers' BertTokenizer reads vocab.txt alone, so only BERT's own rules may use it.
        if (
            tuple(self._names.values()) == SPECIALS
            and bert_tokenizer(vocabulary).to_str() == self._plain.to_str()
        ):
            lines = "".join(
                f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__)
            )
            (folder / "vocab.txt").write_text(lines, encoding="utf-8")
            settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
        settings |= {
            "model_max_length": self.max_tokens,
            "model_input_names": ["input_ids", "attention_mask"],
            **{f"{name[1:-1].lower()}_token": token for name, token in self._names.items()},
        }
        write_json(folder / "tokenizer_config.json", settings)

    def require_same_ids(self, folder: str) -> None:
        """Require the same ids as the tokenizer in a folder of weights, if there is one."""
        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
            return
        other = TextProcessor.load(folder, self.max_tokens)
        ours, theirs = (parse_json(text._plain.to_str()) for text in (self, other))
        if ours["normalizer"] != theirs["normalizer"]:
            raise ConfigError(
                f"data.vocabulary treats case or accents in another way than {folder}, which the "
                f"weights were trained with: set data.vocabulary={folder}"
            )
        if other.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"data.vocabulary has other token ids than {folder}, which the weights were "
                f"trained with: set data.vocabulary={folder}"
            )

    @classmethod
    def load(cls, folder_or_hub_id: str | Path, max_tokens: int) -> TextProcessor:
        """Read a tokenizer from a folder (`tokenizer.json` or `vocab.txt`) or from the hub."""
        folder = Path(folder_or_hub_id)
        try:
            if (folder / "tokenizer.json").is_file():
                processor = cls(Tokenizer.from_file(str(folder / "tokenizer.json")), max_tokens)
                processor([""])  # a damaged file may fail only at the first call
                return processor
            if (folder / "vocab.txt").is_file():
                vocabulary = models.WordPiece.read_file(str(folder / "vocab.txt"))
                normalizer = _bert_normalizer(folder, vocabulary)
                return cls(bert_tokenizer(vocabulary, normalizer), max_tokens)
        except ConfigError:
            raise
        except BaseException as error:  # tokenizers: bare Exception, or a Rust panic
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{folder}: its tokenizer cannot be read ({error})") from error
        if folder.is_dir():
            raise ConfigError(f"{folder}: holds neither tokenizer.json nor vocab.txt")
        return cls(Tokenizer.from_file(_from_hub(str(folder_or_hub_id))), max_tokens)


def predicted_positions(ids: Tensor, pad_id: int) -> Tensor:
    """Return the (R,) positions in (B * (L - 1),) that a decoder predicts: all but padding.

    `ids` are (B, L); their first column, [CLS], is not predicted.
    """
    return (ids[:, 1:] != pad_id).flatten().nonzero()[:, 0]


def as_texts(inputs: Any) -> list[str]:
    """Return one text or several as a list; TypeError or ValueError for anything else."""
    texts = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(
                f"a text is of type {type(text).__name__}; give a string or a list of strings"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a text is no valid Unicode at character {error.start}: {error.reason}"
            ) from error
    return texts


def bert_tokenizer(
    vocabulary: dict[str, int], normalizer: normalizers.BertNormalizer | None = None
) -> Tokenizer:
    """Return BERT's WordPiece tokenizer over a vocabulary; by default it lower-cases."""
    _special_names(vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizer or normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(CLS, vocabulary[CLS]), (SEP, vocabulary[SEP])],
    )
    return tokenizer


def train_wordpiece(captions: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lower-case BERT WordPiece vocabulary; equal captions give equal vocabularies."""
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = bert_tokenizer({name: number for number, name in enumerate(SPECIALS)})
    words: Counter[str] = Counter()
    for caption in captions:
        normal = tokenizer.normalizer.normalize_str(caption)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    if not words:
        raise ConfigError("there are no captions to train a vocabulary on")
    first = {word[0] for word in words}
    inner = sorted({f"##{letter}" for word in words for letter in word[1:]})
    letters = first | {mark[2:] for mark in inner}
    needed = len(SPECIALS) + len(inner) + len(letters)
    if vocab_size < needed:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small: the letters of these captions alone need "
            f"{needed}"
        )
    # The library assigns ids to inner letters in random order and breaks ties of merges by id, so
    # their ids are assigned here.
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *inner],
        limit_alphabet=len(letters),
        show_progress=False,
    )
    repeated = (word for word in sorted(words) for _ in range(words[word]))
    tokenizer.train_from_iterator(repeated, trainer)
    return bert_tokenizer(tokenizer.get_vocab())


def _special_names(vocabulary: dict[str, int]) -> dict[str, str]:
    """Return a vocabulary's names of BERT's special tokens, by BERT's names."""
    names = {name: name if name in vocabulary else _ROBERTA_NAMES[name] for name in SPECIALS}
    missing = [name for name in SPECIALS if names[name] not in vocabulary]
    if missing:
        raise ConfigError(f"the vocabulary has no {', '.join(missing)}; it is not BERT-like")
    return names


def _bert_normalizer(folder: Path, vocabulary: Iterable[str]) -> normalizers.BertNormalizer:
    """Return the normalizer by a folder's `tokenizer_config.json`, or by the case of its words."""
    file = folder / "tokenizer_config.json"
    if file.is_file():
        settings = parse_json(file.read_text(encoding="utf-8"))
    else:
        # Cased models may lack the file: capitals in the vocabulary show that case matters.
        settings = {"do_lower_case": not any(re.match("(##)?[A-Z]", word) for word in vocabulary)}
    return normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )


def _from_hub(name: str) -> str:
    from huggingface_hub import hf_hub_download

    if not may_be_on_hub(name):
        raise ConfigError(
            f"vocabulary {name!r}: there is no such folder with tokenizer.json or vocab.txt; make "
            f"it with: vlp data vocabulary --shards DIR --out {name}"
        )
    try:
        check_hub()
        return hf_hub_download(name, "tokenizer.json")
    except Exception as error:  # one message for no network, unknown and invalid names
        raise ConfigError(
            f"vocabulary {name!r} is neither a folder with tokenizer.json or vocab.txt nor a name "
            f"on the hub that can be reached ({type(error).__name__}); without a hub pass "
            "--text-tower DIR and --image-tower DIR, or data.vocabulary=DIR"
        ) from error
