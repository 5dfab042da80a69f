import gzip
import json
import math

import pytest
import torch
from pair_shards import annotated_shards
from PIL import Image
from question_shards import photo, question, write_shards

import vlp
from evaluation.__main__ import main
from evaluation.downstream.predict import predict, predict_item
from evaluation.downstream.submissions import (
    write_captions,
    write_nlvr2,
    write_refcoco,
    write_snli_ve,
    write_vqa,
)
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation, Expression
from vlp.data.shards.shard_reader import ShardWriter
from vlp.models.decoder import answer_likelihood
from vlp.models.vlp import VLPModel
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import load_task, start_parts
from vlp.tasks.pair_classification.task import Nlvr2Config, PairClassification

IMAGE = encode_png(render(sample_scene(0, 3, image_size=16)))


@pytest.fixture(scope="module")
def folders(task_folders):
    return {name: str(folder) for name, folder in task_folders.items()}


def predicted(model, shards, out, *more):
    return main(["predict", "--model", model, "--shards", str(shards), "--out", str(out), *more])


def submission(model, shards, out, *more):
    assert predicted(model, shards, out, *more) == 0
    lines = out.read_text().splitlines()
    if out.suffix == ".csv":
        return [line.split(",") for line in lines]
    return json.loads(lines[0]) if out.suffix == ".json" else list(map(json.loads, lines))


def test_unlabelled_questions_and_images_are_answered_and_captioned(folders, tmp_path):
    asked = {"image_id": "000042", "questions": [question(7, "is it red?", {})]}
    shards = write_shards(tmp_path / "test", [(photo(), Annotation(**asked))])
    (row,) = submission(folders["vqa"], shards, tmp_path / "out" / "results.json")
    assert row == {"question_id": 7, "answer": row["answer"]}
    (line,) = submission(folders["vqa"], shards, tmp_path / "r.jsonl", "--format", "jsonl")
    assert line["answer"] == row["answer"]
    assert set(line) == {"key", "question_id", "question", "answer", "image"}
    (row,) = submission(folders["caption"], shards, tmp_path / "c.json")
    assert row["image_id"] == 42
    assert isinstance(row["caption"], str)


def test_snli_ve_and_nlvr2(folders, tmp_path):
    pairs = [Annotation(hypothesis="a red circle", pairID=f"{n}.jpg#0r1c") for n in range(3)]
    shards = annotated_shards(tmp_path / "pairs", pairs, IMAGE)
    rows = submission(folders["snli_ve"], shards, tmp_path / "test.jsonl")
    assert [row["pairID"] for row in rows] == [one.pairID for one in pairs]
    own = predict(folders["snli_ve"], [shards]).rows
    assert [row["label"] for row in rows] == [row["prediction"] for row in own]
    first = predict(folders["snli_ve"], [shards], EvalOptions(limit=2)).rows
    assert [row["key"] for row in first] == [row["key"] for row in own[:2]]
    shards = tmp_path / "nlvr2"
    with ShardWriter(shards, samples_per_shard=5) as writer:
        for n in range(3):
            said = Annotation(statement="two red circles", identifier=f"test1-0-0-{n}")
            writer.write(f"{n}", IMAGE, "png", said, IMAGE)
    lines = submission(folders["nlvr2"], shards, tmp_path / "test.csv")
    assert [line[0] for line in lines] == [f"test1-0-0-{n}" for n in range(3)]
    assert {line[1] for line in lines} <= {"True", "False"}


def test_boxes_of_expressions_need_no_task(folders, tmp_path, capsys):
    said = {"text": "a red circle", "box": [1, 1, 4, 4], "ref_id": 5}
    says = [Expression(id=str(number), **said) for number in (30, 31)]
    proposals = [[0.0, 0, 8, 8], [8.0, 8, 8, 8]]
    asked = [Annotation(expressions=says, proposals=proposals)]
    shards = annotated_shards(tmp_path / "asked", asked, IMAGE)
    rows = submission(folders["plain"], shards, tmp_path / "boxes.json")
    assert [row["sent_id"] for row in rows] == [30, 31]
    assert all(row["box"] in proposals for row in rows)
    asked = [Annotation(expressions=says)]
    shards = annotated_shards(tmp_path / "no_proposals", asked, IMAGE)
    assert predicted(folders["plain"], shards, tmp_path / "none.json") == 2
    assert "has no proposals to choose from" in capsys.readouterr().err
    first, _ = submission(folders["plain"], shards, tmp_path / "n.jsonl", "--format", "jsonl")
    assert (first["ref_id"], first["box"]) == (5, None)


@pytest.fixture
def files(tmp_path):
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(photo(colour))
    return [str(tmp_path / "red.png"), str(tmp_path / "blue.png")]


def test_labels_of_files_with_probabilities(folders, files, capsys):
    said = predict_item(folders["nlvr2"], files, "two red circles")
    assert sorted(name for name, _ in said.answers) == ["False", "True"]
    assert sum(share for _, share in said.answers) == pytest.approx(1)
    assert said.answers[0][1] >= said.answers[1][1]
    swapped = predict_item(folders["nlvr2"], files[::-1], "two red circles")
    assert dict(swapped.answers) != dict(said.answers), "left and right are told apart"
    command = ["predict", "--model", folders["snli_ve"], "--image", files[0]]
    assert main([*command, "--text", "a red circle"]) == 0
    printed = capsys.readouterr().out.split()
    assert set(printed[::2]) == {"entailment", "neutral", "contradiction"}


def test_an_answer_of_a_file_is_that_of_the_shards_with_its_likelihood(folders, files):
    said = predict_item(folders["vqa"], files[:1], "is it red?")
    rows = predict(folders["vqa"], [folders["shards"]]).rows
    same = [row for row in rows if row["key"] == "000" and row["question"] == "is it red?"]
    ((answer, share),) = said.answers
    assert answer == same[0]["answer"]
    task = load_task(folders["vqa"])
    pixels = task.preprocess(Image.open(files[0]))[None]
    words = task.text(["is it red?"])
    with torch.no_grad():
        crossed = task.model.cross(
            task.model.encode_image(pixels), task.model.encode_text(*words), need_image=False
        )
        memory = task.decoder.remember(crossed.text, words.attention_mask)
        ids, embedding = task.answer_text([answer]).text_ids, task.model.text_encoder.embedding
        likelihood = answer_likelihood(task.decoder, memory, ids, embedding, task.text.pad_id)
    assert math.log(share) == pytest.approx(float(likelihood.log_probability), abs=1e-4)


def test_captions_and_matches_of_files(folders, files):
    ((text, share),) = predict_item(folders["caption"], files[:1]).answers
    rows = predict(folders["caption"], [folders["shards"]]).rows
    assert text == rows[0]["caption"]
    assert 0 < share <= 1
    said = dict(predict_item(folders["plain"], files[:1], "a red circle").answers)
    loaded = vlp.load(folders["plain"])
    with torch.no_grad():
        odds = loaded.model.match(
            loaded.model.encode_image(loaded.preprocess(Image.open(files[0]))[None]),
            loaded.model.encode_text(*loaded.text(["a red circle"])),
        )
    assert said["matches"] == pytest.approx(float(odds.sigmoid()), abs=1e-6)
    rounded = predict_item(folders["plain"], files[:1], "a red circle", precision="bf16")
    assert 0 < abs(dict(rounded.answers)["matches"] - said["matches"]) < 0.05


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nlvr2", "--image red.png --text a", "takes 2 images, not 1"),
        ("snli_ve", "--image red.png", "needs a text"),
        ("caption", "--image red.png --text a", "leave --text out"),
        ("vqa", "--image gone.png --text a", "gone.png: cannot be read"),
        ("vqa", "--image red.png --text a --batch 2", "--batch is for --shards"),
        ("vqa", "", "give either --shards and --out"),
        ("vqa", "--shards x", "--shards and --out go together"),
        ("vqa", "--shards x --out y --text a", "--text is for --image"),
        ("vqa", "--shards x --out .", "is a folder"),
        ("snli_ve", "--shards unnumbered --out y", "has no pairID"),
        ("vqa", "--shards unnumbered --out y", "is not a number"),
        ("plain", "--shards unnumbered --out y", "is not fine-tuned for a task"),
        ("nowhere", "--shards unnumbered --out y", "there is no model folder"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    folders, files, tmp_path, capsys, monkeypatch, kind, options, message
):
    monkeypatch.chdir(tmp_path)
    asked = [question("scenes-1-what", "what is it?", {})]
    scene = Annotation(hypothesis="a red circle", questions=asked)
    annotated_shards(tmp_path / "unnumbered", [scene], IMAGE)
    model = folders.get(kind, "./nowhere")
    assert main(["predict", "--model", model, *options.split()]) == 2
    *_, error = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "y").exists()


@pytest.fixture(scope="module")
def panelled(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("panelled")
    parts, _ = start_parts(folders["plain"], {})
    values = {"data": {"train": ["unused"]}, "images": 1, "panels": 3}
    task = PairClassification(Nlvr2Config.model_validate(values), parts)
    task.save_model(root / "model", task.state_dict())
    strip = Image.new("RGB", (48, 16))
    for left, colour in zip((0, 16, 32), ("red", "green", "blue")):
        strip.paste(colour, (left, 0, left + 16, 16))
    strip.save(root / "strip.png")
    return str(root / "model"), root / "strip.png", task.eval()


def test_a_image_of_several_panels_is_one_file(panelled, tmp_path, capsys):
    folder, strip, task = panelled
    said = Annotation(statement="a red circle", identifier="1572-0")
    shards = annotated_shards(tmp_path / "strips", [said], strip.read_bytes())
    pairs = task.dataset([shards])
    with torch.no_grad():
        inputs = pairs.collate([pairs.make(pairs.items.read(0), 0)])
        wanted = dict(zip(("False", "True"), task.logits(inputs).softmax(-1)[0].tolist()))
    found = predict_item(folder, [strip], "a red circle", "cpu")
    assert dict(found.answers) == pytest.approx(wanted, abs=1e-6)
    files = ["--image", *[str(strip)] * 3]
    assert main(["predict", "--model", folder, *files, "--text", "a red circle"]) == 2
    error = capsys.readouterr().err
    assert "takes 1 image with 3 panels, not 3: write --image FILE" in error


def test_permutations_are_named_by_their_keys(panelled, tmp_path, capsys):
    folder, strip, _ = panelled

    def submitted(*keys):
        shards = tmp_path / "-".join(keys)
        with ShardWriter(shards, samples_per_shard=5) as writer:
            for key in keys:
                identifier = key.split("-", 1)[1].rsplit("-", 1)[0]
                said = Annotation(statement="a red circle", identifier=identifier)
                writer.write(key, strip.read_bytes(), "png", said)
        return [row[0] for row in submission(folder, shards, tmp_path / "out.csv")]

    assert submitted("dev-1572-0-0", "dev-1573-0-0") == ["1572-0", "1573-0"]
    # As lil-lab/nlvr's nlvr/metrics_images.py reads them: split-identifier-permutation.
    keys = ["dev-1572-0-0", "dev-1572-0-1", "dev-1572-0-5"]
    assert submitted(*keys) == keys
    twice = [str(tmp_path / "-".join(keys))] * 2
    command = ["predict", "--model", folder, "--shards", *twice]
    assert main([*command, "--out", str(tmp_path / "twice.csv")]) == 2
    assert "predicted more than once" in capsys.readouterr().err


def test_a_score_that_was_never_trained_answers_nothing(folders, files, monkeypatch):
    monkeypatch.setattr(VLPModel, "match_is_trained", False)
    with pytest.raises(EvaluationError, match=r"never trained to match \(no ITM\)"):
        predict_item(folders["plain"], files[:1], "a red circle")


def test_nlvr2_as_the_official_script_reads_it(shared, tmp_path):
    with gzip.open(shared / "data_tasks/nlvr2/dev.json.gz", "rt") as file:
        official = [json.loads(line) for line in file]
    path = tmp_path / "dev.csv"
    rows = [{"identifier": row["identifier"], "label": row["label"] == "True"} for row in official]
    write_nlvr2(path, rows)
    read = dict(line.split(",") for line in path.read_text().splitlines())
    assert read == {row["identifier"]: row["label"] for row in official}


def test_refcoco_by_expression(tmp_path):
    write_refcoco(tmp_path / "s.json", [{"sent_id": "3", "box": (1, 2, 3.5, 4)}])
    assert json.loads((tmp_path / "s.json").read_text()) == [{"sent_id": 3, "box": [1, 2, 3.5, 4]}]


BOX = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("write", "rows", "message"),
    [
        (write_vqa, [{"question_id": "a-1", "answer": "no"}], "'a-1' is not a number"),
        (write_vqa, [{"question_id": True, "answer": "no"}], "True is not a number"),
        (write_vqa, [{"question_id": "²", "answer": "no"}], "'²' is not a number"),
        (write_vqa, [{"answer": "no"}], "has no question_id"),
        (write_vqa, [{"question_id": n, "answer": ""} for n in (1, "1", 2)], "once: question_id 1"),
        (write_captions, [{"image_id": "a", "caption": ""}], "image_id 'a' is not a number"),
        (write_captions, [{"image_id": 1, "caption": ""}] * 2, "more than once: image_id 1"),
        (write_nlvr2, [{"identifier": "a-1", "label": "True"}], "'True' of a-1 is not True or"),
        (write_nlvr2, [{"identifier": "a,b", "label": True}], "does not fit into a CSV line"),
        (write_nlvr2, [{"identifier": "", "label": True}], "an empty identifier"),
        (write_nlvr2, [{"identifier": "a", "label": True}] * 2, "more than once: identifier a"),
        (write_snli_ve, [{"pairID": "a", "label": "-"}], "label '-' of a is not one of entailment"),
        (write_snli_ve, [{"pairID": "a", "label": "neutral"}] * 2, "more than once: pairID a"),
        (write_refcoco, [{"sent_id": 1, "box": [1, 2, 0, 3]}], "of sent_id 1 must be"),
        (write_refcoco, [{"sent_id": 1, "box": [1, 2, float("nan"), 3]}], "of sent_id 1 must be"),
        (write_refcoco, [{"sent_id": 1, "box": None}], "box None of sent_id 1"),
        (write_refcoco, [{"sent_id": 1, "box": BOX}, {"id": 2, "box": BOX}], "has no sent_id"),
        (write_refcoco, [{"sent_id": 7, "box": BOX}] * 2, "more than once: sent_id 7"),
    ],
)
def test_rows_that_a_benchmark_would_refuse(tmp_path, write, rows, message):
    path = tmp_path / "out"
    path.write_text("from before")
    with pytest.raises(EvaluationError) as problem:
        write(path, rows)
    assert message in str(problem.value)
    assert str(path) in str(problem.value)
    assert path.read_text() == "from before"
