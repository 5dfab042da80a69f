import itertools
from pathlib import Path

import pytest
import torch

from vlp.config import ConfigError, load_config
from vlp.tasks.widgets.data import WidgetBatch
from vlp.tasks.widgets.model import WidgetCaptioner, WidgetModelConfig
from vlp.training.config import VisionConfig

RICO = Path(__file__).parents[3] / "configs" / "vision" / "widgets_rico.yaml"

WORDS, PAD, START, END = 12, 0, 2, 3
SPECIALS = (0, 1, 2, 3, 4)

BOXES = {
    "learned-4d": {},
    "sine-4d": {"extent": 100},
    "md-sine": {"dimensions": 4, "extent": 100},
    "mlp": {"dimensions": 4},
    "fourier": {"dimensions": 4, "groups": 2, "extent": 100, "gamma": 10, "features": 8},
}
ATTENTION = {"rope-axial": {"grid": [20, 20]}, "rope-mixed": {"grid": [20, 20]}}


def model(positions=(), seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"width": 16, "heads": 2, "layers": 2, "decoder_layers": 1, "intermediate": 16}
    config = WidgetModelConfig.model_validate(
        {**sizes, "dropout": 0.0, "positions": list(positions), **options}
    )
    return WidgetCaptioner(config, WORDS, SPECIALS, PAD, START, END)


def named(name):
    return [{"name": name, "options": {**BOXES, **ATTENTION}[name]}]


def batch(screens=2, widgets=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    low, size = (torch.rand(screens, widgets, 2, generator=rng) / 2 for _ in range(2))
    words = torch.randint(5, WORDS, (2, screens, widgets, 3), generator=rng)
    words[:, :, ::2, 1:] = PAD
    words[:, :, 0] = PAD
    captions = torch.randint(5, WORDS, (3, 6), generator=rng)
    captions[:, 0], captions[:, 4], captions[:, 5] = START, END, PAD
    return WidgetBatch(
        torch.cat([low, low + size], -1),
        torch.randint(0, 11, (screens, widgets), generator=rng),
        torch.randint(0, 2, (screens, widgets), generator=rng),
        *words,
        torch.randint(1, 9, (screens, widgets, 3), generator=rng),
        torch.ones(screens, widgets, dtype=torch.bool),
        torch.tensor([[0, 1], [1, 0], [1, 4]]),
        captions,
        torch.ones(screens, dtype=torch.bool),
    )


class TestModel:
    @pytest.mark.parametrize("combine", ["concat", "add"])
    @pytest.mark.parametrize("name", [*BOXES, *ATTENTION])
    def test_every_encoding_of_boxes_sees_them(self, name, combine):
        net = model(named(name), combine=combine)
        given = batch()
        moved = given._replace(boxes=given.boxes * 0.5)
        logits = net(given)
        assert logits.shape == (3, 5, WORDS)
        assert not torch.allclose(logits, net(moved), atol=1e-6)
        logits.square().sum().backward()
        for key, parameter in net.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key

    @pytest.mark.parametrize("name", ["fourier", "rope-axial"])
    def test_the_order_of_widgets_means_nothing(self, name):
        net, given = model(named(name), trees=10).double(), batch()
        order = torch.tensor([3, 0, 4, 1, 2])
        fields = ("boxes", "kinds", "clickable", "words", "resources", "trees", "widget_mask")
        other = given._replace(**{field: getattr(given, field)[:, order] for field in fields})
        places = order.argsort()[given.targets[:, 1]]
        other = other._replace(targets=torch.stack([given.targets[:, 0], places], -1))
        torch.testing.assert_close(net(given), net(other), rtol=0, atol=1e-9)

    def test_padding_is_not_seen(self):
        net, given = model(named("fourier")), batch()
        real = torch.tensor([[True, True, True, False, False], [True] * 5])
        changed = given.boxes.clone()
        changed[0, 3:] = 0.9
        torch.testing.assert_close(
            net(given._replace(widget_mask=real)),
            net(given._replace(widget_mask=real, boxes=changed)),
        )
        assert not torch.allclose(net(given), net(given._replace(boxes=changed)))

    def test_words_are_pooled_by_their_largest(self):
        net, given = model(), batch()
        pooled = net.encoder._pooled_words(given.words, net.words)
        for screen, widget in itertools.product(range(2), range(5)):
            ids = [one for one in given.words[screen, widget].tolist() if one != PAD]
            wanted = net.words.weight[ids].amax(0) if ids else torch.zeros(16)
            torch.testing.assert_close(pooled[screen, widget], wanted)

    def test_trees_are_read_and_large_numbers_unknown(self):
        net, given = model(trees=5), batch()
        beyond = given._replace(trees=torch.where(given.trees >= 5, 7, given.trees))
        unknown = given._replace(trees=torch.where(given.trees >= 5, 0, given.trees))
        assert torch.equal(net(given), net(beyond))
        assert torch.equal(net(given), net(unknown))
        assert not torch.equal(net(given), net(given._replace(trees=given.trees + 1)))
        assert torch.equal(model()(given), model()(given._replace(trees=given.trees + 1)))

    def test_decoding_looks_back_alone(self):
        net, given = model(named("fourier")), batch()
        captions = given.captions.clone()
        captions[:, 3:] = 5
        first, other = net(given), net(given._replace(captions=captions))
        torch.testing.assert_close(first[:, :3], other[:, :3])
        assert not torch.allclose(first[:, 3:], other[:, 3:])

    def test_generated_captions_are_the_greedy_ones(self):
        net, given = model(named("fourier")).eval(), batch()
        said = net.generate(given, 6)
        states = net.widgets(given)
        ids = torch.full((3, 1), START)
        over = torch.zeros(3, dtype=torch.bool)
        for _ in range(said.shape[1]):
            logits = net.decode(states, ids)[:, -1]
            logits[:, [0, 1, 2, 4]] = -torch.inf
            chosen = torch.where(over, END, logits.argmax(-1))
            over |= chosen == END
            ids = torch.cat([ids, chosen[:, None]], 1)
        assert torch.equal(said, ids[:, 1:])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"heads": 3}, r"model.heads 3 .* model.width 16"),
            ({"positions": [{"name": "nope"}]}, "unknown position encoding 'nope'"),
            ({"positions": [{"name": "fourier", "options": {"rows": 1}}]}, "fourier.*rows"),
            ({"positions": [{"name": "fourier", "options": {"groups": 3}}]}, "3 groups"),
        ],
    )
    def test_refused_configurations(self, options, message):
        with pytest.raises(ConfigError, match=message):
            model(**options)


def test_parameters_by_part_at_the_papers_size():
    config = load_config(RICO, VisionConfig).task.model
    with torch.device("meta"):
        made = WidgetCaptioner(config, 10_000, tuple(range(5)), pad_id=0, start=2, end=3)
    parts = {
        ("words.",): 1_280_000,
        ("output.",): 1_290_000,
        ("encoder.layers.", "encoder.norm."): 1_189_888,
        ("decoder.", "norm."): 1_587_712,
        ("encoder.kinds.", "encoder.clickable."): 1_664,
        ("encoder.trees.",): 192_000,
        ("encoder.positions.",): 3_168,
        ("encoder.content.",): 98_432,
    }
    for names, expected in parts.items():
        sizes = [p.numel() for name, p in made.named_parameters() if name.startswith(names)]
        assert sum(sizes) == expected, names
    assert sum(p.numel() for p in made.parameters()) == sum(parts.values()) == 5_642_864
