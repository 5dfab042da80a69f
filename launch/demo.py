"""`vlp demo`: data, pretraining and evaluation of a small model on generated scenes.

Writes shards of generated scenes, trains a vocabulary on their texts, pretrains with DeepSpeed
(up to two GPUs, else two CPU ranks), evaluates on held-out pairs and writes an HTML report.
The exit code is 1 if a figure is below its target.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evaluation.probes.word_pointing import PointingResult
    from evaluation.retrieval.retrieval import Direction, RetrievalResult

ROOT = Path(__file__).resolve().parents[1]
RUN = Path("runs/demo")
SHARDS = RUN / "shards"
REPORT = RUN / "report.html"
CONFIG = ROOT / "configs/pretrain/scenes_tiny.yaml"
RERANK = 16
# The batch has two sample groups, and a rank holds whole groups.
GPU_RANKS = (1, 2)
ANCHOR_MAPS = 4

DIRECTIONS: tuple[Direction, ...] = ("text_to_image", "image_to_text")
MIN_RECALL = {"R@1": 0.75, "R@10": 0.95}
MIN_POINTING = {"colour": 0.80, "shape": 0.60}


def run_demo(fresh: bool = False) -> int:
    """Run every part; return 1 for missed targets, 2 if an earlier demo's files are there."""
    if not fresh and RUN.exists() and any(RUN.iterdir()):
        print(f"{RUN} is not empty; --fresh deletes it (make demo FRESH=1)", file=sys.stderr)
        return 2
    start = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    try:
        return _run(start)
    except subprocess.CalledProcessError as error:
        command = " ".join(error.cmd)
        print(f"demo: a part failed with code {error.returncode}: {command}", file=sys.stderr)
        return 1


def _run(start: float) -> int:
    corpus = ("--out", str(SHARDS), "--train", "20000", "--val", "256")
    _print_title("1/5 shards: 20,000 generated scenes and 256 held out")
    _python("-m", "data_tools", "scenes", *corpus)
    _print_title("2/5 a WordPiece vocabulary of captions, questions and expressions")
    vocabulary = ("--size", "256", "--texts", "all", "--out", str(SHARDS / "vocabulary"))
    _python("-m", "data_tools", "vocabulary", "--shards", str(SHARDS / "train"), *vocabulary)
    _print_title("3/5 pretraining with DeepSpeed")
    pretraining_start = time.monotonic()
    _pretrain()
    pretraining_seconds = time.monotonic() - pretraining_start
    _print_title("4/5 retrieval on the held-out scenes")
    problems = _evaluate()
    _print_title("5/5 done")
    for problem in problems:
        print(f"below target: {problem}")
    seconds = time.monotonic() - start
    print(f"took {seconds:.0f} s, of which pretraining {pretraining_seconds:.0f} s")
    model = RUN / "run" / "model"
    print(f"report, with retrievals, anchors and curves: {REPORT}")
    print(f"anchors of {ANCHOR_MAPS} captions: {RUN / 'anchors.png'}")
    print(f"model folder: {model}\n\nnext:")
    print(f"  vlp app --model {model}   # search and match in a browser")
    print(f"  vlp evaluate retrieval --model {model} --shards {SHARDS / 'val'} --rerank {RERANK}")
    print("  docs/get-started/own-data.md: shards of your own images and captions")
    return 1 if problems else 0


def _pretrain() -> None:
    import torch

    from vlp.training.engines.environment import free_port, is_emulated

    environment = dict(os.environ)
    gpus = torch.cuda.device_count()
    if gpus:
        ranks = max(count for count in GPU_RANKS if count <= gpus)
    else:
        environment["DS_ACCELERATOR"] = "cpu"
        ranks = 2
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_accelerators", str(ranks), "--master_port", str(free_port())),
        str(ROOT / "launch/pretrain.py"),
        *("--config", str(CONFIG)),
        f"output={RUN / 'run'}",
        f"data.sources=[{{path: {SHARDS / 'train'}}}]",
        f"data.vocabulary={SHARDS / 'vocabulary'}",
    ]
    if not gpus and is_emulated(torch.device("cpu"), "bf16"):
        command.append("training.precision=float32")
    _run_quietly(command, environment, RUN / "pretrain.log")


def _run_quietly(command: Sequence[str], environment: dict[str, str], log: Path) -> None:
    """Run a command, write its output to a log and print the lines of its progress bar."""
    interrupts: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, previous_handler)  # a second Ctrl-C interrupts at once

    # Ctrl-C reaches the ranks, too: read on until they have saved a checkpoint.
    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with (
            log.open("w", encoding="utf-8") as file,
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if "step/s" in line or "s/step" in line:
                    print(f"\r{line.rstrip()}", end="", flush=True)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    print()
    if interrupts:
        print(f"interrupted; the output of the training: {log}", file=sys.stderr)
        raise KeyboardInterrupt
    if process.returncode:
        print("".join(log.read_text("utf-8").splitlines(keepends=True)[-20:]), file=sys.stderr)
        print(f"the whole output: {log}", file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)


def _evaluate() -> list[str]:
    """Evaluate the model, print tables, draw anchor maps, write the report; return shortfalls."""
    import vlp
    from evaluation.options import EvalOptions
    from evaluation.probes.anchor_maps import anchor_maps
    from evaluation.probes.anchor_plots import draw_anchor_maps
    from evaluation.probes.word_pointing import evaluate_pointing
    from evaluation.report.html_page import page
    from evaluation.report.sources import read_sources
    from evaluation.retrieval.retrieval import evaluate_retrieval

    loaded = vlp.load(RUN / "run" / "model")
    val_shards = [SHARDS / "val"]
    retrieval = evaluate_retrieval(
        loaded, val_shards, rerank=RERANK, options=EvalOptions(progress=True)
    )
    pointing = evaluate_pointing(loaded, val_shards, options=EvalOptions(progress=True))
    for result in (retrieval, pointing):
        print(f"\n{result.table().text()}")
        result.save(RUN / "run" / "evaluation" / "model")
    maps = anchor_maps(loaded, val_shards, count=ANCHOR_MAPS)
    draw_anchor_maps(maps, RUN / "anchors.png")
    REPORT.write_text(page(read_sources([RUN / "run"]), val_shards), encoding="utf-8")
    return shortfalls(retrieval, pointing)


def shortfalls(retrieval: RetrievalResult, pointing: PointingResult) -> list[str]:
    """Return a line for every target that the results miss."""
    problems = []
    for direction in DIRECTIONS:
        for name, minimum in MIN_RECALL.items():
            value = retrieval.figures["dual", direction, name].value
            if value < minimum:
                problems.append(f"{direction} {name} {value:.1%} is below {minimum:.0%}")
        dual_recall = retrieval.figures["dual", direction, "R@1"].value
        rerank_recall = retrieval.figures["rerank", direction, "R@1"].value
        if rerank_recall < dual_recall:
            problems.append(
                f"{direction} R@1 {dual_recall:.1%} drops to {rerank_recall:.1%} re-ranked"
            )
    for kind, minimum in MIN_POINTING.items():
        value = pointing.kinds[kind].pointing.value
        if value < minimum:
            problems.append(f"{kind} words point right in {value:.1%}, below {minimum:.0%}")
    return problems


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


def _print_title(title: str) -> None:
    print(f"\n== {title}", flush=True)
