import itertools
import json
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydantic import ValidationError
from tests_support import train

from evaluation.options import EvalOptions
from evaluation.vision.grids import evaluate
from vlp.config import ConfigError
from vlp.positions.object import object_ids
from vlp.tasks.grids.arc import (
    RULES,
    TURNS,
    GridPair,
    GridVariant,
    Symmetry,
    draw_variant,
    held_out_variants,
    orbit,
    read_tasks,
)
from vlp.tasks.grids.data import (
    BELOW,
    CORNER,
    PADDING,
    RIGHT,
    GridDataConfig,
    object_boxes,
    open_grids,
    to_tokens,
)
from vlp.tasks.grids.task import GridsConfig, build

GRIDS = arrays.arrays(
    np.int64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.integers(0, 9)
)


@pytest.fixture(scope="module")
def archive(shared):
    return shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz"


def config(path, *tasks, **options):
    named = [{"name": task} if isinstance(task, str) else task for task in tasks]
    plain = {"path": str(path), "tasks": named, "size": 7, "samples": 40, "canonical_streams": 2}
    return GridDataConfig.model_validate(plain | options)


def batches(chosen, count, batch=10):
    _, data = build(GridsConfig(data=chosen, model=MODEL), batch, 0, "float32")
    return [found for found, _ in data.batches(stop_after=count)]


def to_grid(tokens, size):
    template = tokens.reshape(size + 1, size + 1)
    rows, columns = np.argwhere(template == CORNER)[0]
    return template[:rows, :columns]


def pairs(batch, size):
    for inputs, outputs in zip(batch.inputs.numpy(), batch.outputs.numpy()):
        yield GridPair(to_grid(inputs, size), to_grid(outputs, size))


def test_a_template_by_hand():
    tokens = to_tokens(np.array([[1, 2], [3, 4]]), 3).reshape(4, 4)
    assert tokens.tolist() == [
        [1, 2, RIGHT, PADDING],
        [3, 4, RIGHT, PADDING],
        [BELOW, BELOW, CORNER, PADDING],
        [PADDING] * 4,
    ]
    with pytest.raises(ValueError, match="1 x 4 is larger than 3 x 3"):
        to_tokens(np.zeros((1, 4), int), 3)


@given(GRIDS)
def test_a_template_holds_its_grid(grid):
    assert np.array_equal(to_grid(to_tokens(grid, 5), 5), grid)


def test_objects_are_groups_of_one_colour_and_diagonals_join():
    grid = np.array([[0, 3, 0, 0, 2], [3, 0, 0, 0, 2], [0, 0, 1, 0, 0], [0, 0, 0, 0, 3]])
    assert object_boxes(grid).tolist() == [[2, 2, 1, 1], [4, 0, 1, 2], [0, 0, 2, 2], [4, 3, 1, 1]]
    ids = object_ids(torch.from_numpy(object_boxes(grid))[None], (4, 5))[0]
    assert ids.tolist() == [[3, 3, 0, 0, 2], [3, 3, 0, 0, 2], [0, 0, 1, 0, 0], [0, 0, 0, 0, 4]]
    assert object_boxes(np.array([[7, 7, 0]])).tolist() == [[2, 0, 1, 1]]  # most is background
    assert object_boxes(np.array([[0, 7]])).tolist() == [[1, 0, 1, 1]]
    assert object_boxes(np.full((2, 2), 5)).shape == (0, 4)


def test_batches_hold_pairs_of_the_rule_task_by_task(archive):
    names = ("67a3c6ac", "74dd1130", "67385a82")
    seen = Counter()
    for batch in batches(config(archive, *names), 4):
        assert batch.inputs.shape == batch.outputs.shape == (10, 64)
        assert batch.valid.all()
        for pair, task, boxes in zip(pairs(batch, 7), batch.tasks.tolist(), batch.boxes):
            assert np.array_equal(RULES[names[task]].answer(pair.input), pair.output)
            real = boxes[boxes[:, 2] > 0]
            assert np.array_equal(real.numpy(), object_boxes(pair.input))
            seen[task] += 1
    assert sum(seen.values()) == 40
    assert seen == {0: 14, 1: 13, 2: 13}


SMALL_SPACES = ("25ff71a9", "74dd1130", "6150a2bd")


@pytest.mark.parametrize("source", ["rule", "pairs"])
def test_no_test_input_is_ever_trained_on_in_any_variant(archive, source):
    """Tasks of 3 x 3 cells, whose test grids are soon drawn by chance."""
    named = [{"name": name, "source": source} for name in SMALL_SPACES]
    chosen = config(archive, *named, size=3, samples=600)
    tasks = open_grids(chosen)
    for batch in batches(chosen, 6, batch=100):
        for pair, task in zip(pairs(batch, 3), batch.tasks.tolist()):
            name = SMALL_SPACES[task]
            symmetry = RULES[name].symmetry
            for test in tasks[name].test:
                assert orbit(pair.input, symmetry) != orbit(test.input, symmetry)


def test_rules_do_draw_test_inputs_which_are_left_out(archive):
    """Else the test above would say nothing."""
    rule, name = RULES["25ff71a9"], "25ff71a9"
    tests = {
        orbit(pair.input, rule.symmetry) for pair in open_grids(config(archive, name))[name].test
    }
    rng = np.random.default_rng(0)
    assert any(orbit(rule.draw(rng, 3), rule.symmetry) in tests for _ in range(300))


def test_given_pairs_come_in_variants_of_both_grids(archive):
    chosen = config(archive, {"name": "68b16354", "source": "pairs"}, samples=60)
    task = open_grids(chosen)["68b16354"]
    symmetry = RULES["68b16354"].symmetry
    known = {orbit(pair.input, symmetry): pair for pair in task.train}
    seen = set()
    for batch in batches(chosen, 6):
        for pair in pairs(batch, 7):
            given_pair = known[orbit(pair.input, symmetry)]
            seen.add(pair.input.tobytes())
            assert pair.input.shape == given_pair.input.shape
            assert np.array_equal(pair.output, np.flipud(pair.input))
    assert len(seen) > 50


def test_given_pairs_that_are_too_large_are_counted(archive):
    # Its train grids are 4, 6 and 7 wide, its test grid 3.
    chosen = config(archive, {"name": "67a3c6ac", "source": "pairs"}, size=6)
    found = batches(chosen, 4)
    skipped = [skip for batch in found for skip in batch.skipped]
    assert 0 < len(skipped) < 30
    assert sum(len(batch.inputs) for batch in found) == 40 - len(skipped)
    assert {skip.kind for skip in skipped} == {"grid too large"}
    assert skipped[0].where.startswith("67a3c6ac (a grid of 7 x 7")


def test_tasks_that_cannot_be_trained_are_refused(archive):
    def refused(*tasks, match, **options):
        with pytest.raises(ConfigError, match=match):
            open_grids(config(archive, *tasks, **options))

    refused("a5313dff", match="a5313dff has no rule; .* tasks with a rule: 67a3c6ac", size=9)
    refused("68b16354", match="test grids of 7 rows or columns, data.size is 6", size=6)
    refused("nothing", match="there are no tasks nothing")
    only_large = {"name": "67a3c6ac", "source": "pairs"}
    refused(only_large, match="no train pair that fits data.size 3", size=3)
    wrong = {"name": "67a3c6ac", "symmetry": {"turns": ["identity", "transpose"]}}
    refused(wrong, match="data.tasks.0: task 67a3c6ac: turn transpose with colours")
    wrong = {"name": "d511f180", "symmetry": {"colours": [5, 1]}}
    refused(wrong, match="d511f180: turn identity with colours")
    with pytest.raises(ValidationError, match="named twice"):
        config(archive, "67a3c6ac", "67a3c6ac")
    with pytest.raises(ValidationError, match="less than or equal to 30"):
        config(archive, "67a3c6ac", size=31)


GRID = np.array([[1, 2, 3], [4, 5, 6]])
EVERYTHING = Symmetry(turns=tuple(TURNS), colours=tuple(range(10)))
MIRRORS = ("identity", "half", "left-right", "top-bottom")
SYMMETRIES = st.sampled_from(
    [
        Symmetry(),
        EVERYTHING,
        Symmetry(turns=MIRRORS, colours=(1, 2, 5)),
        Symmetry(turns=("identity", "transpose"), colours=(0, 3)),
    ]
)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("identity", [[1, 2, 3], [4, 5, 6]]),
        ("quarter", [[3, 6], [2, 5], [1, 4]]),
        ("half", [[6, 5, 4], [3, 2, 1]]),
        ("three-quarter", [[4, 1], [5, 2], [6, 3]]),
        ("left-right", [[3, 2, 1], [6, 5, 4]]),
        ("top-bottom", [[4, 5, 6], [1, 2, 3]]),
        ("transpose", [[1, 4], [2, 5], [3, 6]]),
        ("anti-transpose", [[6, 3], [5, 2], [4, 1]]),
    ],
)
def test_turns(turn, expected):
    assert GridVariant(turn)(GRID).tolist() == expected


def test_colours_are_written_for_others():
    colours = (0, 2, 1, 3, 4, 5, 6, 7, 8, 9)
    assert GridVariant("left-right", colours)(GRID).tolist() == [[3, 1, 2], [6, 5, 4]]


@given(SYMMETRIES, st.integers(0, 1000))
def test_drawn_variants_keep_to_the_symmetry_and_are_not_held_out(symmetry, seed):
    variant = draw_variant(symmetry, np.random.default_rng(seed))
    assert variant.turn in symmetry.turns
    assert sorted(variant.colours) == list(range(10))
    assert all(variant.colours[c] == c for c in range(10) if c not in symmetry.colours)
    assert not variant.held_out


def test_held_out_variants_are_others_and_the_same_each_time():
    first, second = (held_out_variants(EVERYTHING, 20, np.random.default_rng(0)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 20
    assert all(variant.held_out for variant in first)
    rng = np.random.default_rng(1)
    assert not {draw_variant(EVERYTHING, rng) for _ in range(500)} & set(first)
    assert GridVariant() not in first


def test_small_symmetries_give_what_they_have():
    assert held_out_variants(Symmetry(), 5, np.random.default_rng(0)) == ()
    assert draw_variant(Symmetry(), np.random.default_rng(0)) == GridVariant()
    colours = Symmetry(colours=(1, 2, 3))
    every = [(0, *order, *range(4, 10)) for order in itertools.permutations((1, 2, 3))]
    found = held_out_variants(colours, 100, np.random.default_rng(0))
    assert set(found) == {v for v in (GridVariant(colours=c) for c in every) if v.held_out}
    for turns in (tuple(TURNS), MIRRORS):  # a rule about turns alone has something to be asked
        assert held_out_variants(Symmetry(turns=turns), 5, np.random.default_rng(0))


@pytest.mark.parametrize("turns", [("identity", "left-right"), MIRRORS, tuple(TURNS)])
def test_equal_orbits_are_variants(turns):
    """All 2 x 2 grids of three colours, of which two may be exchanged, by brute force."""
    symmetry = Symmetry(turns=turns, colours=(1, 2))
    swapped = (0, 2, 1, *range(3, 10))
    variants = [
        GridVariant(turn, c) for turn in symmetry.turns for c in (tuple(range(10)), swapped)
    ]
    grids = [np.array(cells).reshape(2, 2) for cells in itertools.product((0, 1, 2), repeat=4)]
    orbits = [orbit(grid, symmetry) for grid in grids]
    for first, first_orbit in zip(grids, orbits):
        reached = {variant(first).tobytes() for variant in variants}
        for second, second_orbit in zip(grids, orbits):
            assert (first_orbit == second_orbit) == (second.tobytes() in reached)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"turns": ("identity", "quarter")}, "compose to half"),
        ({"turns": ("identity", "twice")}, "twice"),
        ({"turns": ()}, "compose to identity"),
        ({"colours": (1, 1)}, "must be different"),
        ({"colours": (10,)}, "less than 10"),
    ],
)
def test_symmetries_that_are_none_are_refused(options, problem):
    with pytest.raises(ValidationError, match=problem):
        Symmetry.model_validate(options)


PAIR = {"input": [[1, 2], [0, 9]], "output": [[2, 1], [9, 0]]}


def write(folder, name="mirror", **parts):
    content = {"train": [PAIR], "test": [PAIR]} | parts
    (folder / "training").mkdir(exist_ok=True)
    (folder / "training" / f"{name}.json").write_text(json.dumps(content))


def test_folders_and_tar_files_hold_the_same(tmp_path):
    write(tmp_path, "mirror")
    write(tmp_path, "other", test=[{"input": [[3]], "output": [[4, 5]]}])
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "training", "data/training")
    for path in (tmp_path, tmp_path / "all.tar.gz"):
        tasks = read_tasks(str(path), ["other", "mirror"])
        assert list(tasks) == ["other", "mirror"]
        assert tasks["mirror"].train[0].input.tolist() == PAIR["input"]
        assert tasks["other"].test[0].output.tolist() == [[4, 5]]


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ([[1, 10]], "test 0 output: colours are 0 to 9, not 1 to 10"),
        ([[1, 2], [3]], "inhomogeneous"),
        ([[1.5]], "not float64"),
        ([], "1 to 30 rows"),
        ([[0] * 31], r"not int64 \(1, 31\)"),
    ],
)
def test_what_is_no_grid_is_refused_with_its_place(tmp_path, grid, problem):
    write(tmp_path, test=[{"input": [[0]], "output": grid}])
    with pytest.raises(ConfigError, match=rf"mirror.json: no ARC task \(.*{problem}"):
        read_tasks(str(tmp_path), ["mirror"])


@pytest.fixture(scope="module")
def tasks(shared):
    return read_tasks(str(shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz"), list(RULES))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_answers_every_given_pair(tasks, name):
    for pair in tasks[name].train + tasks[name].test:
        assert np.array_equal(RULES[name].answer(pair.input), pair.output)


@pytest.mark.parametrize("name", RULES)
def test_drawn_grids_fit_and_are_not_trivial(tasks, name):
    rule, rng = RULES[name], np.random.default_rng(0)
    smallest = max(max(*pair.input.shape, *pair.output.shape) for pair in tasks[name].test)
    changed = 0
    kinds = set()
    for number in range(200):
        side = (smallest, rule.largest, 30)[number % 3]
        grid = rule.draw(rng, side)
        answer = rule.answer(grid)
        assert grid.dtype == np.int64
        assert 0 <= grid.min() <= grid.max() <= 9
        assert max(*grid.shape, *answer.shape) <= min(side, rule.largest)
        for variant in [draw_variant(rule.symmetry, rng) for _ in range(3)]:
            assert np.array_equal(rule.answer(variant(grid)), variant(answer))
        changed += not np.array_equal(grid, answer)
        kinds.add(grid.tobytes())
    assert changed > 100
    # 25ff71a9 has two colours in six cells.
    assert len(kinds) > (60 if name == "25ff71a9" else 150)


MODEL = {"width": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 4, "feed_forward": 128}


def task_config(path, *tasks, positions=("sine-2d", "alibi-2d"), **data):
    return GridsConfig.model_validate(
        {
            "model": MODEL | {"positions": [{"name": name} for name in positions]},
            "data": {
                "path": str(path),
                "tasks": [{"name": name} for name in tasks],
                "size": 3,
                "canonical_streams": 2,
            }
            | data,
        }
    )


def test_the_loss_is_torchs_cross_entropy_over_all_cells(archive):
    task, data = build(task_config(archive, "74dd1130", "25ff71a9"), 6, 0, "float32")
    batch, _ = next(data.batches())
    out = task(batch, 0)
    logits = task.model(batch, batch.outputs)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.outputs.flatten())
    torch.testing.assert_close(out.loss, expected)
    right = logits.argmax(-1) == batch.outputs
    assert float(out.statistics["cells"]) == pytest.approx(float(right.float().mean()))
    assert float(out.statistics["exact"]) == pytest.approx(float(right.all(-1).float().mean()))


def test_training_learns_a_shift(archive):
    torch.manual_seed(0)
    task, data = build(task_config(archive, "25ff71a9"), 32, 0, "float32")
    assert evaluate(task, EvalOptions())["exact"] < 20
    outputs = train(task, data, 250, 3e-3)
    assert outputs[-1].loss < 0.1 * outputs[0].loss
    assert evaluate(task, EvalOptions())["exact"] > 80
