import pytest
import torch
from tests_support import ace, tiny_config

from vlp.models import itm_scorer as module
from vlp.models.itm_scorer import ITMScorer, PreparedTexts
from vlp.models.vlp import VLPModel
from vlp.positions import CROSS_MODAL, PositionEncoding, list_positions, register_position, registry

LENGTHS = torch.tensor([6, 8, 4, 12, 3])
ANCHORS = [
    {"mode": "bias"},
    *({"roles": (role,)} for role in ("query", "key", "value")),
    {"features": "encoder"},
    {"shared_heads": True, "scale": 2.0},
    {"mode": "bias", "shared_heads": True},
    {"text_window": None, "patch_window": None, "metric": "manhattan"},
    {"tau": 5.0},
    {"unreachable": "far"},
]


def strong(layout, position, layers=3, dtype=torch.float64, pooling="cls", token_score=0, **anchor):
    """A model whose every part matters to its scores: from a plain start few of them would."""
    torch.manual_seed(0)
    cross = {"layers": layers, "layout": layout, "position": position, "pooling": pooling}
    cross |= {"token_score": token_score, **ace(**anchor)}
    model = VLPModel(tiny_config(cross=cross)).to(dtype).eval()
    for name, parameter in model.named_parameters():
        scale = "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(scale), std=0.3 if parameter.ndim > 1 else 0.1)
    model.anchor_threshold.fill_(0.1)
    return model


def encoded(model, dtype=torch.float64):
    ids = torch.randint(5, 40, (len(LENGTHS), 12))
    attention = torch.arange(12) < LENGTHS[:, None]
    words = attention & (torch.arange(12) > 0) & (torch.arange(12) < LENGTHS[:, None] - 1)
    with torch.no_grad():
        images = model.encode_image(torch.randn(2, 3, 16, 16, dtype=dtype))
        return images, model.encode_text(ids, attention, words)


def both_ways(model, images, texts, image=1):
    rows = torch.full((len(texts.states),), image)
    with torch.no_grad():
        plain = model.match(images.select(rows), texts)
    itm_scorer = ITMScorer(model)
    prepared = itm_scorer.prepare_image(images.select(rows[:1]))
    return plain, itm_scorer.match(prepared, itm_scorer.prepare_texts(texts))


@pytest.mark.parametrize("layout", ["text", "albef", "ace"])
@pytest.mark.parametrize(
    ("position", "pooling"),
    [
        *((names, "cls") for names in ((), ("anchor",), ("uniform",), ("alignment",))),
        (("ape", "anchor", "alignment"), "cls"),
        *((("anchor",), pooling) for pooling in ("mean", "cls+mean")),
    ],
)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_scores_are_those_of_the_model(layout, position, pooling, layers):
    model = strong(layout, position, layers, pooling=pooling)
    plain, shared = both_ways(model, *encoded(model))
    assert plain.std() > 0.05
    assert shared.dtype == torch.float32
    assert not shared.requires_grad
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)


def test_a_token_score_needs_projected_tokens():
    with pytest.raises(ValueError, match="token_score reads projected tokens"):
        strong("text", ("anchor",), token_score=5, features="encoder")


def test_weights_in_bf16_are_prepared():
    model = strong("ace", ("anchor",), dtype=torch.float32)
    expected = ITMScorer(model).tables
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = part.weight.data.bfloat16()
    for shift, right in zip(ITMScorer(model).tables, expected, strict=True):
        torch.testing.assert_close(shift.query, right.query, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("position", [(), ("anchor",)])
def test_token_scores_are_those_of_the_model(position):
    model = strong("ace", position, token_score=5)
    features = encoded(model)
    plain, shared = both_ways(model, *features)
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        model.token_score.factor.zero_()
        without, _ = both_ways(model, *features)
        model.token_score.factor.fill_(0.4)
    images, texts = features
    cosines = [
        images.tokens[1] @ words[real].T for words, real in zip(texts.tokens, texts.word_mask)
    ]
    expected = without + 2 * torch.stack([part.amax(0).mean() for part in cosines]).float()
    torch.testing.assert_close(both_ways(model, *features)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["text", "albef", "ace"])
@pytest.mark.parametrize("anchor", ANCHORS)
def test_every_form_of_ace_rpe_is_kept(layout, anchor):
    model = strong(layout, ("anchor",), **anchor)
    features = encoded(model)
    plain, shared = both_ways(model, *features)
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        if "cross_attention.positions" in name:
            torch.nn.init.zeros_(parameter)
    without, _ = both_ways(model, *features)
    assert (without - plain).abs().max() > 1e-3  # it was seen


@pytest.mark.parametrize("name", [name for name in list_positions() if name not in CROSS_MODAL])
def test_every_encoding_of_the_streams_is_kept(name):
    model = strong("ace", (name, "anchor"))
    plain, shared = both_ways(model, *encoded(model))
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)
    assert ITMScorer(model).reads_padding


@pytest.fixture
def _own_encodings(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODINGS", dict(registry._ENCODINGS))
    kept = list(CROSS_MODAL)

    @register_position("test-content", cross_modal=True)
    class Content(PositionEncoding):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.factors = torch.nn.Parameter(torch.ones(heads, 1, 1))

        def bias(self, query, key, context):
            field = context.anchors
            path = field.text_path if context.text_queries else field.image_path
            content = query.mean(-1)[..., None] * key.mean(-1)[:, :, None]
            return self.factors * content * (1 + path.mean(-1)[:, None])

    @register_position("test-turn", cross_modal=True)
    class Turn(PositionEncoding):
        def rotate(self, query, key, context):
            rows, columns = context.grid
            places = torch.arange(context.prefix_tokens + rows * columns).to(query.dtype)
            return query * places.cos()[:, None], key.roll(1, -1)

    yield
    CROSS_MODAL[:] = kept


@pytest.mark.usefixtures("_own_encodings")
@pytest.mark.parametrize("layout", ["text", "albef", "ace"])
@pytest.mark.parametrize("own", ["test-content", "test-turn"])
@pytest.mark.parametrize("others", [(), ("anchor",)])
@pytest.mark.parametrize(("layers", "pooling"), [(1, "cls"), (3, "mean")])
def test_encodings_of_ones_own_are_kept(layout, own, others, layers, pooling):
    model = strong(layout, (own, *others), layers, pooling=pooling)
    features = encoded(model)
    plain, shared = both_ways(model, *features)
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)
    assert ITMScorer(model).reads_padding
    for layer in model.cross_encoder.layers:
        layer.cross_attention.positions = layer.cross_attention.positions[1:]
    without, _ = both_ways(model, *features)
    assert (without - plain).abs().max() > 1e-3  # it was seen


def test_float32_and_bf16_agree_with_the_model():
    for layout in ("albef", "ace"):
        model = strong(layout, ("anchor",), dtype=torch.float32)
        features = encoded(model, torch.float32)
        plain, shared = both_ways(model, *features)
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            plain_bf16, shared_bf16 = both_ways(model, *features)
        spread = plain.std()
        assert (plain_bf16 - plain).abs().max() < 0.2 * spread
        assert (shared_bf16 - plain).abs().max() < 0.2 * spread


def test_stacked_and_selected_texts_score_as_they_did():
    model = strong("ace", ("anchor",))
    images, texts = encoded(model)
    plain, _ = both_ways(model, images, texts)
    itm_scorer = ITMScorer(model)
    assert not itm_scorer.reads_padding
    parts = []
    for rows, width in ((torch.tensor([4, 2]), 4), (torch.tensor([0, 1, 3]), 12)):
        part = texts.select(rows)
        cut = type(part)(part.states[:, :width], part.feature, part.tokens[:, :width],
                         part.attention_mask[:, :width], part.word_mask[:, :width])  # fmt: skip
        parts.append(itm_scorer.prepare_texts(cut))
    stacked = PreparedTexts.stack(parts)
    assert stacked.states.shape[:2] == (5, 12)
    image = itm_scorer.prepare_image(images.select(torch.tensor([1])))
    for rows, own, width in (([2, 0, 1], [0, 4, 2], 6), ([0], [4], 3), ([4, 3], [3, 1], 12)):
        odds = itm_scorer.match(image, stacked.select(torch.tensor(rows), width))
        torch.testing.assert_close(odds, plain[own], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 40])
def test_few_pairs_at_a_time_change_nothing(monkeypatch, tokens):
    monkeypatch.setattr(module, "_CACHED_TOKENS", tokens)
    model = strong("ace", ("anchor",))
    plain, shared = both_ways(model, *encoded(model))
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("layout", "layers"), [("text", 3), ("albef", 3), ("ace", 1)])
def test_a_image_is_projected_once_for_all_its_texts(layout, layers):
    model = strong(layout, ("anchor",), layers)
    images, texts = encoded(model)
    itm_scorer = ITMScorer(model)
    seen = []
    for layer in itm_scorer.layers:
        for projection in (layer.cross_attention.key, layer.cross_attention.value):
            projection.register_forward_hook(lambda _, __, out: seen.append(out.shape[0]))
    image = itm_scorer.prepare_image(images.select(torch.tensor([0])))
    assert seen == [1, 1] * layers
    prepared = itm_scorer.prepare_texts(texts)
    for _ in range(3):
        itm_scorer.match(image, prepared)
    assert seen == [1, 1] * layers
