import json
import os
import shutil
from pathlib import Path

import pytest
import ranks
from launch_lab import COMMAND, STEPS
from safetensors.torch import load_file

from evaluation.__main__ import main as evaluation


def files(folder):
    result = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in result}


@pytest.fixture(scope="module")
def finished(lab):
    lab.train("survivor")
    return lab.output("survivor")


@pytest.fixture
def run(lab, finished, request):
    return Path(shutil.copytree(finished, lab.output(f"copy_{request.node.name}")))


def resume(lab, run, *more, code=0):
    [output] = lab.ended(run.name, *more, "--resume", codes=(code,))
    return output


def results(lab, model, capsys):
    shards = str(lab.folder / "scenes" / "train")
    assert evaluation(["retrieval", "--model", str(model), "--shards", shards, "--limit", "8"]) == 0
    return Path(capsys.readouterr().out.rpartition("written to ")[2].strip())


def test_results_and_edited_files_survive_a_resume_and_a_longer_one(lab, run, capsys):
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

    output = resume(lab, run)
    assert "left unchanged" in output
    assert files(place) == measured
    assert files(model) == before

    old = load_file(model / "model.safetensors")
    resume(lab, run, f"training.steps={STEPS + 1}")
    assert files(place) == measured
    assert (model / "README.md").read_text() == "my own words"
    assert (model / "notes" / "idea.txt").read_text() == "mine"
    new = load_file(model / "model.safetensors")
    assert any(bool((old[name] != new[name]).any()) for name in old), "it was trained on"


@pytest.mark.nightly
def test_results_are_found_beside_the_model(lab, run, capsys):
    model = run / "model"
    place = results(lab, model, capsys)
    for shown in (run, model, place):
        assert evaluation(["report", str(shown), "--out", str(run / "report.html")]) == 0
        page = (run / "report.html").read_text()
        assert "no results of" not in page, shown
    (place / "retrieval.predictions.jsonl").write_text('{"key": "a", "text": "b"}\n')
    assert evaluation(["compare", str(model), str(run / "none")]) == 2
    assert "none: there is neither" in capsys.readouterr().err


def test_a_moved_run_goes_on_where_it_is_by_its_own_configuration(lab, finished, run):
    moved, before = run.rename(lab.output("moved")), files(finished)
    command = [COMMAND, "--config", str(moved / "config.yaml"), "--resume"]
    ranks.run([*command, f"training.steps={STEPS + 1}"])
    assert lab.report("moved")["resumed_at_steps"] == [STEPS]
    assert files(finished) == before, "its configuration still names that place"
    assert not run.exists()


def test_a_folder_that_is_no_run_is_refused_and_stays_as_it_is(lab, tmp_path):
    mine = lab.output("photographs")
    (mine / "model").mkdir(parents=True)
    (mine / "model" / "model.safetensors").write_text("precious")
    (mine / "config.yaml").write_text("theirs: 1\n")
    (mine / "checkpoints" / "step_100").mkdir(parents=True)
    (mine / "checkpoints" / "step_100" / "model.pt").write_text("of another program")
    before = files(mine)
    assert "but no run" in resume(lab, mine, code=2)
    assert files(mine) == before


def test_a_finished_run_without_its_checkpoints_never_begins_anew(lab, run):
    shutil.rmtree(run / "checkpoints")
    before = files(run)
    output = resume(lab, run, code=2)
    assert "holds a run that finished at step 12, but" in output
    assert files(run) == before


@pytest.mark.nightly
def test_an_error_of_the_disk_damages_no_checkpoint(lab, run):
    """/proc/self/mem is a regular file whose first byte gives EIO to whoever reads it."""
    checkpoints = run / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    for file in ("weights.safetensors", "SHA256SUMS", "state.json"):
        kept = checkpoints / "step_12" / file
        kept.rename(run / "aside")
        kept.symlink_to("/proc/self/mem")
        output = resume(lab, run, code=1)
        assert "step_12 cannot be read now ([Errno 5]" in output
        assert sorted(path.name for path in checkpoints.iterdir()) == names
        kept.unlink()
        (run / "aside").rename(kept)
    resume(lab, run, f"training.steps={STEPS + 1}")
    assert lab.report(run.name)["resumed_at_steps"] == [STEPS]


@pytest.mark.nightly
def test_where_all_checkpoints_are_damaged_no_start_begins_anew(lab, run):
    for step in (run / "checkpoints").iterdir():
        os.truncate(step / "weights.safetensors", 10)
    # Else the finished model would say enough.
    shutil.rmtree(run / "model")
    (run / "report.json").unlink()
    for _ in range(2):  # the second start finds them set aside
        output = resume(lab, run, code=1)
        assert "is whole; to begin anew, choose another `output`" in output
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step_4.corrupt", "step_8.corrupt", "step_12.corrupt"}
