"""Validation of a pretraining by the real command: it watches, chooses, and changes nothing."""

from __future__ import annotations

import pytest
import ranks
from launch_lab import STEPS, Lab

import vlp
from evaluation.options import EvalOptions
from evaluation.retrieval.retrieval import evaluate_retrieval

COMMAND = ranks.ROOT / "launch" / "pretrain.py"


def validated(lab: Lab, *more: str) -> list[str]:
    shards = lab.folder / "scenes" / "train"
    chosen = f"{{shards: [{shards}], rerank: 4}}"
    return [f"validation={chosen}", "training.evaluate_every=5", *more]


def looks(lab: Lab, name: str) -> dict[int, dict[str, float]]:
    """Figures of the validations by step."""
    lines = [line for line in lab.log(name) if "validation/mean" in line]
    return {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in lines}


@pytest.mark.nightly
def test_it_changes_nothing_and_ranks_do_not_change_it(lab: Lab) -> None:
    ranks.run([COMMAND, *lab.arguments("not_validated")])
    ranks.run([COMMAND, *lab.arguments("validated", *validated(lab))])
    ranks.run([COMMAND, *lab.arguments("validated_by_two", *validated(lab, lab.zero(3)))], 2)
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
    found = evaluate_retrieval(
        loaded,
        [lab.folder / "scenes" / "train"],
        options=EvalOptions(limit=48, resamples=1),
        rerank=4,
    )
    assert found.mean("rerank").value == pytest.approx(report["best"]["mean"])
