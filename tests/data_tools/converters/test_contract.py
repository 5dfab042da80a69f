"""Every converter: samples with their annotation, faults named, resume, other files, splits, boxes.

Each case has good rows beside every kind of faulty row that its format can have.
"""

import json
import pickle
from typing import Any, NamedTuple

import pytest
from benchmark_files import failures_of, json_of, lines_of, said_of, samples_of
from raw_images import files_of, raw_image

from data_tools.__main__ import main
from data_tools.builder import write_shard

COCO = "COCO_train2014_{:012d}"
URL = "http://x.org/{}.jpg"


class Case(NamedTuple):
    """A small data set of one format.

    Args:
        arguments: of the command, in which `RAW/` stands for the folder of the files; the first
            file that it names holds the annotations.
        files: by name: images (bytes), JSON (anything else) or JSON lines (a name in .jsonl).
        samples: folder below OUT -> key -> fields of its annotation.
        faults: folder below OUT -> kind -> ids; one that ends in a colon is the id's beginning.
        split: of those in `faults`, where the command takes --splits.
    """

    arguments: str
    files: dict[str, Any]
    samples: dict[str, dict[str, dict[str, Any]]]
    faults: dict[str, dict[str, list[str]]]
    split: str = ""


def photos(*names, folder="images/", size=(24, 16)):
    return {f"{folder}{name}": raw_image(seed, size) for seed, name in enumerate(names)}


def entry(name, split, *captions, **more):
    sentences = [{"raw": text} for text in captions]
    return {"filename": name, "split": split, "sentences": sentences, **more}


KARPATHY = [
    {"filename": "no split.jpg"},
    entry("a.jpg", "train", " A dog . ", "Two dogs ."),
    *(entry(f"{place}/x.jpg", "train", place) for place in ("left", "right")),
    entry("b.jpg", "train", "b"),
    entry("gone.jpg", "train", "nobody has it"),
    entry("cut.jpg", "train", "cut"),
    entry("mute.jpg", "train"),
    entry("c.d.jpg", "train", "dots", None),
    entry("a.jpg", "train", "once more"),
    entry("v.jpg", "val", "held out"),
]
KARPATHY_FILES = photos(
    "a.jpg", "b.jpg", "mute.jpg", "c.d.jpg", "v.jpg", "left/x.jpg", "right/x.jpg"
) | {"images/cut.jpg": raw_image(9)[:-300]}
KARPATHY_SAMPLES = {
    "train": {
        "a": {"captions": ["A dog .", "Two dogs ."], "image_id": "a"},
        "left_x": {"captions": ["left"], "image_id": "left/x"},
        "right_x": {"captions": ["right"], "image_id": "right/x"},
        "b": {"captions": ["b"]},
        "c_d": {"captions": ["dots"], "image_id": "c.d"},
    },
    "val": {"v": {"captions": ["held out"]}},
}
KARPATHY_FAULTS = {
    "train": {
        "row of another layout": ["RAW/toy.json, images, row 1: split:"],
        "duplicate key": ["a"],
        "missing image": ["gone"],
        "no text": ["mute"],
        "unreadable image": ["cut"],
        "empty caption": ["c_d/caption 1"],
    },
    "val": {},
}
TSV = "".join(
    f"{caption}\t{URL.format(number)}\n"
    for number, caption in enumerate(("one &amp; 0", "two", "www.x.org", " ", "gone", "three"))
)


def web(rows, source):
    lines = [line.encode() for line in rows.splitlines(keepends=True)]
    lines[1] = b"a\tb\tc\n"
    lines.append(lines[0].replace(b"one", b"caf\xe9"))
    files = photos(*(f"{number:08d}.jpg" for number in range(4)), "00000005.jpg")
    samples = {
        f"{source}-00000000": {"caption": "one & 0", "url": URL.format(0), "source": source},
        f"{source}-00000005": {"caption": "three", "url": URL.format(5)},
    }
    faults = {
        "caption of a URL alone": [f"{source}-00000002"],
        "empty caption": [f"{source}-00000003"],
        "line of another layout": ["line 2"],
        "line that is not UTF-8": ["line 7"],
        "missing image": [f"{source}-00000004"],
    }
    return {"list.tsv": b"".join(lines), **files}, {"": samples}, {"": faults}


def region(number, phrase, *box):
    return {"region_id": number, "phrase": phrase, **dict(zip(("x", "y", "width", "height"), box))}


def statement(identifier, **changes):
    return {"identifier": identifier, "sentence": "two dogs", "label": "True"} | changes


def pair(identifier, **changes):
    row = {"Flickr30K_ID": "7", "pairID": identifier, "sentence1": "p", "sentence2": "h"}
    return row | {"gold_label": "neutral", "captionID": "7.jpg#0"} | changes


def asked(number, image, question="what?"):
    return {"question_id": number, "image_id": image, "question": question}


def answered(number, image, *answers):
    return {"question_id": number, "image_id": image, "answers": [{"answer": a} for a in answers]}


def reference(number, image, split, *sentences):
    return {
        "ref_id": number,
        "ann_id": 100 + number,
        "image_id": image,
        "split": split,
        "sentences": [{"sent_id": identifier, "sent": text} for identifier, text in sentences],
    }


def instance(number, image, *box):
    return {"id": number, "image_id": image, "bbox": box}


CASES = {
    **{
        name: Case(
            "--annotations RAW/toy.json --images RAW/images",
            {"toy.json": {"dataset": name, "images": KARPATHY}, **KARPATHY_FILES},
            KARPATHY_SAMPLES,
            KARPATHY_FAULTS,
            "val",
        )
        for name in ("flickr8k", "flickr30k")
    },
    "coco": Case(
        "--annotations RAW/captions_toy.json --images RAW/images",
        {
            "captions_toy.json": {
                "images": [
                    *({"id": n, "file_name": f"{n}.jpg"} for n in (1, 2, 3, 4)),
                    {"id": 5},
                    *({"id": 6, "file_name": name} for name in ("6.jpg", "7.jpg")),
                    *({"id": n, "file_name": f"{n}/x.jpg"} for n in (8, 9)),
                    {"id": 12, "file_name": f"{COCO.format(12)}.jpg"},
                ],
                "annotations": [
                    {"id": 0, "image_id": 8, "caption": "eight"},
                    {"id": 9, "image_id": 9, "caption": "nine"},
                    {"id": 1, "image_id": 1, "caption": "one"},
                    {"id": 2, "image_id": 1, "caption": None},
                    {"id": 3, "image_id": 10, "caption": "of nothing"},
                    {"id": 4, "caption": "of nobody"},
                    {"id": 5, "image_id": 3, "caption": "three"},
                    {"id": 6, "image_id": 4, "caption": "four"},
                    {"id": 7, "image_id": 12, "caption": "twelve"},
                ],
            },
            **photos("1.jpg", "2.jpg", "3.jpg", "6.jpg", "7.jpg", "8/x.jpg", "9/x.jpg"),
            **photos(f"{COCO.format(12)}.jpg"),
        },
        {
            "toy": {
                "1": {"captions": ["one"], "source": None},
                "3": {"captions": ["three"]},
                "8_x": {"captions": ["eight"], "image_id": "8"},
                "9_x": {"captions": ["nine"]},
                COCO.format(12): {"captions": ["twelve"], "source": "coco", "image_id": "12"},
            }
        },
        {
            "toy": {
                "row of another layout": [
                    "RAW/captions_toy.json, annotations, row 6:",
                    "RAW/captions_toy.json, images, row 5:",
                ],
                "captions of an unknown image": ["10"],
                "image id of several files": ["6 (6.jpg)", "6 (7.jpg)"],
                "empty caption": ["1/caption 1"],
                "no text": ["2"],
                "missing image": ["4"],
            }
        },
        "toy",
    ),
    "cc3m": Case("--annotations RAW/list.tsv --images RAW/images", *web(TSV, "cc3m")),
    "cc12m": Case(
        "--annotations RAW/list.tsv --images RAW/images",
        *web("".join("\t".join(reversed(r.split("\t"))) + "\n" for r in TSV.splitlines()), "cc12m"),
    ),
    "sbu": Case(
        "--annotations RAW/sbu.json --images RAW/images --names {file}",
        {
            "sbu.json": {
                "image_urls": [*(URL.format(number) for number in range(4)), None, "x", "y"],
                "captions": ["one", None, "three", "gone", "nowhere", "no URL", ["list"]],
                "user_ids": ["u0", "u1", None, "u3", "u4", "u5", "u6"],
            },
            **photos("0.jpg", "1.jpg", "2.jpg"),
        },
        {"": {"sbu-00000000": {"user_id": "u0"}, "sbu-00000002": {"caption": "three"}}},
        {
            "": {
                "empty caption": ["sbu-00000001"],
                "missing image": ["sbu-00000003"],
                "row of another layout": [
                    *("RAW/sbu.json, row 5: url:", "RAW/sbu.json, row 6: no URL"),
                    "RAW/sbu.json, row 7: caption:",
                ],
            }
        },
    ),
    "visual_genome": Case(
        "--regions RAW/regions.json --images RAW/images",
        {
            "regions.json": [
                {
                    "id": 1,
                    "regions": [
                        None,
                        region(10, "a dog", 0, 0, 5, 5),
                        region(11, "a dog", 3, 3, 5, 5),
                        region(12, " ", 3, 3, 5, 5),
                        region(13, "negative", 3, 3, -5, 5),
                        region(14, "outside", 30, 3, 5, 5),
                        {"region_id": 15, "phrase": "no box"},
                        region(16, "cut", 20, 0, 6, 4),
                        region(17, "a sliver", 22, 0, 9, 4),
                    ],
                },
                {"id": 2, "regions": []},
                {"id": 3, "regions": [region(30, "missing", 0, 0, 5, 5)]},
                {"regions": []},
                {"id": 1, "regions": [region(17, "again", 0, 0, 5, 5)]},
                {"id": 4, "regions": [region(40, "a cat", 0, 0, 5, 5)]},
            ],
            **photos("1.jpg", "2.jpg", "4.jpg"),
        },
        {
            "": {
                # A phrase that two regions share is one caption and two expressions.
                "vg-1": {
                    "captions": ["a dog", "negative", "outside", "cut", "a sliver"],
                    "expressions": [
                        {"id": "10", "text": "a dog", "box": [0, 0, 5, 5]},
                        {"id": "11", "text": "a dog", "box": [3, 3, 5, 5]},
                        {"id": "16", "text": "cut", "box": [20, 0, 4, 4]},
                        {"id": "17", "text": "a sliver", "box": [22, 0, 2, 4]},
                    ],
                },
                "vg-4": {"captions": ["a cat"], "source": "visual_genome", "image_id": "4"},
            }
        },
        {
            "": {
                "box outside its image": ["vg-1/expression 13", "vg-1/expression 14"],
                "box cut at the edge of its image (kept)": [
                    "vg-1/expression 16",
                    "vg-1/expression 17",
                ],
                "duplicate key": ["vg-1"],
                "empty caption": ["vg-1/region 12"],
                "missing image": ["vg-3"],
                "no text": ["vg-2"],
                "region of another layout": ["vg-1/region without an id", "vg-1/region 15"],
                "row of another layout": ["RAW/regions.json, row 4:"],
            }
        },
    ),
    "nlvr2": Case(
        "--annotations RAW/train.jsonl --images RAW/images --extension jpg",
        {
            "train.jsonl": [
                statement("train-1-0-0", directory=12),
                statement("train-1-0-0", sentence="again"),
                statement("train-1-0-1", label="false"),
                statement("train-1-0-2", label="Perhaps"),
                statement("train-1-0-3", label=None),
                statement("train-2-0-0"),
                statement("nonsense"),
                statement("train-1-0-4", sentence=""),
                {"identifier": "train-1-0-5"},
            ],
            **photos("12/train-1-0-img0.jpg", "12/train-1-0-img1.jpg", "train-2-0-img0.jpg"),
        },
        {
            "": {
                "train-1-0-0": {"label": True, "image_id": "train-1-0", "source": "nlvr2"},
                "train-1-0-1": {"label": False, "statement": "two dogs"},
                "train-1-0-3": {"identifier": "train-1-0-3"},
            }
        },
        {
            "": {
                "identifier given twice": ["train-1-0-0"],
                "unknown label": ["train-1-0-2 (Perhaps)"],
                "missing image": ["train-2-0-0"],
                "identifier is not split-set-pair-sentence": ["nonsense"],
                "no statement": ["train-1-0-4"],
                "row of another layout": ["RAW/train.jsonl, line 9:"],
            }
        },
    ),
    "nlvr_v1": Case(
        "--annotations RAW/dev.jsonl --images RAW/images --split dev --permutations 2",
        {
            "dev.jsonl": [
                *(statement(f"{n}-0") for n in (1, 1, 2, 3, 4)),
                statement("5-0", label="yes"),
                statement("6-0", sentence=""),
                {"identifier": "7-0"},
            ],
            "images/dev-1-0-0.png": raw_image(1, (400, 100), "png"),
            "images/dev-2-0-0.png": raw_image(1, (401, 100), "png"),
            "images/dev-3-0-0.png": b"no image",
        },
        {
            "": {
                "dev-1-0-0": {"permutation": 0, "image_id": "dev-1-0", "source": "nlvr"},
                "dev-1-0-1": {"permutation": 1, "label": True},
            }
        },
        {
            "": {
                "identifier given twice": ["1-0"],
                "unreadable image": ["dev-2-0-0", "dev-2-0-1", "dev-3-0-0", "dev-3-0-1"],
                "missing image": ["dev-4-0-0", "dev-4-0-1"],
                "unknown label": ["5-0 (yes)"],
                "no statement": ["6-0"],
                "row of another layout": ["RAW/dev.jsonl, line 8:"],
            }
        },
    ),
    "snli_ve": Case(
        "--annotations RAW/dev.jsonl --images RAW/images",
        {
            "dev.jsonl": [
                pair("a"),
                pair("a", sentence2="again"),
                pair("b", gold_label="-"),
                pair("c", gold_label="maybe"),
                pair("d", sentence2=" "),
                pair("e", Flickr30K_ID="8"),
                {"pairID": "f"},
                pair("g", sentence1=None, Flickr30K_ID=7),
            ],
            **photos("7.jpg"),
        },
        {"": {"a": {"premise": "p", "hypothesis": "h", "label": "neutral"}, "g": {}}},
        {
            "": {
                "row of another layout": ["RAW/dev.jsonl, line 7: Flickr30K_ID:"],
                "pairID given twice": ["a"],
                "no gold label": ["b"],
                "unknown label": ["c (maybe)"],
                "no hypothesis": ["d"],
                "missing image": ["e"],
            }
        },
    ),
    "vqa": Case(
        "--questions RAW/q.json --annotations RAW/a.json --images RAW/images",
        {
            "q.json": {
                "data_subtype": "train2014",
                "questions": [
                    *(asked(1, 1), asked(1, 2), asked(2, 1), asked(3, 9), asked(4, 2)),
                    *(asked(5, 1, " "), {"question_id": 6}),
                ],
            },
            "a.json": {
                "annotations": [
                    *(
                        answered(1, 1, "a", "b", None, "a"),
                        answered(1, 1, "c"),
                        answered(3, 9, "d"),
                    ),
                    *(answered(4, 1, "e"), answered(5, 1, "g"), answered(99, 1, "f")),
                ]
            },
            **photos(*(f"{COCO.format(number)}.jpg" for number in (1, 2))),
        },
        {
            "": {
                COCO.format(1): {
                    "source": "coco",
                    "image_id": "1",
                    "questions": [
                        {
                            "id": "1",
                            "question": "what?",
                            "answers": [{"answer": "a", "count": 2}, {"answer": "b", "count": 1}],
                        },
                        {"id": "2", "question": "what?", "answers": []},
                    ],
                },
                COCO.format(2): {"questions": [{"id": "4", "question": "what?", "answers": []}]},
            }
        },
        {
            "": {
                "row of another layout": ["RAW/q.json, questions, row 7: image_id:"],
                "part of another layout": ["question 1: answer:"],
                "question id given twice": ["1"],
                "question annotated twice": ["1"],
                "annotation without question": ["99"],
                "annotation of another image": ["4 (asked of 2, answered of 1)"],
                "question without answers (kept)": ["2", "4"],
                "empty question": ["5"],
                "missing image": [COCO.format(9)],
                "question of a missing image": ["3"],
            }
        },
    ),
    "easy_vqa": Case(
        "--questions RAW/q.json --images RAW/images",
        {
            "q.json": [
                ["is it red?", "yes", 0],
                ["is it red?", "no"],
                ["is it red?", "", 0],
                ["is it blue?", "no", 4],
                ["is it blue?", "no", 1],
            ],
            **{f"images/{number}.png": raw_image(number, kind="png") for number in (0, 1)},
        },
        {
            "": {
                "0": {
                    "questions": [
                        {
                            "id": "0",
                            "question": "is it red?",
                            "answers": [{"answer": "yes", "count": 10}],
                        }
                    ]
                },
                "1": {"source": "easy-vqa"},
            }
        },
        {
            "": {
                "row of another layout": ["RAW/q.json, row 2:", "RAW/q.json, row 3:"],
                "missing image": ["4"],
                "question of a missing image": ["3"],
            }
        },
    ),
    "refcoco": Case(
        "--refs RAW/refs.p --instances RAW/instances.json --detections RAW/dets.json "
        "--images RAW/images",
        {
            "refs.p": pickle.dumps(
                [
                    reference(1, 5, "train", (1, "the left dog"), (2, "dog")),
                    reference(2, 5, "train", (3, "cat"), (16, None)),
                    reference(3, 6, "train", (4, "man")),
                    reference(4, 5, "train", (10, "sticks out")),
                    reference(5, 5, "train", (11, "of image 6")),
                    reference(6, 5, "train", (12, "without an object")),
                    reference(7, 7, "train", (13, "image not there")),
                    reference(8, 99, "train", (14, "image not known")),
                    reference(1, 5, "train", (1, "again"), (15, " ")),
                    {"ref_id": 9},
                ],
                2,
            ),
            "instances.json": {
                "images": [
                    {"id": n, "file_name": f"{COCO.format(n)}.jpg", "width": 40, "height": 20}
                    for n in (5, 6, 7)
                ],
                "annotations": [
                    instance(101, 5, 1.5, 2, 10, 10),
                    instance(102, 5, 20, 0, 20, 20.5),
                    instance(103, 6, 0, 0, 5, 5),
                    instance(104, 5, 40, 0, 20, 5),
                    instance(105, 6, 0, 0, 5, 5),
                    instance(107, 7, 0, 0, 5, 5),
                ],
            },
            "dets.json": [
                {"image_id": image, "box": box}
                for image, box in (
                    *((5, [0, 0, 4, 4]), (5, [48, 0, 10, 4]), (5, [1, 1, 0, 5])),
                    (6, [0, 0, 4, 4]),
                )
            ],
            # Half as wide and high as the files say.
            **photos(*(f"{COCO.format(number)}.jpg" for number in (5, 6)), size=(20, 10)),
        },
        {
            "train": {
                COCO.format(5): {
                    "proposals": [[0, 0, 2, 2]],
                    "expressions": [
                        {"id": str(number), "text": text, "box": box, "ref_id": ref, "ann_id": ann}
                        for number, text, box, ref, ann in (
                            (1, "the left dog", [0.75, 1, 5, 5], 1, 101),
                            (2, "dog", [0.75, 1, 5, 5], 1, 101),
                            (3, "cat", [10, 0, 10, 10], 2, 102),
                        )
                    ],
                },
                COCO.format(6): {"source": "coco", "image_id": "6"},
            }
        },
        {
            "train": {
                "row of another layout": ["RAW/refs.p, row 10: ann_id:"],
                "part of another layout": ["ref 2: sent:"],
                "box outside its image": [
                    f"{COCO.format(5)}/{name}"
                    for name in ("expression 10", "proposals 1", "proposals 2")
                ],
                "object of another image": ["ref 5"],
                "object not in instances.json": ["ref 6"],
                "image not in instances.json": ["ref 8"],
                "missing image": [COCO.format(7)],
                "expression of a missing image": ["13"],
                "image without proposals (kept)": [f"{COCO.format(7)}.jpg"],
                "sent_id given twice": ["1 of ref 1"],
                "empty expression": ["15 of ref 1"],
            }
        },
        "train",
    ),
    "albef": Case(
        "--annotations RAW/vqa.json --kind vqa --images RAW",
        {
            "vqa.json": [
                {"image": "a/b.jpg"},
                {
                    "image": "visual-genome/image/3.jpg",
                    "question": "Who?",
                    "answer": "A Man.",
                    "dataset": "vg",
                },
                {"image": "a/b.jpg", "question": "What?", "question_id": 5, "dataset": "vqa"},
                {"image": "a/b.jpg", "question": "What?", "question_id": 5, "dataset": "vqa"},
                {"image": "visual-genome/image/3.jpg", "question": "", "question_id": 6},
                {"image": "gone.jpg", "question": "Where?", "question_id": 7},
            ],
            **photos("visual-genome/image/3.jpg", "a/b.jpg", folder=""),
        },
        {
            "": {
                "visual-genome_image_3": {
                    "source": "visual_genome",
                    "questions": [
                        {
                            "id": "vqa-1",
                            "question": "Who?",
                            "answers": [{"answer": "a man", "count": 10}],
                        }
                    ],
                },
                "a_b": {"questions": [{"id": "5", "question": "What?", "answers": []}]},
            }
        },
        {
            "": {
                "question id given twice": ["5"],
                "empty question": ["6"],
                "missing image": ["gone"],
                "question of a missing image": ["7"],
                "row of another layout": ["RAW/vqa.json, row 1:"],
            }
        },
    ),
}


@pytest.fixture(params=sorted(CASES))
def case(request):
    return CASES[request.param]


@pytest.fixture
def name(request, case):
    return next(name for name, other in CASES.items() if other is case)


def command_of(name, folder):
    """Write the raw files of a case; returns its command without --out."""
    for file, content in CASES[name].files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            (lines_of if path.suffix == ".jsonl" else json_of)(path, content)
    return [name, *(word.replace("RAW", str(folder), 1) for word in CASES[name].arguments.split())]


@pytest.fixture
def run(name, tmp_path):
    command = command_of(name, tmp_path / "raw")
    return lambda out, *more: main([*command, "--out", str(tmp_path / out), *more])


def test_samples_arrive_and_faults_are_named(case, run, tmp_path, capsys):
    assert run("out", "--processes", "1") == 0
    printed = capsys.readouterr().out
    for folder, expected in case.samples.items():
        samples = samples_of(tmp_path / "out" / folder)
        assert list(samples) == list(expected)
        for key, fields in expected.items():
            said = said_of(samples[key])
            assert {field: said.get(field) for field in fields} == fields
    for folder, kinds in case.faults.items():
        found = failures_of(tmp_path / "out" / folder)
        assert found.keys() == kinds.keys()
        for kind, ids in kinds.items():
            full = [one.replace("RAW", str(tmp_path / "raw"), 1) for one in ids]
            begins = [
                one[: len(each)] if each.endswith(":") else one
                for one, each in zip(found[kind], full, strict=True)
            ]
            assert begins == full
            assert f"{kind}: {len(ids)} (first: {found[kind][0]})" in printed


def test_an_interrupted_run_resumes_to_the_same_bytes(run, tmp_path, monkeypatch):
    options = ["--samples-per-shard", "1", "--processes", "1"]
    assert run("whole", *options) == 0
    calls, prepare = 0, write_shard.prepare_image

    def interrupt(*arguments):
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt
        return prepare(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(write_shard, "prepare_image", interrupt)
        assert run("twice", *options) == 130
    assert not list((tmp_path / "twice").rglob("manifest.json"))
    assert not list((tmp_path / "twice").rglob("*.tmp"))
    assert run("twice", *options) == 0
    assert files_of(tmp_path / "twice") == files_of(tmp_path / "whole")


def test_other_and_missing_annotations_are_refused(case, run, tmp_path, capsys):
    file = next(iter(case.files))
    path = tmp_path / "raw" / file
    for content in (json.dumps({"a": [1]}).encode(), b"\xff\xfe\x00", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert run("out") == 2
        assert file in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_splits_are_chosen(case, run, tmp_path, capsys):
    if not case.split:
        pytest.skip("takes no --splits")
    assert run("out", "--splits", case.split, "--processes", "1") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [case.split]
    assert run("out", "--splits", "dev") == 2
    assert f"there is no 'dev', only {', '.join(case.faults)}" in capsys.readouterr().err
