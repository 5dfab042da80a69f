import itertools
import json

import numpy as np
import pytest
from pair_shards import statement_shards
from scipy import stats

import vlp
from evaluation.__main__ import main
from evaluation.downstream.task_evaluation import evaluate_task
from evaluation.options import EvalOptions
from evaluation.results import write_lines
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from evaluation.suite.compare import compare, item_difference, sign_flip_p
from vlp.tasks.downstream.task import load_task


def slow_sign_flip(differences):
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * one for sign, one in zip(signs, differences)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return np.mean([one >= observed - 1e-12 for one in sums])


def test_the_sign_flip_test_tries_all_signs_of_few_images():
    differences = np.array([1.0, 2.0, -0.5, 0.0, 1.5, 1.0])
    assert sign_flip_p(differences, 1) == pytest.approx(slow_sign_flip(differences))
    assert sign_flip_p(np.zeros(5), 1) == 1
    assert sign_flip_p(np.ones(10), 1) == pytest.approx(2 / 1024)


def test_drawn_signs_come_close_to_all_signs():
    differences = np.random.default_rng(0).normal(0.4, 1, 16)
    assert sign_flip_p(differences, 40_000) == pytest.approx(slow_sign_flip(differences), abs=0.01)
    assert sign_flip_p(np.ones(200), 999) == pytest.approx(1 / 1000)


def test_mcnemar_is_the_binomial_test_of_the_items_that_differ():
    first, second = np.zeros(40), np.zeros(40)
    first[:3], second[3:15] = 1, 1
    found = item_difference(first, second, range(40))
    assert found.mcnemar == pytest.approx(stats.binomtest(12, 15).pvalue)
    assert (found.only_first, found.only_second) == (3, 12)
    assert found.difference == pytest.approx(9 / 40)
    assert found.low <= found.difference <= found.high
    assert item_difference(first, second / 2, range(40)).mcnemar is None
    assert item_difference(first, first, range(40)).mcnemar == 1


def test_items_of_one_image_are_one_draw():
    """Ten times the same item of an image must not look like ten times the evidence."""
    rng = np.random.default_rng(0)
    first, second = (rng.random(30) < share for share in (0.4, 0.6))
    once = item_difference(first * 1.0, second * 1.0, range(30))
    often = item_difference(
        np.repeat(first, 10) * 1.0, np.repeat(second, 10) * 1.0, np.repeat(np.arange(30), 10)
    )
    assert often.p == once.p
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert often.mcnemar < once.mcnemar, "McNemar's is over items"


@pytest.fixture(scope="module")
def statements(tmp_path_factory, task_folders):
    folder = tmp_path_factory.mktemp("statements")
    shards = statement_shards(folder / "shards", 24)
    task = load_task(task_folders["nlvr2"])
    results = []
    for name in ("a", "b"):
        result = evaluate_task(task, [shards], options=EvalOptions(resamples=2))
        result.save(folder / name)
        results.append(result)
        task.head[-1].weight.data.neg_()
        task.head[-1].bias.data.neg_()
    return folder, results


def test_figures_are_those_of_the_two_results(statements, tmp_path):
    folder, (one, other) = statements
    found = compare(folder / "a", folder / "b").differences
    assert {"accuracy", "consistency"} <= found.keys()
    for name, difference in found.items():
        assert difference.first == pytest.approx(one.figures[name].value), name
        assert difference.second == pytest.approx(other.figures[name].value), name
    changed = [a != b for a, b in zip(one.predictions, other.predictions)]
    assert any(changed)
    accuracy = found["accuracy"]
    assert accuracy.only_first + accuracy.only_second == sum(changed)
    command = ["compare", str(folder / "a"), str(folder / "b"), "--permutations", "99"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["figures"]["accuracy"]["items"] == 24


def test_retrieval_is_compared_query_by_query(model_folder, scene_shards, tmp_path):
    loaded, options = vlp.load(model_folder), EvalOptions(resamples=5)
    dual = evaluate_retrieval(loaded, [scene_shards], options=options)
    both = evaluate_retrieval(loaded, [scene_shards], rerank=6, rerank_by="match", options=options)
    dual.save(tmp_path / "dual")
    both.save(tmp_path / "both")
    found = compare(tmp_path / "dual", tmp_path / "both", permutations=50)
    assert set(found.differences) == {
        f"{arrow} R@{k}, dual" for arrow in ("text → image", "image → text") for k in (1, 5, 10)
    }
    again = compare(tmp_path / "both", tmp_path / "both", permutations=50).differences
    for direction, arrow in (("text_to_image", "text → image"), ("image_to_text", "image → text")):
        for stage in ("dual", "rerank"):
            for k in (1, 5, 10):
                own = again[f"{arrow} R@{k}, {stage}"]
                assert own.first == pytest.approx(both.recall(stage, direction, k).value)
    assert found.images == 21


def rows(*items):
    return [
        {"key": key, "text": "t", "label": label, "image": key, "prediction": "x",
         "scores": {"accuracy": score}}
        for key, label, score in items
    ]  # fmt: skip


def test_other_items_are_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", rows(*((f"{n:02d}", "x", 1) for n in range(9))))
    write_lines(tmp_path / "b.jsonl", rows(("00", "x", 1), ("other", "x", 0)))
    with pytest.raises(EvaluationError) as problem:
        compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    message = str(problem.value)
    assert "a.jsonl lacks other t" in message
    assert "b.jsonl lacks 01 t, 02 t, 03 t, 04 t, 05 t and 3 more" in message
    write_lines(tmp_path / "b.jsonl", rows(*((f"{n:02d}", "y", 1) for n in range(9))))
    with pytest.raises(EvaluationError, match="not the same labels: 00 t is x in"):
        compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("nowhere", "neither a folder nor a file"),
        ("empty", "holds no *.predictions.jsonl"),
        ("vqa", "no results of the same task in both"),
        ("torn.jsonl", "torn.jsonl, line 1: not a JSON object"),
        ("unscored.jsonl", "no row has scores"),
        ("queries.jsonl", "results of different tasks"),
        ("nan.jsonl", "finite numbers as `scores`"),
        ("null.jsonl", "finite numbers as `scores`"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_code_2(tmp_path, capsys, second, message):
    first = tmp_path / "first" / "snli_ve.predictions.jsonl"
    write_lines(first, rows(("0", "x", 1)))
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "vqa" / "vqa.predictions.jsonl", [{"key": "0", "question_id": 1}])
    (tmp_path / "torn.jsonl").write_text('{"key": ')
    write_lines(tmp_path / "unscored.jsonl", [{"key": "0", "prediction": "x"}])
    write_lines(
        tmp_path / "queries.jsonl",
        [{"direction": "image_to_text", "key": "0", "ranks": {"dual": 1}}],
    )
    for name, score in (("nan.jsonl", float("nan")), ("null.jsonl", None)):
        write_lines(tmp_path / name, rows(("0", "x", score)))
    is_file = second.endswith(".jsonl")
    code = main(["compare", str(first if is_file else first.parent), str(tmp_path / second)])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1


def test_foils_are_known_by_what_was_exchanged(tmp_path):
    def foils(*names):
        return [
            {"key": "0", "image": "0", "kind": "colour", "caption": "a red dog", "foil": foil,
             "scores": {"dual, all": 1.0}}
            for foil in names
        ]  # fmt: skip

    write_lines(tmp_path / "a.jsonl", foils("a blue dog", "a green dog"))
    write_lines(tmp_path / "b.jsonl", foils("a green dog", "a blue dog"))
    result = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl", permutations=2)
    assert result.differences["dual, all"].items == 2
    write_lines(tmp_path / "b.jsonl", foils("a blue dog", "a pink dog"))
    with pytest.raises(EvaluationError, match="lacks 0 colour a red dog a pink dog"):
        compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
