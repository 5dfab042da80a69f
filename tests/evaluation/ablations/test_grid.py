import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests_support import dark_and_light

from data_tools.executor import Executor
from evaluation.ablations import grid
from evaluation.ablations.config import AblationConfig
from evaluation.ablations.grid import RESULT, VLP, Run, check, do_runs, plan, results, run_ablation
from evaluation.ablations.tables import report, to_frame
from launch.cli.main import main
from vlp.config import PLUGINS, ConfigError, load_config, save_config

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs" / "ablation").glob("*.yaml"))
SOURCE = ROOT / "configs" / "ablation" / "x.yaml"
TABLE = {
    "title": "Table 1",
    "figures": {"top-1": "top1"},
    "paper": ["C10"],
    "reference": "none",
    "rows": [{"label": "None", "variant": "none"}],
}
PLAIN = {
    "output": "runs/x",
    "training": {"config": "../vision/cifar10_vit_tiny.yaml", "overrides": {"training.steps": 5}},
    "variants": {
        "few": {"seeds": 2},
        "none": {"overrides": {"training.steps": 3}},
        "ape": {"overrides": {"task.model.absolute": "keep", "init_from": "start/{seed}"}},
    },
    "tables": [TABLE],
}


@pytest.fixture
def config(tmp_path):
    return AblationConfig.model_validate(PLAIN | {"output": str(tmp_path / "out")})


def test_main_rows_come_first_and_seed_by_seed(config):
    runs = plan(config, SOURCE)
    assert [run.name for run in runs] == [
        *("none/0", "ape/0", "none/1", "ape/1", "none/2", "ape/2"), *("few/0", "few/1")
    ]  # fmt: skip
    assert runs[0].command[:4] == [*VLP, "train"]
    assert {"training.steps=3", "training.seed=0"} <= set(runs[0].changes)
    assert {"training.steps=5", 'init_from="start/1"'} <= set(runs[3].changes)
    assert set(runs[1].changes) < set(runs[1].command)
    assert runs[0].read().training.steps == 3
    assert [run.name for run in plan(config, SOURCE, ["ape"])] == ["ape/0", "ape/1", "ape/2"]
    with pytest.raises(ConfigError, match="unknown variants rope; there are few, none, ape"):
        run_ablation(config, SOURCE, ["rope"])


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_ablation_is_planned(file):
    check(plan(load_config(file, AblationConfig), file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": [{**TABLE, "reference": "rope"}]}, "unknown variants rope"),
        (
            {"tables": [{**TABLE, "rows": [{"label": "A", "variant": "ape", "paper": [1, 2]}]}]},
            "A has 2 figures",
        ),
        ({"scenes": "x", "measured": {"shards": ["x"]}}, "scenes and measured are"),
    ],
)
def test_what_cannot_be_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        AblationConfig.model_validate(PLAIN | change)


@pytest.mark.parametrize("flags", [[], ["--plan"]])
def test_the_last_variants_mistake_is_named_before_the_first_is_trained(flags, tmp_path, capsys):
    training = {"config": str(ROOT / "configs/vision/cifar10_vit_tiny.yaml")}
    wrong = {"overrides": {"task.model.absolut": "keep"}}
    variants = PLAIN["variants"] | {"ape": {}, "wrong": wrong}
    settings = {"output": str(tmp_path / "out"), "training": training, "variants": variants}
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(PLAIN | settings))
    assert main(["ablate", "--config", str(file), *flags]) == 2
    said = "variant wrong: its overrides: unknown key 'task.model.absolut'"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_training_is_refused_and_of_another_evaluation_not_done(config):
    run = plan(config, SOURCE)[0]
    run.folder.mkdir(parents=True)
    kept = run.folder / "config.yaml"
    same = run.read().model_dump(mode="json")
    kept.write_text(yaml.safe_dump(same | {"output": "elsewhere"}))
    check([run])
    same["training"]["batch"] += 1
    kept.write_text(yaml.safe_dump(same))
    with pytest.raises(ConfigError, match=r"none/0 holds a run of other settings \(training.batch"):
        check([run])
    stored = {"evaluation": config.evaluation(), "figures": {"top1": 1.0}}
    (run.folder / RESULT).write_text(json.dumps(stored))
    assert results(config, SOURCE) == {("none", 0): {"top1": 1.0}}
    assert results(config.model_copy(update={"limit": 9}), SOURCE) == {}


def test_runs_have_the_threads_of_the_outer_openmp_level(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    monkeypatch.setattr(Executor, "map", lambda self, work, runs, ordered: map(work, runs))
    (tmp_path / "model").mkdir()
    do_runs([Run("none/0", tmp_path, [])], 1, lambda folder, threads: {"threads": threads})
    assert json.loads((tmp_path / RESULT).read_text()) == {"threads": 4}
    grid.run_with_log(["sh", "-c", "echo $OMP_NUM_THREADS"], tmp_path / "log", 4)
    assert (tmp_path / "log").read_text() == "4,2\n"


@pytest.mark.nightly
def test_a_grid_is_trained_once_resumed_and_evaluated_again_without_training(tiny_ablation):
    config = load_config(tiny_ablation, AblationConfig)
    said = []
    done = run_ablation(config, tiny_ablation, ["none"], said.append)
    assert said[0] == "2 runs, 0 of them done"
    assert set(done) == {("none", 0), ("none", 1)}
    assert 0 <= done["none", 0]["top1"] <= 100
    assert done["none", 0]["training/steps"] == 2
    folder = Path(config.output) / "none" / "1"
    trained = (folder / "report.json").stat().st_mtime_ns
    (folder / RESULT).unlink()
    again = run_ablation(config, tiny_ablation, ["none"], said.append)
    assert said[-2] == "2 runs, 1 of them done"
    assert again == done
    fewer = config.model_copy(update={"limit": 8})
    assert results(fewer, tiny_ablation) == {}
    assert set(run_ablation(fewer, tiny_ablation, ["none"], said.append)) == set(done)
    assert (folder / "report.json").stat().st_mtime_ns == trained
    assert "None" in report(config, to_frame(done))


@pytest.mark.nightly
def test_scenes_are_prepared_and_models_pretrained_and_evaluated(tmp_path, capsys):
    scenes, vocabulary = tmp_path / "scenes", str(tmp_path / "scenes" / "vocabulary")
    train = f"data vocabulary --shards {scenes}/train --size 256 --out {vocabulary}"
    overrides = {
        "model.text.width": 16, "model.image.width": 16, "model.text.layers": 1,
        "model.image.layers": 1, "model.cross.layers": 1, "model.image.image_size": 32,
        "training.batch": 16, "training.steps": 3, "training.optimiser.warmup_steps": 1,
        "objectives.itm.group": 8, "model.embed_dim": 16,
        "data.sources": [{"path": str(scenes / "train")}],
        "data.vocabulary": vocabulary,
    }  # fmt: skip
    sizes = "--train 64 --val 8 --swaps 8 --image-size 32"
    plain = {
        "output": str(tmp_path / "out"),
        "prepare": [
            {"run": f"data scenes --out {scenes} {sizes}"},
            {"run": train, "makes": vocabulary},
        ],
        "scenes": str(scenes),
        "seeds": [0, 1],
        "training": {
            "config": str(ROOT / "configs/pretrain/scenes_tiny.yaml"),
            "overrides": overrides,
        },
        "variants": {"none": {"overrides": {"model.cross.position": []}}, "ace": {}},
        "tables": [{**TABLE, "figures": {"swaps": "swaps/{view}/words/all/pair"}}],
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(plain))
    config = load_config(file, AblationConfig)
    found = run_ablation(config, file)
    assert set(found) == {(name, seed) for name in ("none", "ace") for seed in (0, 1)}
    assert "swaps/shuffled/words/all/pair" in found["none", 0]
    assert (tmp_path / "out/ace/1/queries.csv").read_text().startswith("direction,image,caption,")
    capsys.readouterr()
    run_ablation(config, file)
    assert capsys.readouterr().out.splitlines() == [
        f"vlp data scenes --out {scenes} {sizes}", "4 runs, 4 of them done"
    ]  # fmt: skip


TRAINING = """
import os, sys, time
os.makedirs(sys.argv[1], exist_ok=True)
with open(os.path.join(sys.argv[1], "pids"), "w") as file:
    print(os.getpid(), os.getppid(), file=file, flush=True)
time.sleep(300)
"""

FAILING = """
import os, sys, time
other = os.path.join(os.path.dirname(sys.argv[1]), "1")
if sys.argv[1].endswith("0"):  # fails when the one beside it has begun
    while not os.path.exists(other):
        time.sleep(0.05)
    sys.exit(3)
os.makedirs(sys.argv[1], exist_ok=True)
time.sleep(300)
"""

GRID = """
import sys
from pathlib import Path
from evaluation.ablations.grid import Run, do_runs

if __name__ == "__main__":
    out, script = Path(sys.argv[1]), sys.argv[2]
    folders = [out / str(n) for n in range(3)]
    do_runs([Run(f.name, f, [sys.executable, script, str(f)]) for f in folders], 1, dict)
"""


def _running(pid):
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(what, holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_grid_that_is_killed_leaves_no_training(tmp_path, how):
    script, grid = tmp_path / "training.py", tmp_path / "grid.py"
    script.write_text(TRAINING)
    grid.write_text(GRID)
    process = subprocess.Popen(
        [sys.executable, str(grid), str(tmp_path / "runs"), str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        pids = tmp_path / "runs" / "0" / "pids"
        _until("a training starts", lambda: pids.is_file() and pids.read_text().endswith("\n"))
        started = [int(pid) for pid in pids.read_text().split()]
        process.send_signal(how)
        process.wait(60)
        _until("training and worker end", lambda: not any(map(_running, started)), 30)
        time.sleep(0.5)
        assert not (tmp_path / "runs" / "1").exists(), "the next one in the queue was started"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
def test_a_failed_training_is_named_and_ends_those_beside_it(tmp_path, capsys):
    script, out = tmp_path / "training.py", tmp_path / "runs"
    script.write_text(FAILING)
    runs = [Run(f"run {n}", out / str(n), [sys.executable, str(script), str(out / str(n))])
            for n in range(4)]  # fmt: skip
    started = time.monotonic()
    with pytest.raises(ConfigError, match="0 ended with code 3; see ") as error:
        do_runs(runs, 2, dict)
    assert error.value.__notes__ == [f"This was run 0, in {out / '0'}."]
    assert capsys.readouterr().out == "4 runs, 0 of them done\n"
    assert time.monotonic() - started < 100, "the one beside it was waited for"
    assert not (out / "3").exists(), "the last one in the queue was started"


PAGE = ROOT / "docs" / "how-to" / "add-an-encoding.md"
SMALL = [
    "--seeds", "0,1", "training.steps=2", "task.data.image_size=16", "training.batch=8",
    "task.model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
    "training.optimiser.warmup_steps=0", "training.log_every=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    dark_and_light(tmp_path / "images/train", 8)
    dark_and_light(tmp_path / "images/test", 8)
    code = blocks("python")[0]
    assert len(code.splitlines()) <= 22
    (tmp_path / "my_bias.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PLUGINS, raising=False)
    return tmp_path


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def page_command(line, folder, *more):
    words = shlex.split(line.replace("\\\n", " "))
    assert words[0] == "vlp"
    return subprocess.run(
        [sys.executable, "-m", "launch", *words[1:], *more],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.nightly
def test_the_page_leads_to_a_table(folder):
    line = blocks("bash")[1].replace("vit_small", "vit_tiny")
    line = re.sub(r"--seeds \S+ --epochs \S+", "", line.replace(",irpe-product", ""))
    done = page_command(line, folder, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^my-bias .*Holm", done.stdout, re.MULTILINE)
    out = folder / "runs" / "compare"
    latex = (out / "report.tex").read_text()
    assert "my-bias &" in latex
    assert "| my-bias |" in (out / "report.md").read_text()
    rows = list(csv.DictReader((out / "figures.csv").open()))
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("my-bias", "own", "rope-mixed") for seed in "01"
    ]
    trained = json.loads((out / "my-bias/0/model/config.json").read_text())["task"]["model"]
    assert trained["positions"][0]["name"] == "my-bias"
    assert trained["absolute"] == "drop"

    again = page_command(line, folder, *SMALL)  # nothing is done twice
    assert "6 runs, 6 of them done" in again.stdout
    wrong = page_command(line, folder, *SMALL, "training.steps=3")
    assert wrong.returncode == 2
    assert "holds a run of other settings" in wrong.stderr


def test_minutes_a_run_give_all_encodings_the_steps_of_the_slowest(folder, capsys):
    out = folder / "runs" / "compare"
    words = ["positions", "compare", "--model", "vit_tiny_patch16_224", "--encodings", "rope-mixed"]
    words += ["--train", "images/train", "--test", "images/test", "--reference", "rope-mixed"]
    words += ["--plan", "--minutes-a-run", "2"]
    small = [word for word in SMALL if word != "training.steps=2"]
    assert main([*words, *small]) == 0
    assert "timing 24 steps of rope-mixed" in capsys.readouterr().out
    stored = json.loads((out / "rate.json").read_text())
    assert 0 < stored["step_seconds"]["rope-mixed"] < 5
    stored["step_seconds"] = {"faster": 0.25, "rope-mixed": 0.5}
    (out / "rate.json").write_text(json.dumps(stored))
    assert main([*words, *small]) == 0
    assert "timing" not in (said := capsys.readouterr().out), "a resumed comparison has its steps"
    assert "240 steps a run: the slowest encoding, rope-mixed, takes 0.5 s a step" in said
    source = out / "comparison.yaml"
    runs = plan(load_config(source, AblationConfig), source)
    assert [run.read().training.steps for run in runs] == [240] * 2
    save_config(runs[0].read(), runs[0].folder / "config.yaml")
    assert main([*words, *small]) == 0, "its begun runs are its own"
    assert main([*words, *SMALL]) == 2
    assert "leave out --epochs and training.steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "vit_tny_patch16_224"], "model vit_tny_patch16_224: "),
        (["--model", "cait_xxs24_224"], "Cait mixes the logits of its heads"),
        (["--encodings", "sap"], r"unknown position encoding 'sap' \(did you mean 'sape'"),
        (["--encodings", "anchor"], "between an image and a text|cross-modal"),
        (["--encodings", "rope-mixed:k"], "rope-mixed has no choice of queries, keys and values"),
        (["--encodings", "irpe-product:q:k"], "give roles and each option once"),
        (["--encodings", "irpe-product:k:mode=biss"], "irpe-product.*mode.*biss"),
        (["--reference", "sape"], "unknown variants sape"),
        (["--seeds", "0,0"], "a seed is named twice"),
        (["--seeds", "0,[1"], "the value is not YAML"),
        (["training.step=3"], "did you mean 'training.steps'"),
        (["--plugin", "gone.py"], "plugin .*gone.py: there is no such file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(folder, change, message, capsys):
    words = ["positions", "compare", "--model", "vit_tiny_patch16_224", "--encodings", "rope-mixed"]
    data = ["--train", "images/train", "--test", "images/test"]
    assert main([*words, *data, *SMALL, *change]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"^error: .*({message})", said, re.DOTALL), said
    assert not (folder / "runs").exists()
