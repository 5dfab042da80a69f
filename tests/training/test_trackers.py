import json
import math
import os
import struct
import time

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from vlp.config import ConfigError
from vlp.training import log as trackers
from vlp.training.log import RunLog, open_trackers, require_access, require_trackers
from vlp.training.run_folder import RunFolder, read_starts


def two_starts(folder, name):
    folder.config.write_text("training: {batch: 8}\ndata: {sources: [{path: shards}]}\n")
    for step, more in ((0, (1, 2)), (2, (3,))):
        with RunLog(folder, step, 3, open_trackers([name], folder, step, step), step) as log:
            for number in more:
                log.write({"step": number, "loss/total": 1.0 / number, "epoch": None})
            log.write_validation(number, {"text_to_image R@1": number / 10})


@pytest.mark.nightly
def test_wandb_offline_has_a_step_once_after_a_resume_from_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.path.mkdir()
    two_starts(folder, "wandb")
    one = read_starts(folder.path)["trackers"]["wandb"]
    with RunLog(folder, 1, 3, open_trackers(["wandb"], folder, 1)) as log:
        log.write({"step": 2, "loss/total": 7.0})
    other = read_starts(folder.path)["trackers"]["wandb"]
    for name, losses in ((one, [1.0, 0.5, pytest.approx(1 / 3)]), (other, [1.0, 7.0])):
        found = []
        end = time.monotonic() + 30
        while len(found) < len(losses) and time.monotonic() < end:  # a process of wandb's writes it
            found = [items for items in history(folder, name) if "loss/total" in items]
        assert [int(items["step"]) for items in found] == [*range(1, len(losses) + 1)]
        assert [float(items["loss/total"]) for items in found] == losses
    recalls = [items.get("validation/text_to_image R@1") for items in history(folder, one)]
    assert [recall for recall in recalls if recall] == ["0.2", "0.3"]


def history(folder, one):
    found = []
    for file in sorted(folder.path.glob(f"wandb/offline-run-*-{one}*/*.wandb")):
        for record in records(file):
            if record.run.run_id:
                assert (record.run.run_id, record.run.project) == (one, "vlp")
                assert record.run.display_name == "run"
            if record.history.item:
                found.append(
                    {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                )
    return found


def records(file):
    """Records of a LevelDB log: blocks of 32 KiB, of parts with a header of 7 bytes each."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768


@pytest.mark.nightly
def test_mlflow_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # counts as not set
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.path.mkdir()
    two_starts(folder, "mlflow")
    one = read_starts(folder.path)["trackers"]["mlflow"]
    client = MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    losses = client.get_metric_history(one, "loss/total")
    assert {metric.step: metric.value for metric in losses} == {1: 1.0, 2: 0.5, 3: 1 / 3}
    [recall, _] = client.get_metric_history(one, "validation/text_to_image R_1")
    assert recall.value == 0.2
    assert recall.timestamp / 1000 == pytest.approx(time.time(), abs=600)
    run = client.get_run(one)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.tags["training.batch"] == "8"
    with (
        pytest.raises(FloatingPointError),
        RunLog(folder, 3, 4, open_trackers(["mlflow"], folder, 3, 3), 3),
    ):
        raise FloatingPointError
    assert client.get_run(one).info.status == "FAILED"
    with RunLog(folder, 2, 4, open_trackers(["mlflow"], folder, 2, 1), 1) as log:
        log.write_validation(2, {"text_to_image R@1": 0.2})  # validated again
        log.write({"step": 3, "loss/total": 7.0})
    other = read_starts(folder.path)["trackers"]["mlflow"]
    losses = client.get_metric_history(other, "loss/total")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    [recall] = client.get_metric_history(other, "validation/text_to_image R_1")
    assert client.get_metric_history(one, "loss/total") == []


def test_a_tracker_that_fails_is_left_out(tmp_path, capsys):
    class Lost:
        def log(self, figures, step):
            raise ConnectionError("no network")

        def close(self, failed):
            raise AssertionError("not asked any more")

    folder = RunFolder(tmp_path, resume=False)
    with RunLog(folder, 0, 2, {"wandb": Lost()}) as log:
        for step in (1, 2):
            log.write({"step": step, "loss/total": 1.0})
            log.advance()
    printed = capsys.readouterr().err
    assert printed.count("wandb gets no more figures: no network") == 1
    assert "2/2 [" in printed  # the bar is drawn once more at the end
    assert len(folder.log.read_text().splitlines()) == 2


def test_other_ranks_write_nothing(capsys):
    with RunLog(None, 0, 1) as log:
        log.write({"step": 1})
        log.write_validation(1, {"accuracy": 0.5})
        log.advance()
        log.info("nothing")
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_used_is_said_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"mlflow is not installed: pip install 'vlp\[track\]'"):
        require_trackers(["mlflow"])
    require_access(["tensorboard"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    run = RunFolder(tmp_path / "run", resume=False)
    for act in lambda: require_access(["mlflow"]), lambda: open_trackers(["mlflow"], run, 0):
        with pytest.raises(ConfigError, match=r"training\.trackers: mlflow cannot be used"):
            act()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"


def test_steps_and_validations_after_the_checkpoint_and_a_torn_line_are_removed(tmp_path):
    folder = RunFolder(tmp_path, resume=False)
    with RunLog(folder, 0, 8) as log:
        for step in (2, 4, 6):
            log.write({"step": step, "samples": 8 * step})
            log.write_validation(step, {"accuracy": 0.5})
    with folder.log.open("a") as file:
        file.write('{"step": 8, "lo')
    with RunLog(folder, 4, 8, validated_step=2) as log:
        assert log.last_record["step"] == 4
        log.write_validation(4, {"accuracy": 0.5})
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert [line["step"] for line in lines if "samples" in line] == [2, 4]
    assert [line["step"] for line in lines if "samples" not in line] == [2, 4]


@pytest.mark.parametrize("resumed_at", [0, 1])
def test_tensorboard_has_every_number_once_after_a_killed_start(tmp_path, resumed_at):
    folder = RunFolder(tmp_path, resume=False)
    for step in (0, resumed_at):
        with RunLog(folder, step, 2, open_trackers(["tensorboard"], folder, step)) as log:
            for number, norm in list(enumerate((math.nan, 1.0), 1))[step:]:
                log.write({"step": number, "loss": number / 4, "skipped": {"a": 0}, "norm": norm})
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "skipped/a", "norm"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("norm")] == [(2, 1.0)]
