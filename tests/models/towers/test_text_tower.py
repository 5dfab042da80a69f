import json

import pytest
import torch
from tests_support import POOLED_TOWER, tiny_config, tiny_text
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

import vlp
from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor, bert_tokenizer
from vlp.models.decoder import AnswerDecoder, AnswerDecoderConfig, initialise_decoder
from vlp.models.folder import save_pretrained
from vlp.models.itm_scorer import ITMScorer
from vlp.models.pretrained.load import load_public_weights
from vlp.models.towers import require_padding
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.tasks.pretraining import Pretraining

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 40}  # fmt: skip
SPECIALS = [f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")]
KINDS = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64},
    "mpnet": {},
    "electra": {"embedding_size": 16},
    "modernbert": dict.fromkeys(SPECIALS, 0),
    "deberta-v2": {"relative_attention": True, "position_biased_input": False},
    "esm": {"pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "absolute"},
}  # fmt: skip


def architecture(kind):
    return {"model_type": kind, **SMALL, **KINDS[kind]}


def saved(kind, folder):
    """A model with its head for masked words, as the hub holds them; returns its encoder."""
    torch.manual_seed(2)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**architecture(kind))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return AutoModel.from_pretrained(folder).eval()


def sizes(width=32, cross=(), **text):
    text = {"vocab_size": 60, "width": width, "max_positions": 99} | text
    return tiny_config(text=text, image={"width": width}, cross=dict(cross))


def texts():
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    ids = torch.randint(5, 60, (2, 9), generator=generator)
    return ids.masked_fill(~mask, 1), mask


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_weights_and_outputs_are_those_of_transformers(kind, tmp_path):
    theirs = saved(kind, tmp_path)
    model = VLPModel(sizes(architecture=str(tmp_path), weights=str(tmp_path))).eval()
    (report,) = load_public_weights(model)
    assert report.missing == ["projection"]
    ids, mask = texts()
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert torch.allclose(model.text_encoder(ids, mask), expected, atol=1e-5)
    if kind not in ("roberta", "mpnet"):  # whose positions are counted without padding
        other = model.text_encoder(ids.masked_fill(~mask, 7), mask)
        assert torch.allclose(other[mask], expected[mask], atol=1e-5)


@torch.no_grad()
def test_folder_of_a_trained_model_is_whole_without_the_hub(tmp_path):
    public, own = tmp_path / "public", tmp_path / "own"
    saved("roberta", public)
    config = sizes(width=16, architecture=str(public), weights=str(public))
    model = VLPModel(config).eval()
    load_public_weights(model)
    assert model.config.text.architecture["model_type"] == "roberta"
    # RoBERTa pads with 1.
    words = sorted(tiny_text().tokenizer.get_vocab(), key=lambda word: (word != "[UNK]", word))
    words.remove("[PAD]")
    words.insert(1, "[PAD]")
    text = TextProcessor(bert_tokenizer({word: row for row, word in enumerate(words)}), 12)
    save_pretrained(own, model.config, model.state_dict(), text, Preprocessing(16))
    for file in public.iterdir():
        file.unlink()
    loaded = vlp.load(own)
    ids, mask = texts()
    assert torch.equal(loaded.model.text_encoder(ids, mask), model.text_encoder(ids, mask))
    served = vlp.VlpModel.from_pretrained(own)
    assert loaded.model.text_encoder.pad_id == 1
    with pytest.raises(ValueError, match="do not show the padding"):
        served.encode_text(ids)
    assert served.encode_text({"input_ids": ids, "attention_mask": mask}).shape[0] == 2
    assert loaded.model.text_encoder(ids, mask).shape == (2, 9, 16)  # by the adapter
    assert json.loads((own / "config.json").read_text())["text"]["weights"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_frozen_from_below(kind):
    encoder = VLPModel(sizes(architecture=architecture(kind), trainable=1)).text_encoder
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    inside = {name for name in trained if name.startswith("tower.") and "norm" not in name[:30]}
    assert inside
    assert all(f"{encoder.blocks}.2." in name for name in inside)
    frozen = VLPModel(sizes(architecture=architecture(kind), trainable=0)).train().text_encoder
    ids, mask = texts()
    assert not frozen.tower.training
    assert torch.equal(frozen(ids, mask), frozen(ids, mask))  # dropout is off


@pytest.mark.parametrize("kind", ["electra", "distilbert"])
def test_masked_words_are_predicted_by_the_towers_own_table(kind):
    config = sizes(width=16, architecture=architecture(kind))
    objectives = ObjectivesConfig.model_validate({"mim": None, "teacher": None})
    task = Pretraining(config, objectives, "unused")
    table = task.model.text_encoder.word_table
    assert table.shape == (60, 16 if kind == "electra" else 32)
    head = task.objectives["mlm"].head
    assert head(torch.zeros(3, 16), table).shape == (3, 60)


@pytest.mark.parametrize("text_weights", [False, True])
@torch.no_grad()
def test_cross_modal_encoder_starts_from_the_last_layers_of_another_bert(text_weights, tmp_path):
    theirs = saved("bert", tmp_path)
    own = {"layers": 2, "heads": 2, "intermediate": 64, "max_positions": 40}
    own |= {"weights": str(tmp_path)} if text_weights else {}
    cross = {"layers": 2, "heads": 2, "intermediate": 64, "weights": str(tmp_path)}
    model = VLPModel(sizes(cross=cross, **own))
    *_, report = load_public_weights(model)
    assert len(_) == text_weights
    for number, layer in enumerate(model.cross_encoder.layers):
        there = theirs.encoder.layer[number + 1]
        assert torch.equal(layer.attention.query.weight, there.attention.self.query.weight)
        assert torch.equal(layer.feed_forward.contract.bias, there.output.dense.bias)
    assert "layers.*.cross_attention" in report.missing
    if text_weights:
        first = model.text_encoder.layers[1].attention.query.weight
        assert torch.equal(first, theirs.encoder.layer[1].attention.self.query.weight)
    more = sizes(cross=cross | {"layers": 4}, **own | {"weights": None})
    with pytest.raises(ConfigError, match=r"cross\.weights: .* 3 layers, cross\.layers needs 4"):
        load_public_weights(VLPModel(more))
    heads = sizes(cross=cross | {"heads": 4}, **own | {"weights": None})
    with pytest.raises(ConfigError, match=r"set cross\.heads=2"):
        load_public_weights(VLPModel(heads))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"architecture": architecture("bert"), "vocab_size": 50}, r"set text\.vocab_size=60"),
        ({"architecture": {**SMALL, "model_type": "gpt2"}}, "gpt2 is not BERT-like"),
        ({"architecture": {**SMALL, "model_type": "t5"}}, "t5 is not BERT-like"),
        ({"architecture": {"model_type": "nobodys"}}, "cannot read this configuration"),
        ({"architecture": "/no/such/folder"}, "cannot read a config.json"),
        ({"architecture": architecture("bert"), "max_tokens": 41}, "more than the 40 positions"),
    ],
)
def test_unfit_towers_are_refused_in_a_sentence(text, message):
    with pytest.raises(ConfigError, match=message):
        VLPModel(sizes(**text))


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("bert", {"num_attention_heads": 1}, "num_attention_heads"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id"),
        ("mpnet", {"layer_norm_eps": 1e-3}, "layer_norm_eps"),
        ("distilbert", {"model_type": "bert"}, "model_type"),
        ("deberta-v2", {"max_position_embeddings": 60}, "max_position_embeddings"),
        ("esm", {"token_dropout": True}, "token_dropout"),
    ],
)
def test_settings_that_no_shape_tells_are_compared(kind, change, key, tmp_path):
    saved(kind, tmp_path)
    model = VLPModel(sizes(architecture=architecture(kind) | change, weights=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"text\.weights: .*{key} is "):
        load_public_weights(model)


def test_positions_that_begin_behind_the_id_of_padding():
    with pytest.raises(ConfigError, match="more than the 38 positions"):
        VLPModel(sizes(architecture=architecture("roberta"), max_tokens=39))
    tower = VLPModel(sizes(architecture=architecture("roberta"))).text_encoder.tower
    require_padding(tower, 1)
    require_padding(None, 0)
    with pytest.raises(ConfigError, match=r"set text\.architecture\.pad_token_id=0"):
        require_padding(tower, 0)


def tower_model(text):
    sizes = {"vocab_size": text.vocab_size, "max_tokens": 24, "max_positions": 24}
    tower = architecture("bert") | {"vocab_size": text.vocab_size}
    torch.manual_seed(0)
    model = VLPModel(tiny_config(text=sizes | {"architecture": tower}, image=POOLED_TOWER)).eval()
    for name, parameter in model.named_parameters():
        if "cross_encoder" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.anchor_threshold.fill_(0.1)
    return model


@torch.no_grad()
def test_shared_parts_of_scores_are_those_of_the_model():
    model = tower_model(text := tiny_text(24))
    images = model.encode_image(torch.randn(2, 3, 56, 56))
    assert images.tokens.shape == (2, 4, 8)
    texts = model.encode_text(*text(["a red circle", "a small blue square above a star"]))
    plain = model.match(images.select(torch.tensor([1, 1])), texts)
    scorer = ITMScorer(model)
    prepared = scorer.prepare_image(images.select(torch.tensor([1])))
    shared = scorer.match(prepared, scorer.prepare_texts(texts))
    assert plain.std() > 1e-4
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)


def test_answers_are_not_written_by_a_tower():
    model = tower_model(tiny_text())
    decoder = AnswerDecoder(AnswerDecoderConfig(), model.config, torch.nn.Linear(16, 64))
    with pytest.raises(ConfigError, match=r"text\.architecture: answers and captions"):
        initialise_decoder(decoder, model)
