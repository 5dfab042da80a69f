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

# Ids 0-4, in this order, in every vocabulary trained here.
PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_TOKENS = 2**24  # rows of an embedding table

# The same as RoBERTa, XLM-R and MPNet name them.
_OTHERS = dict(zip(SPECIALS, ("<pad>", "<unk>", "<s>", "</s>", "<mask>")))


class TextTokens(NamedTuple):
    """Captions as tensors (captions, tokens)."""

    text_ids: Tensor
    # All but padding.
    attention_mask: Tensor
    # Neither padding nor [CLS] and [SEP]: tokens that masking may choose and anchors may lie at.
    word_mask: Tensor


class TextProcessor:
    """BERT-like tokenizer to ids of a fixed length; long captions are cut, keeping [SEP].

    Special tokens have BERT's or RoBERTa's names. `max_tokens` counts [CLS] and [SEP].
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._names = _special_names(vocabulary)
        self.max_tokens = max_tokens
        ids = {name: vocabulary[token] for name, token in self._names.items()}
        # Rows that an embedding table needs; asking the library copies the whole vocabulary.
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_TOKENS:
            raise ConfigError(
                f"the vocabulary has a token of id {self.vocab_size - 1}, more than {MAX_TOKENS:,}"
            )
        self.pad_id: int = ids[PAD]
        self.unk_id: int = ids[UNK]
        self.cls_id: int = ids[CLS]
        self.sep_id: int = ids[SEP]
        self.mask_id: int = ids[MASK]
        # By id, not by the tokenizer's own mask: a caption may hold the text "[SEP]".
        self._is_word = np.ones(self.vocab_size, dtype=np.bool_)
        self._is_word[[self.pad_id, self.cls_id, self.sep_id, self.mask_id]] = False
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.no_truncation()
        self._plain.no_padding()
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

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD], [UNK], [CLS], [SEP], [MASK]: never a random word of masking."""
        return self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id

    def __call__(self, texts: str | Sequence[str]) -> TextTokens:
        """Tokenise one caption or several into (captions, max_tokens) tensors."""
        texts = as_texts(texts)
        # One caption at a time in loader workers: encode_batch starts threads, which a forked
        # process must not.
        encodings = (
            [self._tokenizer.encode(texts[0])]
            if len(texts) == 1
            else self._tokenizer.encode_batch(texts)
        )
        shape = len(texts), self.max_tokens
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64).reshape(shape)
        attention = np.array(
            [encoding.attention_mask for encoding in encodings], dtype=np.bool_
        ).reshape(shape)
        words = attention & self._is_word[ids]
        return TextTokens(*map(torch.from_numpy, (ids, attention, words)))

    def count_cut(self, texts: Sequence[str]) -> int:
        """Count the texts that exceed `max_tokens`."""
        encodings = self._plain.encode_batch(list(texts))
        return sum(len(encoding.ids) > self.max_tokens for encoding in encodings)

    def words(self, text: str) -> list[str]:
        """Return a caption's word pieces as in its ids, with special tokens, without padding."""
        encoding = self._tokenizer.encode(text)
        return encoding.tokens[: sum(encoding.attention_mask)]

    def as_read(self, text: str) -> str:
        """Return a text without what is cut off, and with [UNK] for its unknown words."""
        encoding, parts, last = self._tokenizer.encode(text), [], 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets):
            # Special tokens have no characters, and pieces of one character the same.
            if end > last:
                word = text[start:end]
                # Punctuation that the vocabulary lacks is no word.
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
        # Of a BertTokenizer transformers reads the vocabulary alone.
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

    def require_words_of(self, folder: str) -> None:
        """Require the ids of the tokenizer in a folder of weights, if it has one."""
        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
            return
        other = TextProcessor.load(folder, self.max_tokens)
        ours, theirs = (parse_json(text._plain.to_str()) for text in (self, other))
        if ours["normalizer"] != theirs["normalizer"]:
            raise ConfigError(
                f"data.vocabulary changes case or accents otherwise than {folder}, whose weights "
                f"know other words: set data.vocabulary={folder}"
            )
        if other.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"data.vocabulary has other words, or in another order, than {folder}, whose "
                f"weights know them by number: set data.vocabulary={folder}"
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
    """Return the places (R,) in (B * (L - 1),) that a decoder predicts: no padding, no [CLS]."""
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
    """Train a lower-case BERT WordPiece vocabulary; equal captions give the same one."""
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
            f"a vocabulary of {vocab_size} is too small: these captions need {needed} for single "
            "letters alone"
        )
    # The library numbers inner letters in the order of a randomly seeded hash table and breaks ties
    # of merges by number, so they are numbered here first.
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
    """Return the names that a vocabulary has for BERT's special tokens."""
    names = {name: name if name in vocabulary else _OTHERS[name] for name in SPECIALS}
    missing = [name for name in SPECIALS if names[name] not in vocabulary]
    if missing:
        raise ConfigError(f"the vocabulary has no {', '.join(missing)}; it is not BERT-like")
    return names


def _bert_normalizer(folder: Path, vocabulary: Iterable[str]) -> normalizers.BertNormalizer:
    """Return the normalizer of a folder's `tokenizer_config.json`, by default of its words."""
    file = folder / "tokenizer_config.json"
    if file.is_file():
        settings = parse_json(file.read_text(encoding="utf-8"))
    else:
        # Some folders of cased models have no configuration.
        settings = {"do_lower_case": not any(re.match("(##)?[A-Z]", word) for word in vocabulary)}
    return normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )


def _from_hub(name: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        if not may_be_on_hub(name):
            raise FileNotFoundError(name)
        check_hub()
        return hf_hub_download(name, "tokenizer.json")
    except Exception as error:  # no network, no such name, not a name: one answer to all
        raise ConfigError(
            f"vocabulary {name!r} is neither a folder with tokenizer.json or vocab.txt nor a name "
            f"on the hub that can be reached ({type(error).__name__}); without a hub pass "
            "--text-tower DIR and --image-tower DIR, or data.vocabulary=DIR"
        ) from error
