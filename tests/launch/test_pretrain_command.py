"""What the command says and does when something is wrong, or it is told to stop."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from launch_lab import Lab
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter, index_folder
from vlp.training.checkpoints import verify
from vlp.training.command import _explain, run_training
from vlp.training.config import PretrainConfig
from vlp.training.stop_requests import REQUEUE

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
FAILING = Path(__file__).with_name("failing_pretrain.py")


def refused(lab: Lab, *arguments: str, world_size: int = 1) -> str:
    """What a run with exit code 2 printed; it must be a message and no traceback."""
    results = ranks.finish(ranks.start([COMMAND, *arguments], world_size), timeout=120)
    assert {code for code, _ in results} == {2}, results
    said = "".join(output for _, output in results)
    assert "Traceback" not in said
    assert said.count("error:") == 1, said
    return said


@pytest.mark.nightly
def test_two_ranks_report_an_error_once(lab: Lab) -> None:
    said = refused(lab, *lab.arguments("refused", "data.sources=[{path: nowhere}]"), world_size=2)
    assert "nowhere" in said
    said = refused(lab, *lab.arguments("refused"), "output=/proc/run", world_size=2)
    assert "error: /proc/run: cannot be written (No such file or directory)\n" in said
    assert not lab.output("refused").exists()


def test_ranks_of_slurm_without_a_rendezvous_are_told_what_is_missing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {
        "PROCID": "0",
        "LOCALID": "0",
        "STEP_NUM_TASKS": "2",
        "STEP_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run_training(lab.config, PretrainConfig, [], False, lambda config: (None, None)) == 2
    assert "error: MASTER_ADDR is not set" in capsys.readouterr().err


@pytest.mark.nightly
def test_nodes_with_other_settings_or_data_do_not_train_together(lab: Lab) -> None:
    bad_shards(lab.folder / "node_b", good=16, bad=0)
    sources = f"data.sources=[{lab.folder / 'node_b'}]"
    for other, expected in {
        "training.optimiser.learning_rate=1e-3": "learning_rate is 0.001, 0.0003 on rank 0",
        sources: "source 0 of the data is not that of rank 0",
    }.items():
        command = [FAILING, "other", "1", other, *lab.arguments("nodes", "training.timeout=20")]
        results = ranks.finish(ranks.start(command, 2), timeout=120)
        assert [code for code, _ in results] == [2, 2], results
        assert expected in results[0][1]
        assert "Traceback" not in results[0][1] + results[1][1]
        assert not lab.output("nodes").exists()


@pytest.mark.nightly
def test_a_node_that_is_refused_says_so_and_the_others_that_it_did_not_come(lab: Lab) -> None:
    for engine in ("ddp", "deepspeed"):
        arguments = lab.arguments("nodes", "training.timeout=5", f"training.engine={engine}")
        command = [FAILING, "other", "1", "training.step=3", *arguments]
        (code, said), (other, refused) = ranks.finish(ranks.start(command, 2), timeout=120)
        assert (code, other) == (1, 2)
        assert "did you mean 'training.steps'" in refused
        assert "rank 0 waited for another one longer than training.timeout" in said
        assert "Traceback" not in said


class Killed(Dataset[int]):
    """Its loader's process is killed, as when memory runs out."""

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index

    def __len__(self) -> int:
        return 1


def test_memory_that_a_loader_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as killed:
        next(iter(DataLoader(Killed(), num_workers=1)))
    _explain(killed.value)
    small = (
        "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"
    )
    _explain(RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{small}\n"))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert "signal: Killed; where memory ran out, lower the workers of the data or" in said[0]
    assert "(28); enlarge /dev/shm (docker run --shm-size), or lower the workers" in said[1]


def bad_shards(folder: Path, good: int, bad: int, per_shard: int = 1000) -> None:
    """Shards with `good` samples, and `bad` ones each of three kinds."""
    image = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(image, "JPEG")
    whole = image.getvalue()
    spoilt = [
        (whole[: len(whole) // 2], Annotation(caption="a red circle")),
        (b"no image at all", Annotation(caption="a red circle")),
        (whole, Annotation()),
    ]
    with ShardWriter(folder, per_shard) as writer:
        for number in range(good):
            writer.write(f"good{number}", whole, "jpg", Annotation(caption="a red circle"))
        for number in range(bad):
            for kind, (content, annotation) in enumerate(spoilt):
                writer.write(f"bad{kind}{number}", content, "jpg", annotation)


def test_bad_samples_are_skipped_counted_and_named(lab: Lab) -> None:
    bad_shards(lab.folder / "some_bad", good=26, bad=2)
    sources = f"data.sources=[{{path: {lab.folder / 'some_bad'}}}]"
    ranks.run([COMMAND, *lab.arguments("skips", sources, "training.steps=4")])
    report = lab.report("skips")
    assert report["ended"] == "finished"
    assert report["samples"] == 32
    assert report["trained_samples"] == 26
    assert sum(report["skipped_samples"].values()) == 6
    named = " ".join(where for found in report["skipped_examples"].values() for where in found)
    assert all(f"bad{kind}{number}" in named for kind in range(3) for number in range(2)), named
    assert lab.log("skips")[-1]["skipped/total"] == 6


def ended(arguments: list[str]) -> tuple[int, str]:
    ((code, said),) = ranks.finish(ranks.start([COMMAND, *arguments], 1))
    assert "Traceback" not in said, said
    return code, said


@pytest.mark.nightly
def test_a_missing_local_shard_ends_the_run_unless_it_may_be_skipped(lab: Lab) -> None:
    folder = lab.folder / "two_shards"
    shutil.copytree(lab.folder / "scenes" / "train", folder)
    [first] = folder.glob("*.tar")
    shutil.copy(first, folder / "shard-000001.tar")
    index_folder(folder)
    (folder / "shard-000001.tar").unlink()
    sources = f"data.sources=[{{path: {folder}}}]"
    code, said = ended(lab.arguments("lost_shard", sources))
    assert code == 2
    assert "1 of 2 shards of its index are missing, shard-000001.tar for one; restore them" in said
    skip = "data.outages.policy=skip"
    ranks.run([COMMAND, *lab.arguments("lost_shard", sources, skip, "training.steps=50")])
    assert lab.report("lost_shard")["skipped_samples"].keys() == {"missing shard"}


@pytest.mark.nightly
def test_a_start_within_an_outage_is_a_pause_where_that_is_the_policy(lab: Lab) -> None:
    store = f"http://127.0.0.1:{ranks.free_port()}/shards"
    cache = f"data.cache={{folder: {lab.folder / 'cache'}, limit: 1GB}}"
    arguments = lab.arguments("outage", f"data.sources=[{{path: {store}}}]", cache)
    for policy, expected in (("pause", REQUEUE), ("fail", 2)):
        outages = f"data.outages={{seconds: 0, policy: {policy}}}"
        code, said = ended([*arguments, outages])
        assert code == expected, said
    assert not lab.output("outage").exists()


@pytest.mark.nightly
def test_few_open_files_are_refused_and_enough_are_enough(lab: Lab) -> None:
    """Nine sources of 30 shards, read by two worker processes."""
    sources = []
    for number in range(9):
        folder = lab.folder / f"source_{number}"
        bad_shards(folder, good=60, bad=0, per_shard=2)
        sources.append(f"{{path: {folder}}}")
    arguments = lab.arguments("files", f"data.sources=[{', '.join(sources)}]", "data.workers=2")

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        said = f"ulimit -n {limit}; exec {sys.executable} {COMMAND} " + '"$@"'
        return subprocess.run(
            ["bash", "-c", said, "pretrain", *arguments, "training.steps=60"],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ranks.ROOT,
        )

    few = run(64)
    assert few.returncode == 2
    assert "only 64 open files are allowed (ulimit -n); 256 are needed" in few.stderr
    enough = run(256)
    assert enough.returncode == 0, enough.stderr
    assert not lab.report("files")["skipped_samples"]


@pytest.mark.nightly
def test_a_full_disk_ends_with_a_message_and_the_run_goes_on_later(lab: Lab) -> None:
    """The system refuses files of a checkpoint's size from the sixth batch on, on both ranks."""
    arguments = lab.arguments("full", "training.engine=zero3")
    results = ranks.finish(ranks.start([FAILING, "full", "0", "5", *arguments], 2))
    assert [code for code, _ in results] == [1, 1]
    said = results[0][1]
    assert "cannot write the checkpoint" in said
    assert "step_8" in said
    assert "File too large" in said
    assert "Traceback" not in said + results[1][1]
    checkpoints = lab.output("full") / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_4"]
    assert verify(checkpoints / "step_4") is None
    ranks.run([COMMAND, *arguments, "--resume"], 2)
    assert lab.report("full")["ended"] == "finished"
    assert lab.report("full")["resumed_at_steps"] == [4]


@pytest.mark.nightly
def test_a_full_disk_at_the_final_model_loses_no_training(lab: Lab) -> None:
    arguments = lab.arguments("full_at_model", lab.zero(0), "training.steps=2")
    results = ranks.finish(ranks.start([FAILING, "model", "0", "0", *arguments], 2))
    assert [code for code, _ in results] == [1, 1]
    said = results[0][1] + results[1][1]
    assert said.count("\nerror") == 1, said
    assert f"\nerror: cannot write the model {lab.output('full_at_model') / 'model'}: " in said
    assert "File too large" in said
    assert "start again with --resume" in said
    assert "Traceback" not in said
    assert not list(lab.output("full_at_model").glob("model*"))
    ranks.run([COMMAND, *arguments, "--resume"], 2)
    assert (lab.output("full_at_model") / "model" / "model.safetensors").exists()


def test_a_checkpoint_of_another_configuration_is_refused(lab: Lab) -> None:
    ranks.run([COMMAND, *lab.arguments("other", "training.steps=1")])
    arguments = lab.arguments("other", "model.cross.anchor.groups=8", "objectives.mim=null")
    results = ranks.finish(ranks.start([COMMAND, *arguments, "--resume"], 2))
    assert [code for code, _ in results] == [1, 1]
    said = results[0][1] + results[1][1]
    assert said.count("was trained with another configuration") == 1
    assert "model.cross.anchor.groups: saved 4, now 8" in said
    assert "objectives.mim.output" in said
    assert "Traceback" not in said


@pytest.mark.nightly
def test_one_failing_rank_ends_the_others(lab: Lab) -> None:
    start = time.monotonic()
    arguments = lab.arguments("failed", "training.engine=zero2")
    results = ranks.finish(ranks.start([FAILING, "raise", "1", "2", *arguments], 2), timeout=120)
    assert [code for code, _ in results] == [1, 1]
    assert "error on rank 1" in results[1][1]
    assert "the disaster of this test" in results[1][1]
    assert "rank 0 lost another rank" in results[0][1]
    assert "Traceback" not in results[0][1]
    assert time.monotonic() - start < 100
    assert lab.report("failed")["ended"] == "failed"


@pytest.mark.nightly
def test_a_run_on_changed_shards_is_refused(lab: Lab) -> None:
    shards = lab.folder / "changing"
    shutil.copytree(lab.folder / "scenes" / "train", shards)
    arguments = lab.arguments("changed", f"data.sources=[{{path: {shards}}}]")
    ranks.run([COMMAND, *arguments, "training.steps=4"])
    bad_shards(shards, good=21, bad=0)
    index_folder(shards)
    ((code, said),) = ranks.finish(ranks.start([COMMAND, *arguments, "--resume"], 1))
    assert code == 1
    assert "was trained on other data: source 0 changed since" in said
    assert "Traceback" not in said


@pytest.mark.nightly
def test_a_run_outlives_who_reads_its_messages_and_stops_as_ever(lab: Lab) -> None:
    """Ctrl-C ends both sides of `vlp train … 2>&1 | tee log`."""
    more = ("training.steps=100000", "training.checkpoint_every=100000")
    run = subprocess.Popen(
        [sys.executable, COMMAND, *lab.arguments("piped", *more)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=ranks.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        log = lab.output("piped") / "log.jsonl"
        waited = time.monotonic() + 120
        while not (log.exists() and len(log.read_text().splitlines()) >= 3):
            assert run.poll() is None
            assert time.monotonic() < waited
            time.sleep(0.1)
        assert run.stdout is not None
        run.stdout.close()
        time.sleep(11)  # the bar is drawn anew after 10 s
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == REQUEUE
    finally:
        run.kill()
    report = lab.report("piped")
    assert report["ended"] == "stopped"
    assert verify(lab.output("piped") / "checkpoints" / f"step_{report['step']}") is None
