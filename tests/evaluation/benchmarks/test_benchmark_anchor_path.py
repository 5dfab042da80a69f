"""The benchmark of the anchor path: right references, counted memory, figures that parse."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from evaluation.benchmarks.anchor_path import (
    Size,
    brute_path,
    main,
    measure,
    offsets_path,
    parse_size,
    random_distance,
)
from evaluation.benchmarks.harness import Measurement, device_name, peak_memory, print_figures
from vlp.positions.anchor import anchor_path

CPU = torch.device("cpu")


def test_references_are_the_path():
    distance = random_distance(Size(3, 4, 6, 2, 2), CPU).double()
    assert torch.isinf(distance).float().mean() > 0.5
    torch.testing.assert_close(brute_path(distance, (3, 4)), anchor_path(distance, (3, 4))[0])
    for metric in ("manhattan", "chebyshev", "euclidean"):
        unbounded = anchor_path(distance, (3, 4), None, None, None, metric)[0]
        torch.testing.assert_close(offsets_path(distance, (3, 4), metric), unbounded)


def test_a_way_that_finds_other_paths_is_not_timed():
    distance = random_distance(Size(3, 4, 6, 2, 1), CPU)
    paths = {"right": lambda d: brute_path(d, (3, 4)), "wrong": lambda d: brute_path(d, (4, 3))}
    with pytest.raises(RuntimeError, match="wrong finds other paths than right"):
        measure(paths, distance, False, 1)


def test_peak_memory_counts_what_is_held_at_once():
    mebibyte = 2**18  # float32 entries

    def work():
        kept = torch.empty(3 * mebibyte)
        torch.empty(4 * mebibyte)  # released at once
        return kept, torch.empty(2 * mebibyte)

    assert peak_memory(work, CPU) == pytest.approx(7 * 2**20, rel=0.01)
    assert peak_memory(lambda: None, CPU) == 0


def test_prints_tables_and_a_line_for_each_figure(capsys):
    assert main(["--sizes", "5x4x6x2x2", "--repeats", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = [json.loads(line) for line in lines if line.startswith("{")]
    assert lines[-len(figures) :] == [json.dumps(figure) for figure in figures]
    for figure in figures:
        assert list(figure) == ["name", "value", "unit", "target", "stretch", "device"]
        assert figure["device"] == f"cpu, {torch.get_num_threads()} threads"
    values = {figure["name"]: figure["value"] for figure in figures}
    assert len(values) == 16  # 2 ways x (2 passes + 2 metrics) x (time, memory)
    assert all(value > 0 for value in values.values())
    name = "anchor_path/5x4x6x2x2/forward{}/{}/peak_memory"
    assert values[name.format("", "brute")] > 5 * values[name.format("", "torch")]
    assert values[name.format("", "torch")] < values[name.format("+backward", "torch")]
    # Path (float32) and reachable (bool) are what must be held at the least.
    assert values[name.format("", "torch")] * 2**20 >= math.prod((5, 4, 6, 2, 2)) * 5
    rows = [line.split()[:3] for line in lines if line.startswith("5x4")]
    assert ["5x4x6x2x2", "forward", "brute"] in rows
    assert ["5x4x6x2x1", "chebyshev", "torch"] in rows


@pytest.mark.parametrize("text", ["5x4x6x2", "5x4x6x2x0", "axbxcxdxe", "1x1x1x1x1x1"])
def test_sizes_that_make_no_sense_are_named(text, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not ROWSxCOLUMNS"):
        parse_size(text)
    with pytest.raises(SystemExit):
        main(["--sizes", text])
    assert text in capsys.readouterr().err


def test_figures_name_target_and_device(capsys):
    print_figures([Measurement("a", 1.5, "ms", 2.0), Measurement("b", 3, "MiB", stretch=1)], CPU)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "name": "a",
        "value": 1.5,
        "unit": "ms",
        "target": 2.0,
        "stretch": None,
        "device": device_name(CPU),
    }
    assert (second["target"], second["stretch"]) == (None, 1)
