import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pydantic import ValidationError
from tests_support import ace, tiny_config

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import PairIndices
from vlp.models.vlp import VLPModel
from vlp.positions import PositionContext, PositionEncoding, register_position, registry


def tiny(**cross):
    model = VLPModel(tiny_config(cross=cross)).eval()
    for name, parameter in model.named_parameters():
        if "table" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.anchor_threshold.fill_(0.2)
    return model


def inputs(rows=3):
    pixels = torch.randn(rows, 3, 16, 16)
    ids = torch.randint(5, 40, (rows, 12))
    lengths = torch.tensor([6, 8, 4])[:rows, None]
    attention = torch.arange(12) < lengths
    words = attention & (torch.arange(12) > 0) & (torch.arange(12) < lengths - 1)
    return pixels, ids, attention, words


def encoded(model, rows=3):
    pixels, *text = inputs(rows)
    return model.encode_image(pixels), model.encode_text(*text)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_paper_sizes_are_exact():
    with torch.device("meta"):
        model = VLPModel(ModelConfig())
    parts = (model.text_encoder, model.image_encoder, model.cross_encoder)
    assert [count(part) for part in parts] == [66_561_280, 43_760_128, 53_277_696]
    assert sum(count(part) for part in parts) == 163_599_104
    assert count(model.text_tokens) == count(model.image_tokens) == 196_608
    assert model.image_encoder.vit.pos_embed.shape == (1, 577, 768)
    for layout, size in (("ace", 53_167_104), ("albef", 56_710_656)):
        config = ModelConfig.model_validate({"cross": {"layout": layout, "position": ()}})
        with torch.device("meta"):
            assert count(VLPModel(config).cross_encoder) == size


def test_linear_layers_of_encodings_keep_their_own_start(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODINGS", {**registry._ENCODINGS})

    @register_position("own-gate")
    class Gate(PositionEncoding):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(width // heads, 1)
            torch.nn.init.ones_(self.gate.bias)

        def bias(self, query, key, context: PositionContext):
            return self.gate(key).mT

    cross = {"position": ("own-gate", "anchor")}
    model = VLPModel(tiny_config(image={"positions": {"own-gate": {}}}, cross=cross))
    linear = [(n, part) for n, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    gates = [part for name, part in linear if name.endswith("gate")]
    assert len(gates) == 1 + 2 * 2  # of the tower's block, and of both streams in both layers
    assert all(gate.bias.eq(1).all() for gate in gates)
    biases = [part.bias for _, part in linear if part not in gates and part.bias is not None]
    assert not any(bias.any() for bias in biases)


def test_positions_of_patches_start_as_sines_by_which_neighbours_are_alike():
    table = model_with(image={"position": 0.5}).image_encoder.vit.pos_embed.detach()[0]
    assert (table[0] == 0).all()
    places = table[1:].unflatten(0, (4, 4))
    torch.testing.assert_close(places.square().mean(-1), torch.full((4, 4), 0.125))
    next_door = (places[1:] * places[:-1]).sum(-1).min()
    assert next_door > (places[0] * places[3]).sum(-1).max()
    torch.testing.assert_close(places.mT.diff(dim=0).abs().sum(), places.mT.diff(dim=2).abs().sum())


@pytest.mark.parametrize("layout", ["ace", "text", "albef"])
@pytest.mark.parametrize(
    "position", [(), ("anchor",), ("uniform",), ("alignment",), ("ape",), ("ape", "anchor")]
)
def test_padding_changes_nothing(layout, position):
    model = tiny(layout=layout, position=position)
    pixels, ids, attention, words = inputs()
    image = model.encode_image(pixels)
    text = model.encode_text(ids, attention, words)
    other = model.encode_text(ids.masked_fill(~attention, 7), attention, words)
    torch.testing.assert_close(model.match(image, text), model.match(image, other))
    torch.testing.assert_close(text.feature, other.feature)
    with pytest.raises(ValueError, match="pad on the right"):
        model.encode_text(ids.flip(1), attention.flip(1), words.flip(1))


@pytest.mark.parametrize("layout", ["ace", "text"])
def test_pairing_rows_late_equals_pairing_them_first(layout):
    model = tiny(layout=layout)
    image, text = encoded(model)
    pairs = PairIndices(texts=torch.tensor([0, 2, 1, 0]), images=torch.tensor([1, 1, 0, 2]))
    late = model.cross(image, text, pairs)
    first = model.cross(image.select(pairs.images), text.select(pairs.texts))
    torch.testing.assert_close(late.text, first.text)
    if layout == "ace":
        torch.testing.assert_close(late.image, first.image)
    alone = model.cross(image, text, pairs, need_image=False)
    torch.testing.assert_close(alone.text, first.text)
    assert alone.image is None


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *itertools.product(["ace", "text", "albef"], ["sine-2d", "learned-2d", "ape"]),
        ("ace", "rpe"),  # elsewhere patches have no self-attention
    ],
)
def test_of_several_images_each_has_the_positions_of_one(layout, name):
    model = tiny(layout=layout, position=("anchor", name))
    image, text = encoded(model)
    twice = model.cross_multi_image([image, image], text, torch.zeros(2, 16)).text
    torch.testing.assert_close(twice, model.cross(image, text).text)
    other = image.select(torch.tensor([1, 2, 0]))
    there = model.cross_multi_image([image, other], text, torch.zeros(2, 16)).text
    back = model.cross_multi_image([other, image], text, torch.zeros(2, 16)).text
    torch.testing.assert_close(there, back)
    assert not torch.allclose(there, twice)


def test_of_several_images_none_attends_to_another():
    model = tiny(layers=1, position=("rpe",))
    image, text = encoded(model)
    other = image.states[torch.tensor([1, 2, 0])]
    alone = model.cross(image, text).image
    states = torch.cat([image.states, other], dim=1)
    both = model.cross_encoder(text.states, states, text.attention_mask, None)[1]
    torch.testing.assert_close(both[:, : alone.shape[1]], alone)


@pytest.mark.parametrize("edits", [(torch.zeros_like, None), (None, torch.zeros_like)])
def test_an_edit_of_patches_is_its_threads_own(edits):
    model, pixels = tiny(), torch.randn(2, 3, 16, 16)
    expected = [model.encode_image(pixels, edit).feature for edit in edits]
    assert not torch.equal(*expected)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again.encode_image(pixels, edits[0]).feature, expected[0])
    beside = []
    with ThreadPoolExecutor(1) as other:

        def ask_beside(*_):
            hook.remove()
            beside.append(other.submit(model.encode_image, pixels, edits[1]).result())

        hook = model.image_encoder.vit.patch_embed.register_forward_pre_hook(ask_beside)
        assert torch.equal(model.encode_image(pixels, edits[0]).feature, expected[0])
    assert torch.equal(beside[0].feature, expected[1])


def test_path_gradient_is_stopped_unless_configured():
    for passed in (False, True):
        model = tiny(**ace(path_gradient=passed))
        model.match(*encoded(model)).sum().backward()
        gradient = model.image_tokens.weight.grad
        assert (gradient is not None and bool(gradient.any())) == passed


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"image": {"image_size": 18}}, "18 is not a multiple of patch_size 4"),
        ({"cross": {"anchor": {"groups": 3}}}, "3 does not divide embed_dim 8"),
        ({"image": {"width": 32}}, "16 and 32"),
        ({"image": {"width": 18, "position": 0.5}}, "18 is not a multiple of 4"),
        ({"text": {"max_tokens": 17}}, "17 is more than max_positions 16"),
    ],
)
def test_sizes_that_do_not_fit_are_named(part, message):
    with pytest.raises(ValidationError, match=message):
        tiny_config(**part)


def model_with(**parts):
    torch.manual_seed(0)
    return VLPModel(tiny_config(**parts))


def outputs(model, seed=1):
    torch.manual_seed(7)
    pixels, *text = inputs()
    torch.manual_seed(seed)
    image, text = model.encode_image(pixels), model.encode_text(*text)
    return image, text, model.cross(image, text)


DROPOUT = {"text": {"dropout": 0.5}, "cross": {"dropout": 0.5}, "feature_dropout": 0.5}


def test_dropout_acts_in_training_alone():
    plain, dropping = model_with(), model_with(**DROPOUT)
    assert [*plain.state_dict()] == [*dropping.state_dict()]
    expected, found = outputs(plain.eval()), outputs(dropping.eval())
    assert torch.equal(expected[1].states, found[1].states)
    assert torch.equal(expected[2].text, found[2].text)
    assert torch.equal(expected[0].feature, found[0].feature)
    first, again, other = (outputs(dropping.train(), seed) for seed in (1, 1, 2))
    assert torch.equal(first[2].text, again[2].text)
    assert not torch.equal(first[1].states, other[1].states)
    assert 0 < (first[0].feature == 0).float().mean() < 1
    assert torch.allclose(first[0].feature.norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_texts_in_groups_of_length_are_the_same_texts(groups):
    plain, grouped = model_with().eval(), model_with(text={"length_groups": groups}).eval()
    (_, expected, crossed), (_, found, across) = outputs(plain), outputs(grouped)
    real = expected.attention_mask
    assert torch.allclose(expected.states[real], found.states[real], atol=1e-6)
    assert torch.allclose(expected.feature, found.feature, atol=1e-6)
    assert torch.allclose(crossed.text[real], across.text[real], atol=1e-6)
    assert not found.states[:, int(real.sum(1).amax()) :].any()


def test_flips_are_averaged_in_evaluation():
    plain, averaging = model_with(), model_with(image={"average_hflip": True})
    torch.manual_seed(3)
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(plain.image_encoder(pixels), averaging.train().image_encoder(pixels))
    encoder = averaging.eval().image_encoder
    states, flipped = plain.eval().image_encoder(pixels), encoder.tower(pixels.flip(-1))
    found = encoder(pixels)
    assert torch.allclose(found[:, 0], (states[:, 0] + flipped[:, 0]) / 2)
    for row in range(4):
        for column in range(4):
            places = states[:, 1 + 4 * row + column], flipped[:, 1 + 4 * row + 3 - column]
            assert torch.allclose(found[:, 1 + 4 * row + column], sum(places) / 2)
    again = encoder(pixels.flip(-1))
    assert torch.allclose(again[:, 0], found[:, 0], atol=1e-6)


def test_the_adapter_of_a_frozen_tower_is_trained():
    tower = {"model_type": "bert", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
    for groups in (1, 2):
        text = {"architecture": tower, "trainable": 0, "length_groups": groups}
        model = model_with(text=text)
        outputs(model)[1].states.square().sum().backward()
        assert model.text_encoder.adapter.weight.grad.any()
        assert not any(weight.requires_grad for weight in model.text_encoder.tower.parameters())
