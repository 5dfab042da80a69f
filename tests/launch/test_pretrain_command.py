import io
import os
import shutil
import signal
import sys
import time

import pytest
import ranks
from launch_lab import COMMAND, ENDLESS, FAILING, started, until
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import PausedDataError, UnreadableDataError
from vlp.data.shards.shard_reader import ShardWriter, index_folder
from vlp.training.checkpoints import verify
from vlp.training.command import _explain, run_training
from vlp.training.config import PretrainConfig
from vlp.training.stop_requests import REQUEUE


def test_ranks_of_slurm_without_a_rendezvous_are_told_what_is_missing(lab, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("STEP_NUM_TASKS", "STEP_NUM_NODES"):
        monkeypatch.setenv(f"SLURM_{name}", "2")
    for name in ("PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    assert run_training(lab.config, PretrainConfig, [], False, lambda config: (None, None)) == 2
    assert "error: MASTER_ADDR is not set" in capsys.readouterr().err


@pytest.mark.nightly
def test_nodes_with_other_settings_or_data_do_not_train_together(lab):
    bad_shards(lab.folder / "node_b", good=16, bad=0)
    for other, expected in {
        "training.optimiser.learning_rate=1e-3": "learning_rate is 0.001, 0.0003 on rank 0",
        f"data.sources=[{lab.folder / 'node_b'}]": "source 0 of the data is not that of rank 0",
    }.items():
        how = ("other", "1", other)
        assert expected in lab.ended("nodes", "training.timeout=20", codes=(2, 2), how=how)[0]
        assert not lab.output("nodes").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_a_node_that_is_refused_says_so_and_the_others_that_it_did_not_come(engine, lab):
    more = ("training.timeout=5", f"training.engine={engine}")
    how = ("other", "1", "training.step=3")
    output, refused = lab.ended("nodes", *more, codes=(1, 2), how=how)
    assert "did you mean 'training.steps'" in refused
    assert "rank 0 waited for another rank longer than training.timeout" in output


class Killed(Dataset[int]):
    """Its loader's process is killed, as when memory runs out."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)
        return index

    def __len__(self):
        return 1


def test_memory_that_a_loader_lacks_is_named(capsys):
    with pytest.raises(RuntimeError) as killed:
        next(iter(DataLoader(Killed(), num_workers=1)))
    _explain(killed.value)
    small = "unable to allocate shared memory(shm) for file </torch_7>: No space left on device"
    _explain(RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{small} (28)\n"))
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 2, output
    assert "signal: Killed; where memory ran out, lower the workers of the data or" in output[0]
    assert "(28); enlarge /dev/shm (docker run --shm-size), or lower the workers" in output[1]
    for kind, remedy in (PausedDataError, "; paused: continue"), (UnreadableDataError, "=skip"):
        _explain(kind("the store is away"))
        assert remedy in capsys.readouterr().err


def bad_shards(folder, good, bad, per_shard=1000):
    """Shards with `good` samples, and `bad` ones each of three kinds."""
    image, caption = io.BytesIO(), Annotation(caption="a red circle")
    Image.new("RGB", (32, 32), "red").save(image, "JPEG")
    whole = image.getvalue()
    spoilt = [(whole[: len(whole) // 2], caption), (b"no image", caption), (whole, Annotation())]
    with ShardWriter(folder, per_shard) as writer:
        for number in range(good):
            writer.write(f"good{number}", whole, "jpg", caption)
        for number in range(bad):
            for kind, (content, annotation) in enumerate(spoilt):
                writer.write(f"bad{kind}{number}", content, "jpg", annotation)


def test_bad_samples_are_skipped_counted_and_named(lab):
    bad_shards(lab.folder / "some_bad", good=26, bad=2)
    lab.train("skips", f"data.sources=[{{path: {lab.folder / 'some_bad'}}}]", "training.steps=4")
    report = lab.report("skips")
    assert report["ended"] == "finished"
    assert (report["samples"], report["trained_samples"]) == (32, 26)
    assert sum(report["skipped_samples"].values()) == 6
    named = " ".join(where for result in report["skipped_examples"].values() for where in result)
    assert all(f"bad{kind}{number}" in named for kind in range(3) for number in range(2)), named
    assert lab.log("skips")[-1]["skipped/total"] == 6


@pytest.mark.nightly
def test_a_missing_local_shard_ends_the_run_unless_it_may_be_skipped(lab):
    folder = lab.folder / "two_shards"
    shutil.copytree(lab.folder / "scenes" / "train", folder)
    [first] = folder.glob("*.tar")
    shutil.copy(first, folder / "shard-000001.tar")
    index_folder(folder)
    (folder / "shard-000001.tar").unlink()
    sources = f"data.sources=[{{path: {folder}}}]"
    [output] = lab.ended("lost_shard", sources, codes=(2,))
    assert (
        "1 of 2 shards of its index are missing, shard-000001.tar for one; restore them" in output
    )
    lab.train("lost_shard", sources, "data.outages.policy=skip", "training.steps=50")
    assert lab.report("lost_shard")["skipped_samples"].keys() == {"missing shard"}


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "code"), [("pause", REQUEUE), ("fail", 2)])
def test_a_start_within_an_outage_is_a_pause_where_that_is_the_policy(policy, code, lab):
    store = f"data.sources=[{{path: http://127.0.0.1:{ranks.free_port()}/shards}}]"
    cache = f"data.cache={{folder: {lab.folder / 'cache'}, limit: 1GB}}"
    outages = f"data.outages={{seconds: 0, policy: {policy}}}"
    lab.ended("outage", store, cache, outages, codes=(code,))
    assert not lab.output("outage").exists()


@pytest.mark.nightly
def test_few_open_files_are_refused_and_enough_are_enough(lab):
    """Nine sources of 30 shards, read by two worker processes."""
    sources = [lab.folder / f"source_{number}" for number in range(9)]
    for folder in sources:
        bad_shards(folder, good=60, bad=0, per_shard=2)
    more = (f"data.sources=[{', '.join(map(str, sources))}]", "data.workers=2", "training.steps=60")
    for limit, code in ((64, 2), (256, 0)):
        script = f"ulimit -n {limit}; exec {sys.executable} {COMMAND} " + '"$@"'
        run = started(["bash", "-c", script, "pretrain", *lab.arguments("files", *more)])
        output = run.communicate(timeout=300)[0]
        assert run.returncode == code, output
        few = "only 64 open files are allowed; raise `ulimit -n` to 256" in output
        assert few == (limit == 64)
    assert not lab.report("files")["skipped_samples"]


@pytest.mark.nightly
def test_a_full_disk_ends_with_a_message_and_the_run_goes_on_later(lab):
    """The system refuses files of a checkpoint's size from the sixth batch on, on both ranks."""
    engine = "training.engine=zero3"
    output, _ = lab.ended("full", engine, codes=(1, 1), how=("full", "0", "5"))
    assert "cannot write the checkpoint" in output
    assert "step_8" in output
    assert "File too large" in output
    assert lab.saved_steps("full") == [4]
    assert verify(lab.output("full") / "checkpoints" / "step_4") is None
    lab.train("full", engine, "--resume", world_size=2)
    assert lab.report("full")["ended"] == "finished"
    assert lab.report("full")["resumed_at_steps"] == [4]


@pytest.mark.nightly
def test_a_full_disk_at_the_final_model_loses_no_training(lab):
    more, run = (lab.zero(0), "training.steps=2"), lab.output("full_at_model")
    output = "".join(lab.ended(run.name, *more, codes=(1, 1), how=("model", "0", "0")))
    assert output.count("\nerror") == 1, output
    assert f"\nerror: cannot write the model {run / 'model'}: " in output
    assert "File too large" in output
    assert "start again with --resume" in output
    assert not list(run.glob("model*"))
    lab.train(run.name, *more, "--resume", world_size=2)
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.nightly
def test_one_failing_rank_ends_the_others(lab):
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
def test_a_run_outlives_who_reads_its_messages_and_stops_as_ever(lab):
    """Ctrl-C ends both sides of `vlp train … 2>&1 | tee log`."""
    run = started([sys.executable, COMMAND, *lab.arguments("piped", *ENDLESS)])
    try:
        until(lambda: lab.steps("piped") >= 3 or run.poll() is not None)
        assert run.poll() is None
        run.stdout.close()
        time.sleep(11)  # the bar is drawn anew after 10 s
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == REQUEUE
    finally:
        run.kill()
    report = lab.report("piped")
    assert report["ended"] == "stopped"
    assert verify(lab.output("piped") / "checkpoints" / f"step_{report['step']}") is None
