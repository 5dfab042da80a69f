import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
from training_toy import PlainEngine, ToyData, ToyTask, UnreadEngine, log_lines, run, toy_config

from vlp.config import ConfigError, load_config
from vlp.distributed import broadcast_tensors
from vlp.tasks.pretraining import statistics
from vlp.training import loop
from vlp.training.config import PretrainConfig
from vlp.training.loop import NonFiniteError, count_steps, nan_if_non_finite
from vlp.training.optimiser import cosine_schedule
from vlp.training.progress import Meter, Progress
from vlp.training.run_folder import RunFolder


def state(folder, step):
    found = {}
    for name in ("weights", "extra"):
        path = folder / "checkpoints" / f"step_{step}" / f"{name}.safetensors"
        found |= {f"{name}/{key}": value for key, value in broadcast_tensors(path)}
    return found


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_run_leaves_its_folder_as_documented(tmp_path, monkeypatch):
    phases = []
    monkeypatch.setattr(loop.Watchdog, "enter", lambda self, phase: phases.append(phase))
    task, report = run(tmp_path / "run")
    assert phases[:7] == ["data", "forward", "backward", "update", "log", "data", "forward"]
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} - {"git"} == {  # of changed code
        *("config.yaml", "log.jsonl", "tensorboard", "checkpoints", "model", "report.json"),
        "run.json",
    }
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_6", "step_8"}
    assert load_config(folder / "config.yaml", PretrainConfig) == toy_config(folder)
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["ended"] == "finished"
    assert report["step"] == report["total_steps"] == 8
    assert report["samples"] == report["trained_samples"] == 64
    assert report["peak_memory_bytes"] > 2**25
    model = dict(broadcast_tensors(folder / "model" / "model.safetensors"))
    assert same(model, task.state_dict())
    assert list((folder / "tensorboard").iterdir())


def test_log_lines_hold_means_over_their_steps(tmp_path):
    run(tmp_path)
    run(tmp_path / "each", log_every=1)
    pairs, each = log_lines(tmp_path), log_lines(tmp_path / "each")
    assert [line["step"] for line in pairs] == [2, 4, 6, 8]
    for line in pairs:
        one, two = each[line["step"] - 2], each[line["step"] - 1]
        for key in ("loss/total", "loss/words", "statistics/scale", "gradient_norm"):
            assert line[key] == pytest.approx((one[key] + two[key]) / 2, rel=1e-6)
    for line in each:
        expected = cosine_schedule(line["step"] - 1, 8, 1e-2, 1e-6, 2)
        assert line["learning_rate"] == expected
        assert line["samples"] == 8 * line["step"]
        assert line["epoch"] == line["step"] / 4
        assert line["samples_per_second"] > 0
        assert 0 <= line["data_wait_share"] <= 1
        assert line["skipped/total"] == line["non_finite_steps"] == 0
    assert each[-1]["loss/total"] < each[0]["loss/total"]


def test_epochs_or_steps_say_how_long():
    def count(*run, steps=None, **length):
        return count_steps(toy_config(steps=steps, **length), *run)

    run = ToyData(epoch=30), Progress()  # 4 batches of 8, the last one not full
    assert count(*run, steps=7, epochs=2) == 7
    assert count(*run, epochs=3) == 12
    assert count(*run, epochs=3, gradient_accumulation_steps=5) == 2
    # Batches of 16 after 8 of 8, which were two of three epochs of 32.
    larger = ToyData(batch=16), Progress(step=8, samples=64)
    assert count(*larger, epochs=3) == 10
    assert count(*larger, epochs=2) == 8


def test_accumulation_of_two_halves_is_one_large_batch(tmp_path):
    # Equal batches, so the mean of their means is the mean of the whole.
    small, _ = run(tmp_path / "small", ToyData(batch=4), batch=4, gradient_accumulation_steps=2)
    whole = ToyData(batch=8)
    halves = ToyData(batch=4)

    def merged(*_):
        stream = halves.batches()
        for number in range(1, 100):
            first, second = next(stream)[0], next(stream)[0]
            fields = [
                torch.cat([a, b]) if isinstance(a, torch.Tensor) else a
                for a, b in zip(first, second)
            ]
            yield type(first)(*fields), 8 * number

    whole.batches = merged  # type: ignore[method-assign]
    large, _ = run(tmp_path / "large", whole)
    for name, value in large.named_parameters():
        assert torch.allclose(value, dict(small.named_parameters())[name], atol=1e-5), name


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, stop):
    run(tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(number):
        if number == stop:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "cut", ToyData(before=kill))
    assert json.loads((tmp_path / "cut" / "report.json").read_text())["ended"] == "failed"
    _, report = run(tmp_path / "cut", resume=True)
    assert report["resumed_at_steps"] == ([] if stop < 3 else [stop // 3 * 3])
    assert same(state(tmp_path / "whole", 8), state(tmp_path / "cut", 8))
    logs = [log_lines(tmp_path / name, times=False) for name in ("whole", "cut")]
    for whole, cut in zip(*logs, strict=True):
        # A window that the kill cut in two is averaged over what was left of it.
        assert whole == cut or whole["step"] == stop // 3 * 3 + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint_and_it_goes_on(tmp_path, number):
    run(tmp_path / "whole")
    before = signal.getsignal(number)

    def send(batch):
        if batch == 4:
            os.kill(os.getpid(), number)

    _, report = run(tmp_path / "cut", ToyData(before=send))
    assert signal.getsignal(number) == before
    assert report["ended"] == "stopped"
    assert report["step"] == 5  # the step that was under way is finished
    assert not (tmp_path / "cut" / "model").exists()
    assert (tmp_path / "cut" / "checkpoints" / "step_5").is_dir()
    _, report = run(tmp_path / "cut", resume=True)
    assert report["ended"] == "finished"
    assert report["resumed_at_steps"] == [5]
    assert same(state(tmp_path / "whole", 8), state(tmp_path / "cut", 8))


def test_a_finished_run_resumes_to_nothing(tmp_path):
    run(tmp_path)
    before = state(tmp_path, 8)
    _, report = run(tmp_path, ToyData(before=lambda number: pytest.fail("trained")), resume=True)
    assert report["ended"] == "finished"
    assert report["step"] == 8
    assert same(before, state(tmp_path, 8))


def test_a_skipped_step_changes_nothing_but_the_counters(tmp_path, capsys):
    kept, task = [], ToyTask()

    def look(number):
        kept.append({name: value.clone() for name, value in task.state_dict().items()})

    _, report = run(tmp_path, ToyData(bad=frozenset({3}), before=look), task=task, log_every=1)
    assert same(kept[3], kept[4])
    assert not same(kept[2], kept[3])
    assert not same(kept[4], kept[5])
    assert task.skipped == 1
    assert report["step"] == 8
    assert report["non_finite_steps"] == 1
    # The toy's bad batch also says that one sample of it was skipped.
    assert report["skipped_samples"] == {"truncated image": 1}
    assert report["skipped_examples"] == {"truncated image": ["shard-000.tar: 7"]}
    log = log_lines(tmp_path)
    assert [line["non_finite_steps"] for line in log] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert "loss/total" not in log[3]
    assert log[4]["skipped/truncated image"] == 1
    assert all(math.isfinite(line["loss/total"]) for line in log if "loss/total" in line)
    assert "step 4 skipped: the loss is not finite (total)" in capsys.readouterr().err


def test_a_gradient_that_is_not_finite_is_skipped_too(tmp_path, capsys):
    task, spoil = ToyTask(), iter([False, False, True] + [False] * 5)
    task.out.weight.register_hook(lambda g: g * float("inf") if next(spoil) else g)
    _, report = run(tmp_path, task=task)
    assert report["non_finite_steps"] == 1
    assert all(torch.isfinite(value).all() for value in task.parameters())
    assert "step 3 skipped: a gradient is not finite" in capsys.readouterr().err


@pytest.mark.parametrize("most", [0, 2])
def test_too_many_skips_in_a_row_end_the_run(tmp_path, most, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NON_FINITE", most)
    with pytest.raises(NonFiniteError, match=rf"{most + 1} steps in a row .*loss is not finite"):
        run(tmp_path, ToyData(bad=frozenset(range(3, 99))), steps=99)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ended"] == "failed"
    assert report["step"] == 3 + most + 1
    assert (tmp_path / "checkpoints" / "step_3").is_dir()


def test_skips_that_are_not_in_a_row_do_not_end_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NON_FINITE", 2)
    _, report = run(tmp_path, ToyData(bad=frozenset({0, 1, 3, 4, 6})))
    assert report["ended"] == "finished"
    assert report["non_finite_steps"] == 5


def test_the_row_of_skips_survives_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NON_FINITE", 2)
    data = ToyData(bad=frozenset(range(2, 99)))
    run(tmp_path, data, steps=4)
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        run(tmp_path, data, resume=True, steps=9)


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, 3.0])
def test_only_a_loss_that_is_not_finite_has_gradients_that_are_not(factor):
    weight = torch.tensor(0.1, requires_grad=True)
    loss = nan_if_non_finite(weight * factor)
    loss.backward()
    assert weight.grad.isnan() if factor != 3 else (weight.grad == 3 and loss == weight * 3)


def test_a_used_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "something").write_text("precious")
    with pytest.raises(ConfigError, match="not empty; continue its run with --resume"):
        RunFolder(tmp_path, resume=False)
    assert (tmp_path / "something").read_text() == "precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder(tmp_path / "file", resume=False)


def change_outputs(monkeypatch, change):
    forward = ToyTask.forward
    monkeypatch.setattr(ToyTask, "forward", lambda *arguments: change(forward(*arguments)))


def test_dead_features_are_warned_about(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(statistics, "GRACE_STEPS", 0)
    monkeypatch.setattr(statistics, "PATIENCE", 2)
    values = {"image_token_cosine": 0.99, "text_spread": 0.7, "anchor_spread": 0.0}
    dead = {name: torch.tensor(value) for name, value in values.items()}
    change_outputs(monkeypatch, lambda output: output._replace(statistics=dead))
    run(tmp_path)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "image_token_cosine is 0.990" in warned[0]


def test_dropout_is_the_same_after_a_resume(tmp_path, monkeypatch):
    change_outputs(monkeypatch, lambda output: output._replace(loss=output.loss * torch.rand(())))
    run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_8")
    run(tmp_path / "resumed", resume=True)
    assert same(state(tmp_path / "whole", 8), state(tmp_path / "resumed", 8))


def test_outcomes_that_are_read_late_change_nothing(tmp_path, capsys):
    found = {}
    for kind in (PlainEngine, UnreadEngine):
        folder = tmp_path / kind.__name__
        _, report = run(folder, ToyData(bad=frozenset({2, 6})), engine=kind)
        said = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        states = state(folder, 6), state(folder, 8)
        found[kind] = log_lines(folder, times=False), report["non_finite_steps"], *states, said
    (*plain, six, eight, said), (*late, late_six, late_eight, late_said) = found.values()
    assert plain == late
    assert plain[1] == 2
    assert same(six, late_six)
    assert same(eight, late_eight)
    assert len(said) == len(late_said) == 2


def test_a_row_of_skips_that_is_read_late_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NON_FINITE", 1)
    with pytest.raises(NonFiniteError, match=r"2 steps in a row were skipped, the last \(3\)"):
        run(tmp_path, ToyData(bad=frozenset({1, 2})), engine=UnreadEngine, log_every=4)


SCRIPT = Path(__file__).with_name("meter_ranks.py")


def test_a_rank_without_samples_does_not_count():
    output = ranks.run([SCRIPT], 2)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found == {"loss/total": 2.0, "loss/words": 3.0, "statistics/bits": 3.0}


def test_seconds_without_training_do_not_count(monkeypatch):
    progress, now = Progress(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(progress)
    meter.add_batch(next(ToyData().batches())[0], 1.0)
    now[0] = 10.0
    meter.exclude(6.0)
    record = meter.flush()
    assert (record["samples_per_second"], record["data_wait_share"]) == (2.0, 0.25)
    assert progress.seconds == 4.0


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_ends(tmp_path, caplog):
    def fail(number):
        (tmp_path / "report.json").mkdir()
        raise KeyError("no such sample")

    with pytest.raises(KeyError):
        run(tmp_path, ToyData(before=fail))
    assert f"cannot write {tmp_path / 'report.json'}" in caplog.text


def test_schedules_that_surprise_are_said(tmp_path, capsys):
    run(tmp_path / "a", steps=4, optimiser={"learning_rate": 1e-2, "warmup_steps": 4})
    assert "warmup_steps 4 is not over when the run ends, after 4" in capsys.readouterr().err
    run(tmp_path / "b", steps=4, optimiser={"learning_rate": 1e-2})
    assert "warm-up: 0 of 4 steps" in capsys.readouterr().err
    rates = [line["learning_rate"] for line in log_lines(tmp_path / "b")]
    run(tmp_path / "b", resume=True, steps=8, optimiser={"learning_rate": 1e-3})
    said = capsys.readouterr().err
    now = cosine_schedule(4, 8, 1e-3, 1e-6, 0)
    assert f"step 4 of 8 with learning rate {now:.4g}; it was {rates[-1]:.4g} at step 4" in said
