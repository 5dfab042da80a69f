"""`vlp plan`: the table, the JSON file and the exit code of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluation.benchmarks.gpu.roofline import GPUS
from evaluation.benchmarks.harness import table
from evaluation.benchmarks.planning.count import count_groups, scale, smallest_rows
from evaluation.benchmarks.planning.network import Cluster
from evaluation.benchmarks.planning.plan import (
    Plan,
    engine_plans,
    make_plan,
    most_rows,
    smaller_plans,
)
from vlp.config import ConfigError, load_config
from vlp.data.shards.shard_index import ShardIndex
from vlp.io import as_url, write_json
from vlp.process.command_line import nearest
from vlp.training.config import PretrainConfig

SHOWN = 12
"""World sizes that the table names; the JSON file has all."""


def run_plan(
    path: str | Path,
    gpus: int,
    gpus_per_node: int,
    gpu: str,
    overrides: list[str],
    pairs: int | None = None,
    json_file: Path | None = None,
) -> int:
    """Print the plan of a pretraining; returns 0 where it can start and fits, else 2.

    Args:
        path: configuration.
        gpus: ranks.
        gpus_per_node: that share NVLink and a node's network.
        gpu: one of `GPUS`.
        overrides: `key.sub=value`.
        pairs: of an epoch; None asks the index of sources that are here.
        json_file: takes all figures.

    Raises:
        ConfigError: the configuration is wrong, or the GPU unknown.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: unknown GPU; {nearest(gpu, list(GPUS))}")
    config = load_config(path, PretrainConfig, overrides)
    sizes = config.world_sizes()
    nodes = -(-gpus // gpus_per_node)
    print(
        f"{path} on {gpus:,} {gpu} ({nodes:,} node{'s' * (nodes > 1)} of "
        f"{min(gpus, gpus_per_node)}): predictions, not measurements\n"
    )
    print(f"ranks that can train it: {_listed(sizes)}")
    found: dict[str, Any] = {"gpus": gpus, "gpu": gpu, "world_sizes": sizes}
    try:
        config.require_world_size(gpus)
    except ConfigError as error:
        near = _nearest(sizes, gpus)
        print(f"{gpus} GPUs cannot train it: {error}")
        print(f"nearest numbers of GPUs that can: {_listed(near)}" if near else "none can")
        return _end(found | {"fits": False, "problem": str(error), "nearest": near}, json_file)
    device, cluster = GPUS[gpu], Cluster(gpus_per_node)
    rows, group = config.training.batch // gpus, smallest_rows(config)
    count = scale(config, count_groups(config, rows), gpus)
    plan = make_plan(config, count, gpus, device, cluster)
    fits = plan.total.high <= device.memory
    most = most_rows(plan, count, rows, group, device.memory)
    print(f"a GPU's batch: {rows:,} pairs of {config.training.batch:,}; at most {most:,} fit\n")
    print(_memory_table(plan, device.memory), end="\n\n")
    steps = _steps(config, pairs)
    print(_time_table(plan, config, steps), end="\n\n")
    if plan.collectives:
        print(_calls_table(plan), end="\n\n")
    engines = dict(engine_plans(config, count, gpus, device, cluster)) if gpus > 1 else {}
    if engines:
        print(_engine_table(engines), end="\n\n")
    changes: list[dict[str, Any]] = []
    if not fits:
        for change, smaller in smaller_plans(config, gpus, device, cluster):
            changes.append({"change": change, **_figures(smaller, config)})
            print(_change(change, smaller, device.memory))
            if smaller.total.high <= device.memory:
                break
        print(f"or a batch of at most {most * gpus:,}: {most:,} pairs a GPU" if most else "")
    found |= {"fits": fits, "pairs_of_a_gpu": rows, "most_pairs": most, "steps": steps}
    found |= _figures(plan, config) | {"changes": changes}
    found["engines"] = {name: _figures(one, config) for name, one in engines.items()}
    return _end(found, json_file)


def _end(found: Mapping[str, Any], json_file: Path | None) -> int:
    if json_file is not None:
        write_json(json_file, found)
    return 0 if found["fits"] else 2


def _nearest(sizes: list[int], ranks: int) -> list[int]:
    """Return the largest of some numbers below `ranks` and the smallest above, where there are."""
    return [*[n for n in sizes if n < ranks][-1:], *[n for n in sizes if n > ranks][:1]]


def _listed(sizes: list[int]) -> str:
    shown = [f"{size:,}" for size in sizes]
    if len(shown) > SHOWN:
        half = SHOWN // 2
        shown = [*shown[:half], "...", *shown[-half:]]
        return f"{' '.join(shown)} ({len(sizes)} numbers)"
    return " ".join(shown)


def _memory_table(plan: Plan, memory: float) -> str:
    rows = [[part.name, f"{part.low / 1e9:.2f}", f"{part.high / 1e9:.2f}"] for part in plan.memory]
    verdict = "fits" if plan.total.high <= memory else "may not fit"
    if plan.total.low > memory:
        verdict = "does not fit"
    rows.append(["sum", f"{plan.total.low / 1e9:.2f}", f"{plan.total.high / 1e9:.2f}"])
    head = ["memory of a GPU, GB", "least", "most"]
    return table(head, rows) + f"\nof {memory / 1e9:.0f} GB: {verdict}"


def _time_table(plan: Plan, config: PretrainConfig, steps: int | None) -> str:
    def row(name: str, *values: float) -> list[str]:
        return [name, *(f"{value:,.1f}" for value in values)]

    pairs = _pairs(plan, config)
    rows = [
        row("compute, ms", *(1e3 * x for x in plan.compute)),
        row("waiting for other GPUs, ms", *(1e3 * x for x in plan.waiting)),
        row("step, ms", *(1e3 * x for x in plan.step)),
        row("pairs/s, all GPUs", *pairs),
    ]
    if steps is not None:
        rows.append(row(f"run of {steps:,} steps, h", *(steps * x / 3600 for x in plan.step)))
    else:
        rows.append(row("10⁹ pairs, h", *(1e9 / x / 3600 for x in pairs)))
    return table(["time", "near end", "far end"], rows)


def _calls_table(plan: Plan) -> str:
    rows = [
        [
            one.name,
            one.kind,
            f"{one.calls:.0f}",
            f"{one.bytes / 1e6:,.1f}",
            f"{1e3 * seconds:.1f}",
            one.behind,
        ]
        for one, seconds in plan.collectives
    ]
    return table(["communication of a step", "kind", "calls", "MB", "ms", "runs beside"], rows)


def _engine_table(engines: Mapping[str, Plan]) -> str:
    rows = [
        [
            name,
            *(f"{x / 1e9:.1f}" for x in plan.total),
            *(f"{1e3 * x:,.0f}" for x in plan.step),
            *(f"{100 * done / step:.1f}" for done, step in zip(plan.compute, plan.step)),
        ]
        for name, plan in engines.items()
    ]
    head = ["engine", "GB", "to", "ms a step", "to", "% compute", "to"]
    return table(head, rows)


def _change(change: Mapping[str, Any], plan: Plan, memory: float) -> str:
    keys = " ".join(f"training.{key}={value}" for key, value in change.items())
    low, high = (f"{x / 1e9:.1f}" for x in plan.total)
    steps = " to ".join(f"{1e3 * x:,.0f}" for x in plan.step)
    verdict = "fits" if plan.total.high <= memory else "is not enough"
    return f"{keys} {verdict}: {low} to {high} GB, {steps} ms a step"


def _pairs(plan: Plan, config: PretrainConfig) -> list[float]:
    training = config.training
    each = training.batch * training.gradient_accumulation_steps
    return [each / seconds for seconds in plan.step]


def _steps(config: PretrainConfig, pairs: int | None) -> int | None:
    """Return the optimiser steps of the run; None where nothing says how many pairs there are."""
    training = config.training
    if training.steps is not None:
        return training.steps
    pairs = pairs or config.data.epoch_samples or _indexed(config)
    if pairs is None or training.epochs is None:
        return None
    return training.epochs * pairs // (training.batch * training.gradient_accumulation_steps)


def _indexed(config: PretrainConfig) -> int | None:
    total = 0.0
    for source in config.data.sources:
        index = None
        if not as_url(source.path):
            with suppress(ConfigError):
                index = ShardIndex.open(source.path)
        if index is None:
            return None
        each = index.shards.samples if config.data.captions == "one" else index.shards.pairs
        total += source.weight * float(each.sum())
    return int(total)


def _figures(plan: Plan, config: PretrainConfig) -> dict[str, Any]:
    return {
        "memory_bytes": {part.name: [part.low, part.high] for part in plan.memory},
        "total_bytes": plan.total,
        "compute_seconds": plan.compute,
        "waiting_seconds": plan.waiting,
        "step_seconds": plan.step,
        "pairs_per_second": _pairs(plan, config),
        "collectives": [one._asdict() | {"seconds": taken} for one, taken in plan.collectives],
    }
