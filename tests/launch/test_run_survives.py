"""A run survives a resume: results, edited files, checkpoints, and folders of others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import ranks
from launch_lab import STEPS, Lab
from safetensors.torch import load_file

from evaluation.__main__ import main as evaluation

COMMAND = ranks.ROOT / "launch" / "pretrain.py"


def files(folder: Path) -> dict[str, bytes]:
    """Contents by path of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def finished(lab: Lab) -> Path:
    """The folder of a finished run of steps 4, 8 and 12, which tests copy."""
    ranks.run([COMMAND, *lab.arguments("survivor")])
    return lab.output("survivor")


@pytest.fixture
def run(lab: Lab, finished: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, lab.output(f"copy_{request.node.name}")))


def resume(lab: Lab, run: Path, *more: str) -> tuple[int, str]:
    command = [COMMAND, *lab.arguments(run.name, *more), "--resume"]
    ((code, said),) = ranks.finish(ranks.start(command, 1))
    assert "Traceback" not in said, said
    return code, said


def results(lab: Lab, model: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Evaluate a model with the default place of its results; returns that."""
    shards = str(lab.folder / "scenes" / "train")
    assert evaluation(["retrieval", "--model", str(model), "--shards", shards, "--limit", "8"]) == 0
    return Path(capsys.readouterr().out.rpartition("written to ")[2].strip())


def test_results_and_edited_files_survive_a_resume_and_a_longer_one(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run / "model"
    place = results(lab, model, capsys)
    assert place == run / "evaluation" / "model"
    assert evaluation(["card", "--model", str(model)]) == 0
    card = (model / "README.md").read_text()
    assert "| retrieval" in card or "Recall" in card or "R@1" in card
    (model / "README.md").write_text("my own words")
    (model / "notes").mkdir()
    (model / "notes" / "idea.txt").write_text("mine")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"note": "mine"}))
    measured, before = files(place), files(model)

    code, said = resume(lab, run)
    assert code == 0, said
    assert "stays as it is" in said
    assert files(place) == measured
    assert files(model) == before

    old = load_file(model / "model.safetensors")
    code, said = resume(lab, run, f"training.steps={STEPS + 1}")
    assert code == 0, said
    assert files(place) == measured
    assert (model / "README.md").read_text() == "my own words"
    assert (model / "notes" / "idea.txt").read_text() == "mine"
    new = load_file(model / "model.safetensors")
    assert any(bool((old[name] != new[name]).any()) for name in old), "it was trained on"


@pytest.mark.nightly
def test_results_are_found_beside_the_model(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run / "model"
    place = results(lab, model, capsys)
    for shown in (run, model, place):
        assert evaluation(["report", str(shown), "--out", str(run / "report.html")]) == 0
        page = (run / "report.html").read_text()
        assert "no results of" not in page, shown
    (place / "retrieval.predictions.jsonl").write_text('{"key": "a", "text": "b"}\n')
    assert evaluation(["compare", str(model), str(run / "none")]) == 2
    assert "none: there is neither" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused_and_stays_as_it_is(lab: Lab, tmp_path: Path) -> None:
    mine = lab.output("photographs")
    (mine / "model").mkdir(parents=True)
    (mine / "model" / "model.safetensors").write_text("precious")
    (mine / "config.yaml").write_text("theirs: 1\n")
    before = files(mine)
    code, said = resume(lab, mine)
    assert code == 2, said
    assert "holds config.yaml, model but no run" in said
    assert files(mine) == before


def test_a_finished_run_without_its_checkpoints_never_begins_anew(lab: Lab, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = files(run)
    code, said = resume(lab, run)
    assert code == 2, said
    assert "holds a run that finished at step 12, but" in said
    assert files(run) == before


@pytest.mark.nightly
def test_an_error_of_the_disk_damages_no_checkpoint(lab: Lab, run: Path) -> None:
    """/proc/self/mem is a regular file whose first byte gives EIO to whoever reads it."""
    checkpoints = run / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    for file in ("weights.safetensors", "SHA256SUMS", "state.json"):
        kept = checkpoints / "step_12" / file
        kept.rename(run / "aside")
        kept.symlink_to("/proc/self/mem")
        code, said = resume(lab, run)
        assert code == 1, said
        assert "step_12 cannot be read now ([Errno 5]" in said
        assert sorted(path.name for path in checkpoints.iterdir()) == names
        kept.unlink()
        (run / "aside").rename(kept)
    code, said = resume(lab, run, f"training.steps={STEPS + 1}")
    assert code == 0, said
    assert lab.report(run.name)["resumed_at_steps"] == [STEPS]


@pytest.mark.nightly
def test_where_all_checkpoints_are_damaged_no_start_begins_anew(lab: Lab, run: Path) -> None:
    for step in (run / "checkpoints").iterdir():
        os.truncate(step / "weights.safetensors", 10)
    # Else the finished model would say enough.
    shutil.rmtree(run / "model")
    (run / "report.json").unlink()
    for _ in range(2):  # the second start finds them set aside
        code, said = resume(lab, run)
        assert code == 1, said
        assert "is whole; to begin anew, choose another `output`" in said
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step_4.corrupt", "step_8.corrupt", "step_12.corrupt"}
