import functools
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch.pretrain
import launch.train_vision
from evaluation.probes.word_pointing import KindFigures, PointingResult
from evaluation.results import Figure
from evaluation.retrieval.retrieval import RetrievalResult
from launch import demo
from launch.cli.main import main, run_script, train
from vlp.lock import FolderLock
from vlp.training.run_folder import RunFolder, record_start

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 5.0  # many times what help takes on an idle machine, about 0.3 s


def without_torch(*arguments):
    """Exit code and output of a command, in a process of its own where PyTorch cannot be used."""
    program = (
        "import sys; from launch.cli.main import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as leaving: code = leaving.code\n"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - started < MOST_SECONDS
    *output, imported = ran.stdout.splitlines()
    assert imported == "False", "PyTorch was imported"
    return ran.returncode, "\n".join(output) + ran.stderr


@pytest.mark.parametrize("arguments", [(), ("evaluate", "retrieval")])
def test_help_is_answered_without_pytorch(arguments):
    code, output = without_torch(*arguments, "--help")
    assert code == 0
    assert output.lower().startswith(f"usage: {' '.join(('vlp', *arguments[:1]))}")


def test_closed_standard_streams_are_the_null_device():
    code = (
        "import sys; from vlp.command_line import _open_standard_streams as streams; streams()\n"
        "assert open('/dev/zero').fileno() > 2 and sys.stdin.read() == '' and print('x') is None\n"
        "import subprocess; sys.exit(subprocess.call(['sh', '-c', 'echo x && echo x >&2']))"
    )
    command = ["bash", "-c", 'exec 0<&- 1>&- 2>&-; exec "$@"', "bash", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_info_of_a_run_under_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["vlp", "train", "--config", "own.yaml"])
    folder = RunFolder(tmp_path / "run", resume=False)
    with FolderLock(folder.path):
        record_start(folder, 0, 60, 0, [("node", "CPU")] * 2, {"source 0": "abcdef"})
        figures = [
            {"step": n, "samples": 8 * n, "seconds": 3.0 * n, "loss/total": 2.0} for n in (10, 20)
        ]
        folder.log.write_text("".join(json.dumps(line) + "\n" for line in figures))
        assert main(["info", str(folder.path)]) == 0
    output = capsys.readouterr().out
    assert f"written by process {os.getpid()}" in output
    assert "20 of 60" in output
    assert "vlp train --config own.yaml" in output


@pytest.mark.parametrize("left", ["run/model", "run/checkpoints/step_10", "notes"])
def test_the_demo_keeps_an_earlier_demo_even_if_it_was_interrupted(
    left, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    model = demo.RUN / left
    model.mkdir(parents=True)
    monkeypatch.setattr(demo, "_run", lambda started: 0)
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert main(["demo"]) == 2
    assert "--fresh deletes it" in capsys.readouterr().err
    assert model.exists()
    assert main(["demo", "--fresh"]) == 0
    assert not model.exists()


@pytest.mark.parametrize("inherited", ["base.yaml", "nowhere.yaml"])
def test_an_inherited_task_is_trained_as_a_vision_model(inherited, tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text("task: {kind: classification}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"inherit: {inherited}\noutput: run\n")
    called = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    for run in (launch.pretrain.run_pretraining, launch.train_vision.run_vision):
        fake = functools.partial(lambda name, *_: called.append(name) or 0, run.__name__)
        monkeypatch.setattr(sys.modules[run.__module__], run.__name__, fake)
    assert train(child) == 0
    assert called == ["run_vision" if inherited == "base.yaml" else "run_pretraining"]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("pretrain", ["a.b=1", "--config", "x.yaml"], (Path("x.yaml"), ["a.b=1", "c=2"], False)),
        ("train_vision", ["--config", "configs/vision/cifar10_vit_tiny.yaml", "--resume"], None),
        ("finetune", ["vqa", "--config", "x.yaml", "--from", "DIR", "--resume"], (
            Path("x.yaml"), "vqa", ["init_from=DIR", "c=2"], True
        )),
    ],
)  # fmt: skip
def test_a_script_of_a_launcher_runs_the_same_training_as_one_rank(
    script, arguments, expected, monkeypatch
):
    module = importlib.import_module(f"launch.{script}")
    runs = {"pretrain": "pretraining", "train_vision": "vision", "finetune": "finetuning"}
    called = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(module, f"run_{runs[script]}", lambda *found: called.append(found) or 75)
    command = "finetune" if script == "finetune" else "train"
    assert run_script(command, ["--local_rank=3", *arguments, "c=2"]) == 75
    if expected is None:
        expected = (Path(arguments[1]), ["c=2"], True)
    assert called == [expected]


def test_configuration_keys_are_listed_by_a_pattern(capsys):
    assert main(["config", "keys", r"^training\.optimiser\.(epsilon|clip)$"]) == 0
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()[::2]] == [
        "training.optimiser.epsilon",
        "training.optimiser.clip",
    ]
    assert main(["config", "keys", "^task.model.absolute", "--of", "vision"]) == 0
    assert "task.model.absolute" in capsys.readouterr().out
    assert main(["config", "keys", "(["]) == 2
    assert "error: PATTERN '([': unterminated character set" in capsys.readouterr().err


def test_the_demos_training_shows_progress_and_logs_the_rest(tmp_path, capfd):
    code = "import sys; print('noise'); print('9/9, 2.0step/s', file=sys.stderr); sys.exit(%d)"
    log = tmp_path / "log"
    demo._run_quietly([sys.executable, "-c", code % 0], dict(os.environ), log)
    assert "noise" in log.read_text()
    assert "noise" not in (out := capfd.readouterr().out)
    assert "2.0step/s" in out
    with pytest.raises(subprocess.CalledProcessError):
        demo._run_quietly([sys.executable, "-c", code % 3], dict(os.environ), log)
    assert "noise" in capfd.readouterr().err
    code = "import os, signal; os.kill(os.getppid(), signal.SIGINT); print('saved', flush=True)"
    with pytest.raises(KeyboardInterrupt):
        demo._run_quietly([sys.executable, "-c", code], dict(os.environ), log)
    assert "saved" in log.read_text()


def test_ranks_that_cannot_share_a_batch_are_refused_before_any_starts(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = str(ROOT / "configs/pretrain/small.yaml")
    assert main(["train", "--config", config, "--ranks", "3"]) == 2
    assert "cannot be shared equally by 3 ranks" in capsys.readouterr().err


def test_finetune_names_tasks_of_plugins_and_their_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launch.cli.main.task_kinds", lambda: ("vqa", "counting"))
    with pytest.raises(SystemExit):
        main(["finetune", "--help"])
    assert "one of vqa, counting" in capsys.readouterr().out
    (tmp_path / "broken.py").write_text("1 +")
    (tmp_path / "run.yaml").write_text(f"plugins: [{tmp_path}/broken.py]")
    assert main(["finetune", "counted", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "broken.py: SyntaxError" in capsys.readouterr().err


def vlp(*arguments, **options):
    """Run a command in a process of its own."""
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, **{"capture_output": True} | options, text=True, check=False)


@pytest.mark.parametrize("command", ["config keys task", "evaluate vqa --help", "data stats gone"])
def test_a_plugin_of_the_environment_that_fails_is_named_by_every_command(command, tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ny = z")
    ran = vlp(*command.split(), env={"VLP_PLUGINS": str(tmp_path / "broken.py")})
    assert ran.returncode == 2
    place = f"{tmp_path}/broken.py"
    error = f"error: plugin {place}: NameError: name 'z' is not defined ({place}, line 2)\n"
    assert ran.stderr == error


@pytest.mark.parametrize("command", ["positions list", "config keys", "evaluate --help"])
def test_a_reader_that_ends_ends_a_command_without_a_word(command):
    reader, writer = os.pipe()
    os.close(reader)
    ran = vlp(*command.split(), capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "completed"),
    [("fine", "finetune"), ("evaluate ret", "retrieval"), ("data st", "stats")],
)
def test_the_shell_completes_names_of_commands(words, completed):
    shell = {"_VLP_COMPLETE": "complete_bash", "COMP_WORDS": f"vlp {words}"}
    ran = vlp(env=shell | {"COMP_CWORD": str(len(words.split()))})
    assert completed in ran.stdout.split(), ran.stderr
    # The tests may run without a shell among their parents.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = vlp("--show-completion", "bash", env=named)
    assert "_VLP_COMPLETE=complete_bash" in shown.stdout


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dual R@1", 0.80, None),
        ("dual R@1", 0.74, "R@1 74.0% is below 75%"),
        ("dual R@10", 0.94, "R@10 94.0% is below 95%"),
        ("rerank R@1", 0.79, "R@1 80.0% drops to 79.0% re-ranked"),
        ("colour", 0.79, "colour words point right in 79.0%, below 80%"),
        ("shape", 0.59, "shape words point right in 59.0%, below 60%"),
    ],
)
def test_every_promise_of_the_demo_is_checked(name, value, message):
    values = {"dual R@1": 0.80, "dual R@10": 0.99, "rerank R@1": 0.81, "rerank R@10": 0.99}
    values |= {"colour": 0.9, "shape": 0.8, name: value}
    kinds = {
        kind: KindFigures(10, Figure(values.pop(kind), 0, 1, 0.09), 0.4, Figure(1, 1, 1, 0.2), None)
        for kind in ("colour", "shape")
    }
    figures = {
        (key.split()[0], direction, key.split()[1]): Figure(share, share, share, 0.0)
        for key, share in values.items()
        for direction in demo.DIRECTIONS
    }
    problems = demo.shortfalls(
        RetrievalResult("retrieval", {}, ("val",), figures),
        PointingResult("pointing", {}, ("val",), {}, kinds=kinds),
    )
    assert any(message in problem for problem in problems) if message else not problems
