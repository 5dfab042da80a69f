"""What must hold for every encoding by name, whatever its equation."""

import pytest
import timm
import torch
from pydantic import ValidationError
from tests_support import TINY_MODEL, ace

from vlp.layers.attention import Attention
from vlp.models.config import CrossConfig, ModelConfig
from vlp.models.vlp import VLPModel
from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    attach,
    create_fitting_position,
    list_positions,
    position_options,
    registry,
)

WIDTH, HEADS, GRID = 16, 2, (2, 3)
WITHIN = [name for name in list_positions() if name not in CROSS_MODAL]
QKV = {"roles": ("query", "key", "value")}
VARIANTS = [
    ("alibi-2d", {"variant": "four-diagonal", "ratio": "code"}),
    ("cope", {"causal": True, "shared_heads": False}),
    ("fourier", {"groups": 2, "norm": True}),
    ("fourier", {"mlp": False, "learnable": False}),
    ("irpe-cross", QKV),
    ("irpe-euclidean", QKV | {"shared_heads": False}),
    ("irpe-product", QKV),
    ("irpe-product", {"mode": "bias", "roles": ("query", "key")}),
    ("irpe-quantization", QKV),
    ("learned-2d", {"combine": "sum", "mixer": True}),
    ("rope-axial", {"layout": "half", "rescale": True}),
    ("rope-mixed", {"layout": "half"}),
    ("sape", {"mode": "query", "summation": "suffix"}),
    ("shaw", {"offsets": "raster", "shared_heads": False}),
    ("huang", {"offsets": "raster", "shared_heads": False}),
    ("transformer-xl", {"offsets": "axes"}),
    ("transformer-xl", {"offsets": "raster", "shared_heads": False}),
]
"""Options that lead to other code; each name is tested with its defaults, too."""
CASES = [(name, {}) for name in WITHIN] + VARIANTS
IDS = [" ".join([name, *map(str, options.values())]) for name, options in CASES]

everything = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


def made(name, options, grid=GRID, filled=True):
    sizes = {"width": WIDTH, "heads": HEADS, "grid": grid}
    encoding = create_fitting_position(name, sizes, **options).double()
    for parameter in encoding.parameters() if filled else ():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoding


def of_tokens(encoding):
    return "tokens" in encoding.hooks


def in_attention(encoding, fused=None):
    """An attention layer of float64; what acts on tokens stands before it."""
    layers = [] if of_tokens(encoding) else [encoding]
    layer = Attention(WIDTH, HEADS, positions=layers, fused=fused).double()

    def run(x, context):
        x = encoding("tokens", x, context) if of_tokens(encoding) else x
        return layer(x, context=context)

    return run, torch.nn.ModuleList([layer, encoding])


@pytest.mark.parametrize("fused", [False, True])
@everything
def test_attention_calls_the_hooks_where_they_belong(name, options, fused):
    encoding = made(name, options)
    run, (layer, _) = in_attention(encoding, fused)
    x, context = torch.randn(2, 7, WIDTH).double(), PositionContext(GRID, 1)
    found = run(x, context)
    if of_tokens(encoding):
        x = encoding("tokens", x, context)
    query, key, value = (
        part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (layer.query, layer.key, layer.value)
    )
    query, key = encoding("rotate", query, key, context)
    logits = query @ key.mT / (WIDTH // HEADS) ** 0.5
    if "bias" in encoding.hooks:
        logits = logits + encoding("bias", query, key, context)
    weights = logits.softmax(-1)
    out = weights @ value
    if "value" in encoding.hooks:
        out = out + encoding("value", weights, context)
    torch.testing.assert_close(found, layer.output(out.transpose(1, 2).flatten(-2)))


@everything
def test_gradients(name, options):
    grid = (1, 2)
    encoding = made(name, options, grid)
    run, _ = in_attention(encoding)
    names, parameters = [[*each] for each in zip(*encoding.named_parameters())] or ([], [])
    context = PositionContext(grid, 1)
    x = torch.randn(1, 3, WIDTH).double().requires_grad_()
    keep = torch.randn(1, 3, WIDTH).double()

    def loss(x, *values):
        with torch.nn.utils.stateless._reparametrize_module(encoding, dict(zip(names, values))):
            return (run(x, context) * keep).sum()

    assert torch.autograd.gradcheck(loss, (x, *parameters), fast_mode=True)


@everything
def test_bfloat16_autocast_stays_near_float64(name, options):
    encoding = made(name, options)
    run, modules = in_attention(encoding)
    x, context = torch.randn(2, 7, WIDTH).double(), PositionContext(GRID, 1)
    expected = run(x, context)
    modules.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(x.float(), context)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.1)
    found.float().square().sum().backward()
    for parameter in modules.parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all()
    own = list(encoding.parameters())
    assert not own or any(each.grad is not None and each.grad.abs().sum() > 0 for each in own)


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in CASES if case[0].startswith("irpe") or case[0] in ("shaw", "huang", "sasa")]
    + [("cope", {}), ("transformer-xl", {}), ("transformer-xl", {"offsets": "axes"})],
)
def test_the_start_changes_nothing_and_learns(name, options):
    encoding = made(name, options, filled=False)
    run, (layer, _) = in_attention(encoding)
    plain = Attention(WIDTH, HEADS).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x, context = torch.randn(2, 7, WIDTH).double(), PositionContext(GRID, 1)
    found = run(x, context)
    assert torch.equal(found, plain(x))
    found.square().sum().backward()
    gradients = {each: p.grad.abs().sum() for each, p in encoding.named_parameters()}
    # Transformer-XL's v waits for W^R, which moves first.
    assert all(total > 0 for each, total in gradients.items() if each != "v")


@everything
def test_training_works_after_inference_mode_saw_the_same_grid(name, options):
    run, modules = in_attention(made(name, options, (3, 5)))
    x, context = torch.randn(1, 16, WIDTH).double(), PositionContext((3, 5), 1)
    with torch.inference_mode():
        expected = run(x, context)
    found = run(x, context)
    found.square().sum().backward()
    torch.testing.assert_close(found.detach(), expected.clone())
    assert modules[0].query.weight.grad.abs().sum() > 0


@everything
def test_the_grid_of_the_options_stands_in_for_a_missing_one(name, options):
    run, _ = in_attention(made(name, options))
    x = torch.randn(1, 7, WIDTH).double()
    assert torch.equal(run(x, PositionContext(GRID, 1)), run(x, PositionContext(None, 1)))


OF_OFFSETS = ["irpe-euclidean", "irpe-cross", "irpe-product", "shaw", "huang", "transformer-xl"]


@pytest.mark.parametrize("name", [*OF_OFFSETS, "alibi-2d", "rope-axial", "rope-mixed", "sasa"])
def test_only_offsets_matter(name):
    encoding = made(name, {"reach": 3} if name == "sasa" else {}, None)
    large, small = (6, 8), (2, 3)
    inside = ((torch.arange(2)[:, None] + 3) * 8 + torch.arange(3) + 4).flatten()
    query, key = torch.randn(2, 1, HEADS, 48, WIDTH // HEADS).double()

    def logits(query, key, grid):
        query, key = encoding("rotate", query, key, PositionContext(grid))
        bias = encoding("bias", query, key, PositionContext(grid))
        products = query @ key.mT
        return products if bias is None else products + bias

    found = logits(query, key, large)[:, :, inside][..., inside]
    expected = logits(query[:, :, inside], key[:, :, inside], small)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - query[:, :, inside] @ key[:, :, inside].mT).abs().max() > 0.1


@everything
def test_the_prefix_has_no_place(name, options):
    encoding = made(name, options)
    context = PositionContext(GRID, 2)
    query, key = torch.randn(2, 1, HEADS, 1, WIDTH // HEADS).double().expand(-1, -1, -1, 8, -1)
    if "tokens" in encoding.hooks and "mixer" not in options:
        x = torch.randn(1, 8, WIDTH).double()
        moved = encoding("tokens", x, context) != x
        assert not moved[:, :2].any()
        assert moved[:, 2:].any()
    if "rotate" in encoding.hooks:
        for before, after in zip((query, key), encoding("rotate", query, key, context)):
            assert torch.equal(after[:, :, :2], before[:, :, :2])
            assert not torch.equal(after, before)
    if "bias" in encoding.hooks:
        # Of equal tokens the prefix sees all alike, and all see the prefix alike.
        bias = encoding("bias", query, key, context)
        for prefix in (bias[..., :2, :], bias[..., :2].mT):
            torch.testing.assert_close(prefix, prefix[..., :1, :1].expand_as(prefix))
        assert options.get("summation") == "suffix" or bias[..., 2:, 2:].std() > 1e-6


FREE = ("cope", "rope-1d", "sine-1d", "learned-1d", "md-sine")


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] not in FREE])
def test_other_numbers_of_tokens_are_named(name, options):
    run, _ = in_attention(made(name, options))
    with pytest.raises(ValueError, match="grid"):
        run(torch.randn(1, 6, WIDTH).double(), PositionContext(GRID, 1))


IMPOSSIBLE = [
    ("alibi-2d", {"heads": 0}, "0"),
    ("alibi-2d", {"ratio": "half"}, "half"),
    ("alibi-2d", {"variant": "one"}, "one"),
    ("alibi-2d", {"grid": (0, 3)}, "0 x 3"),
    ("cope", {"heads": 3, "length": 4}, "3 heads"),
    ("cope", {"grid": None}, "length None"),
    ("cope", {"grid": None, "length": 0}, "length 0"),
    ("cope", {"length": 5}, "length 5"),
    ("fourier", {"dimensions": 3}, "3"),
    ("fourier", {"groups": 3}, "3 groups"),
    ("fourier", {"groups": 0}, "0 groups"),
    ("fourier", {"width": 6, "dimensions": 4, "groups": 4}, "width 6"),
    ("fourier", {"features": 5}, "5 features"),
    ("fourier", {"mlp": False, "features": 4}, "not 4"),
    ("fourier", {"projection": True}, "projection"),
    ("fourier", {"mlp": False, "norm": True}, "norm=True"),
    ("fourier", {"mlp": False, "dropout": 0.1}, r"dropout=0\.1"),
    ("fourier", {"mlp": False, "hidden": 8}, "hidden=8"),
    ("fourier", {"mlp": False, "approximate": "tanh"}, "approximate='tanh'"),
    ("fourier", {"learnable": False, "regularised": True}, "regularise"),
    ("fourier", {"gamma": 0.0}, "gamma"),
    ("fourier", {"extent": -1.0}, "extent"),
    ("fourier", {"initialisation": "zeros"}, "zeros"),
    ("huang", {"grid": (0, 3)}, "0 x 3"),
    ("irpe-product", {"mode": "relative"}, "relative"),
    ("irpe-product", {"roles": ("key", "output")}, "output"),
    ("irpe-product", {"roles": ()}, "roles"),
    ("irpe-product", {"mode": "bias", "roles": ("key", "value")}, "values"),
    ("irpe-product", {"bias_inside_scale": False}, "bias_inside_scale"),
    ("irpe-product", {"heads": 3}, "3 heads"),
    ("irpe-product", {"function": "linear"}, "linear"),
    ("learned-1d", {"grid": None}, "length"),
    ("learned-1d", {"grid": None, "length": 0}, "length 0"),
    ("learned-1d", {"length": 5}, "length 5"),
    ("learned-1d", {"deviation": -1}, "-1"),
    ("learned-2d", {"width": 5}, "width 5"),
    ("learned-2d", {"combine": "product"}, "product"),
    ("learned-2d", {"grid": (0, 3)}, "0 x 3"),
    ("learned-4d", {"width": 6}, "width 6"),
    ("learned-4d", {"combine": "product"}, "product"),
    ("learned-4d", {"places": 1}, "1"),
    ("md-sine", {"freqs": [1.0], "temperature": 2.0}, "temperature=2.0"),
    ("md-sine", {"width": 5}, "5 channels"),
    ("md-sine", {"dimensions": 3}, "3"),
    ("md-sine", {"freqs": [1.0, 2.0]}, "8 freqs"),
    ("md-sine", {"freqs": [[1.0], [2.0]]}, r"\(2, 1\)"),
    ("md-sine", {"layout": "thirds"}, "thirds"),
    ("md-sine", {"extent": -1}, "extent"),
    ("md-sine", {"approximate": "tanh"}, "approximate='tanh'"),
    ("mlp", {"dimensions": 1}, "1"),
    ("mlp", {"extent": 0}, "extent"),
    ("object", {"width": 12}, "width 12"),
    ("object", {"layout": "thirds"}, "thirds"),
    ("rope-1d", {"heads": 3}, "3 heads"),
    ("rope-1d", {"width": 6}, "not 3"),
    ("rope-axial", {"width": 12}, "not 6"),
    ("rope-axial", {"theta": 0}, "theta"),
    ("rope-axial", {"layout": "quarter"}, "quarter"),
    ("rope-axial", {"rescale": True, "grid": None}, "rescale"),
    ("rope-mixed", {"grid": (0, 3)}, "0 x 3"),
    ("sape", {"heads": 3}, "3 heads"),
    ("sape", {"grid": (2, 0)}, "2 x 0"),
    ("sape", {"mode": "value"}, "value"),
    ("sape", {"summation": "all"}, "all"),
    ("sape", {"deviation": 0}, "deviation must be positive, not 0"),
    ("sasa", {"width": 6}, "head width 3"),
    ("sasa", {"grid": None}, "reach"),
    ("shaw", {"roles": ("query",)}, "query"),
    ("shaw", {"roles": ()}, "roles"),
    ("shaw", {"offsets": "axes"}, "axes"),
    ("sine-2d", {"width": 6}, "width 6"),
    ("sine-4d", {"groups": 2}, "2 groups"),
    ("sine-4d", {"mlp": 4, "groups": 3}, "3 groups"),
    ("sine-2d", {"mlp": 4, "groups": 0}, "0 groups"),
    ("sine-2d", {"extent": 0}, "extent"),
    ("sine-2d", {"temperature": -1}, "temperature"),
    ("sine-2d", {"approximate": "tanh"}, "approximate='tanh'"),
    ("transformer-xl", {"sinusoid_width": 5}, "not 5"),
    ("transformer-xl", {"sinusoid_width": 0}, "not 0"),
    ("transformer-xl", {"sinusoid_width": 6, "offsets": "axes"}, "not 6"),
    ("transformer-xl", {"temperature": 0.0}, "temperature"),
    ("transformer-xl", {"heads": 3}, "3 heads"),
    ("transformer-xl", {"reach": None, "grid": None}, "reach"),
]


@pytest.mark.parametrize(("name", "options", "word"), IMPOSSIBLE)
def test_impossible_options_are_named(name, options, word):
    sizes = {"width": WIDTH, "heads": HEADS, "grid": GRID}
    fitting = {size: value for size, value in sizes.items() if size in position_options(name)}
    with pytest.raises(ValueError, match=word):
        registry._ENCODINGS[name](**fitting | options)


def test_a_prefix_needs_its_bucket():
    for name in ("irpe-product", "shaw", "huang", "transformer-xl", "sasa"):
        run, _ = in_attention(made(name, {"prefix_bucket": False}))
        with pytest.raises(ValueError, match=rf"{name}.*prefix_bucket"):
            run(torch.randn(1, 7, WIDTH).double(), PositionContext(GRID, 1))


@pytest.mark.parametrize("name", list_positions())
def test_it_trains_in_the_cross_modal_encoder(name):
    torch.manual_seed(0)
    positions = [name] if name in CROSS_MODAL else [name, "anchor"]
    cross = TINY_MODEL["cross"] | {"position": positions}
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"cross": cross}))
    model.anchor_threshold.fill_(0.2)
    pixels = torch.randn(4, 3, 16, 16)
    ids = torch.randint(5, 40, (4, 12))
    attention = torch.arange(12) < torch.tensor([6, 8, 4, 12])[:, None]
    words = attention & (torch.arange(12) > 0)
    labels = torch.tensor([0, 1, 0, 1])

    def loss():
        crossed = model.cross(model.encode_image(pixels), model.encode_text(ids, attention, words))
        return torch.nn.functional.cross_entropy(model.itm_logits(crossed), labels)

    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(4):
        losses.append(loss())
        losses[-1].backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0]
    # Evaluation cuts texts to the longest of a block.
    if name == "irpe-quantization":  # ranks are of one grid
        return
    text = model.encode_text(ids[:, :8], attention[:, :8], words[:, :8])
    assert model.match(model.encode_image(pixels), text).isfinite().all()


@pytest.mark.parametrize(
    ("cross", "message"),
    [
        ({"position": ["rope"]}, "did you mean 'rope-1d'"),
        ({"position": ["sape"], "layout": "text"}, "position `sape` needs layout `ace`"),
        ({"position": ["anchor"], "options": {"sape": {}}}, "options of sape, which position does"),
        ({"options": {"anchor": {"mod": "bias"}}}, r"options\.anchor\.mod: .*did you mean 'mode'"),
        ({"options": {"anchor": {"roles": []}}}, r"options\.anchor: roles must name"),
        ({"position": ["anchor"], "options": {"alignment": {}}}, "options of alignment"),
        ({"position": ["alignment", "uniform"]}, "`alignment` and `uniform` exclude each other"),
        ({"position": ["anchor", "anchor-soft"]}, "names an encoding twice: anchor, anchor"),
        ({"position": ["anchor-soft"], "anchor": 5}, "should be a valid dictionary"),
        ({**ace(tau=5, unreachable="far")}, "far needs hard anchors"),
        ({"position": ["anchor-sof"]}, "did you mean 'anchor-soft'"),
    ],
)
def test_what_cannot_be_in_the_cross_modal_encoder_is_named(cross, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(TINY_MODEL | {"cross": TINY_MODEL["cross"] | cross})


def test_soft_anchors_have_a_name():
    cross = TINY_MODEL["cross"] | {"position": ["alignment", "anchor-soft"]}
    cross |= {"anchor": {"groups": 2}}
    named = ModelConfig.model_validate(TINY_MODEL | {"cross": cross}).cross
    assert named.position == ("alignment", "anchor")
    assert (named.anchor_options.tau, named.anchor.groups) == (5, 2)
    assert CrossConfig.model_validate(named.model_dump()) == named
    cross["options"] = {"anchor": {"tau": 2}}
    assert ModelConfig.model_validate(TINY_MODEL | {"cross": cross}).cross.anchor_options.tau == 2
    # Over a stored configuration, which has every setting.
    stored = CrossConfig().model_dump() | {"position": ("anchor-soft",)}
    assert CrossConfig.model_validate(stored).anchor_options.tau == 5


@pytest.mark.parametrize("name", WITHIN)
def test_trained_at_one_size_it_runs_at_another_or_names_both(name):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, dynamic_img_size=True, **sizes)
    model = attach(vit, name, absolute="drop").eval()
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()
    bound = {"learned-1d", "learned-2d", "irpe-quantization"}
    if name in bound:
        with pytest.raises(ValueError, match=r"8 x 8|12 x 12|64|145"):
            model(torch.randn(1, 3, 48, 48))
    else:
        assert model(torch.randn(1, 3, 48, 48)).isfinite().all()
        assert model(torch.randn(1, 3, 32, 48)).isfinite().all()
