import logging
from types import SimpleNamespace

import pytest
import torch
from anchor_layers import layer_and_field, outputs_and_gradients

from vlp.positions import create_position
from vlp.positions.anchor_attention import anchor_attention, contextual_terms, readable_keys

pytest.importorskip("triton")
from interpreted_triton import interpreted


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    with interpreted():
        yield


def run(layer, field, kernel, *options, **named):
    """Output and gradients of a layer, by the kernel, which a CPU interprets, or explicitly."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel and not layer.query.weight.is_cuda:
            patch.setattr(layer, "_uses_kernel", lambda states: True)
        return outputs_and_gradients(layer, field, kernel, *options, **named)


def assert_equal(explicit, kernel, tolerance=1e-5):
    assert explicit.keys() == kernel.keys()
    for name, expected in explicit.items():
        bound = tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(kernel[name], expected, rtol=0, atol=bound, msg=name)


ALL = ("query", "key", "value")
OPTIONS = [
    {"roles": ALL},
    {"roles": ("value",), "scale": 0.5},
    {"roles": ("query", "value"), "value_pooled": False},
    {"roles": ("key", "value"), "shared_heads": True},
    {"mode": "bias"},
    {"mode": "bias", "shared_heads": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("text_queries", [True, False])
def test_equals_the_explicit_path(options, text_queries):
    layer, field = layer_and_field(**options)
    results = [run(layer, field, kernel, text_queries) for kernel in (False, True)]
    assert_equal(*results)
    for name in layer.positions[0].state_dict():
        assert results[0][f"positions.0.{name}"].any()


@pytest.mark.parametrize("options", [{}, {"mode": "bias"}], ids=str)
@pytest.mark.parametrize("text_queries", [True, False])
def test_gradients_of_paths(options, text_queries):
    layer, field = layer_and_field(**options)
    side = "text_path" if text_queries else "image_path"
    field = field._replace(
        **{
            name: getattr(field, name).clone().requires_grad_()
            for name in ((side,) if options else (side, "image_mean", "text_mean"))
        }
    )
    explicit = run(layer, field, False, text_queries)
    assert explicit[side].any()
    assert_equal(explicit, run(layer, field, True, text_queries))


@pytest.mark.parametrize(
    ("grid", "words", "sizes"),
    [
        ((4, 9), 35, {"channels": 3, "groups": 1}),  # more tokens than a block holds
        *(((3, 6), 7, {"groups": groups}) for groups in (1, 12, 20)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"mode": "bias"}], ids=str)
def test_other_sizes(grid, words, sizes, options):
    layer, field = layer_and_field(grid, words, heads=1, rows=1, **sizes, **options)
    for text_queries in (True, False):
        assert_equal(*(run(layer, field, kernel, text_queries) for kernel in (False, True)))


@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_what_lies_behind_the_keys_is_read_and_counts_nowhere(text_queries, mode):
    """Rows of 16 load fast; a compiler may leave anything between them."""
    layer, field = layer_and_field(mode=mode)
    side = "text_path" if text_queries else "image_path"
    path = getattr(field, side)
    aligned = path.new_full((*path.mT.shape[:3], 16), torch.nan)[..., : path.shape[2]].mT
    aligned.copy_(path)
    assert readable_keys(path) == path.shape[2]
    assert readable_keys(aligned) == 16
    found, expected = (
        run(layer, field._replace(**{side: x}), True, text_queries) for x in (aligned, path)
    )
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_keys_are_read_only_where_memory_holds_them():
    rows = torch.zeros(2, 3, 4, 16)
    assert readable_keys(rows.mT[:, :, :9]) == 16
    form = (2, 3, 9, 4), (192, 64, 1, 16)
    assert readable_keys(torch.zeros(2 * 3 * 4 * 16).as_strided(*form)) == 16
    assert readable_keys(torch.zeros(2 * 3 * 4 * 16 - 5).as_strided(*form)) == 9
    assert readable_keys(rows.mT[:, :, 1:9]) == 8  # rows begin between multiples of 16
    assert readable_keys(rows[:, :, :, :4]) == 4  # keys are not side by side


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("mode", ["contextual", "bias"])
@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize("words", [pytest.param(40, marks=pytest.mark.nightly), 30])
def test_half_precision_over_many_keys(words, text_queries, mode, dtype):
    """A row's mean gradient, taken from a rounded output, would err several times as much."""
    layer, field = layer_and_field((6, 7), words, channels=24, groups=5, mode=mode)
    side = "text_path" if text_queries else "image_path"

    def gradients(kernel, dtype):
        moved = {name: x.to(dtype, copy=True) for name, x in field._asdict().items()}
        moved[side].requires_grad_()
        return run(layer.to(dtype), type(field)(**moved), kernel, text_queries)

    exact = gradients(False, torch.float32)
    explicit, kernel = (gradients(kernel, dtype) for kernel in (False, True))
    assert side in exact
    for name, expected in exact.items():
        error, usual = ((x[name].float() - expected).norm() for x in (kernel, explicit))
        assert error <= 1.5 * usual + torch.finfo(dtype).eps * expected.norm() / 4, name


def test_a_batch_that_is_expanded_and_rows_that_are_not_contiguous():
    query, key = torch.randn(1, 3, 8).expand(2, -1, -1), torch.randn(2, 8, 4).mT
    path, table = torch.rand(2, 3, 4, 2), torch.randn(2, 2)
    out = anchor_attention(query, key, key, path, table, 2)
    plain = anchor_attention(query.contiguous(), key.contiguous(), key.clone(), path, table, 2)
    assert torch.equal(out, plain)


def test_operators_keep_the_rules_of_custom_operators():
    layer, field = layer_and_field(heads=1, rows=1)
    (position,) = layer.positions
    tables = [position.tables[role].detach().requires_grad_() for role in ALL]
    weights = [each.weight.detach().requires_grad_() for each in (layer.query,) * 3]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.vlp.anchor_terms.default, (*tables, *weights, True), test_utils=tests
    )
    states = [torch.randn(1, tokens, 4, requires_grad=True) for tokens in (5, 7, 7)]
    terms = contextual_terms(*tables, *weights).detach().requires_grad_()
    means = field.text_mean, field.image_mean
    arguments = (*states, field.text_path, None, *means, terms, 1, 0.5)
    torch.library.opcheck(torch.ops.vlp.anchor_attention.default, arguments, test_utils=tests)
    half = [torch.randn(1, tokens, 4).bfloat16().requires_grad_() for tokens in (5, 40, 40)]
    means = torch.rand(1, 5, 3).bfloat16(), torch.rand(1, 40, 3).bfloat16()
    arguments = (*half, torch.rand(1, 5, 40, 3).bfloat16(), None, *means, terms, 1, 0.5)
    torch.library.opcheck(torch.ops.vlp.anchor_attention.default, arguments, test_utils=tests)
    assert torch.ops.vlp.anchor_attention(*arguments)[1].shape == (1, 5, 4)


def test_compiles_as_one_graph():
    layer, field = layer_and_field(heads=1, rows=1)
    expected = run(layer, field, True)
    compiled = run(
        layer, field, True, wrap=lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)
    )
    assert_equal(expected, compiled, 1e-6)


def test_layers_that_the_kernel_does_not_take(caplog):
    layer, _ = layer_and_field()
    states = SimpleNamespace(is_cuda=True, shape=(2, 5, 8), dtype=torch.float32)
    assert layer._uses_kernel(states)
    layer.fused = False
    assert not layer._uses_kernel(states)
    layer.fused = None
    assert not layer._uses_kernel(SimpleNamespace(**vars(states) | {"is_cuda": False}))
    with caplog.at_level(logging.INFO):
        assert not layer._uses_kernel(SimpleNamespace(**vars(states) | {"dtype": torch.float64}))
    assert "ACE-RPE runs unfused" in caplog.text
    layer.positions.append(create_position("alignment", heads=2))
    assert not layer._uses_kernel(states)
    assert not layer_and_field(roles=("query", "key"))[0]._uses_kernel(states)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(options, text_queries, dtype):
    layer, field = layer_and_field((16, 16), 30, 12, 64, 8, rows=4, **options)
    exact = run(layer, field, False, text_queries)
    layer, field = layer.to("cuda", dtype), type(field)(*(x.to("cuda", dtype) for x in field))
    first, second = (run(layer, field, True, text_queries) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    if dtype == torch.float32:
        return assert_equal(exact, {name: x.cpu() for name, x in first.items()}, 1e-4)
    explicit = run(layer, field, False, text_queries)
    for name, expected in exact.items():
        error, usual = ((x[name].cpu().float() - expected).norm() for x in (first, explicit))
        assert error <= 1.5 * usual, name
