import pytest
import torch

from vlp.config import ConfigError
from vlp.positions import create_position
from vlp.positions.base import PositionContext
from vlp.tasks.grids.data import TOKENS, GridBatch
from vlp.tasks.grids.model import GridModelConfig, GridTransformer

SIZE, LENGTH = 3, 16
VITARC = ({"name": "object", "options": {"mixer": True}}, {"name": "alibi-2d"})


def config(*positions, **options):
    plain = {"width": 16, "encoder_layers": 1, "decoder_layers": 2, "heads": 2, "feed_forward": 32}
    named = [{"name": one} if isinstance(one, str) else one for one in positions]
    return GridModelConfig.model_validate(plain | {"positions": named} | options)


def model(*positions, **options):
    made = GridTransformer(config(*positions, **options), SIZE, tasks=2).double()
    for parameter in made.parameters():  # also those that start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def question(rows=2, boxes=None):
    boxes = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 3]]) if boxes is None else boxes
    inputs, tasks = torch.randint(TOKENS, (rows, LENGTH)), torch.arange(rows) % 2
    return GridBatch(inputs, None, boxes.expand(rows, -1, -1), tasks, None)


def templates(rows=2):
    return torch.randint(TOKENS, (rows, LENGTH))


@pytest.mark.parametrize(
    "positions",
    [(), ("sine-2d",), ("learned-1d",), VITARC, ("irpe-product",), ("rope-mixed",), ("cope",)],
)
def test_a_later_cell_never_changes_an_earlier_logit(positions):
    made, asked, outputs = model(*positions), question(), templates()
    logits = made(asked, outputs)
    assert logits.shape == (2, LENGTH, TOKENS)
    for cell in range(LENGTH):
        changed = outputs.clone()
        changed[:, cell:] = torch.randint(TOKENS, (2, LENGTH - cell))
        found = made(asked, changed)
        torch.testing.assert_close(found[:, : cell + 1], logits[:, : cell + 1])
    changed = outputs.clone()
    changed[:, 5] = (changed[:, 5] + 1) % TOKENS
    assert (made(asked, changed)[:, 6] - logits[:, 6]).abs().max() > 1e-3


def test_every_input_cell_and_the_task_reach_every_logit():
    made, asked, outputs = model(*VITARC), question(), templates()
    logits = made(asked, outputs)
    for cell in range(LENGTH):
        inputs = asked.inputs.clone()
        inputs[:, cell] = (inputs[:, cell] + 1) % TOKENS
        assert ((made(asked._replace(inputs=inputs), outputs) - logits).abs().amax(-1) > 0).all()
    other = made(asked._replace(tasks=1 - asked.tasks), outputs)
    assert ((other - logits).abs().amax(-1) > 0).all()


def test_objects_count_for_the_encoder_alone():
    with_objects, places_alone = model(*VITARC), model("sine-2d", "alibi-2d")
    asked, outputs = question(), templates()
    moved = asked._replace(boxes=torch.tensor([[0.0, 0, 4, 4]]).expand(2, -1, -1))
    assert not torch.allclose(with_objects(asked, outputs), with_objects(moved, outputs))
    torch.testing.assert_close(places_alone(asked, outputs), places_alone(moved, outputs))
    encoded = with_objects.encode(asked)
    torch.testing.assert_close(with_objects.decode(outputs, encoded), with_objects(asked, outputs))


def test_the_encoders_tokens_are_the_task_and_the_placed_cells():
    made = model({"name": "object", "options": {"mixer": True}})
    seen = []
    made.encoder[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    asked = question()
    made.encode(asked)
    encoding = made.encoder_places[0]
    plain = create_position("object", width=16)
    context = PositionContext(grid=(4, 4), boxes=asked.boxes)
    where = plain.embeddings(torch.zeros(2, LENGTH, 16, dtype=torch.float64), context)
    cells = encoding.alpha * made.embedding(asked.inputs) + encoding.beta * where
    torch.testing.assert_close(seen[0][:, 1:], cells)
    torch.testing.assert_close(seen[0][:, 0], encoding.alpha * made.tasks(asked.tasks))


def test_the_decoder_may_have_encodings_of_its_own():
    made = model("sape", "sine-2d", decoder_positions=[{"name": "learned-2d"}])
    assert len(made.encoder[0].attention.positions) == 1
    assert len(made.decoder[0].attention.positions) == 0
    assert type(made.decoder_places[0]).__name__ == "LearnedGridPosition"
    with pytest.raises(ConfigError, match=r"sape with .* sees later tokens"):
        model("sape")


@pytest.mark.parametrize("positions", [("sine-2d",), VITARC])
def test_greedy_writing_is_what_one_pass_says(positions):
    made, asked = model(*positions), question(rows=4)
    written = made.generate(asked)
    likeliest = made(asked, written).argmax(-1)
    assert torch.equal(written, likeliest)
    # And no other template passes that test: the first cell that differs is not the likeliest.
    for cell in (0, 7, LENGTH - 1):
        other = written.clone()
        other[:, cell] = (other[:, cell] + 1) % TOKENS
        assert not (made(asked, other).argmax(-1) == other).all(-1).any()


def test_without_objects_or_rows_there_is_an_answer():
    made = model(*VITARC)
    assert made(question(boxes=torch.zeros(0, 4)), templates()).isfinite().all()
    assert made(question(rows=0), templates(rows=0)).shape == (0, LENGTH, TOKENS)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"model.heads 3 do not divide model.width 16"):
        model(heads=3)
    with pytest.raises(ConfigError, match="object: width 12"):
        model("object", width=12)
    outside = question(boxes=torch.tensor([[3.0, 0, 2, 1]]))
    with pytest.raises(ValueError, match=r"object box 0 of image 0 .*does not lie inside"):
        model(*VITARC)(outside, templates())


def test_the_scale_reaches_all_attention():
    """Without one, as in the T5 code; a model with larger queries is the same."""
    unscaled, plain = model(*VITARC, scale=1.0), model(*VITARC)
    state = unscaled.state_dict()
    for name in state:
        if ".query." in name:
            state[name] = state[name] * 8**0.5
    plain.load_state_dict(state)
    asked, outputs = question(), templates()
    torch.testing.assert_close(unscaled(asked, outputs), plain(asked, outputs))
    with pytest.raises(ValueError, match="scale"):
        config(scale=0)
