import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlp.training.log import RunLog, flatten, open_trackers
from vlp.training.run_folder import RunFolder


def test_nested_names_are_joined_and_what_json_lacks_is_null() -> None:
    record = {"step": 1, "skipped": {"total": 2, "no text": 2}, "norm": float("inf"), "x": 0.5}
    flat = flatten(record)
    assert flat == {"step": 1, "skipped/total": 2, "skipped/no text": 2, "norm": None, "x": 0.5}
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat


def test_lines_after_the_resumed_step_and_a_torn_line_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=False)
    whole = [json.dumps({"step": step}) for step in (2, 4, 6, 8)]
    folder.log.write_text("\n".join([*whole, '{"step": 10, "lo']))
    with RunLog(folder, step=4, total=8) as log:
        log.write({"step": 5, "loss/total": 1.0})
    steps = [json.loads(line)["step"] for line in folder.log.read_text().splitlines()]
    assert steps == [2, 4, 5]


def test_a_validation_that_comes_again_after_a_kill_is_in_the_log_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=False)
    with RunLog(folder, 0, 8) as log:
        for step in (2, 4):
            log.write({"step": step, "samples": 8 * step})
            log.validated(step, {"accuracy": 0.5})
    with RunLog(folder, 4, 8, looked=2) as log:
        log.validated(4, {"accuracy": 0.5})
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert [line["step"] for line in lines if "samples" in line] == [2, 4]
    assert [line["step"] for line in lines if "samples" not in line] == [2, 4]


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=False)
    with RunLog(folder, 0, 2, open_trackers(["tensorboard"], folder, 0)) as log:
        log.write({"step": 1, "loss/total": 3.0, "skipped": {"total": 0}, "norm": float("nan")})
        log.write({"step": 2, "loss/total": 2.0, "skipped": {"total": 1}, "norm": 1.0})
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss/total", "skipped/total", "norm"}
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 3.0), (2, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("norm")] == [(2, 1.0)]


@pytest.mark.parametrize("resumed_at", [0, 1])
def test_tensorboard_forgets_what_a_killed_start_wrote(tmp_path: Path, resumed_at: int) -> None:
    folder = RunFolder(tmp_path, resume=False)
    for step in (0, resumed_at):
        with RunLog(folder, step, 2, open_trackers(["tensorboard"], folder, step)) as log:
            for number in range(step + 1, 3):
                log.write({"step": number, "loss": 1.0})
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("loss")] == [1, 2]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(None, step=0, total=1) as log:
        log.write({"step": 1})
        log.advance()
        log.say("nothing")
    assert list(tmp_path.iterdir()) == []
