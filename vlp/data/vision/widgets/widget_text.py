"""The words of a screen: texts and captions to ids, and ids to captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlp.data.shards.sample_files import BadSample
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.data.vision.widgets.screen_sets import Screens

_REMEMBERED = 50_000  # texts of widgets, most of which come again and again


class WidgetText:
    """Widgets' texts and captions as ids, and ids as captions.

    Args:
        tokenizer: BERT-like.
        max_words: length of a text's row.
        max_caption: word pieces of a caption; its row has [CLS] and [SEP] besides.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int, max_caption: int) -> None:
        self._tokenizer = tokenizer
        self._words = TextProcessor(tokenizer, max_words + 2)
        self._captions = TextProcessor(tokenizer, max_caption + 2)
        self._known: dict[str, Tensor] = {}
        self.max_words, self.max_caption = max_words, max_caption
        self.vocab_size = self._words.vocab_size
        self.pad_id, self.cls_id, self.sep_id = (
            self._words.pad_id,
            self._words.cls_id,
            self._words.sep_id,
        )
        self.special_ids = self._words.special_ids

    def words(self, text: str) -> Tensor:
        """(max_words,) int64 without special tokens."""
        if text not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            tokens = self._words([text])
            kept = tokens.text_ids[tokens.word_mask]
            row = torch.full((self.max_words,), self.pad_id)
            row[: len(kept)] = kept
            self._known[text] = row
        return self._known[text]

    def caption(self, text: str) -> Tensor:
        """(max_caption + 2,) int64: [CLS], word pieces, [SEP], padding."""
        return self._captions([text]).text_ids[0]

    def sentence(self, ids: Sequence[int]) -> str:
        """Return the caption that ids stand for, up to the first [SEP]."""
        kept = list(ids)
        kept = kept[: kept.index(self.sep_id)] if self.sep_id in kept else kept
        sentence: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return sentence

    def to_json(self) -> str:
        """Return the tokenizer, for a model folder."""
        text: str = self._tokenizer.to_str()
        return text


def widget_text(
    screens: Screens, vocabulary: str | None, size: int, max_words: int, max_caption: int
) -> WidgetText:
    """Return a public vocabulary, or one trained on all texts and captions of `screens`.

    Args:
        screens: of the training part.
        vocabulary: folder or hub name of a BERT tokenizer; None trains one.
        size: tokens of a trained one, at most.
        max_words: see `WidgetText`.
        max_caption: see `WidgetText`.

    Raises:
        ConfigError: there is no such vocabulary, or it is too small for the letters that occur.
    """
    if vocabulary is not None:
        tokenizer = TextProcessor.load(vocabulary, max_words + 2).tokenizer
    else:
        tokenizer = train_wordpiece(_texts(screens), size)
    return WidgetText(tokenizer, max_words, max_caption)


def _texts(screens: Screens) -> Iterator[str]:
    for number in range(len(screens)):
        try:
            screen = screens.read(number)
        except BadSample:  # counted when it is trained on
            continue
        for widget in screen.widgets:
            yield widget.text
            yield widget.resource
        for captions in screen.captions.values():
            yield from captions


def read_tokenizer(text: str) -> Tokenizer:
    """Return a tokenizer from what `WidgetText.to_json` gave.

    Raises:
        ValueError: it is none.
    """
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the stored tokenizer cannot be read ({error})") from error
