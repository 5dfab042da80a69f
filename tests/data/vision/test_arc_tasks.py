"""ARC's files, and the rules that stand for some of its tasks."""

from __future__ import annotations

import json
import tarfile

import numpy as np
import pytest

from vlp.config import ConfigError
from vlp.tasks.grids.arc import RULES, draw_variant, held_out_variants, read_tasks

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


def test_names_that_are_missing_or_there_twice_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match="there are no tasks b, c"):
        read_tasks(str(tmp_path), ["mirror", "b", "c"])
    (tmp_path / "evaluation").mkdir()
    twice = json.dumps({"train": [PAIR], "test": [PAIR]})
    (tmp_path / "evaluation" / "mirror.json").write_text(twice)
    with pytest.raises(ConfigError, match="mirror is there twice"):
        read_tasks(str(tmp_path), ["mirror"])
    with pytest.raises(ConfigError, match="neither a folder nor a tar file"):
        read_tasks(str(tmp_path / "nothing"), ["mirror"])
    (tmp_path / "file.tar").write_text("no archive")
    with pytest.raises(ConfigError, match="not a tar file"):
        read_tasks(str(tmp_path / "file.tar"), ["mirror"])


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ([[1, 10]], "test 0 output: colours are 0 to 9, not 1 to 10"),
        ([[1, 2], [3]], "inhomogeneous"),
        ([[1.5]], "not float64"),
        ([[True]], "not bool"),
        ([], "1 to 30 rows"),
        ([[0] * 31], r"not int64 \(1, 31\)"),
    ],
)
def test_what_is_no_grid_is_refused_with_its_place(tmp_path, grid, problem):
    write(tmp_path, test=[{"input": [[0]], "output": grid}])
    with pytest.raises(ConfigError, match=rf"mirror.json: no ARC task \(.*{problem}"):
        read_tasks(str(tmp_path), ["mirror"])


def test_files_without_pairs_are_refused(tmp_path):
    write(tmp_path, test=[])
    with pytest.raises(ConfigError, match="1 train and 0 test pairs"):
        read_tasks(str(tmp_path), ["mirror"])
    (tmp_path / "training" / "mirror.json").write_text('{"train": []}')
    with pytest.raises(ConfigError, match="no ARC task"):
        read_tasks(str(tmp_path), ["mirror"])


@pytest.fixture(scope="module")
def tasks(shared):
    return read_tasks(str(shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz"), list(RULES))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_answers_every_given_pair(tasks, name):
    for pair in tasks[name].train + tasks[name].test:
        assert np.array_equal(RULES[name].answer(pair.input), pair.output)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_the_same_in_all_variants_of_given_grids(tasks, name):
    rule, rng = RULES[name], np.random.default_rng(0)
    variants = [draw_variant(rule.symmetry, rng) for _ in range(20)]
    for pair in tasks[name].train + tasks[name].test:
        for variant in [*variants, *held_out_variants(rule.symmetry, 20, rng)]:
            assert np.array_equal(rule.answer(variant(pair.input)), variant(pair.output))


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


def test_draws_repeat():
    for rule in RULES.values():
        first, second = (rule.draw(np.random.default_rng(3), 30) for _ in range(2))
        assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["00d62c1b", "67385a82"])
def test_slow_rules_say_the_same(name):
    """Neighbours by hand: cells joined through sides."""
    rule, rng = RULES[name], np.random.default_rng(1)
    for _ in range(30):
        grid = rule.draw(rng, 9)
        expected = grid.copy()
        wanted = 0 if name == "00d62c1b" else 3
        for start in map(tuple, np.argwhere(grid == wanted)):
            group, edge = {start}, [start]
            while edge:
                row, column = edge.pop()
                for step in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                    cell = row + step[0], column + step[1]
                    inside = all(0 <= place < size for place, size in zip(cell, grid.shape))
                    if inside and cell not in group and grid[cell] == wanted:
                        group.add(cell)
                        edge.append(cell)
            rows, columns = zip(*group)
            last = grid.shape[0] - 1, grid.shape[1] - 1
            at_border = 0 in rows or 0 in columns or last[0] in rows or last[1] in columns
            if name == "00d62c1b" and not at_border:
                expected[start] = 4
            if name == "67385a82" and len(group) >= 3:
                expected[start] = 8
        assert np.array_equal(rule.answer(grid), expected)
