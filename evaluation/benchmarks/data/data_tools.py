"""Cost of the data tools by the number of samples: CPU time a sample, and peak memory.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.data.data_tools --samples 10000 100000

Each tool runs as its own command on one process, over shards of noise in JPEGs of 48 pixels and
1,000 samples a shard. Time is the command's CPU time without that over one sample, memory its
resident peak. Beyond `--most-decoded` samples `verify` reads headers only, and `stats` is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_index import ShardWriter

_SHARD = 1000
_DUPLICATE_EVERY = 1000
SETTINGS = {"processes": "1", "executor": "local"}
# A process's peak begins with that of its parent, so a small one starts the tool.
_MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(code)
"""


class Cost(NamedTuple):
    """CPU seconds and peak resident bytes of a command."""

    seconds: float
    bytes: int


def make_shards(folder: Path, samples: int) -> None:
    """Write samples whose images differ, all but one in a thousand."""
    rng = np.random.default_rng(0)
    image = b""
    with ShardWriter(folder, _SHARD) as writer:
        for number in range(samples):
            if number % _DUPLICATE_EVERY != 1:
                noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
                stream = BytesIO()
                Image.fromarray(noise).resize((48, 48), Image.Resampling.BICUBIC).save(
                    stream, "jpeg"
                )
                image = stream.getvalue()
            known = Annotation(
                captions=[f"a sample with number {number}"], source="noise", image_id=str(number)
            )
            # The bytes behind a JPEG's end make it another file.
            writer.write(f"{number:09d}", image + number.to_bytes(4, "little"), "jpg", known)


def cost(*words: object) -> Cost:
    """Run a data tool in a process of its own.

    Raises:
        ConfigError: it fails.
    """
    command = [sys.executable, "-m", "data_tools", *map(str, words)]
    command += [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", _MEASURED, *command],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: exit {done.returncode}")
    seconds, kilobytes = done.stdout.splitlines()[-1].split()
    return Cost(float(seconds), 1024 * int(kilobytes))


def costs(folder: Path, samples: int, decoded: bool) -> Iterator[tuple[str, Cost]]:
    """Yield every tool and its cost over so many samples."""
    shards, out = folder / f"{samples}", folder / f"{samples}-out"
    make_shards(shards, samples)
    yield "index", cost("index", shards)
    yield "verify --quick", cost("verify", shards, "--quick")
    if decoded:
        yield "verify", cost("verify", shards)
        yield "stats", cost("stats", shards, "--out", out / "stats.json")
        size = ("--samples-per-shard", 500)
        yield "reshard", cost("reshard", shards, "--out", out / "dealt", *size)
        yield (
            "reshard --shuffle",
            cost("reshard", shards, "--out", out / "mixed", *size, "--shuffle", 0),
        )
        yield "dedup, hashes", cost("dedup", shards, "--out", out / "exact.txt", "--exact",
                                    "--hashes", out / "hashes")  # fmt: skip
        yield "dedup, near pairs", cost("dedup", shards, "--out", out / "near.txt", "--hashes",
                                        out / "hashes")  # fmt: skip


def table(found: Mapping[int, Mapping[str, Cost]], start: Mapping[str, Cost]) -> str:
    """Lay out microseconds a sample and peak megabytes of each size, beside each other."""
    sizes = sorted(found)
    head = ["one process", *(f"{n:,}: µs a sample, MB" for n in sizes)]
    rows = []
    for tool in found[sizes[0]]:
        row = [tool]
        for samples in sizes:
            one = found[samples].get(tool)
            row.append("" if one is None else f"{_micro(one, start[tool], samples):.0f}, "
                       f"{one.bytes / 1e6:.0f}")  # fmt: skip
        rows.append(row)
    return harness.table(head, rows)


def _micro(one: Cost, start: Cost, samples: int) -> float:
    return 1e6 * max(0.0, one.seconds - start.seconds) / samples


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes, and where the shards are made."""
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--most-decoded", type=int, default=100_000)
    parser.add_argument("--folder", help="where shards are made; default: a temporary folder")


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Measure every size, print the table, yield the figures."""
    found: dict[int, dict[str, Cost]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        start = dict(costs(folder, 1, decoded=True))
        for samples in options.samples:
            found[samples] = {}
            for tool, one in costs(folder, samples, samples <= options.most_decoded):
                found[samples][tool] = one
                print(f"{samples:,} {tool}: {one.seconds:.1f} s, {one.bytes / 1e6:.0f} MB",
                      file=sys.stderr)  # fmt: skip
    print(table(found, start), end="\n\n")
    for samples, tools in found.items():
        for tool, one in tools.items():
            place = f"data_tools/{tool.replace(' ', '_')}/{samples}"
            yield Measurement(f"{place}/time", _micro(one, start[tool], samples), "µs a sample")
            yield Measurement(f"{place}/memory", one.bytes / 1e6, "MB")


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
