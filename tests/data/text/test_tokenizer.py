import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, normalizers

from vlp.config import ConfigError
from vlp.data.text.tokenizer import SPECIALS, TextProcessor, bert_tokenizer, train_wordpiece

CAPTIONS = [
    "A black dog is running after a white dog in the snow .",
    "Two dogs play together in the snow .",
    "Ein Café : l'été, naïve!",
]


@pytest.fixture(scope="module")
def text():
    return TextProcessor(train_wordpiece(CAPTIONS, 90), 10)


def test_ids_and_masks(text):
    tokens = text(["dog", CAPTIONS[0], ""])
    assert [tuple(part.shape) for part in tokens] == [(3, 10)] * 3
    assert [part.dtype for part in tokens] == [torch.int64, torch.bool, torch.bool]
    for row, caption in enumerate(["dog", CAPTIONS[0], ""]):
        words = text.pieces(caption)
        count = len(words)
        assert words[0] == "[CLS]"
        assert words[-1] == "[SEP]"
        assert tokens.text_ids[row, count:].tolist() == [text.pad_id] * (10 - count)
        assert tokens.attention_mask[row].tolist() == [True] * count + [False] * (10 - count)
        real = [False, *[True] * (count - 2), False, *[False] * (10 - count)]
        assert tokens.word_mask[row].tolist() == real
    assert len(text.pieces(CAPTIONS[0])) == 10  # cut, and [SEP] is still there
    assert text.pieces("") == ["[CLS]", "[SEP]"]


def test_special_tokens_in_captions_are_not_words(text):
    tokens = text(["dog [SEP] dog [MASK]"])
    assert tokens.text_ids[0].tolist()[2] == text.sep_id
    words = tokens.word_mask[0].tolist()
    assert words[:6] == [False, True, False, True, False, False]


def test_trained_vocabulary(text):
    vocabulary = train_wordpiece(CAPTIONS, 90).get_vocab()
    assert [vocabulary[name] for name in SPECIALS] == [0, 1, 2, 3, 4]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) <= 90
    assert text.vocab_size == len(vocabulary)
    for caption in CAPTIONS:
        assert "[UNK]" not in TextProcessor(train_wordpiece(CAPTIONS, 90), 64).pieces(caption)


def test_training_is_the_same_in_every_process():
    # The library seeds its hash tables afresh in each process.
    code = (
        "import json, sys; from vlp.data.text.tokenizer import train_wordpiece;"
        "print(json.dumps(train_wordpiece(json.loads(sys.argv[1]), 90).get_vocab()))"
    )
    command = [sys.executable, "-c", code, json.dumps(CAPTIONS)]
    fresh = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(fresh.stdout) == train_wordpiece(CAPTIONS, 90).get_vocab()


def byte_level():
    """Return a byte-level BPE tokenizer with BERT's names, as ModernBERT's."""
    from tokenizers import ByteLevelBPETokenizer, processors

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CAPTIONS, vocab_size=300, special_tokens=list(SPECIALS))
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def cased():
    words = (*SPECIALS, "A", "a", "dog", "Dog", "Two", "café", "犬")
    vocabulary = {word: number for number, word in enumerate(words)}
    return bert_tokenizer(vocabulary, normalizers.BertNormalizer(lowercase=False))


@pytest.mark.parametrize("make", [lambda: train_wordpiece(CAPTIONS, 90), cased, byte_level])
def test_transformers_reads_the_same_ids(make, tmp_path):
    from transformers import AutoTokenizer

    text, texts = TextProcessor(make(), 10), [*CAPTIONS, "A Dog a dog café 犬"]
    text.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tokens = theirs(
        texts, padding="max_length", truncation=True, max_length=10, return_tensors="pt"
    )
    assert torch.equal(tokens["input_ids"], text(texts).text_ids)
    assert torch.equal(tokens["attention_mask"].bool(), text(texts).attention_mask)
    assert (theirs.mask_token_id, theirs.model_max_length) == (text.mask_id, 10)
    assert (tmp_path / "vocab.txt").exists() == (make not in (cased, byte_level))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
)
def test_a_vocabulary_alone_is_read_with_its_settings(settings, tmp_path):
    from transformers import BertTokenizer

    words = [*SPECIALS, "dog", "Dog", "cafe", "Cafe", "café", "Café", "犬", "##dog"]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = TextProcessor.load(tmp_path, 5)(["Dog Café 犬dog"]).text_ids[0]
    theirs = BertTokenizer.from_pretrained(tmp_path)
    assert ours.tolist() == theirs("Dog Café 犬dog", max_length=5, truncation=True)["input_ids"]
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        TextProcessor.load(tmp_path, 5)


def test_robertas_special_tokens_are_read_and_saved(tmp_path):
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import AutoTokenizer

    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CAPTIONS, vocab_size=300, special_tokens=names)
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    text = TextProcessor(tokenizer, 40)
    assert (text.cls_id, text.pad_id, text.sep_id, text.unk_id, text.mask_id) == (0, 1, 2, 3, 4)
    ours = text(CAPTIONS)
    assert ours.text_ids[:, 0].tolist() == [0, 0, 0]
    assert not (ours.word_mask & torch.isin(ours.text_ids, torch.tensor([0, 1, 2]))).any()
    text.save(tmp_path)
    assert torch.equal(TextProcessor.load(tmp_path, 40)(CAPTIONS).text_ids, ours.text_ids)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    padding = {"padding": "max_length", "truncation": True, "max_length": 40}
    assert torch.equal(theirs(CAPTIONS, return_tensors="pt", **padding)["input_ids"], ours.text_ids)
    assert theirs.mask_token_id == 4


def test_require_same_ids_compares_vocabularies(text, tmp_path):
    text.require_same_ids(str(tmp_path))  # it has no tokenizer
    text.require_same_ids("bert-base-uncased")  # a name of the hub
    text.save(tmp_path)
    text.require_same_ids(str(tmp_path))
    other = TextProcessor(train_wordpiece(["quite other words"] * 9, 40), 8)
    with pytest.raises(ConfigError, match=f"set data.vocabulary={tmp_path}"):
        other.require_same_ids(str(tmp_path))


def test_words_of_a_cased_vocabulary_keep_their_case(tmp_path):
    words = [*SPECIALS, "Dog", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    text = TextProcessor.load(tmp_path, 8)
    assert text.pieces("Dog dog") == ["[CLS]", "Dog", "dog", "[SEP]"]
    lower_cased = bert_tokenizer({word: number for number, word in enumerate(words)})
    with pytest.raises(ConfigError, match="treats case or accents"):
        TextProcessor(lower_cased, 8).require_same_ids(str(tmp_path))


def test_a_vocabulary_without_the_special_tokens(tmp_path):
    with pytest.raises(ConfigError, match=r"no \[MASK\]"):
        bert_tokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "dog": 4})
    from tokenizers import models

    with pytest.raises(ConfigError, match="not BERT-like"):
        TextProcessor(Tokenizer(models.WordLevel({"dog": 0}, unk_token="dog")), 8)
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, "dog"])}
    with pytest.raises(ConfigError, match=r"puts no \[CLS\] before and no \[SEP\] behind"):
        TextProcessor(Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")), 8)
