"""BLEU, ROUGE-L, CIDEr, METEOR and SPICE by pycocoevalcap: between 0 and 1, CIDEr up to 10."""

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

    Keys are bleu1 to bleu4, rouge_l, cider and meteor; BLEU is no mean of captions.
    """

    corpus: dict[str, float]
    per_caption: dict[str, NDArray[np.float64]]


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
    if empty := [n for n, texts in enumerate(references) if not any(map(str.strip, texts))]:
        raise ValueError(f"caption {empty[0]} ({candidates[empty[0]]!r}) has no reference")
    require_caption_tools(java=meteor or tokenizer == "ptb")
    with _english_java():
        predicted = _tokenised([[candidate] for candidate in candidates], tokenizer)
        target = _tokenised(references, tokenizer)
    # A reference of punctuation alone is empty by now, but the scorers need at least one.
    target = {n: [text for text in texts if text] or [""] for n, texts in target.items()}
    if not any(map(any, target.values())):
        raise ValueError(f"no reference has a word, such as {references[0]!r}")
    bleu = _scorer("bleu", "Bleu")(4).compute_score(target, predicted, verbose=0)[0]
    corpus = {f"bleu{n}": float(score) for n, score in enumerate(bleu, start=1)}
    per_caption = {}
    for name, module, kind in (("rouge_l", "rouge", "Rouge"), ("cider", "cider", "Cider")):
        score, scores = _scorer(module, kind)().compute_score(target, predicted)
        corpus[name], per_caption[name] = float(score), np.asarray(scores, dtype=np.float64)
    if meteor:
        # It reads one caption a line, with ||| between fields, and only cleans the candidate.
        clean = {n: [text.replace("|||", " ") for text in texts] for n, texts in target.items()}
        with _english_java():
            scorer = _scorer("meteor", "Meteor")()
        try:
            score, scores = scorer.compute_score(clean, predicted)
        except Exception as error:
            scorer.lock.release()  # its destructor would wait for ever
            scorer.meteor_p.kill()
            message = scorer.meteor_p.stderr.read().decode(errors="replace").strip()
            raise CaptionToolError(f"METEOR gives no figures ({error}): {message}") from error
        corpus["meteor"], per_caption["meteor"] = float(score), np.asarray(scores, dtype=np.float64)
    return CaptionScores(corpus, per_caption)


@contextmanager
def _english_java() -> Iterator[None]:
    # Other locales write "0,5" and lower-case differently.
    name, options = "_JAVA_OPTIONS", "-Duser.language=en -Duser.country=US -Dfile.encoding=UTF-8"
    before = os.environ.get(name)
    os.environ[name] = f"{before or ''} {options}".strip()
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _tokenised(captions: Sequence[Sequence[str]], tokenizer: TokenizerName) -> dict[int, list[str]]:
    lines = {n: [" ".join(text.split()) for text in texts] for n, texts in enumerate(captions)}
    if tokenizer == "plain":
        nothing = str.maketrans("", "", string.punctuation)
        return {
            n: [" ".join(text.lower().translate(nothing).split()) for text in texts]
            for n, texts in lines.items()
        }
    if tokenizer != "ptb":
        raise ValueError(f"unknown tokenizer {tokenizer!r}; one of ptb, plain")
    # A line must not be empty: the tokeniser ends where only empty ones follow.
    rows = {n: [{"caption": text or "."} for text in texts] for n, texts in lines.items()}
    module = importlib.import_module("pycocoevalcap.tokenizer.ptbtokenizer")
    with _writable(module):
        tokenised: dict[int, list[str]] = module.PTBTokenizer().tokenize(rows)
    return tokenised


@contextmanager
def _writable(module: Any) -> Iterator[None]:
    # The tools write beside their module, which may lie in a read-only installation.
    file = Path(module.__file__)
    if os.access(file.parent, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for other in file.parent.iterdir():
            (Path(folder) / other.name).symlink_to(other)
        module.__file__ = str(Path(folder) / file.name)
        try:
            yield
        finally:
            module.__file__ = str(file)


def _scorer(module: str, name: str) -> Any:
    path = module if "." in module else f"{module}.{module}"
    return getattr(importlib.import_module(f"pycocoevalcap.{path}"), name)


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
    """Return SPICE's F-score over scene-graph tuples of per_caption caption, between 0 and 1."""
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} captions against references of {len(references)}")
    require_spice()
    predicted = {n: [" ".join(text.split())] for n, text in enumerate(candidates)}
    target = {n: [" ".join(text.split()) for text in texts] for n, texts in enumerate(references)}
    with _english_java(), _writable(_module("spice")):
        _, per_caption = _module("spice").Spice().compute_score(target, predicted)
    # A caption without tuples against references without tuples gives 0 / 0.
    return np.nan_to_num(np.array([scores["All"]["f"] for scores in per_caption], dtype=np.float64))


def _module(name: str) -> Any:
    return importlib.import_module(f"pycocoevalcap.spice.{name}")
