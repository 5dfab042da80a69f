import argparse
import math

import pytest
import torch
from albef_names import TINY, Sizes, albef_shapes, albef_tensors
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.pretrained.albef import MEAN, STD, albef_config, load_albef
from vlp.models.pretrained.published import read_pth
from vlp.models.vlp import VLPModel


def loaded(state, *, dtype=torch.float64, cross=None, **changes):
    config = albef_config(state).model_dump()
    config |= changes
    config["cross"] = config["cross"] | (cross or {})
    model = VLPModel(ModelConfig.model_validate(config)).to(dtype).eval()
    return model, load_albef(model, state, "tiny.pth")


def inputs(rows=3, dtype=torch.float64):
    pixels = torch.randn(rows, 3, 16, 16, dtype=dtype)
    ids = torch.randint(5, TINY.vocabulary, (rows, 9))
    lengths = torch.tensor([6, 9, 4])[:rows, None]
    attention = torch.arange(9) < lengths
    words = attention & (torch.arange(9) > 0) & (torch.arange(9) < lengths - 1)
    return pixels, (ids, attention, words)


def strip(state, prefix):
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in state.items()
        if key.startswith(prefix) and not key.endswith("position_ids")
    }


def transformers_text(state, bert, ids, attention, images):
    plain = {"vocab_size": TINY.vocabulary, "hidden_size": TINY.width,
             "num_attention_heads": TINY.width // 64, "intermediate_size": TINY.intermediate,
             "max_position_embeddings": TINY.tokens, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}  # fmt: skip
    text_config = BertConfig(**plain)
    fusion_config = BertConfig(**plain, is_decoder=True, add_cross_attention=True)
    embeddings = BertEmbeddings(text_config).double().eval()
    embeddings.load_state_dict(strip(state, f"{bert}embeddings."))
    # Additive and the same for every query: nothing is causal.
    mask = torch.where(attention, 0.0, -torch.inf).double()[:, None, None, :]
    states = embeddings(ids)
    between = None
    for number in range(TINY.text_layers + TINY.fusion_layers):
        fusion = number >= TINY.text_layers
        if number == TINY.text_layers:
            between = states
        layer = BertLayer(fusion_config if fusion else text_config).double().eval()
        layer.load_state_dict(strip(state, f"{bert}encoder.layer.{number}."))
        states = layer(states, mask, images if fusion else None)
    return between, states


@pytest.mark.parametrize(
    ("kind", "bert"), [("pretrain", "text_encoder.bert."), ("retrieval", "text_encoder.")]
)
def test_outputs_are_those_of_timm_and_transformers(kind, bert):
    state = albef_tensors(kind=kind)
    model, _ = loaded(state)
    pixels, text_inputs = inputs()
    vit = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=128, depth=2, num_heads=2, mlp_ratio=0.5, num_classes=0
    )
    vit = vit.double().eval()
    vit.load_state_dict(strip(state, "visual_encoder."))
    with torch.no_grad():
        image, text = model.encode_image(pixels), model.encode_text(*text_inputs)
        crossed = model.cross(image, text)
        images = vit.forward_features(pixels)
        between, last = transformers_text(state, bert, *text_inputs[:2], images)
    logits = last[:, 0] @ state["itm_head.weight"].T + state["itm_head.bias"]
    pairs = [(image.states, images), (text.states, between), (crossed.text, last)]
    pairs.append((model.itm_logits(crossed), logits))
    for side, states, feature in (
        ("vision", images, image.feature),
        ("text", between, text.feature),
    ):
        projected = states[:, 0] @ state[f"{side}_proj.weight"].T + state[f"{side}_proj.bias"]
        pairs.append((feature, functional.normalize(projected, dim=-1)))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    # ALBEF's class 1 is 'matched'; the log-odds come out in float32.
    odds = (logits[:, 1] - logits[:, 0]).float()
    torch.testing.assert_close(model.match(image, text), odds, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.temperature(), state["temp"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["pretrain", "retrieval"])
def test_every_tensor_of_the_published_sizes_is_accounted_for(kind):
    side = 24 if kind == "retrieval" else 16
    shapes = albef_shapes(Sizes(side=side), kind)
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
        state["temp"] = torch.tensor(0.07, device="cpu")
        config = albef_config(state)
        model = VLPModel(config)
    # The ALBEF paper: 123.7M parameters of BERT (the decoder is the word embedding), 85.8M of ViT.
    if kind == "pretrain":
        for part, published in (("text_encoder.", 123.7), ("visual_encoder.", 85.8)):
            counts = [
                math.prod(shape)
                for name, shape in shapes.items()
                if name.startswith(part) and "position_ids" not in name and "decoder" not in name
            ]
            assert round(sum(counts) / 1e6, 1) == published
    assert config == ModelConfig.model_validate(
        {
            "image": {"image_size": 16 * side, "layers": 12, "normalisation": (MEAN, STD)},
            "cross": {"layout": "albef"},
            "token_projection": False,
        }
    )
    report = load_albef(model, state, "ALBEF.pth")
    matched, unused = report.matched, report.unused
    assert len(matched) + len(unused) == len(shapes)
    assert len(set(unused)) == len(unused)
    assert not report.resized
    initial = set(model.state_dict()) - set(matched)
    assert {n for n in initial if ".cross_attention.positions." not in n} == {"anchor_threshold"}
    teacher = {name for name in unused if name.partition(".")[0].endswith("_m")}
    expected = {"image_queue", "text_queue", "queue_ptr"}
    if kind == "retrieval":
        expected |= {"idx_queue", "text_encoder.embeddings.position_ids"}
    else:
        mlm = {name for name in shapes if name.startswith("text_encoder.cls.")}
        assert len(mlm) == 7
        expected |= mlm | {"text_encoder.bert.embeddings.position_ids"}
    assert set(unused) - teacher == expected
    assert len(teacher) == sum("_m." in name for name in shapes)


def test_positions_of_another_image_size_are_resampled():
    state = albef_tensors()
    config = albef_config(state, image_size=24)
    assert config.image.grid == (6, 6)
    model = VLPModel(config)
    report = load_albef(model, state, "tiny.pth")
    assert report.resized == ["image_encoder.vit.pos_embed"]
    assert report.resized[0] not in report.matched
    places, before = model.image_encoder.vit.pos_embed, state["visual_encoder.pos_embed"].float()
    assert torch.equal(places[:, 0], before[:, 0])
    # As ALBEF's authors resize them.
    there = before[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    there = functional.interpolate(there, size=(6, 6), mode="bicubic", align_corners=False)
    torch.testing.assert_close(places[:, 1:], there.flatten(2).mT)


def test_a_temperature_outside_the_range_is_held_and_reported():
    model, report = loaded(albef_tensors(temp=0.004))
    assert model.temperature().item() == pytest.approx(0.01)
    assert str(report).endswith("; temperature 0.004 clamped to 0.01")
    with pytest.raises(ValueError, match=r"temp is -0\.1, not a positive"):
        loaded(albef_tensors(temp=-0.1))


def test_keys_that_do_not_fit_are_named():
    state = albef_tensors()
    surprise = {"text_encoder.bert.encoder.layer.0.extra.weight": torch.zeros(1), "cls_head": 1}
    with pytest.raises(
        ValueError, match=r"no rule maps .*: text_encoder\S+layer.0.extra.weight, cls_head$"
    ):
        loaded(state | surprise)
    # Twice under two names: neither may win in silence.
    twice = {"text_encoder.embeddings.LayerNorm.bias": torch.zeros(128)}
    with pytest.raises(ValueError, match=r"no rule maps .*: text_encoder.embeddings.LayerNorm"):
        loaded(state | twice)
    lost = {key: tensor for key, tensor in state.items() if key != "itm_head.bias"}
    with pytest.raises(ValueError, match=r"these weights are missing: match_head.bias"):
        loaded(lost)
    narrow = state | {"itm_head.weight": torch.zeros(3, 128)}
    with pytest.raises(ValueError, match=r"match_head.weight is \(3, 128\) there and \(2, 128\)"):
        loaded(narrow)


def test_a_model_of_other_depth_or_layout_is_refused():
    state = albef_tensors()
    config = albef_config(state).model_dump()
    fewer = ModelConfig.model_validate(config | {"text": config["text"] | {"layers": 1}})
    with pytest.raises(ValueError, match=r"1 text, 2 fusion and 2 image layers: \S*layer\.3\.att"):
        load_albef(VLPModel(fewer), state, "tiny.pth")
    with pytest.raises(ValueError, match=r"fit cross\.layout albef, not ace"):
        loaded(state, cross={"layout": "ace"})


def test_nothing_is_copied_when_something_is_wrong():
    state = albef_tensors()
    model = VLPModel(albef_config(state))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError):
        load_albef(model, state | {"itm_head.bias": torch.zeros(5)}, "tiny.pth")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("left_out", "change", "message"),
    [
        ("text_proj.weight", {}, "text_proj.weight is missing"),
        (".crossattention.", {}, r"of layers \[0, 1, 2, 3\] it is in \[\]"),
        ("-", {"visual_encoder.pos_embed": torch.zeros(1, 13, 128)}, "12 patches are not a square"),
        ("-", {"text_encoder.bert.embeddings.word_embeddings.weight": torch.zeros(50, 96)},
         "the text encoder's width 96 is not a multiple of 64"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_read_are_named(left_out, change, message):
    state = {key: tensor for key, tensor in albef_tensors().items() if left_out not in key}
    with pytest.raises(ValueError, match=message):
        albef_config(state | change)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("key", ["model", "state_dict", None])
def test_files_are_read_wrapped_and_bare(tmp_path, key, zipped):
    state = albef_tensors()
    content = {key: state} if key else state
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    read = read_pth(tmp_path / "a.pth")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[key], state[key]) for key in state)


def test_files_that_cannot_be_read_say_why(tmp_path):
    file = tmp_path / "a.pth"
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*a\.pth"):
        read_pth(file)
    state = {"temp": torch.ones(())}
    torch.save({"model": state, "args": argparse.Namespace(lr=1)}, file)
    with pytest.raises(ValueError, match=r"holds a pickled argparse.Namespace .* run code"):
        read_pth(file)
    torch.save({"model": state}, file)
    whole = file.read_bytes()
    for damaged in (whole[:-60], b"", b"<html>404</html>", b"hello"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.pth: damaged, or not a checkpoint \(.+\)"):
            read_pth(file)
    for content in ([1, 2], {"model": {"epoch": 1}}):
        torch.save(content, file)
        with pytest.raises(ValueError, match="holds no state dict"):
            read_pth(file)


@pytest.mark.parametrize("key", ["text", "image", "cross"])
def test_other_heads_are_refused_by_name(key):
    state = albef_tensors()
    config = albef_config(state).model_dump()
    config[key]["heads"] = 4
    model = VLPModel(ModelConfig.model_validate(config))
    with pytest.raises(ConfigError, match=rf"{key}.heads is 4; set {key}.heads=2"):
        load_albef(model, state, "tiny.pth")
