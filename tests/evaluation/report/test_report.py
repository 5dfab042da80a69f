import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
from pair_shards import annotated_shards, entailment_shards

import vlp
from evaluation.__main__ import main
from evaluation.downstream.task_evaluation import evaluate_task
from evaluation.latex import latex_table
from evaluation.options import EvalOptions
from evaluation.report.html_page import page, retrieval_cases, training_curves
from evaluation.report.sources import read_sources
from evaluation.results import Figure, Table
from evaluation.retrieval.gallery import Gallery
from evaluation.retrieval.retrieval import evaluate_retrieval
from vlp.data.schema import Annotation
from vlp.models.pretrained.local_copy import results_folder
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import load_task


def logged(step, total, itm, rate, **more):
    return {"step": step, "loss/total": total, "loss/itm": itm, "learning_rate": rate, **more}


LOG = [
    logged(10, 3.0, 1.0, 1e-4, samples_per_second=50),
    logged(20, None, 0.8, 9e-5),
    {"step": 20, "validation/accuracy": 0.61},
    logged(30, 2.0, 0.7, 8e-5, samples_per_second=60),
    logged(40, 1.5, 0.6, 7e-5, samples_per_second=60),
]
TRAINING = {
    "ended": "finished", "step": 40, "total_steps": 40, "seconds": 3725.0,
    "samples_per_second": 55.0,
    "skipped_samples": {"no text": 3}, "skipped_examples": {"no text": ["shard-0.tar, <b>7</b>"]},
    "best": {"step": 20, "accuracy": 0.61}, "ranks": 1, "device": "CPU", "non_finite_steps": 0,
}  # fmt: skip


class Page(HTMLParser):
    """What a reader of the page meets: tags, texts, and whether all are closed in their order."""

    VOID = frozenset(("meta", "img", "br", "path", "circle"))

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, model_folder, scene_shards):
    run = tmp_path_factory.mktemp("runs") / "ace_small"
    shutil.copytree(model_folder, run / "model", ignore=shutil.ignore_patterns("evaluation"))
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    (run / "report.json").write_text(json.dumps(TRAINING))
    (run / "config.yaml").write_text("data: {sources: [{path: shards/x}]}\ntraining: {batch: 7}\n")
    found = evaluate_retrieval(
        vlp.load(str(run / "model")), [scene_shards], rerank=4, options=EvalOptions(resamples=50)
    )
    found.save(results_folder(run / "model"))
    return run, found


@pytest.fixture(scope="module")
def entailment(tmp_path_factory, task_folders):
    root = tmp_path_factory.mktemp("entailment")
    task, shards = load_task(task_folders["snli_ve"]), entailment_shards(root / "shards", 12)
    found = evaluate_task(task, [shards], options=EvalOptions(resamples=50))
    found.save(root / "results")
    return root / "results", found


def test_a_page_shows_runs_side_by_side_and_needs_nothing_else(
    pretrained, entailment, scene_shards
):
    run, recall = pretrained
    results, accuracy = entailment
    html = page(read_sources([run, results]), [scene_shards], cases=2)
    made = Page(html)
    assert recall.recall("rerank", "text_to_image", 1).percent() in made.text
    assert accuracy.figures["accuracy"].percent() in made.text
    assert "ace_small, re-ranked top 4" in made.text
    assert all(word in made.text for word in ("step 40", "1.03 h", "no text", "shards/x"))
    assert "retrieval among 21 images" in made.text

    # Nothing is fetched: every address holds its image.
    for tag, attributes in made.tags:
        for name in ("src", "href"):
            if name in attributes:
                assert attributes[name].startswith("data:image/"), (tag, attributes[name])
    assert "url(" not in html
    assert "@import" not in html
    images = [attributes for tag, attributes in made.tags if tag == "img"]
    assert len(images) > 20, "curves, retrievals and anchors of each word"
    assert all(attributes["alt"].strip() for attributes in images)


def test_what_files_say_is_text_and_never_markup(pretrained, tmp_path):
    hostile = '<script>alert("1")</script>'
    figures = {hostile: Figure(0.5, 0.4, 0.6, 0.0)._asdict()}
    results = tmp_path / "<img src=x>"
    results.mkdir()
    for name, content in {
        "vqa.json": {"task": "vqa", "shards": [hostile], "items": 4, "figures": figures},
        "log.jsonl": {"step": 1, f"loss/{hostile.replace('/', '')}": 1.0, "loss/$x_": None},
        "config.yaml": {"data": {"sources": [{"path": hostile}]}},
    }.items():
        (results / name).write_text(json.dumps(content))
    made = Page(page(read_sources([results, pretrained[0]])))
    assert not [tag for tag, _ in made.tags if tag == "script"]
    assert all(a["src"].startswith("data:image/svg") for tag, a in made.tags if tag == "img")
    assert made.text.count(hostile) >= 3
    assert "<img src=x>" in made.text


def test_a_hostile_caption_is_text(model_folder, tmp_path):
    hostile = "a red circle <img src=x onerror=alert(1)>"
    png = encode_png(render(sample_scene(0, 1, image_size=16)))
    shards = annotated_shards(tmp_path / "s", [Annotation(captions=[hostile])] * 2, png)
    run = tmp_path / "run"
    shutil.copytree(model_folder, run, ignore=shutil.ignore_patterns("evaluation"))
    made = Page(page(read_sources([run]), [shards], cases=1))
    assert hostile in made.text
    assert not [a for tag, a in made.tags if tag == "img" and "onerror" in a]


def test_example_retrievals_are_the_last_and_first_ranks_of_the_evaluation(
    pretrained, scene_shards
):
    run, found = pretrained
    gallery = Gallery(vlp.load(str(run / "model")), [scene_shards], EvalOptions(batch=5))
    texts = [Page(part).text for part in retrieval_cases(gallery, 3)]
    best = texts.index("Best, text → image")
    assert texts[0] == "Worst, text → image"
    ranks = [r["ranks"]["dual"] for r in found.predictions if r["direction"] == "text_to_image"]
    for part, expected in ((texts[:best], max(ranks)), (texts[best:], min(ranks))):
        shown = [int(n) for n in re.findall(r"rank of its image: (\d+) of 21", " ".join(part))]
        assert shown[0] == expected
        assert len(shown) == 3
        assert " ".join(part).count(", similarity") == 9


def test_curves_have_every_part_and_a_gap_where_a_number_is_missing():
    curves = training_curves(LOG)
    assert list(curves) == ["learning rate", "loss", "samples per second", "validation"]
    assert list(curves["loss"]) == ["itm", "total"]
    assert curves["loss"]["itm"] == [(10, 1.0), (20, 0.8), (30, 0.7), (40, 0.6)]
    assert math.isnan(curves["loss"]["total"][1][1])
    assert training_curves([]) == {}


def test_damaged_and_unfinished_files_are_left_out_with_a_word(tmp_path):
    lines = "\n".join(json.dumps(line) for line in LOG)
    (tmp_path / "log.jsonl").write_text(lines + '\n{"step": 50, "loss/to')
    (tmp_path / "report.json").write_text('{"ended": ')
    (tmp_path / "vqa.json").write_text('{"task": "vqa", "figures": {"accuracy": {"value": "x", ')
    nan = Figure(math.nan, 0.4, 0.6, 0.0)._asdict()
    (tmp_path / "foils.json").write_text(json.dumps({"task": "foils", "figures": {"all": nan}}))
    (source,) = read_sources([tmp_path])
    assert len(source.log) == len(LOG)
    names = {line.split()[0].rpartition("/")[2].rstrip(":") for line in source.problems}
    assert names == {"log.jsonl", "report.json", "vqa.json", "foils.json"}
    made = Page(page(read_sources([tmp_path])))
    assert "the last logged step is 40" in made.text


def test_the_command_writes_page_markdown_and_latex(pretrained, tmp_path, capsys):
    run, found = pretrained
    files = {name: tmp_path / "made" / name for name in ("a.html", "a.md", "a.tex")}
    given = [str(run), "--out", str(files["a.html"]), "--markdown", str(files["a.md"])]
    assert main(["report", *given, "--latex", str(files["a.tex"])]) == 0
    assert capsys.readouterr().out.split() == [str(file) for file in files.values()]
    cell = found.recall("dual", "image_to_text", 5).percent()
    assert all(cell in files[name].read_text() for name in ("a.md", "a.tex"))
    assert cell in Page(files["a.html"].read_text()).text
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main(["report", str(run), "--out", str(files["a.md"] / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", str(run), "--shards", str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err


def test_latex_escapes_what_is_special_and_keeps_its_columns():
    table = Table(
        "A_b & 100 %",
        ["", "x → y", "IoU ≥ 0.5"],
        [["[a]_1 {c}", "61.3 [55.1, 67.2]", "#1$2"], ["paper, X: ACE-RPE + L_ace", "1.0", ""]],
        [r"a\b ~ ^"],
    )
    drawn = latex_table(table)
    assert r"{A\_b \& 100 \%. a\textbackslash{}b \textasciitilde{} \textasciicircum{}}" in drawn
    assert r"{}[a]\_1 \{c\} & 61.3 [55.1, 67.2] & \#1\$2 \\" in drawn
    assert r"$\rightarrow$" in drawn
    bare = re.sub(r"\\[\\{}&%$#_]", "", drawn)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    body = bare[bare.index(r"\toprule") : bare.index(r"\bottomrule")]
    assert [line.count("&") for line in body.splitlines() if "&" in line] == [2, 2, 2]
