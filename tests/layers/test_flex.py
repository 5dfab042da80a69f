"""Lookups inside FlexAttention against the dense bias, and where dense biases stay."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from vlp.layers import attention as attention_module
from vlp.layers import flex
from vlp.layers.attention import attend
from vlp.layers.flex import flex_attend
from vlp.positions import PositionContext, attach, create_position

HEADS, HEAD_WIDTH, GRID, PREFIX = 2, 16, (3, 4), 1
TOKENS = PREFIX + GRID[0] * GRID[1]
CONTEXT = PositionContext(GRID, PREFIX)
LOOKUPS = {
    "k": ("irpe-product", {"roles": "k"}),
    "qk": ("irpe-product", {"roles": "qk", "shared_heads": False}),
    "transposed": ("irpe-product", {"roles": "q", "q_ids_transposed": True}),
    "two tables": ("irpe-cross", {"roles": "qk"}),
    "bias": ("irpe-product", {"roles": "qk", "mode": "bias", "shared_heads": False}),
    "shaw": ("shaw", {"roles": "k"}),
    "huang": ("huang", {}),
    "sasa": ("sasa", {"grid": GRID}),
    "transformer-xl": ("transformer-xl", {"offsets": "axes"}),
}
ROLES = {"q": "query", "k": "key", "v": "value"}


def encoding(name, options):
    options = {"width": HEADS * HEAD_WIDTH, "heads": HEADS, **options}
    if "roles" in options:
        options["roles"] = [ROLES[letter] for letter in options["roles"]]
    made = create_position(name, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def projected(device="cpu"):
    return [torch.randn(2, HEADS, TOKENS, HEAD_WIDTH, device=device) for _ in range(3)]


def both_gradients(position, states, leaves):
    """Of the same sum of outputs by leaves: by FlexAttention and by the dense bias."""
    upwards = torch.randn_like(states[0])
    return [
        torch.autograd.grad(
            (attend(*states, [position], CONTEXT, fused=fused) * upwards).sum(), leaves
        )
        for fused in ("flex", False)
    ]


def refused(*_):
    raise AssertionError("FlexAttention was called")


def said(caplog):
    """Messages of this package alone: the compiler has its own."""
    return [record.message for record in caplog.records if record.name.startswith("vlp.")]


@pytest.mark.parametrize("name", LOOKUPS)
def test_equals_the_dense_bias(name):
    positions, states = [encoding(*LOOKUPS[name])], projected()
    with torch.no_grad():
        expected = attend(*states, positions, CONTEXT, fused=False)
        found = attend(*states, positions, CONTEXT, fused="flex")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = attend(*states)
    assert (found - plain).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qk", "two tables", "bias"])
def test_gradients_of_the_tables(name):
    """Those of queries, keys and values are PyTorch's own, and on a CPU it has none."""
    position = encoding(*LOOKUPS[name])
    found, expected = both_gradients(position, projected(), list(position.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_several_encodings_are_added_up():
    positions, states = [encoding(*LOOKUPS[name]) for name in ("qk", "sasa")], projected()
    with torch.no_grad():
        found = attend(*states, positions, CONTEXT, fused="flex")
        expected = attend(*states, positions, CONTEXT, fused=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


DEPARTURES = {
    "none": "no encoding adds lookups to the logits",
    "another bias": "DirectionalDistance adds to the logits what is no lookup",
    "values": "RelativePosition reads the probabilities",
    "mask": "a mask or a bias beside the encodings is added to the logits",
    "dropout": "probabilities are dropped",
}


@pytest.mark.parametrize("other", DEPARTURES)
@pytest.mark.parametrize("compiled", [False, True])
def test_where_it_does_not_fit_attention_stays_as_it_was_and_says_so_once(
    other, compiled, monkeypatch, caplog
):
    monkeypatch.setattr(attention_module, "flex_attend", refused)
    flex.log_departure.cache_clear()
    torch.compiler.reset()
    run = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    positions, states, options = [encoding(*LOOKUPS["k"])], projected(), {}
    if other == "none":
        positions = []
    if other == "another bias":
        positions.append(create_position("alibi-2d", heads=HEADS))
    if other == "values":
        positions.append(encoding("irpe-product", {"roles": "v"}))
    if other == "mask":
        options["bias"] = torch.randn(2, 1, 1, TOKENS)
    if other == "dropout":
        options["dropout"] = 0.5
    found, expected = [], []
    for out, fused in ((found, "flex"), (expected, True)):
        for _ in range(2):
            torch.manual_seed(0)
            out.append(run(*states, positions, CONTEXT, fused=fused, **options))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    line = f"attention runs without FlexAttention, because {DEPARTURES[other]}"
    assert said(caplog) == [line]


def vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=48, patch_size=16, embed_dim=32, depth=2, num_heads=2,
        **options,
    )  # fmt: skip


def test_in_a_timm_model():
    model = vit()
    attach(model, "irpe-product", on="qk", fused="flex").eval()
    for name, parameter in model.named_parameters():
        if "positions" in name:
            nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        found = model(pixels)
        for block in model.blocks:
            assert block.attn.fused == "flex"
            block.attn.fused = False
        torch.testing.assert_close(found, model(pixels), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="not 'flax'"):
        attach(model, "irpe-product", fused="flax")


@pytest.mark.nightly
def test_each_form_is_compiled_by_itself():
    """Else the compiler would run the ninth form of a function unfused, without a word."""
    position, (query, key, value) = encoding(*LOOKUPS["qk"]), projected()
    forms = set()
    for rows in range(1, 21):
        states = [state[:1].expand(rows, -1, -1, -1) for state in (query, key, value)]
        forms.add(flex._form(*states, position.lookups(*states[:2], CONTEXT), None))
    assert len(forms) == 20
    codes = {id(flex._compiled(form)._torchdynamo_orig_callable.__code__) for form in forms}
    assert len(codes) == 20
    again = flex._form(
        query[:1], key[:1], value[:1], position.lookups(query[:1], key[:1], CONTEXT), None
    )
    assert flex._compiled(again) in map(flex._compiled, forms)


def test_unfused_on_a_cpu_is_logged_once(caplog):
    flex._unfused.cache_clear()
    position, states = encoding(*LOOKUPS["k"]), projected()
    for _ in range(2):
        with torch.no_grad():
            attend(*states, [position], CONTEXT, fused="flex")
    assert said(caplog) == ["FlexAttention runs unfused on a CPU"]


@pytest.mark.nightly
def test_compiled_on_a_cpu():
    """The compiler refuses what the unfused form takes; without gradients it knows CPUs, too."""
    position, states = encoding(*LOOKUPS["qk"]), projected()
    with torch.no_grad():
        lookups = position.lookups(*states[:2], CONTEXT)
        found = torch.compile(flex_attend)(*states, lookups)
        expected = attend(*states, [position], CONTEXT, fused=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_half_precision_on_a_gpu(width):
    """Held against float32, FlexAttention errs no more than the dense bias in bf16 does."""
    position = create_position("irpe-product", width=2 * width, heads=2, roles=["query", "key"])
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=0.3)
    position = position.cuda()
    states = [torch.randn(2, 2, TOKENS, width, device="cuda") for _ in range(3)]
    upwards = torch.randn_like(states[0])

    def gradients(fused, dtype):
        leaves = [state.to(dtype).requires_grad_() for state in states]
        out = attend(*leaves, [position], CONTEXT, fused=fused)
        return torch.autograd.grad((out * upwards).sum(), [*leaves, *position.parameters()])

    exact = gradients(False, torch.float32)
    dense, found = (gradients(fused, torch.bfloat16) for fused in (False, "flex"))
    for expected, usual, one in zip(exact, dense, found, strict=True):
        error, most = ((x.float() - expected).norm() for x in (one, usual))
        assert error <= 2 * most + torch.finfo(torch.bfloat16).eps * expected.norm() / 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOOKUPS)
def test_on_a_gpu(name):
    position = encoding(*LOOKUPS[name]).cuda()
    states = [state.requires_grad_() for state in projected("cuda")]
    found, expected = both_gradients(position, states, [*states, *position.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
