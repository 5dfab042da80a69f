"""The real command on real shards: killed, resumed, on other ranks and ZeRO stages."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from launch_lab import CHECKPOINT_EVERY, STEPS, Lab
from safetensors.torch import load_file

from vlp.models.folder import read_model
from vlp.training.checkpoints import verify
from vlp.training.stop_requests import REQUEUE

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
FAILING = Path(__file__).with_name("failing_pretrain.py")
STAGES = [0, 1, 2, 3]
TIMES = ("seconds", "samples_per_second", "data_wait_share")
# Statistics that look at one rank's share of the batch.
LOCAL = ("_spread", "_cosine", "anchor_", "itm_accuracy")

Whole = Callable[[int, int], str]


@pytest.fixture(scope="module")
def whole(lab: Lab) -> Whole:
    """Name of the uninterrupted run of a stage on a number of ranks; each is run once."""

    def get(stage: int, world_size: int = 2) -> str:
        name = f"whole_{stage}_{world_size}"
        if not lab.output(name).exists():
            ranks.run([COMMAND, *lab.arguments(name, lab.zero(stage))], world_size)
        return name

    return get


def final(lab: Lab, name: str) -> Path:
    folder = lab.output(name) / "checkpoints" / f"step_{STEPS}"
    assert verify(folder) is None
    return folder


def distance(first: Path, second: Path, file: str = "weights.safetensors") -> float:
    """Largest difference of a weight, but for the biases of keys.

    A key's bias adds the same to all logits of a query, so its gradient is 0 but for rounding,
    which Adam scales up to steps of any size.
    """
    one, two = load_file(first / file), load_file(second / file)
    assert one.keys() == two.keys()
    gaps = {name: (one[name].float() - two[name].float()).abs() for name in one}
    for name, gap in gaps.items():
        if name.endswith("qkv.bias"):
            gap.unflatten(0, (3, -1))[1] = 0
        elif name.endswith("key.bias"):
            gap.zero_()
    return max(float(gap.max()) for gap in gaps.values())


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_killed_between_checkpoints_then_resumed_is_bitwise_the_same(
    lab: Lab, whole: Whole, stage: int
) -> None:
    name = f"killed_{stage}"
    arguments = lab.arguments(name, lab.zero(stage))
    victim = stage % 2
    processes = ranks.start([FAILING, "kill", str(victim), "6", *arguments], 2)
    results = ranks.finish(processes)
    assert results[victim][0] == -9
    other, said = results[1 - victim]
    assert other == 1
    assert f"rank {1 - victim} lost another rank" in said, said
    assert [path.name for path in lab.output(name).glob("checkpoints/*")] == ["step_4"]
    assert not (lab.output(name) / "model").exists()

    ranks.run([COMMAND, *arguments, "--resume"], 2)
    killed, uninterrupted = final(lab, name), final(lab, whole(stage, 2))
    for file in ("weights.safetensors", "optimiser.safetensors", "extra.safetensors"):
        assert (killed / file).read_bytes() == (uninterrupted / file).read_bytes(), file
    model = "model/model.safetensors"
    assert (lab.output(name) / model).read_bytes() == (
        lab.output(whole(stage, 2)) / model
    ).read_bytes()
    assert lab.report(name)["resumed_at_steps"] == [CHECKPOINT_EVERY]
    for one, two in zip(lab.log(name), lab.log(whole(stage, 2)), strict=True):
        assert {k: v for k, v in one.items() if k not in TIMES} == {
            k: v for k, v in two.items() if k not in TIMES
        }


@pytest.mark.nightly
def test_a_checkpoint_becomes_a_model_folder_and_its_run_goes_on(lab: Lab, whole: Whole) -> None:
    name = "early"
    run = lab.output(whole(0, 1))
    lab.begin_with(run.name, CHECKPOINT_EVERY, name)
    step = lab.output(name) / "checkpoints" / f"step_{CHECKPOINT_EVERY}"
    arguments = [COMMAND, *lab.arguments(name, lab.zero(0)), "--resume"]
    with pytest.raises(FileNotFoundError, match=f"--resume training.steps={CHECKPOINT_EVERY}$"):
        read_model(step)
    with pytest.raises(FileNotFoundError, match=f"; {run / 'model'} is one$"):
        read_model(run)

    ranks.run([*arguments, f"training.steps={CHECKPOINT_EVERY}"], 1)
    weights = load_file(step / "weights.safetensors")
    for key, held in load_file(lab.output(name) / "model" / "model.safetensors").items():
        assert torch.equal(held, weights[f"model.{key}"]), key
    ranks.run(arguments, 1)
    for file in ("weights.safetensors", "optimiser.safetensors", "extra.safetensors"):
        assert (final(lab, name) / file).read_bytes() == (final(lab, run.name) / file).read_bytes()


@pytest.mark.nightly
def test_a_second_start_is_refused_on_all_ranks_while_the_first_one_trains(lab: Lab) -> None:
    arguments = lab.arguments("owners", lab.zero(0), "training.steps=100000")
    first = ranks.start([COMMAND, *arguments], 2)
    step, wait_for = lab.output("owners") / "checkpoints" / "step_4", time.monotonic() + 120
    while not step.exists() and time.monotonic() < wait_for:
        time.sleep(0.05)
    for flags in (["--resume"], []):
        second = ranks.finish(ranks.start([COMMAND, *arguments, *flags], 2), timeout=120)
        assert [code for code, _ in second] == [2, 2]
        said = [line for _, output in second for line in output.splitlines() if "error" in line]
        owner = f"is being written by process {first[0].process.pid} on "
        assert len(said) == 1, second
        assert said[0].startswith(f"error: {lab.output('owners')}: {owner}")
    os.kill(first[1].process.pid or 0, signal.SIGTERM)
    assert [code for code, _ in ranks.finish(first)] == [REQUEUE, REQUEUE]
    steps = [line["step"] for line in lab.log("owners")]
    assert steps == list(range(1, len(steps) + 1))
    assert lab.report("owners")["resumed_at_steps"] == []
    assert not list(lab.output("owners").glob(".lock*"))


@pytest.mark.nightly
def test_all_stages_give_the_same_weights(lab: Lab, whole: Whole) -> None:
    folders = [final(lab, whole(stage, 2)) for stage in STAGES]
    for folder in folders[1:]:
        assert distance(folders[0], folder) < 1e-5
        assert distance(folders[0], folder, "extra.safetensors") < 1e-5
    begun = lab.output(whole(0, 2)) / "checkpoints" / f"step_{CHECKPOINT_EVERY}"
    assert distance(begun, folders[0]) > 1e-4, "the bound above would hold without training"


def test_one_rank_and_two_have_the_same_losses(lab: Lab, whole: Whole) -> None:
    one, two = lab.log(whole(0, 1)), lab.log(whole(0, 2))
    assert len(one) == len(two) == STEPS
    for first, second in zip(one, two):
        assert first.keys() == second.keys() - set(TIMES[3:])  # ranks beside each other
        for key in first.keys() - set(TIMES):
            if not any(part in key for part in LOCAL):
                assert first[key] == pytest.approx(second[key], rel=1e-5, abs=1e-6), key
    assert any(key == "loss/token" for key in one[0])
    assert distance(final(lab, whole(0, 1)), final(lab, whole(0, 2))) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize(("source", "target"), [((3, 2), (1, 1)), ((0, 1), (2, 2))])
def test_a_checkpoint_resumes_on_other_ranks_and_another_stage(
    lab: Lab, whole: Whole, source: tuple[int, int], target: tuple[int, int]
) -> None:
    origin = whole(*source)
    name = f"moved_{origin}"
    step = f"checkpoints/step_{CHECKPOINT_EVERY}"
    shutil.copytree(lab.output(origin) / step, lab.output(name) / step)
    stage, world_size = target
    ranks.run([COMMAND, *lab.arguments(name, lab.zero(stage)), "--resume"], world_size)
    report = lab.report(name)
    assert report["resumed_at_steps"] == [CHECKPOINT_EVERY]
    assert report["ranks"] == world_size
    assert report["samples"] == 8 * STEPS
    assert distance(final(lab, name), final(lab, origin)) < 1e-5


def test_the_model_folder_is_the_trained_model(lab: Lab, whole: Whole) -> None:
    import vlp

    name = whole(0, 1)
    loaded = vlp.load(lab.output(name) / "model")
    state = load_file(final(lab, name) / "weights.safetensors")
    for key, value in loaded.model.state_dict().items():
        assert torch.equal(value, state[f"model.{key}"]), key
