import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForPreTraining

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import load_public_weights
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.tasks.pretraining import Pretraining

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 20}  # fmt: skip


def random_bert(**sizes):
    """Norms and biases are random too: at a library's start they are all ones and zeros."""
    torch.manual_seed(3)
    bert = BertForPreTraining(BertConfig(**sizes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in bert.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.1).add_("LayerNorm.weight" in name)
    return bert


def old_names(bert):
    """As files converted from TensorFlow have them."""
    state = {"bert.embeddings.position_ids": torch.arange(512)[None]}
    for key, tensor in bert.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
        state[key.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    return state


def write(folder, bert, state=None, **settings):
    config = bert.config.to_dict() | settings
    (folder / "config.json").write_text(json.dumps(config, default=str))
    torch.save(old_names(bert) if state is None else state, folder / "pytorch_model.bin")
    return str(folder)


def sizes(name, layers=(2, 1), **text):
    return ModelConfig.model_validate(
        {
            "text": {"vocab_size": 50, "width": 32, "layers": layers[0], "heads": 4,
                     "intermediate": 24, "max_positions": 20, "max_tokens": 12, "weights": name,
                     **text},
            "image": {"image_size": 32, "width": text.get("width", 32), "layers": 1, "heads": 4,
                      "intermediate": 64},
            "cross": {"layers": layers[1], "heads": 4, "intermediate": 24},
            "embed_dim": 32,
        }
    )  # fmt: skip


def loaded(*given, **text):
    model = VLPModel(sizes(*given, **text)).eval()
    return model, load_public_weights(model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    bert = random_bert(**TINY)
    return bert, write(tmp_path_factory.mktemp("bert"), bert)


@torch.no_grad()
def test_states_are_those_of_transformers(tiny):
    """Layers 1 and 2 of three are the text encoder's, the last the cross-modal encoder's."""
    bert, folder = tiny
    model, (text, cross) = loaded(folder)
    ids = torch.randint(5, 50, (2, 9))
    mask = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    expected = bert.bert(ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    states = model.text_encoder(ids, mask)
    torch.testing.assert_close(states[mask], expected[2][mask], rtol=1e-5, atol=1e-5)
    (layer,) = model.cross_encoder.layers  # without the cross-attention, which BERT has not
    states = layer.attention_norm(states + layer.attention(states, mask=mask))
    states = layer.feed_forward_norm(states + layer.feed_forward(states))
    torch.testing.assert_close(states[mask], expected[3][mask], rtol=1e-5, atol=1e-5)
    assert (len(text.matched), len(cross.matched)) == (5 + 2 * 16, 16)
    parts = ("cross_attention", "cross_attention.positions", "cross_norm")
    assert cross.missing == [f"layers.*.{part}" for part in parts]
    unused = {key.removeprefix("bert.") for key in text.unused if ".layer." not in key}
    heads = {key for key in unused if key.startswith("cls.")}
    assert len(heads) == 9
    assert unused - heads == {
        "embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"
    }  # fmt: skip


@torch.no_grad()
def test_the_mlm_head_is_bert_s(tiny):
    bert, folder = tiny
    built = Pretraining(sizes(folder), ObjectivesConfig(), "unused")
    states = torch.randn(5, 32)
    expected = bert.cls.predictions(states)
    found = built.mlm_head(states, built.model.text_encoder.embedding.word.weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert built.teacher is not None
    head = built.teacher.average.module["mlm_head"].state_dict()
    assert all(torch.equal(head[name], one) for name, one in built.mlm_head.state_dict().items())
    assert str(built.weight_reports[-1]).startswith(f"{folder} -> MLM head: 5 matched")


@pytest.mark.parametrize("untied", [False, True])
def test_a_bert_without_its_head_leaves_the_models(tiny, tmp_path, untied):
    bert, _ = tiny
    state = old_names(bert)
    if untied:
        state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    else:
        state = {name: tensor for name, tensor in state.items() if "cls." not in name}
    built = Pretraining(sizes(write(tmp_path, bert, state)), ObjectivesConfig(), "unused")
    assert not built.mlm_head.bias.any()
    assert not any("MLM head" in str(report) for report in built.weight_reports)


def test_a_file_alone_says_nothing_of_its_heads(tiny, tmp_path):
    bert, _ = tiny
    file = tmp_path / "bert.safetensors"
    save_file(bert.bert.state_dict(), file)
    _, reports = loaded(str(file))
    for report in reports:
        assert str(report).endswith("; the source does not state its heads: assuming 4")


def test_a_bert_that_ends_with_the_text_encoder_leaves_the_rest_as_it_was(tiny):
    torch.manual_seed(9)
    model = VLPModel(sizes(tiny[1], (3, 2)))
    before = {name: tensor.clone() for name, tensor in model.cross_encoder.state_dict().items()}
    _, cross = load_public_weights(model)
    assert (cross.matched, "layers" in cross.missing) == ([], True)
    after = model.cross_encoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_half_precision_becomes_float32_and_is_noted(tiny, tmp_path):
    state = {key: tensor.bfloat16() for key, tensor in tiny[0].bert.state_dict().items()}
    model, reports = loaded(write(tmp_path, tiny[0], state))
    word = model.text_encoder.embedding.word.weight
    assert torch.equal(word, state["embeddings.word_embeddings.weight"].float())
    assert all(report.notes == ("bfloat16 there, float32 here",) for report in reports)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype, tiny, tmp_path):
    bert, _ = tiny
    state = bert.bert.state_dict()
    name = f"{dtype}".removeprefix("torch.")
    state["encoder.layer.0.output.dense.weight"] = torch.zeros(32, 24).to(dtype)
    with pytest.raises(
        ConfigError, match=rf"layers.0.feed_forward.contract.weight is {name} there"
    ):
        loaded(write(tmp_path, bert, state))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads is 8 there and text.heads is 4 here; set "
         "text.heads=8; num_attention_heads is 8 there and cross.heads is 4"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu' there and 'gelu' in this model"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05 there and 1e-12 in this model"),
        ({"type_vocab_size": 1}, "type_vocab_size is 1 there and 2 in this model"),
        ({"position_embedding_type": "relative_key"},
         "position_embedding_type is 'relative_key' there and 'absolute' in this model"),
        ({"model_type": "roberta"}, "model_type is 'roberta' there and 'bert' in this model"),
        ({"is_decoder": True}, "is_decoder is True there and False in this model"),
    ],
)  # fmt: skip
def test_another_bert_with_the_same_shapes_is_refused(tiny, tmp_path, settings, message):
    folder = write(tmp_path, tiny[0], **settings)
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    assert str(caught.value).startswith(f"text.weights: {folder} does not fit: {message}")


def test_other_sizes_are_named_by_key(tiny):
    settings = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    with pytest.raises(ConfigError) as error:
        loaded(tiny[1], width=64, intermediate=48, vocab_size=60, max_positions=24)
    assert all(f"{name} is {TINY[name]} there and text." in str(error.value) for name in settings)


@pytest.mark.parametrize(
    ("lost", "extra", "message"),
    [
        ("bert.encoder.layer.1.attention.self.key.bias", "cls.more",
         r"weights are missing: layers.1.attention.key.bias$"),
        (None, "embeddings.LayerNorm.weight",
         "bert.embeddings.LayerNorm.gamma and embeddings.LayerNorm.weight are the same"),
        (None, "adapter.0", "keys of BERT: adapter.0"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_named(tiny, tmp_path, lost, extra, message):
    state = old_names(tiny[0]) | {extra: torch.ones(32)}
    state.pop(lost, None)
    with pytest.raises(ConfigError, match=message):
        loaded(write(tmp_path, tiny[0], state))


@pytest.mark.parametrize("layers", [(4, 1), (2, 2)])
def test_too_few_layers(tiny, layers):
    text, cross = layers
    message = rf"has 3 layers; text.layers {text} and cross.layers {cross} need {text + cross} "
    with pytest.raises(ConfigError, match=message):
        loaded(tiny[1], layers)
