"""Figures of a finished run, and the ranks of its queries."""

from __future__ import annotations

import json

import pandas as pd

from evaluation.ablations.config import MeasuredConfig
from evaluation.ablations.figures import evaluate_images, last_losses
from vlp.training.run_folder import read_log


def test_retrieval_by_three_rankings_and_foils_are_measured(model_folder, scene_shards, tmp_path):
    (tmp_path / "model").symlink_to(model_folder)
    measured = MeasuredConfig(shards=(str(scene_shards),), rerank=4, foils=9)
    figures = evaluate_images(tmp_path, measured)
    ways = ("text_to_image", "image_to_text")
    stages = ("dual", "rerank", "match")
    wanted = {f"{stage}/{way}/R@{k}" for stage in stages for way in ways for k in (1, 5, 10)}
    assert wanted | {"foils/match/all", "foils/dual/all"} <= set(figures)
    assert all(0 <= figure <= 100 for figure in figures.values())
    # Each figure is the share of queries whose first right answer has such a rank.
    queries = pd.read_csv(tmp_path / "queries.csv")
    assert queries.columns.tolist() == ["direction", "image", "caption", *stages]
    for way, own in queries.groupby("direction"):
        for stage in stages:
            for k in (1, 5, 10):
                share = 100 * (own[stage] <= k).mean()
                assert abs(share - figures[f"{stage}/{way}/R@{k}"]) < 1e-9
    without = evaluate_images(tmp_path, measured.model_copy(update={"foils": 0}))
    assert without == {name: v for name, v in figures.items() if not name.startswith("foils")}


def test_losses_of_the_last_fifth_of_the_steps_are_measured(tmp_path):
    rows = [
        {"step": n, "loss/itm": n / 10, "loss/total": 1.0, "seconds": 3} for n in range(5, 55, 5)
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"event": "stop"}', '{"step": 5']))
    assert read_log(tmp_path / "log.jsonl") == (rows, 2)
    assert last_losses(rows) == {"training/itm": (4.5 + 5.0) / 2, "training/total": 1.0}
    rows[-1]["loss/itm"] = None  # it was not finite
    rows.append({"step": 50, "validation/mean": 0.5, "validation/loss/total": 2.0})
    assert last_losses(rows) == {"training/itm": 4.5, "training/total": 1.0}
    assert read_log(tmp_path / "elsewhere") == ([], 0)
    assert last_losses([]) == {}
