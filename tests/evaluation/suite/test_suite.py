import json
import os
import shutil
import tarfile

import pytest
import yaml
from pair_shards import annotated_shards, entailment_shards
from test_work_sharding import launch

import evaluation.suite.suite
from evaluation.__main__ import main
from evaluation.results import saved_figures
from evaluation.suite.suite import SuiteConfig, ZeroShotJob, job_key, run_suite
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene

IMAGE = encode_png(render(sample_scene(0, 3, image_size=16)))


@pytest.fixture(scope="module")
def data(tmp_path_factory, task_folders):
    root = tmp_path_factory.mktemp("suite")
    shutil.copytree(task_folders["plain"], root / "plain")
    shutil.copytree(task_folders["snli_ve"], root / "fine")
    scenes = [annotation(sample_scene(0, number, image_size=16)) for number in range(5)]
    annotated_shards(root / "scenes", scenes, IMAGE)
    entailment_shards(root / "claims", 8)
    return root


def suite(data, *more):
    tasks = [
        {"task": "retrieval", "model": str(data / "plain"), "shards": [str(data / "scenes")],
         "rerank": 2},
        {"task": "snli_ve", "shards": [str(data / "claims")], "batch": 3},
    ]  # fmt: skip
    return {"models": [{"name": "one", "model": str(data / "fine"), "tasks": tasks}, *more]}


def written(tmp_path, values):
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_everything_is_evaluated_once_and_kept(data, tmp_path, capsys, monkeypatch):
    other = {"name": "two", "model": str(data / "plain"),
             "tasks": [suite(data)["models"][0]["tasks"][0]]}  # fmt: skip
    file = written(tmp_path, suite(data, other))
    command = ["all", "--config", str(file), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("evaluated in") == 3
    summary = printed.split("All models")[1]
    entailment = json.loads((tmp_path / "out" / "one" / "snli_ve" / "snli_ve.json").read_text())
    accuracy = saved_figures(entailment).figures["accuracy"].percent()
    assert accuracy in summary
    assert "–" in summary, "the second model has no entailment"
    assert (tmp_path / "out" / "one" / "retrieval" / "retrieval.predictions.jsonl").is_file()
    before = (tmp_path / "out" / "all.md").read_text()

    monkeypatch.setattr(evaluation.suite.suite, "run_job", None)  # nothing may be evaluated again
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count(": reused") == 3
    assert (tmp_path / "out" / "all.md").read_text() == before


def test_an_interrupted_suite_goes_on(data, tmp_path, monkeypatch):
    config = SuiteConfig.model_validate(suite(data))
    ran, real = [], evaluation.suite.suite.run_job

    def interrupted(job, *more):
        ran.append(job.label)
        if job.label == "snli_ve" and len(ran) == 2:
            raise KeyboardInterrupt
        return real(job, *more)

    monkeypatch.setattr(evaluation.suite.suite, "run_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(config, tmp_path)
    assert not (tmp_path / "one" / "snli_ve").exists()
    result = run_suite(config, tmp_path)
    assert ran == ["retrieval", "snli_ve", "snli_ve"]
    assert set(result.results) == {("one", "retrieval"), ("one", "snli_ve")}


@pytest.mark.parametrize("change", ["model", "option", "shards", "damage"])
def test_what_a_result_depends_on_is_evaluated_anew(data, tmp_path, monkeypatch, change):
    folder = shutil.copytree(data / "fine", tmp_path / "model")
    shards = tmp_path / "claims"
    entailment_shards(shards, 3)

    def config(**options):
        tasks = [{"task": "snli_ve", "shards": [str(shards)], **options}]
        return SuiteConfig.model_validate(
            {"models": [{"name": "m", "model": str(folder), "tasks": tasks}]}
        )

    out, ran, real = tmp_path / "out", [], evaluation.suite.suite.run_job
    monkeypatch.setattr(
        evaluation.suite.suite, "run_job", lambda job, *more: ran.append(job) or real(job, *more)
    )
    run_suite(config(), out)
    (folder / "README.md").write_text("a card is none of the model's files")
    (folder / "evaluation").mkdir()
    run_suite(config(), out)
    assert len(ran) == 1
    options = {}
    if change == "model":
        (folder / "task.json").write_text((folder / "task.json").read_text() + " ")
    if change == "option":
        options = {"limit": 2}
    if change == "shards":
        for tar in shards.glob("*.tar"):  # the index stays the same
            tar.write_bytes(tar.read_bytes().replace(b'"entailment"', b'"neutral"   '))
    if change == "damage":
        (out / "m" / "snli_ve" / "snli_ve.json").write_text('{"task": ')
    run_suite(config(**options), out)
    assert len(ran) == 2


def test_one_that_fails_is_named_and_the_rest_goes_on(data, tmp_path, capsys):
    values = suite(
        data, {"name": "gone", "model": "./nowhere", "tasks": suite(data)["models"][0]["tasks"][1:]}
    )
    values["models"][0]["tasks"].insert(
        0, {"task": "vqa", "shards": [str(data / "scenes")], "name": "asked"}
    )
    values["models"][0]["tasks"].insert(1, {"task": "pointing", "shards": [str(data / "none")]})
    file = written(tmp_path, values)
    assert main(["all", "--config", str(file), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("failed: ")]
    assert len(errors) == 3
    assert "one/asked: " in errors[0]
    assert "is fine-tuned for snli_ve, not for vqa" in errors[0]
    assert "no such folder of shards" in errors[1]
    assert "gone/snli_ve: there is no model folder ./nowhere" in errors[2]
    assert "All models" in said.out
    assert "failed" in said.out.split("All models")[1]
    content = json.loads((tmp_path / "out" / "all.json").read_text())
    assert {one["name"] for one in content["results"]} == {"retrieval", "snli_ve"}
    assert len(content["failures"]) == 3


@pytest.mark.commands
def test_one_and_two_ranks_write_the_same(data, tmp_path):
    file = written(tmp_path, suite(data))
    command = ["all", "--config", str(file), "--out"]
    assert main([*command, str(tmp_path / "1")]) == 0
    first, second = launch(2, ["-m", "evaluation", *command, str(tmp_path / "2")])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "All models" in first.stdout
    assert second.stdout == ""
    for name in ("all.md", "all.json", "one/snli_ve/snli_ve.predictions.jsonl"):
        assert (tmp_path / "1" / name).read_text() == (tmp_path / "2" / name).read_text()


JOB = {"task": "retrieval", "shards": ["s"], "model": "m"}


def one(name="a", **more):
    return {"name": name, "tasks": [JOB | more]}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([one(task="guessing")], "'retrieval'"),
        ([one(reranc=3)], "'rerank'"),
        ([one(colour=3)], "it has task, shards, name"),
        ([one(rerank_by="match")], "set rerank"),
        ([one(task="zeroshot", classes="c", match_by="match")], "set match"),
        ([one(task="grounding", by="similarity", layer=1)], "Grad-CAM"),
        ([one(temperature=0.1)], "temperature"),
        ([one(temperature=0.1, rerank=2, rerank_by="match")], "temperature"),
        ([{"name": "a", "tasks": [JOB, JOB]}], "`name`"),
        ([{"name": "a", "tasks": [{"task": "swaps", "shards": ["s"]}]}], "set `model`"),
        ([one(), one()], "are called 'a'"),
        ([one(), one("b", shards=["t"])], "differs in task, shards or limit"),
        ([one("../a")], "name"),
        ([], "models"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, capsys, models, message):
    file = written(tmp_path, {"models": models})
    assert main(["all", "--config", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert str(file) in error


@pytest.mark.parametrize("packed", [False, True])
def test_data_without_an_index_are_known_by_their_files(data, tmp_path, packed):
    folder, classes = tmp_path / "images", tmp_path / "classes.txt"
    classes.write_text("red\nblue\n")
    place = tmp_path / "images.tar" if packed else folder

    def key():
        if packed:
            with tarfile.open(place, "w") as tar:
                tar.add(folder, "images")
            os.utime(place, ns=(0, folder.joinpath("red", "0.png").stat().st_mtime_ns))
        job = ZeroShotJob(shards=(str(place),), classes=str(classes))
        return job_key(job, data / "plain", {})

    for colour in ("red", "blue"):
        (folder / colour).mkdir(parents=True)
        (folder / colour / "0.png").write_bytes(IMAGE)
    first = key()
    assert key() == first
    (folder / "red" / "0.png").write_bytes(IMAGE[::-1])
    os.utime(folder / "red" / "0.png", ns=(0, 10**9))
    changed = key()
    (folder / "blue" / "1.png").write_bytes(IMAGE * 40)
    assert len({first, changed, key()}) == 3
