import pytest
import timm
import torch

from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    attach,
    create_fitting_position,
    list_positions,
)
from vlp.positions.carry_over import carry_over
from vlp.positions.zero_start import zero_start

WITHIN = [name for name in list_positions() if name not in CROSS_MODAL]
WIDTH, HEADS = 16, 2
SMALL, LARGE = (4, 4), (6, 6)
RESAMPLED = {"learned-1d", "learned-2d"}
OPTIONS = [
    ("shaw", {"reach": None}),
    ("shaw", {"reach": None, "offsets": "raster", "prefix_bucket": True, "shared_heads": False}),
    ("huang", {"reach": None, "roles": None}),
    ("sasa", {"reach": 2}),
    ("sape", {"mode": "both", "shared_heads": False}),
    ("cope", {"causal": True}),
    ("irpe-quantization", {"universe": "global"}),
    ("irpe-quantization", {"variant": "squared"}),
    ("transformer-xl", {"reach": 5}),
    ("learned-4d", {"places": 7}),
    ("fourier", {"mixer": True}),
]


def made(name, grid, **options):
    options = {key: value for key, value in options.items() if key != "roles" or value}
    torch.manual_seed(0)
    encoding = create_fitting_position(
        name, {"width": WIDTH, "heads": HEADS, "grid": grid}, **options
    ).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoding


def computed(encoding, grid):
    """What the hooks make of the same tokens: one prefix token, then the grid."""
    draw = torch.Generator().manual_seed(1)
    context = PositionContext(grid, 1)
    tokens = 1 + grid[0] * grid[1]

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    query, key = random(2, 2, HEADS, tokens, WIDTH // HEADS)
    inputs = {
        "tokens": (random(2, tokens, WIDTH),),
        "rotate": (query, key),
        "bias": (query, key),
        "value": (random(2, HEADS, tokens, tokens).softmax(-1),),
    }
    return [encoding(hook, *inputs[hook], context) for hook in sorted(encoding.hooks)]


def carried(name, trained, grid, trained_grid, **options):
    encoding = made(name, grid, **options)
    tables = carry_over(name, encoding, trained, trained.state_dict(), grid, trained_grid)
    encoding.load_state_dict(tables)
    return encoding


@pytest.mark.parametrize("to", [(3, 3), (5, 7)])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in WITHIN if name not in {*RESAMPLED, "irpe-quantization"}] + OPTIONS,
)
def test_the_new_encoding_is_the_trained_one_on_the_new_grid(name, options, to):
    trained = made(name, SMALL, **options)
    encoding = carried(name, trained, to, SMALL, **options)
    torch.testing.assert_close(computed(encoding, to), computed(trained, to), rtol=0, atol=1e-12)


def test_learned_rows_and_columns_are_resampled():
    trained = made("learned-2d", SMALL, deviation=0.0)
    with torch.no_grad():  # a ramp over the columns stays one, and rows stay rows
        trained.table_columns.copy_(torch.arange(4.0)[:, None].expand(-1, WIDTH // 2))
        trained.table_rows.fill_(7.0)
    encoding = carried("learned-2d", trained, LARGE, SMALL)
    column = encoding.table_columns[:, 0]
    assert (column.diff() > 0).all()
    assert column.mean().item() == pytest.approx(1.5, abs=1e-6)
    torch.testing.assert_close(encoding.table_rows, torch.full((6, 8), 7.0).double())


def test_a_resampled_grid_is_timm_s():
    from timm.layers.pos_embed import resample_abs_pos_embed

    trained = made("learned-1d", SMALL)
    encoding = carried("learned-1d", trained, LARGE, SMALL)
    theirs = resample_abs_pos_embed(
        trained.table.detach()[None], [6, 6], num_prefix_tokens=0, verbose=False
    )
    torch.testing.assert_close(encoding.table.detach(), theirs[0].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("irpe-quantization", {}, "ranks the distances of its own grid"),
        ("rope-axial", {"rescale": True}, "with `rescale`"),
        ("rope-mixed", {"rescale": True}, "with `rescale`"),
        ("transformer-xl", {"reach": None}, "option reach, 3 there and 5 here"),
    ],
)
def test_what_is_bound_to_its_grid_names_both_sizes(name, options, reason):
    trained = made(name, SMALL, **options)
    with pytest.raises(ValueError, match=f"{name} was trained on a 4 x 4 grid.* 6 x 6: .*{reason}"):
        carried(name, trained, LARGE, SMALL, **options)
    same = carried(name, trained, SMALL, SMALL, **options)
    torch.testing.assert_close(computed(same, SMALL), computed(trained, SMALL))


@pytest.mark.parametrize(
    ("offsets", "to", "trained_on"),
    [
        ("axes", (3, 2), SMALL),
        ("raster", (3, 3), SMALL),
        ("raster", (1, 5), (1, 9)),
        ("product", (1, 5), (1, 9)),
    ],
)
def test_sinusoids_of_places_do_not_go_by_the_reach(offsets, to, trained_on):
    options = {"offsets": offsets, "reach": None}
    trained = made("transformer-xl", trained_on, **options)
    encoding = carried("transformer-xl", trained, to, trained_on, **options)
    assert encoding.reach < trained.reach
    torch.testing.assert_close(computed(encoding, to), computed(trained, to), rtol=0, atol=1e-12)


def test_ranks_of_a_row_carry_over_to_a_longer_row():
    trained = made("irpe-quantization", (1, 5))
    encoding = carried("irpe-quantization", trained, (1, 9), (1, 5))
    torch.testing.assert_close(
        encoding._ids(PositionContext((1, 9), 1), 10, 10, torch.device("cpu"))[:, :6, :6],
        trained._ids(PositionContext((1, 5), 1), 6, 6, torch.device("cpu")),
    )


def test_tables_of_other_sizes_are_refused():
    trained = create_fitting_position("learned-1d", {"width": 4, "length": 5})
    shorter = create_fitting_position("learned-1d", {"width": 4, "length": 3})
    tables = carry_over("ape", shorter, trained, trained.state_dict(), (1, 3), (1, 5))
    assert torch.equal(tables["table"], trained.table[:3])
    with pytest.raises(ValueError, match=r"ape .*1 x 3 .*1 x 5: table is \(3, 4\).* \(5, 4\) here"):
        carry_over("ape", trained, shorter, shorter.state_dict(), (1, 5), (1, 3))
    trained = made("sasa", SMALL, prefix_bucket=False)
    with pytest.raises(ValueError, match=r"sasa .*: table_x is \(1, 7, 4\) there and \(1, 12, 4\)"):
        carried("sasa", trained, LARGE, SMALL)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def vit(name=None, **options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, class_token=True, **VIT)
    return model.eval() if name is None else attach(model.eval(), name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {}) for name in ("fourier", "mlp", "rope-mixed")],
        *[(f"learned-{dimensions}d", {}) for dimensions in (1, 2, 4)],
        ("learned-2d", {"mixer": True}),
        ("fourier", {"mlp": False, "projection": True}),
        ("sine-2d", {"mlp": 8}),
    ],
)
def test_the_function_stays_and_the_encoding_learns(name, options):
    images = torch.randn(2, 3, 32, 32)
    expected, model = vit()(images), vit(name, **options)
    assert (model(images) - expected).abs().max() > 1e-4
    zero_start(model)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    model(images).square().sum().backward()
    own = {n: p for n, p in model.named_parameters() if "positions" in n}
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())
