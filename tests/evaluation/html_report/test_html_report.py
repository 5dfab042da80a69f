"""Reports: the figures that were written, beside the right rows, in a page that needs no other."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from pair_shards import annotated_shards, entailment_shards, tiny_folder
from PIL import Image

import vlp
from evaluation.__main__ import main
from evaluation.ablations.paper_results import RECALLS, TABLES, paper_tables, split_of
from evaluation.downstream import evaluate_task
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.grounding.heatmaps import OWN_BOX, anchors_over, data_uri, heat_over, phrase_heat
from evaluation.html_report.cases import retrieval_cases, task_cases
from evaluation.html_report.curves import Chart, svg, training_charts
from evaluation.html_report.html_report import make_report
from evaluation.html_report.sources import Source, read_result, read_sources, short_names
from evaluation.html_report.tables import result_tables
from evaluation.latex import latex_table
from evaluation.results import Figure, Table
from evaluation.retrieval.gallery import Gallery
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from vlp.data.scenes.render import encode_png, render
from vlp.data.scenes.sample import sample_scene
from vlp.data.schema import Annotation
from vlp.tasks.downstream.init_from import start_parts
from vlp.tasks.pair_classification.task import PairClassification, SnliVeConfig

LOG = [
    {
        "step": 10,
        "loss/total": 3.0,
        "loss/itm": 1.0,
        "learning_rate": 1e-4,
        "samples_per_second": 50,
    },
    {"step": 20, "loss/total": None, "loss/itm": 0.8, "learning_rate": 9e-5},
    {"step": 20, "validation/accuracy": 0.61},
    {
        "step": 30,
        "loss/total": 2.0,
        "loss/itm": 0.7,
        "learning_rate": 8e-5,
        "samples_per_second": 60,
    },
    {
        "step": 40,
        "loss/total": 1.5,
        "loss/itm": 0.6,
        "learning_rate": 7e-5,
        "samples_per_second": 60,
    },
]
POINTING = ["Pointing of words"]
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

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, model_folder, scene_shards):
    """A run folder with a model, a log, and retrieval results of its own."""
    run = tmp_path_factory.mktemp("runs") / "ace_small"
    shutil.copytree(model_folder, run / "model", ignore=shutil.ignore_patterns("evaluation"))
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    (run / "report.json").write_text(json.dumps(TRAINING))
    (run / "config.yaml").write_text("data: {sources: [{path: shards/x}]}\ntraining: {batch: 7}\n")
    found = evaluate_retrieval(vlp.load(str(run / "model")), [scene_shards], rerank=4, resamples=50)
    found.save(run / "model" / "evaluation")
    return run, found


@pytest.fixture(scope="module")
def entailment(tmp_path_factory):
    """A folder of results of a fine-tuned model, and its shards."""
    root = tmp_path_factory.mktemp("entailment")
    parts, _ = start_parts(str(tiny_folder(root / "tiny")), {})
    task = PairClassification(SnliVeConfig.model_validate({"data": {"train": ["unused"]}}), parts)
    shards = entailment_shards(root / "shards", 12)
    found = evaluate_task(task, [shards], resamples=50)
    found.save(root / "results")
    return root / "results", found, shards


def test_a_page_shows_runs_side_by_side_and_needs_nothing_else(
    pretrained, entailment, scene_shards
):
    run, recall = pretrained
    results, accuracy, claims = entailment
    report = make_report([run, results], [scene_shards, claims], cases=2)
    html = report.html()
    page = Page(html)
    assert recall.recall("rerank", "text_to_image", 1).percent() in page.text
    assert accuracy.figures["accuracy"].percent() in page.text
    assert "ace_small, re-ranked top 4" in page.text
    for word in ("finished at step 40", "1 h 02 min", "no text", "shards/x", "batch 7"):
        assert word in page.text, word
    titles = {part.source.name: [title for title, _ in part.cases] for part in report.runs}
    assert titles == {
        "ace_small": ["Cases: retrieval among 21 images, dual encoder"],
        "results": ["Cases: visual entailment"],
    }
    assert len(report.runs[0].anchors) == 2
    assert len(report.runs[0].maps) == 2, "the generated corpus has expressions"
    assert any("no model folder" in word for word in report.runs[1].source.missing)

    # Nothing is fetched: every address is within the page, or holds its image.
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            if name in attributes:
                assert attributes[name].startswith(("data:image/", "#")), (tag, attributes[name])
    assert "url(" not in html
    assert "@import" not in html
    # And it can be read with eyes closed.
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) > 20
    assert all(attributes["alt"].strip() for attributes in images)
    assert all(a["aria-label"] for tag, a in page.tags if tag == "svg" and "role" in a)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [a["href"][1:] for tag, a in page.tags if tag == "a"]
    assert set(links) <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_what_files_say_is_text_and_never_markup(tmp_path, entailment):
    hostile = "<script>alert(1)</script>"
    figures = {hostile: Figure(0.5, 0.4, 0.6, 0.0)._asdict()}
    results = tmp_path / "<img src=x>"
    results.mkdir()
    found = {"task": "vqa", "shards": [hostile], "items": 4, "figures": figures}
    (results / "vqa.json").write_text(json.dumps(found))
    page = Page(make_report([results]).html())
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert hostile in page.text


def test_retrieval_cases_are_the_last_ranks_of_the_evaluation(pretrained, scene_shards):
    run, found = pretrained
    gallery = Gallery(vlp.load(str(run / "model")), [scene_shards], batch=5)
    groups = {group.title: group.cases for group in retrieval_cases(gallery, 3)}
    for arrow, direction in (("text → image", "text_to_image"), ("image → text", "image_to_text")):
        ranks = [row["ranks"]["dual"] for row in found.predictions if row["direction"] == direction]
        for title, expected in (("Worst", max(ranks)), ("Best", min(ranks))):
            first = dict(groups[f"{title}, {arrow}"][0].lines)
            said = first["rank of its image" if "text →" in arrow else "rank of the first"]
            assert int(said.split(" of ")[0]) == expected
    worst = groups["Worst, text → image"]
    assert len(worst) == 3
    assert all(len(case.found) == 3 and len(case.images) == 1 for case in worst)


def test_claim_cases_are_wrong_and_right_with_the_truth(entailment, tmp_path):
    results, found, shards = entailment
    (result,) = read_sources([results])[0].results
    # Samples of other shards with the same keys are not taken for these.
    png = encode_png(render(sample_scene(0, 1, image_size=16)))
    keys = [Annotation(hypothesis="something else", label="neutral")] * 3
    other = annotated_shards(tmp_path / "other", keys, png)
    worst, best = task_cases(result, [other, shards], 3)
    # A sentence may be asked of two images, with two truths.
    rows = {(row["text"], row["prediction"], row["label"]) for row in found.predictions}
    for group, right in ((worst, False), (best, True)):
        assert group.cases
        for case in group.cases:
            lines = dict(case.lines)
            assert (lines["said"] == lines["truth"]) is right
            assert (lines["text"], lines["said"], lines["truth"]) in rows
            assert len(case.images) == 1
    with pytest.raises(EvaluationError, match="holds none of the items"):
        task_cases(result, [other], 3)


def test_a_grounding_case_shows_the_map_and_the_box(pretrained, scene_shards, tmp_path):
    run, _ = pretrained
    loaded = vlp.load(str(run / "model"))
    found = evaluate_grounding(loaded, [scene_shards], limit=8, resamples=50)
    found.save(tmp_path / "evaluation")
    (result,) = read_sources([tmp_path])[0].results
    groups = task_cases(result, [scene_shards], 2, loaded)
    assert [len(one.images) for group in groups for one in group.cases] == [2] * 4
    # The map is the evaluation's: its strongest patch is where the evaluation pointed.
    gallery = Gallery(loaded, [scene_shards], limit=3)
    images = {gallery.image(n).key: gallery.image(n).image for n in range(3)}
    for row in found.predictions[:3]:
        image = images[row["key"]]
        heat = phrase_heat(loaded, image, row["text"])
        down, along = np.unravel_index(heat.argmax(), heat.shape)
        x, y = (along + 0.5) * image.width / 4, (down + 0.5) * image.height / 4
        assert row["point"] == pytest.approx([x, y])


def test_the_papers_rows_stand_only_beside_the_same_data_unless_asked(tmp_path):
    figures = [
        {"stage": "dual", "direction": d, "name": f"R@{k}", **Figure(0.5, 0.4, 0.6, 0.01)._asdict()}
        for d in ("text_to_image", "image_to_text")
        for k in (1, 5, 10)
    ]
    for folder, shards in (("own", "shards/scenes/val"), ("f30k", "shards/flickr30k/test")):
        found = {"task": "retrieval", "shards": [shards], "images": 9, "figures": figures}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "retrieval.json").write_text(json.dumps(found))

    def table(folder, paper="same"):
        return result_tables(read_sources([tmp_path / folder]), paper)[0]

    best = "paper, Flickr30K: ACE-RPE + L_ace (4M)"
    rows = {row[0]: row[1:] for row in table("f30k").rows}
    assert rows[best] == ["95.4", "99.7", "99.9", "84.0", "97.6", "98.9"]
    assert not any("COCO" in label for label in rows)
    assert table("f30k").head[1] == "image → text R@1"
    assert [row[0] for row in table("own").rows] == ["own, dual encoder", "chance"]
    assert any("these are on other data" in note for note in table("own").notes)
    everything = table("own", "all")
    assert any("COCO" in row[0] for row in everything.rows)
    assert any("do not compare" in note for note in everything.notes)
    assert len(table("f30k", "none").rows) == 2


def test_the_papers_figures_are_whole():
    assert {table.number for table in TABLES} == {1, 2, 3, 4, 5}
    for table in TABLES:
        assert len({label for label, _ in table.rows}) == len(table.rows)
        assert all(len(values) == len(table.columns) for _, values in table.rows), table
        assert all(20 < value <= 100 for _, row in table.rows for value in row if value is not None)
    for flickr in paper_tables("retrieval", ["x/flickr30k/test"]):
        # Recall grows with k in both directions.
        for label, values in flickr.rows:
            assert list(values[:3]) == sorted(values[:3]), label
            assert list(values[3:]) == sorted(values[3:]), label
    assert len(RECALLS) == 6
    claims = paper_tables("snli_ve", ["shards/snli_ve/test"])
    assert [split_of(table, ["shards/snli_ve/test"]) for table in claims] == ["test", "test"]
    assert paper_tables("retrieval", ["refcoco/val"]) == []
    assert [table.number for table in paper_tables("grounding", ["shards/refcoco+/testA"])] == [5]
    assert paper_tables("retrieval", ["flickr30k", "scenes"]) == [], "not that data alone"
    for folder in ("shards/vqa/val", "vqa", "shards/vqa_v2/test"):
        assert [table.number for table in paper_tables("vqa", [folder])] == [2, 4], folder
    assert paper_tables("vqa", ["shards/easy_vqa/test"]) == []


def test_damaged_and_unfinished_files_are_left_out_with_a_word(tmp_path):
    lines = "\n".join(json.dumps(line) for line in LOG)
    (tmp_path / "log.jsonl").write_text(lines + '\n{"step": 50, "loss/to')
    (tmp_path / "report.json").write_text('{"ended": ')
    (tmp_path / "vqa.json").write_text('{"task": "vqa", "figures": {"accuracy": {"value": "x", ')
    (source,) = read_sources([tmp_path])
    assert len(source.log) == len(LOG)
    missing = "\n".join(source.missing)
    assert "log.jsonl: 1 lines cannot be read" in missing
    assert "report.json cannot be read" in missing
    assert "vqa.json cannot be read" in missing
    page = Page(make_report([tmp_path]).html())
    assert "not yet, or it was killed; the last logged step is 40" in page.text
    assert "None of these folders holds results" in page.text


def test_an_empty_folder_is_an_error_that_names_what_was_looked_for(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "empty"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "empty: nothing to report" in error
    assert "log.jsonl" in error
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not out.exists()


def test_the_command_writes_page_markdown_and_latex(pretrained, tmp_path, capsys):
    run, found = pretrained
    files = {name: tmp_path / "made" / name for name in ("a.html", "a.md", "a.tex")}
    given = [str(run), "--out", str(files["a.html"]), "--markdown", str(files["a.md"])]
    assert main(["report", *given, "--latex", str(files["a.tex"])]) == 0
    assert capsys.readouterr().out.split() == [str(file) for file in files.values()]
    cell = found.recall("dual", "image_to_text", 5).percent()
    assert all(cell in files[name].read_text() for name in ("a.md", "a.tex"))
    assert cell in Page(files["a.html"].read_text()).text
    assert main(["report", str(run)]) == 2
    assert "--out FILE.html" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(files["a.md"] / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    wrong = ["report", str(run), "--out", str(files["a.html"]), "--shards", str(tmp_path / "gone")]
    assert main(wrong) == 2
    assert "gone" in capsys.readouterr().err


def test_notes_say_code_and_stand_apart(tmp_path):
    kept = {"any_object": Figure(0.5, 0.4, 0.6, 0.0)._asdict()}
    for kind in ("pointing", "snli_ve"):
        found = {"task": kind, "figures": kept, "notes": ["always `<b>`.", "More."]}
        (tmp_path / f"{kind}.json").write_text(json.dumps(found))
    report = make_report([tmp_path])
    assert [table.title for table in report.tables] == ["Visual entailment", *POINTING]
    assert "always <code>&lt;b&gt;</code>." in report.html()
    assert "50.0 [40.0, 60.0]" in Page(report.html()).text
    assert "any object" in Page(report.html()).text
    assert "always `<b>`.\n\nMore." in report.markdown()
    assert r"always \texttt{\textless{}b\textgreater{}}. More." in report.latex()
    assert r"\label{tab:pointing-of-words}" in report.latex()


def test_a_run_has_links_to_its_parts(pretrained):
    run, _ = pretrained
    page = Page(make_report([run]).html())
    targets = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert {"#run1-training", "#run1-curves"} <= set(targets)
    assert "#run1-anchors" not in targets, "there were no shards"


def test_a_loss_of_one_part_is_one_line():
    log = [{"step": n, "loss/total": 1.0 / n, "loss/classes": 1.0 / n} for n in (1, 2)]
    (chart,) = training_charts(log)
    assert list(chart.lines) == ["total"]


def test_latex_escapes_what_is_special_and_keeps_its_columns():
    table = Table(
        "A_b & 100 %",
        ["", "x → y", "IoU ≥ 0.5"],
        [["[a]_1 {c}", "61.3 [55.1, 67.2]", "#1$2"], ["paper, X: ACE-RPE + L_ace", "1.0", ""]],
        [r"a\b ~ ^"],
    )
    drawn = latex_table(table)
    assert r"\caption{A\_b \& 100 \%. a\textbackslash{}b \textasciitilde{} \textasciicircum{}}" in (
        drawn
    )
    assert r"{}[a]\_1 \{c\} & 61.3 [55.1, 67.2] & \#1\$2 \\" in drawn
    assert r"$\rightarrow$" in drawn
    bare = re.sub(r"\\[\\{}&%$#_]", "", drawn)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    body = bare[bare.index(r"\toprule") : bare.index(r"\bottomrule")]
    assert [line.count("&") for line in body.splitlines() if "&" in line] == [2, 2, 2]
    assert drawn.index("[a]") < drawn.rindex(r"\midrule") < drawn.index("paper, X")
    for begun in ("table", "tabular"):
        assert drawn.count(rf"\begin{{{begun}}}") == drawn.count(rf"\end{{{begun}}}") == 1


def test_charts_have_every_part_and_a_gap_where_a_number_is_missing():
    charts = {chart.title: chart for chart in training_charts(LOG)}
    assert list(charts) == ["Loss", "Validation", "Learning rate", "Speed"]
    assert list(charts["Loss"].lines) == ["total", "itm"]
    assert charts["Loss"].lines["total"][1] == (20.0, None)
    assert charts["Loss"].last == {"total": "1.5", "itm": "0.6"}
    drawn = str(svg(charts["Loss"]))
    total, itm = (
        re.findall(rf'<path d="([^"]+)" stroke="var\(--c{n}\)" stroke-width="2"', drawn)[0]
        for n in (0, 1)
    )
    assert [part.count("L") for part in total.split("Z")] == [0, 1], "a dot, a gap, then a line"
    assert 'stroke-linecap="round"' in drawn, "without, the dot cannot be seen"
    assert "nan" not in drawn.lower()
    places = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", itm)]
    assert len(places) == 4
    assert places == sorted(places), "a falling loss goes down, which is where y grows"
    assert all(f">{label}: {last}<" in drawn for label, last in charts["Loss"].last.items())
    many = str(svg(Chart("Runs", {f"<{n}>": [(1.0, n), (2.0, n + 1)] for n in range(9)})))
    assert many.count('stroke-dasharray="6,3"') >= 1, "the ninth line has the first's colour"
    assert "<0>" not in many
    assert training_charts([]) == []
    assert "none" in str(svg(Chart("Empty", {"a": [(1.0, None)]})))


def test_heat_lies_over_its_patches_and_a_box_frames_it():
    grey = Image.new("RGB", (40, 20), (128, 128, 128))
    share = np.zeros((2, 4))
    share[0, 3] = 1.0
    drawn = np.asarray(anchors_over(grey, share, side=80)).astype(int)
    assert drawn.shape == (40, 80, 3)
    coloured = np.abs(drawn - drawn[..., :1]).max(-1) > 20
    assert coloured[:20, 60:].all()
    assert not coloured[20:].any()
    assert not coloured[:, :60].any()
    framed = np.asarray(heat_over(grey, np.ones((2, 4)), [((10, 5, 20, 10), OWN_BOX)], side=80))
    green = np.array([25, 212, 25])
    assert (framed[10, 20] == green).all()
    assert (framed[29, 59] == green).all()
    assert not (framed[20, 40] == green).all()
    heat_over(grey, np.zeros((2, 4)))
    assert data_uri(grey).startswith("data:image/")


def test_names_come_from_folders_and_tell_runs_apart(tmp_path):
    paths = [tmp_path / "a" / "best", tmp_path / "b" / "model" / "evaluation"]
    assert short_names(paths) == ["a", "b"]
    same = [tmp_path / "x" / "run" / "model", tmp_path / "y" / "run" / "model", tmp_path / "z"]
    names = short_names(same)
    assert len(set(names)) == 3
    assert names[2] == "z"


def test_results_without_intervals_are_shown_without(tmp_path):
    (tmp_path / "vision.json").write_text(json.dumps({"top1": 41.05, "top5": 89.5}))
    result = read_result(tmp_path / "vision.json", Source(tmp_path, "v"))
    assert result is not None
    (table,) = result_tables(read_sources([tmp_path]))
    assert table.rows == [[tmp_path.name, "41.0", "89.5"]] or table.rows[0][1] in ("41.0", "41.1")
    assert not any("bootstrap" in note for note in table.notes)


def test_generated_shards_do_not_stand_beside_the_papers_data(tmp_path):
    for name in ("snli_ve_val", "nlvr2_val", "snli_ve/test"):
        (tmp_path / name).mkdir(parents=True)
    shards = [str(tmp_path / name) for name in ("snli_ve_val", "snli_ve/test")]
    assert paper_tables("snli_ve", shards)
    (tmp_path / "scenes.json").write_text("{}")
    for kind in ("snli_ve", "nlvr2"):
        assert paper_tables(kind, [str(tmp_path / f"{kind}_val")]) == []
    assert paper_tables("snli_ve", shards[1:]), "beside a generated corpus, but no part of it"
    (tmp_path / "snli_ve" / "test" / "scenes.json").write_text("{}")
    assert paper_tables("snli_ve", shards[1:]) == []


def test_a_note_of_one_run_names_it(tmp_path):
    figures = {"accuracy": Figure(0.5, 0.4, 0.6, 0.0)._asdict()}
    for run, notes in (("a", ["Both.", "Alone."]), ("b", ["Both."])):
        (tmp_path / run).mkdir()
        found = {"task": "snli_ve", "figures": figures, "notes": notes}
        (tmp_path / run / "snli_ve.json").write_text(json.dumps(found))
    (table,) = result_tables(read_sources([tmp_path / "a", tmp_path / "b"]))
    assert "Both." in table.notes
    assert "a: Alone." in table.notes
