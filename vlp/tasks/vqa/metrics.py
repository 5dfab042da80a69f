"""VQA accuracy: the share of people who gave the predicted answer (Antol et al. 2015)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

# Evaluators: `official` is the current one of the data set's authors, `albef_copy` an older one
# that ALBEF and its successors report. They differ on one question in seven of VQA v2. Their
# normalisation of answers, oddities included, is part of the metric and is copied here.
Version = Literal["official", "albef_copy"]

# Number of other people with the same answer that gives the full score.
ENOUGH = 3

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
# A slip of the evaluators: they pass a regex flag of value 32 as the number of substitutions.
_MAX_PERIODS = 32

_STEMS = {
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were "
    "wo would",
    "'ve": "could couldn't hadn't he'd it'd might mightn't must not she'd should shouldn't "
    "somebody'd someone'd something'd there'd they they'd we we'd what where who who'd would "
    "wouldn't y'all'd you you'd",
    "'d": "he how it someone something there they where who you",
    "'ll": "how it somebody someone something they what who why y'all you",
    "'re": "there they what why you",
    "'s": "he how somebody someone that there what when where who why",
}
_CONTRACTIONS = [stem + end for end, stems in _STEMS.items() for stem in stems.split()]
_CONTRACTIONS += ["ma'am", "o'clock", "'twas", "y'all", "'ow's'at"]


def _drop_apostrophe(form: str) -> list[str]:
    """Return the form without one of its apostrophes, for each of them."""
    positions = [position for position, letter in enumerate(form) if letter == "'"]
    return [form[:position] + form[position + 1 :] for position in positions]


# Contraction without one of its apostrophes -> contraction. The last entry is the evaluators' slip.
_APOSTROPHES = {variant: form for form in _CONTRACTIONS for variant in _drop_apostrophe(form)}
_APOSTROPHES["somebody'd"] = "somebodyd"


def normalise_answer(answer: str) -> str:
    """Normalise an answer as the evaluators do.

    Lower the case, drop articles, write number words up to ten as digits, and restore the missing
    apostrophe of a contraction. Replace a punctuation mark by a blank, or by nothing if a blank is
    next to one such mark or the answer has a comma between digits. Colons, apostrophes and periods
    before a digit stay.
    """
    words = (_DIGITS.get(word, word) for word in _without_punctuation(answer).lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(
    prediction: str, answers: Iterable[tuple[str, int]], version: Version = "official"
) -> float:
    """Return the score of a predicted answer, from 0 to 1.

    For each person (VQA v2 has ten), a third of the number of other people with the predicted
    answer, at most 1; the score is the mean over persons.

    Args:
        answers: each answer with the number of people who gave it.
        version: `official` ignores case and normalises prediction and answers, unless all people
            gave the same answer; `albef_copy` always normalises the prediction, and only drops the
            punctuation of answers, unless all people gave the same answer.
    """
    counts = [(_strip(answer), count) for answer, count in answers if count > 0]
    people = sum(count for _, count in counts)
    if not people:
        raise ValueError("the question has no answer to compare with")
    predicted = _strip(prediction)
    differ = len({answer for answer, _ in counts}) > 1
    if version == "official":
        if differ:
            counts = [(normalise_answer(answer), count) for answer, count in counts]
            predicted = normalise_answer(predicted)
        counts = [(answer.lower(), count) for answer, count in counts]
        predicted = predicted.lower()
    else:
        predicted = normalise_answer(predicted)
        if differ:
            counts = [(_without_punctuation(answer), count) for answer, count in counts]
    agree = sum(count for answer, count in counts if answer == predicted)
    if people == 1:
        return float(agree)
    # With two or three people, all other people have to agree.
    enough = min(ENOUGH, people - 1)
    # An agreeing person has one other agreeing person fewer.
    agreeing_score = min(1.0, max(agree - 1, 0) / enough)
    other_score = min(1.0, agree / enough)
    return (agree * agreeing_score + (people - agree) * other_score) / people


def _strip(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def _without_punctuation(answer: str) -> str:
    has_number_comma = _COMMA_IN_NUMBER.search(answer) is not None
    text = answer
    for mark in _PUNCTUATION:
        is_beside_blank = f"{mark} " in answer or f" {mark}" in answer
        text = text.replace(mark, "" if has_number_comma or is_beside_blank else " ")
    return _PERIOD.sub("", text, count=_MAX_PERIODS)
