"""Everything that a refactoring may not change, as one JSON file.

    make proof OUT=build/proof.json                            all of it
    make proof QUICK=1 OUT=build/new.json AGAINST=build/proof.json   all but the demo; compares

Generates a small corpus, then trains and evaluates on it by the public commands, two runs at a time
with one thread each. On one machine with the same packages two files are equal figure by figure: a
figure that differs, is gone or could not be computed makes the exit code 1. Help texts, the keys of
a configuration and the names of statistics may change on purpose: such changes are only printed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
TIMES = {"step", "seconds", "samples_per_second", "data_wait_share"}
# Imported once for all runs, which saves time; missing modules are ignored.
PRELOADED = ["torch", "transformers", "timm", "scipy.stats", "launch.pretrain", "vlp.training.loop"]

CORPUS = """data scenes --out @ --processes 1 --train 600 --val 48 --swaps 32
    --nlvr2 160 --nlvr2-val 16 --snli-ve 160 --snli-ve-val 16"""
VOCAB = "data vocabulary --shards @train @nlvr2 @snli_ve --texts all --size 256 --out @vocabulary"
# One run per line: kind and name | steps | configuration | overrides, after those of the kind in
# `OVERRIDES`; later overrides win. @train is the folder `train` of the corpus.
RUNS = """
vision sape | 8 | vision/cifar10_vit_tiny | @labelled
vision fourier | 8 | vision/cifar10_vit_tiny | @labelled | task.model.positions=[{name: fourier}]
vision irpe | 8 | vision/cifar10_vit_tiny | @labelled
    | task.model.positions=[{name: irpe-product, roles: k}]
vision rope | 8 | vision/cifar10_vit_tiny | @labelled | task.model.positions=[{name: rope-mixed}]
vision shaw | 8 | vision/cifar10_vit_tiny | @labelled
    | task.model.positions=[{name: shaw, roles: k, options: {offsets: raster, reach: null}}]
vision pixels | 15 | vision/pixels_cifar10_tiny | @labelled
vision detection | 30 | vision/scenes_detr_tiny | task.data.train.count=400
vision detection-irpe | 8 | vision/scenes_detr_tiny | task.data.train.count=400
    | task.model.positions=[{name: sine-2d}, {name: irpe-product, roles: k}]
vision widgets | 30 | vision/widgets_tiny | task.java=false
vision grids | 30 | vision/grids_arc_tiny | task.data.path=@arc
    | task.data.tasks=[{name: 67a3c6ac}, {name: 74dd1130}]
pretrain scenes_tiny | 30 | pretrain/scenes_tiny | training.batch=32
pretrain bf16 | 6 | pretrain/scenes_tiny | training.precision=bf16
    | training.gradient_accumulation_steps=2 | training.engine=deepspeed
pretrain teacher | 30 | pretrain/scenes_tiny | objectives.mim.output=cross
    | objectives.teacher={queue: 64, warmup_steps: 8}
pretrain text | 30 | pretrain/scenes_tiny | model.cross.layout=text | model.cross.dropout=0.1
    | model.cross.pooling=cls+mean | model.cross.token_score=8 | objectives.contrastive={kind: itc}
    | objectives.itm={listwise: 2, group: 16}
pretrain albef | 30 | pretrain/scenes_tiny | model.cross.layout=albef | model.cross.position=[]
    | objectives.contrastive={kind: itc} | objectives.teacher={queue: 64, warmup_steps: 8}
pretrain baselines | 8 | pretrain/scenes_tiny | model.cross.position=[uniform, ape, rpe]
    | objectives.contrastive={kind: sigmoid}
pretrain soft | 8 | pretrain/scenes_tiny | model.cross.position=[anchor-soft]
pretrain bias | 8 | pretrain/scenes_tiny | model.cross.position=[anchor, cope]
    | model.cross.options.anchor.mode=bias
pretrain flickr8k_small | 12 | pretrain/flickr8k_small
pretrain ace_paper | 30 | pretrain/paper | data.canonical_streams=8
    | data.captions=one | data.augment.crop_scale=[0.5,1.0]
    | model.text={weights: null, width: 96, layers: 2, heads: 4, intermediate: 192, vocab_size: 256}
    | model.image={weights: null, width: 96, layers: 2, heads: 4, intermediate: 192}
    | model.text.max_tokens=20 | model.image.image_size=64 | model.image.patch_size=8
    | model.cross.layers=2 | model.cross.heads=4 | model.cross.intermediate=192
    | objectives.teacher.queue=64
finetune retrieval | 30 | finetune/flickr30k | task.data.sources=[@train] | task.data.workers=0
    | model.image.image_size=64 | task.data.canonical_streams=8 | task.objectives.itm.group=16
    | task.data.validation=[@val]
finetune snli_ve | 30 | finetune/scenes_snli_ve | task.data.train=[@snli_ve]
    | task.data.validation=[@snli_ve_val]
finetune nlvr2 | 30 | finetune/scenes_nlvr2 | task.data.train=[@nlvr2]
    | task.data.validation=[@nlvr2_val]
finetune vqa | 30 | finetune/scenes_vqa | task.data.train=[@train] | task.data.validation=[@val]
finetune caption | 30 | finetune/scenes_caption | task.data.train=[@train]
    | task.data.validation=[@val]
finetune grounding | 30 | finetune/scenes_grounding | task.data.sources=[@train]
    | task.data.validation=[@val] | task.objectives.itm.group=16
"""
OVERRIDES = {
    "vision": ["training.engine=ddp"],
    "pretrain": [
        *("training.engine=ddp", "data.workers=0", "data.sources=[@train]"),
        *("data.vocabulary=@vocabulary", "objectives.itm.group=16"),
    ],
    "finetune": ["task.data.validation_limit=16", "training.evaluate_every=15"],
}
RESUME = ["pretrain/scenes_tiny", "objectives.teacher={queue: 64}", "training.checkpoint_every=4"]
EVALUATIONS = """
retrieval | evaluate retrieval --shards @val --rerank 8
retrieval match | evaluate retrieval --shards @val --rerank 4 --rerank-by match
retrieval bank | evaluate retrieval --shards @val --bank @train
pointing | evaluate pointing --shards @val
swaps | evaluate swaps --shards @swaps
"""


class Proof:
    """Runs of all parts in a temporary folder, with their figures by section and name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failed = folder, list[str]()
        self.figures: dict[str, dict[str, Any]] = {}
        # A process that forks from a server with all imports starts at once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def all_but_demo(self) -> None:
        """Run every part but the demo, `PROCESSES` at a time; parts wait for their inputs."""
        with ThreadPoolExecutor(PROCESSES) as pool:
            first = pool.submit(self._run, "corpus", self._corpus)
            tiny = None
            pool.submit(self._run, "interface", self._interface)
            _write_images(self.folder / "shards")
            for line in re.sub(r"\n +", " ", RUNS.strip()).split("\n"):
                name, steps, config, *overrides = line.split(" | ")
                needs = {"vision": None, "pretrain": first}.get(name.split()[0], tiny)
                run = (config, *overrides)
                future = pool.submit(self._run, name, self._train, int(steps), *run, needs=needs)
                if name == "pretrain scenes_tiny":
                    tiny = future
            pool.submit(self._run, "resume", self._resume, needs=first)
            for line in EVALUATIONS.strip().split("\n"):
                name, arguments = line.split(" | ")
                pool.submit(self._run, f"evaluate {name}", self._evaluate, arguments, needs=tiny)

    def _run(self, name: str, part: Any, *arguments: Any, needs: Future[Any] | None = None) -> None:
        """Run a part and collect its figures; print a failure and continue."""
        if needs is not None:
            needs.result()
        start = time.monotonic()
        try:
            for section, figures in part(name, *arguments).items():
                self.figures.setdefault(section, {}).update(figures)
        except Exception as error:
            self.failed.append(name)
            print(f"FAILED: {name}: {error}", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)

    def demo(self, name: str) -> dict[str, Any]:
        """Run `make demo` with its own threads and ranks; return its tables."""
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        command = [sys.executable, "-m", "launch", "demo"]
        subprocess.run(command, cwd=self.folder, env=environment, check=True)
        return {"demo": _tables(name, self.folder / "runs/demo/run/evaluation/model")}

    def _corpus(self, name: str) -> dict[str, Any]:
        self._vlp(name, *CORPUS.split())
        self._vlp(f"{name} vocabulary", *VOCAB.split())
        shards = self.folder / "shards"
        files = [*shards.rglob("*.tar"), shards / "vocabulary/vocab.txt"]
        return {"corpus": {str(f.relative_to(shards)): _hash(f.read_bytes()) for f in files}}

    def _interface(self, name: str) -> dict[str, Any]:
        self._start(name, _write_help, path := str(self.folder / "help.json"))
        return {name: json.loads(Path(path).read_text())}

    def _train(self, name: str, steps: int, *run: str) -> dict[str, Any]:
        self._vlp(name, *self._training(name, steps, *run))
        return self._logged(name)

    def _training(self, name: str, steps: int, config: str, *overrides: str) -> list[str]:
        kind, task = name.split()[:2]
        command = ["finetune", task, "--from", "@model"] if kind == "finetune" else ["train"]
        command += ["--ranks", "1", "--config", str(ROOT / f"configs/{config}.yaml")]
        command += [f"output={self.folder / name}", "training.epochs=null", "training.log_every=1"]
        command += [f"training.steps={steps}", "training.batch=16", "training.precision=float32"]
        labelled = ["task.data.train=@labelled", "task.data.test=@labelled"]
        settings = [
            w
            for override in overrides
            for w in (labelled if override == "@labelled" else [override])
        ]
        return [*command, *OVERRIDES[kind], *settings]

    def _resume(self, name: str) -> dict[str, Any]:
        """Kill a run between checkpoints and resume it; raise if it differs from a whole one."""
        whole = self._train(f"pretrain {name}", 12, *RESUME)
        killed = f"pretrain {name} killed"
        arguments = self._training(killed, 12, *RESUME)
        self._vlp(killed, *arguments, kill_at=6)
        self._vlp(killed, *arguments, "--resume")
        resumed = json.loads(json.dumps(self._logged(killed)).replace(killed, f"pretrain {name}"))
        if resumed != whole:
            raise RuntimeError("losses or weights of a resumed run are not the whole one's")
        if json.loads((self.folder / killed / "report.json").read_text())["resumed_at_steps"] == []:
            raise RuntimeError("the killed run began anew")
        return whole

    def _evaluate(self, name: str, arguments: str) -> dict[str, Any]:
        out = self.folder / name
        self._vlp(name, *arguments.split(), "--model", "@model", "--out", str(out))
        return {"evaluation": _tables(name, out)}

    def _logged(self, name: str) -> dict[str, Any]:
        """Return the last value of each logged figure by step, and a hash of the weights."""
        values: dict[str, dict[int, Any]] = {}
        for line in (self.folder / name / "log.jsonl").read_text().splitlines():
            row = json.loads(line)
            for key in sorted(row.keys() - TIMES):
                values.setdefault(f"{name}: {key}", {})[row["step"]] = row[key]
        losses = {
            key: [value for _, value in sorted(by_step.items())] for key, by_step in values.items()
        }
        keys = (self.folder / name / "config.yaml").read_text().replace(str(self.folder), "")
        weights = {name: _weights(self.folder / name / "model")}
        return {"losses": losses, "weights": weights, "interface": {f"{name}: keys": keys}}

    def _vlp(self, name: str, *arguments: str, kill_at: int = 0) -> None:
        """Run `vlp ARGUMENTS` in a new process; kill it when `kill_at` steps are logged."""
        model, shards = self.folder / "pretrain scenes_tiny/model", self.folder / "shards"
        command = [
            re.sub("@(?!model)", f"{shards}/", w).replace("@model", str(model)) for w in arguments
        ]
        self._start(name, _run_vlp, command, kill_at=kill_at)

    def _start(self, name: str, part: Any, argument: Any, kill_at: int = 0) -> None:
        output, log = self.folder / f"{name}.txt", self.folder / name / "log.jsonl"
        process = self._context.Process(target=part, args=(argument, str(output)))
        process.start()
        while kill_at and process.is_alive():
            if log.exists() and log.read_text().count("\n") >= kill_at:
                process.kill()
            time.sleep(0.02)
        process.join()
        if process.exitcode != (-9 if kill_at else 0):
            message = output.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"exit code {process.exitcode}\n{message}")


def _entry(arguments: list[str]) -> Any:
    """Run `vlp ARGUMENTS`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["vlp"].partition(":")
    return getattr(importlib.import_module(module), function)(arguments)


def _run_vlp(arguments: list[str], output: str) -> None:
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(_entry(arguments))


def _write_help(path: str, output: str) -> None:
    """Write the help of `vlp` and of every command below it."""
    texts: dict[str, str] = {}
    pending: list[list[str]] = [[]]
    while pending:
        arguments, text = pending.pop(), io.StringIO()
        with redirect_stdout(text), redirect_stderr(text), suppress(SystemExit):
            _entry([*arguments, "--help"])
        texts[" ".join(["vlp", *arguments])] = text.getvalue()
        subcommands = text.getvalue().partition("\nCommands:\n")[2]
        pending += [
            [*arguments, name] for name in re.findall(r"^  ([\w-]+)", subcommands, re.MULTILINE)
        ]
    Path(path).write_text(json.dumps(texts))


def _write_images(shards: Path) -> None:
    """Write images of four classes, and two of ARC's tasks: a mirror, an exchange of axes."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(120):
        path = shards / f"labelled/{number % 4}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    (shards / "arc").mkdir()
    for task, change in {"67a3c6ac": np.fliplr, "74dd1130": np.transpose}.items():
        grids = [rng.integers(1, 9, (4, 4)) for _ in range(4)]
        pairs = [{"input": grid.tolist(), "output": change(grid).tolist()} for grid in grids]
        text = json.dumps({"train": pairs[:3], "test": pairs[3:]})
        (shards / f"arc/{task}.json").write_text(text)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _weights(folder: Path) -> str:
    """Hash a model folder's tensors, whatever their names and order."""
    from safetensors.numpy import load_file

    tensors = [
        tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()
    ]
    return _hash(
        "".join(sorted(_hash(f"{t.shape}".encode() + t.tobytes()) for t in tensors)).encode()
    )


def _tables(name: str, folder: Path) -> dict[str, Any]:
    """Return every number of a folder's JSON files, and a hash of each file of ranks."""
    numbers: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            row = " ".join(v for v in node.values() if isinstance(v, str))  # a row's name
            for key, value in node.items():
                walk(value, f"{path} {row} {key}".replace("  ", " "))
        elif isinstance(node, list):
            for item in node:
                walk(item, path)
        elif isinstance(node, int | float):
            numbers.setdefault(path, []).append(node)

    for path in sorted(folder.glob("*.json")):
        walk(json.loads(path.read_text()), f"{name}: {path.stem}")
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line).get("ranks") for line in path.read_text().splitlines()]
        numbers[f"{name}: {path.stem}"] = _hash(json.dumps(rows, sort_keys=True).encode())
    return numbers


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print what differs between two proofs; returns the exit code."""
    intended, differing, equal = list[str](), list[str](), 0
    for section, figures in old.items():
        current = new.get(section)
        if current is None:
            print(f"not compared: {section}")
        elif section == "interface":
            for name in sorted({*figures, *current}):
                texts = [names.get(name, "").splitlines() for names in (figures, current)]
                diff = difflib.unified_diff(*texts, name, name, lineterm="", n=0)
                intended += [line for line in diff if not line.startswith("@@")]
        else:
            same = {name: value for name, value in figures.items() if current.get(name) == value}
            equal += sum(len(_list(value)) for value in same.values())
            intended += [f"new: {section}: {name}" for name in current if name not in figures]
            for name in figures.keys() - same.keys():
                is_statistic = "statistics/" in name and name not in current
                pairs = [
                    (x, y) for x, y in zip(_list(figures[name]), _list(current.get(name))) if x != y
                ]
                first = f"{pairs[0][0]!r} -> {pairs[0][1]!r}" if pairs else "another length"
                text = f"{section}: {name}: {first}"
                (intended if is_statistic else differing).append(text)
    if intended:
        print("\n== interface and names, which may change on purpose", *intended, sep="\n")
    if differing:
        print("\n== figures that differ", *sorted(differing), sep="\n")
    print(
        f"\nproof: {equal} figures equal"
        + (f", {len(differing)} series differ" if differing else "")
    )
    return 1 if differing or not equal else 0


def main() -> int:
    """Run the proof; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write everything a refactoring may not change.")
    parser.add_argument("--out", type=Path, default=Path("build/proof.json"))
    parser.add_argument("--against", type=Path, help="an earlier proof to compare with")
    parser.add_argument("--quick", action="store_true", help="leave the demo out")
    options = parser.parse_args()
    old = json.loads(options.against.read_text()) if options.against else None
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "TOKENIZERS_PARALLELISM": "false"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vlp-proof-") as folder:
        proof = Proof(Path(folder))
        proof.all_but_demo()
        if not options.quick:
            proof._run("demo", proof.demo)
    # NaN, which is no number that equals itself, is read again as text.
    new = json.loads(json.dumps(proof.figures), parse_constant=str)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    print(f"{options.out}: {time.monotonic() - start:.0f} s")
    code = compare(old, new) if old is not None else 0
    if proof.failed:
        print(f"proof: FAILED: {', '.join(proof.failed)}")
    return 1 if proof.failed else code


if __name__ == "__main__":
    sys.exit(main())
