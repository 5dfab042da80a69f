"""Outcomes that the loop reads late, as on a GPU, against those that it reads at once."""

from pathlib import Path

import pytest
import torch
from test_loop import lines, same, state
from training_toy import PlainEngine, ToyData, ToyTask, UnreadEngine, toy_config

from vlp.training.loop import NonFiniteError, train
from vlp.training.run_folder import RunFolder


def test_outcomes_that_are_read_late_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for kind in (PlainEngine, UnreadEngine):
        torch.manual_seed(0)
        folder = tmp_path / kind.__name__
        config, task = toy_config(folder), ToyTask()
        data, engine = ToyData(bad=frozenset({2, 6})), kind(task, config.training)
        report = train(config, task, data, engine, RunFolder(folder, False))
        kept = [{k: v for k, v in line.items() if "second" not in k and "wait" not in k}
                for line in lines(folder)]  # fmt: skip
        said = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        found[kind] = kept, report["non_finite_steps"], state(folder, 6), state(folder, 8), said
    (*plain, six, eight, said), (*late, late_six, late_eight, late_said) = found.values()
    assert plain == late
    assert plain[1] == 2
    assert same(six, late_six)
    assert same(eight, late_eight)
    assert len(said) == len(late_said) == 2


def test_a_row_of_skips_that_is_read_late_ends_the_run(tmp_path: Path) -> None:
    config, task = toy_config(tmp_path, max_non_finite=1, log_every=4), ToyTask()
    data, engine = ToyData(bad=frozenset({1, 2})), UnreadEngine(task, config.training)
    with pytest.raises(NonFiniteError, match=r"2 steps in a row were skipped, the last \(3\)"):
        train(config, task, data, engine, RunFolder(tmp_path, False))
