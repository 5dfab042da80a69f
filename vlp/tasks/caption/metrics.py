"""BLEU, ROUGE-L, CIDEr and METEOR by pycocoevalcap: shares between 0 and 1, CIDEr up to 10.

SPICE is left out, since it downloads its tools when it is called.
"""

from __future__ import annotations

import importlib
import os
import shutil
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenizerName = Literal["ptb", "plain"]


class CaptionToolError(RuntimeError):
    """Error for a missing tool of the caption metrics; the message says how to get it."""


class CaptionScores(NamedTuple):
    """Scores of the corpus and of each caption, (captions,).

    Keys are bleu1 to bleu4, rouge_l, cider and meteor; `each` lacks BLEU, which is no mean of
    captions.
    """

    corpus: dict[str, float]
    each: dict[str, NDArray[np.float64]]


def require_caption_tools(java: bool = True) -> None:
    """Raise an error if a tool of the metrics is missing, before a long run needs it."""
    try:
        importlib.import_module("pycocoevalcap")
    except ImportError as error:
        raise CaptionToolError(
            "caption metrics need the package pycocoevalcap: pip install pycocoevalcap"
        ) from error
    if java and shutil.which("java") is None:
        raise CaptionToolError(
            "METEOR and the PTB tokeniser run on Java, and there is no `java` on the path: install "
            "a runtime (apt-get install openjdk-17-jre-headless), or go without both"
        )


def caption_scores(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenizer: TokenizerName = "ptb",
    meteor: bool = True,
) -> CaptionScores:
    """Compare captions with people's references.

    Args:
        candidates: one caption each; an empty one scores 0.
        references: one or more for each candidate.
        tokenizer: "ptb" (COCO's, in Java) or "plain", which drops ASCII punctuation and splits at
            blanks. Both lower-case.
    """
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} captions against references of {len(references)}")
    if empty := [n for n, said in enumerate(references) if not any(map(str.strip, said))]:
        raise ValueError(f"caption {empty[0]} ({candidates[empty[0]]!r}) has no reference")
    require_caption_tools(java=meteor or tokenizer == "ptb")
    with _english_java():
        found = _tokenised([[one] for one in candidates], tokenizer)
        wanted = _tokenised(references, tokenizer)
    # A reference of punctuation alone is empty by now; the scorers want one all the same.
    wanted = {n: [one for one in said if one] or [""] for n, said in wanted.items()}
    if not any(map(any, wanted.values())):
        raise ValueError(f"no reference has a word, such as {references[0]!r}")
    bleu = _scorer("bleu", "Bleu")(4).compute_score(wanted, found, verbose=0)[0]
    corpus = {f"bleu{n}": float(score) for n, score in enumerate(bleu, start=1)}
    each = {}
    for name, module, kind in (("rouge_l", "rouge", "Rouge"), ("cider", "cider", "Cider")):
        score, scores = _scorer(module, kind)().compute_score(wanted, found)
        corpus[name], each[name] = float(score), np.asarray(scores, dtype=np.float64)
    if meteor:
        # It reads one caption a line, with ||| between fields, and only cleans the candidate.
        clean = {n: [one.replace("|||", " ") for one in said] for n, said in wanted.items()}
        with _english_java():
            scorer = _scorer("meteor", "Meteor")()
        try:
            score, scores = scorer.compute_score(clean, found)
        except Exception as error:
            scorer.lock.release()  # its destructor would wait for ever
            scorer.meteor_p.kill()
            said = scorer.meteor_p.stderr.read().decode(errors="replace").strip()
            raise CaptionToolError(f"METEOR gives no figures ({error}): {said}") from error
        corpus["meteor"], each["meteor"] = float(score), np.asarray(scores, dtype=np.float64)
    return CaptionScores(corpus, each)


@contextmanager
def _english_java() -> Iterator[None]:
    """Run Java programs in an English locale, as others write "0,5" and lower-case differently."""
    name, wanted = "_JAVA_OPTIONS", "-Duser.language=en -Duser.country=US -Dfile.encoding=UTF-8"
    before = os.environ.get(name)
    os.environ[name] = f"{before or ''} {wanted}".strip()
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _tokenised(captions: Sequence[Sequence[str]], tokenizer: TokenizerName) -> dict[int, list[str]]:
    lines = {n: [" ".join(one.split()) for one in said] for n, said in enumerate(captions)}
    if tokenizer == "plain":
        nothing = str.maketrans("", "", string.punctuation)
        return {
            n: [" ".join(one.lower().translate(nothing).split()) for one in said]
            for n, said in lines.items()
        }
    if tokenizer != "ptb":
        raise ValueError(f"unknown tokenizer {tokenizer!r}; one of ptb, plain")
    # A line must not be empty: the tokeniser ends where only empty ones follow.
    asked = {n: [{"caption": one or "."} for one in said] for n, said in lines.items()}
    module = importlib.import_module("pycocoevalcap.tokenizer.ptbtokenizer")
    with _writable(module):
        tokenised: dict[int, list[str]] = module.PTBTokenizer().tokenize(asked)
    return tokenised


@contextmanager
def _writable(module: Any) -> Iterator[None]:
    """Replace a module's own folder, where it is read-only, by a writable one like it."""
    file = Path(module.__file__)
    if os.access(file.parent, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory() as place:
        for other in file.parent.iterdir():
            (Path(place) / other.name).symlink_to(other)
        module.__file__ = str(Path(place) / file.name)
        try:
            yield
        finally:
            module.__file__ = str(file)


def _scorer(module: str, name: str) -> Any:
    place = module if "." in module else f"{module}.{module}"
    return getattr(importlib.import_module(f"pycocoevalcap.{place}"), name)


PARSER = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


def require_spice() -> None:
    """Raise an error if the tools of SPICE are missing."""
    require_caption_tools()
    folder = Path(_module("spice").__file__).parent / "lib"
    missing = [name for name in PARSER if not (folder / name).is_file()]
    if missing:
        raise CaptionToolError(
            f"SPICE needs Stanford CoreNLP 3.6.0: put {' and '.join(missing)} into {folder}, or "
            "let `python -m pycocoevalcap.spice.get_stanford_models` fetch them"
        )


def spice_scores(
    candidates: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return SPICE's F-score over scene-graph tuples of each caption, between 0 and 1."""
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} captions against references of {len(references)}")
    require_spice()
    found = {n: [" ".join(one.split())] for n, one in enumerate(candidates)}
    wanted = {n: [" ".join(one.split()) for one in said] for n, said in enumerate(references)}
    with _english_java(), _writable(_module("spice")):
        _, each = _module("spice").Spice().compute_score(wanted, found)
    # Nothing said and nothing to say gives 0 / 0.
    return np.nan_to_num(np.array([scores["All"]["f"] for scores in each], dtype=np.float64))


def _module(name: str) -> Any:
    return importlib.import_module(f"pycocoevalcap.spice.{name}")
