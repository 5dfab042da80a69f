import os
import signal

import pytest
import ranks
import torch
from launch_lab import CHECKPOINT_EVERY, COMMAND, FAILING, STEPS, until
from safetensors.torch import load_file

import vlp
from evaluation.options import EvalOptions
from evaluation.retrieval.retrieval import evaluate_retrieval
from vlp.models.folder import read_model
from vlp.training.checkpoints import verify
from vlp.training.stop_requests import REQUEUE

STAGES = [0, 1, 2, 3]
TIMES = ("seconds", "samples_per_second", "data_wait_share")
# Statistics that look at one rank's share of the batch.
LOCAL = ("_spread", "_cosine", "anchor_", "itm_accuracy")
STATE = ("weights.safetensors", "optimiser.safetensors", "extra.safetensors")


@pytest.fixture(scope="module")
def whole(lab):
    """Name of the uninterrupted run of a stage on a number of ranks; each is run once."""

    def get(stage, world_size=2):
        name = f"whole_{stage}_{world_size}"
        if not lab.output(name).exists():
            lab.train(name, lab.zero(stage), world_size=world_size)
        return name

    return get


def final(lab, name):
    folder = lab.output(name) / "checkpoints" / f"step_{STEPS}"
    assert verify(folder) is None
    return folder


def distance(first, second, file="weights.safetensors"):
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
def test_killed_between_checkpoints_then_resumed_is_bitwise_the_same(lab, whole, stage):
    name = f"killed_{stage}"
    arguments = lab.arguments(name, lab.zero(stage))
    victim = stage % 2
    results = ranks.finish(ranks.start([FAILING, "kill", str(victim), "6", *arguments], 2))
    assert results[victim][0] == -9
    other, output = results[1 - victim]
    assert other == 1
    assert f"rank {1 - victim} lost another rank" in output, output
    assert lab.saved_steps(name) == [4]
    assert not (lab.output(name) / "model").exists()

    lab.train(name, lab.zero(stage), "--resume", world_size=2)
    killed, uninterrupted = final(lab, name), final(lab, whole(stage, 2))
    for file in (*STATE, "../../model/model.safetensors"):
        assert (killed / file).read_bytes() == (uninterrupted / file).read_bytes(), file
    assert lab.report(name)["resumed_at_steps"] == [CHECKPOINT_EVERY]
    logs = [
        [{key: v for key, v in line.items() if key not in TIMES} for line in lab.log(run)]
        for run in (name, whole(stage, 2))
    ]
    assert logs[0] == logs[1]


@pytest.mark.nightly
def test_a_checkpoint_becomes_a_model_folder_and_its_run_goes_on(lab, whole):
    name = "early"
    run = lab.output(whole(0, 1))
    lab.begin_with(run.name, CHECKPOINT_EVERY, name)
    step = lab.output(name) / "checkpoints" / f"step_{CHECKPOINT_EVERY}"
    with pytest.raises(FileNotFoundError, match=f"--resume training.steps={CHECKPOINT_EVERY}$"):
        read_model(step)
    with pytest.raises(FileNotFoundError, match=f"; {run / 'model'} is one$"):
        read_model(run)

    lab.train(name, lab.zero(0), "--resume", f"training.steps={CHECKPOINT_EVERY}")
    weights = load_file(step / "weights.safetensors")
    for key, held in load_file(lab.output(name) / "model" / "model.safetensors").items():
        assert torch.equal(held, weights[f"model.{key}"]), key
    lab.train(name, lab.zero(0), "--resume")
    for file in STATE:
        assert (final(lab, name) / file).read_bytes() == (final(lab, run.name) / file).read_bytes()


@pytest.mark.nightly
def test_a_second_start_is_refused_on_all_ranks_while_the_first_one_trains(lab):
    arguments = lab.arguments("owners", lab.zero(0), "training.steps=100000")
    first = ranks.start([COMMAND, *arguments], 2)
    until(lambda: lab.saved_steps("owners"))
    for flags in (["--resume"], []):
        second = "".join(lab.ended("owners", lab.zero(0), *flags, codes=(2, 2)))
        [message] = [line for line in second.splitlines() if "error" in line]
        owner = f"is being written by process {first[0].process.pid} on "
        assert message.startswith(f"error: {lab.output('owners')}: {owner}")
    os.kill(first[1].process.pid or 0, signal.SIGTERM)
    assert [code for code, _ in ranks.finish(first)] == [REQUEUE, REQUEUE]
    steps = [line["step"] for line in lab.log("owners")]
    assert steps == list(range(1, len(steps) + 1))
    assert lab.report("owners")["resumed_at_steps"] == []
    assert not list(lab.output("owners").glob(".lock*"))


@pytest.mark.nightly
def test_all_stages_give_the_same_weights(lab, whole):
    folders = [final(lab, whole(stage, 2)) for stage in STAGES]
    for folder in folders[1:]:
        assert distance(folders[0], folder) < 1e-5
        assert distance(folders[0], folder, "extra.safetensors") < 1e-5
    begun = lab.output(whole(0, 2)) / "checkpoints" / f"step_{CHECKPOINT_EVERY}"
    assert distance(begun, folders[0]) > 1e-4, "the bound above would hold without training"


def test_one_rank_and_two_have_the_same_losses(lab, whole):
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
def test_a_checkpoint_resumes_on_other_ranks_and_another_stage(lab, whole, source, target):
    origin = whole(*source)
    name = f"moved_{origin}"
    lab.begin_with(origin, CHECKPOINT_EVERY, name)
    stage, world_size = target
    lab.train(name, lab.zero(stage), "--resume", world_size=world_size)
    report = lab.report(name)
    assert report["resumed_at_steps"] == [CHECKPOINT_EVERY]
    assert report["ranks"] == world_size
    assert report["samples"] == 8 * STEPS
    assert distance(final(lab, name), final(lab, origin)) < 1e-5


def looks(lab, name):
    lines = [line for line in lab.log(name) if "validation/mean" in line]
    return {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in lines}


@pytest.mark.nightly
def test_a_validation_changes_nothing_and_ranks_do_not_change_it(lab):
    shards = lab.folder / "scenes" / "train"
    validation = (f"validation={{shards: [{shards}], rerank: 4}}", "training.evaluate_every=5")
    lab.train("not_validated")
    lab.train("validated", *validation)
    lab.train("validated_by_two", *validation, lab.zero(3), world_size=2)
    weights = [
        lab.output(name) / "model" / "model.safetensors" for name in ("not_validated", "validated")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    alone, shared = looks(lab, "validated"), looks(lab, "validated_by_two")
    assert list(alone) == list(shared) == [5, 10, STEPS]
    for step, figures in alone.items():
        assert figures.keys() >= {"validation/loss/total", "validation/loss/itm"}
        recalls = [name for name in figures if "loss/" not in name]
        assert [shared[step][name] for name in recalls] == pytest.approx(
            [figures[name] for name in recalls], abs=1.01 / 48
        )
        losses = figures.keys() - recalls
        assert {name: shared[step][name] for name in losses} == pytest.approx(
            {name: figures[name] for name in losses}, rel=1e-4
        )
    report = lab.report("validated")
    best = max(alone, key=lambda step: alone[step]["validation/mean"])
    assert report["best"]["mean"] == alone[best]["validation/mean"]
    loaded = vlp.load(lab.output("validated") / "best")
    result = evaluate_retrieval(
        loaded,
        [shards],
        options=EvalOptions(resamples=1),
        rerank=4,
    )
    assert result.mean("rerank").value == pytest.approx(report["best"]["mean"])
