import json
import re
from collections import Counter

import pytest

from vlp.data.text.foils import FOIL_KINDS, Edit, apply_edits, make_foils

MAN_DOG = "A man in red chases a small dog ."


def every_foil(kind, *captions):
    """All foils of the first caption that any of 40 seeds draws."""
    drawn = [make_foils(captions, seed, "key")[0] for seed in range(40)]
    return {foil.text for foils in drawn for foil in foils if foil.kind == kind}


@pytest.mark.parametrize(
    ("kind", "caption", "foils"),
    [
        ("subject_object", MAN_DOG, {"A small dog in red chases a man ."}),
        ("subject_object", "the dogs watch two girls run", set()),  # no number before `dogs`
        ("subject_object", "A man dances with a woman", set()),
        (
            "subject_object",
            "A man who lost his hat sees a boy",
            {"A boy who lost his hat sees a man"},
        ),
        ("subject_object", "A man who lost his hat sees a girl", set()),
        ("subject_object", "A child pushes a boy", set()),  # the boy may be the child
        ("subject_object", "A man chases two dogs", set()),  # the verb would not agree
        ("subject_object", "a dog house near a man", set()),
        (
            "colour",
            "a gray cap",
            {f"{c} cap" for c in ("a red", "a yellow", "a green", "an orange", "a brown")},
        ),
        ("colour", "a black man on white snow in a red-blue cap", set()),
        ("colour", "a black and white photo", set()),
        ("binding", "a blue hat and a red ball", {"a red hat and a blue ball"}),
        ("binding", "a blue dog and a red dog", set()),
        ("binding", "a black dog with a red ball", set()),  # a red dog is no guess
        ("number", "Two dogs run", {"Three dogs run", "Four dogs run"}),
        ("number", "a two-piece suit on two wheels", set()),
        ("count", "A young woman running", {"Two young women running"}),
        ("count", "A young woman runs while singing", set()),
        ("count", "A dog running with its ball", set()),
        ("preposition", "A dog behind a tree .", {"A dog in front of a tree ."}),
        ("preposition", "A dog is outside .", {"A dog is inside .", "A dog is indoors ."}),
        ("preposition", "walking down a street", set()),  # who is to say that it is not up
        ("preposition", "walking down a steep hill", {"walking up a steep hill"}),
        ("left_right", "the left man and the right dog", {"the right man and the left dog"}),
        ("left_right", "from the left to the right", set()),
        ("near_far", "A dog next to a tree", {"A dog far from a tree"}),
    ],
)
def test_foils_of_one_caption(kind, caption, foils):
    assert every_foil(kind, caption) == foils


@pytest.mark.parametrize(
    ("kind", "caption", "other"),
    [
        ("colour", "A tan dog", "A black dog ."),
        ("subject_object", MAN_DOG, "a small dog in red chases a man!"),
        ("count", "A boy running", "Another boy is behind him"),
        ("preposition", "A dog behind a tree", "A cat in front of a dog"),
    ],
)
def test_words_of_other_captions_make_no_foil(kind, caption, other):
    assert every_foil(kind, caption)
    assert not every_foil(kind, caption, other)


def test_articles_and_capitals_are_adapted():
    assert apply_edits("An old hat", [Edit(3, 6, "red")]) == "A red hat"
    assert apply_edits("a red hat, a cap", [Edit(2, 5, "orange")]) == "an orange hat, a cap"
    assert apply_edits("Red caps", [Edit(0, 3, "blue")]) == "Blue caps"
    assert apply_edits("red caps", [Edit(0, 3, "blue")]) == "blue caps"


def test_foils_depend_only_on_seed_key_and_kind():
    captions = ["Two dogs behind a red bench", "A pink cap on two boys"]
    assert make_foils(captions, 3, "k") == make_foils(captions, 3, "k")
    drawn = {str(make_foils(captions, seed, key)) for seed in range(5) for key in "ab"}
    assert len(drawn) > 3
    assert make_foils(captions[:1], 0, "k")[0][0].kind == "colour"


def test_foils_of_flickr8k_are_many_and_their_words_are_those_of_their_kind(shared):
    content = json.loads((shared / "data/flickr8k/dataset_flickr8k.json").read_text())
    counts = Counter()
    for image in content["images"]:
        if image["split"] != "val":
            continue
        captions = [sentence["raw"] for sentence in image["sentences"]]
        for caption, foils in zip(captions, make_foils(captions, 0, image["filename"])):
            for foil in foils:
                counts[foil.kind] += 1
                assert foil.text not in captions
                removed, new = bag(caption) - bag(foil.text), bag(foil.text) - bag(caption)
                if foil.kind in ("subject_object", "binding"):
                    assert not removed
                    assert not new
                elif foil.kind in ("colour", "number"):
                    assert removed.total() == new.total() == 1
    assert min(counts[kind] for kind in FOIL_KINDS) >= 25
    assert counts["colour"] > 1500
    assert counts["preposition"] > 900


def bag(text):
    return Counter(word for word in re.findall(r"[\w'-]+", text.lower()) if word not in ("a", "an"))
