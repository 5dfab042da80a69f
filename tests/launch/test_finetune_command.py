"""`launch/finetune.py`: real runs on Accelerate, on two ranks as on one, judged and resumed."""

import json
import shutil

import pytest
import ranks
import torch
from pair_shards import entailment_shards, tiny_folder
from safetensors.torch import load_file

from evaluation.downstream import evaluate_task
from evaluation.options import EvalOptions
from vlp.tasks.downstream.task import load_task

COMMAND = [ranks.ROOT / "launch" / "finetune.py", "snli_ve"]
CONFIGS = ranks.ROOT / "configs" / "finetune"
PLAIN = "{randaugment: false, crop_scale: [1.0, 1.0], hflip: false}"


def run(arguments, world_size=1):
    results = ranks.finish(ranks.start([*COMMAND, *arguments], world_size), timeout=300)
    said = "".join(output for _, output in results)
    assert {code for code, _ in results} == {0}, said
    return said


@pytest.mark.commands
def test_two_ranks_train_what_one_does_and_a_killed_run_goes_on(tmp_path):
    start = tiny_folder(tmp_path / "start")
    train = entailment_shards(tmp_path / "train", 24)
    validation = entailment_shards(tmp_path / "validation", 10)
    arguments = [
        *("--config", str(CONFIGS / "scenes_snli_ve.yaml"), "--from", str(start)),
        f"task.data.train=[{train}]",
        f"task.data.validation=[{validation}]",
        f"task.data.augment={PLAIN}",
        *("task.data.canonical_streams=2", "training.precision=float32", "training.batch=8"),
        *("training.steps=6", "training.gradient_accumulation_steps=2", "training.log_every=1"),
        *("training.checkpoint_every=3", "training.evaluate_every=2", "task.teacher={}"),
    ]
    run([*arguments, f"output={tmp_path / 'one'}"])
    run([*arguments, f"output={tmp_path / 'two'}"], 2)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for mine, other in zip(*logs, strict=True):
        assert mine["step"] == other["step"]
        for name in ("loss/total", "validation/accuracy"):
            assert mine.get(name) == pytest.approx(other.get(name), abs=1e-5)
    looks = [line["step"] for line in logs[0] if "validation/accuracy" in line]
    assert looks == [2, 4, 6]
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert report["best"]["step"] in looks
    best = load_task(tmp_path / "one" / "best")
    assert best.kind == "snli_ve"

    # As if it had been killed between its checkpoints, and goes on with another number of ranks.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_6")
    shutil.rmtree(tmp_path / "two" / "model")
    run([*arguments, f"output={tmp_path / 'two'}", "--resume"])
    one, two = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")
    )
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("teacher", ["null", "{momentum: 0.5}"])
def test_two_runs_of_one_seed_are_equal_to_the_bit_and_so_is_a_resumed_one(teacher, tmp_path):
    start = tiny_folder(tmp_path / "start")
    train = entailment_shards(tmp_path / "train", 16)

    def trained(name, *more):
        run([
            *("--config", str(CONFIGS / "scenes_snli_ve.yaml"), f"init_from={start}"),
            *(f"task.data.train=[{train}]", "task.data.validation=[]", "training.batch=8"),
            *("training.steps=3", "training.checkpoint_every=2", f"task.teacher={teacher}"),
            *(f"output={tmp_path / name}", *more),
        ])  # fmt: skip
        assert not (tmp_path / name / "best").exists()
        files = ("model/heads", "model/model", "checkpoints/step_3/extra")
        return [load_file(tmp_path / name / f"{file}.safetensors") for file in files]

    first, second = trained("first"), trained("second")
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step_3")
    shutil.rmtree(tmp_path / "second" / "model")
    resumed = trained("second", "--resume")
    assert bool(first[2]) == (teacher != "null")
    for one, same, again in zip(first, second, resumed):
        assert one.keys() == same.keys() == again.keys()
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.nightly
def test_a_run_of_zero_3_is_validated(tmp_path):
    start = tiny_folder(tmp_path / "start")
    shards = entailment_shards(tmp_path / "shards", 12)
    zero = tmp_path / "zero3.json"  # cuts up every parameter, however small
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero.write_text(json.dumps({"zero_optimization": settings}))
    run([
        *("--config", str(CONFIGS / "scenes_snli_ve.yaml"), f"init_from={start}"),
        *(f"task.data.{part}=[{shards}]" for part in ("train", "validation")),
        *("task.data.canonical_streams=2", "task.teacher={}", "training.precision=float32"),
        *(f"training.engine={zero}", "training.batch=4"),
        *("training.steps=2", "training.evaluate_every=1", f"output={tmp_path / 'run'}"),
    ], 2)  # fmt: skip
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = evaluate_task(
        load_task(tmp_path / "run" / "best"), [shards], options=EvalOptions(resamples=1)
    )
    assert report["best"]["accuracy"] == pytest.approx(found.metrics["accuracy"])
