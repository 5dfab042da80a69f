"""Two nodes in network namespaces: their link is cut, one goes on alone and dies, both finish."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ranks
import torch
from launch_lab import CHECKPOINT_EVERY, Lab

pytestmark = pytest.mark.nightly

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
STEPS = 60
NODES = ("vlp-node-0", "vlp-node-1")
LINKS = ("vlp0", "vlp1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    """Call `ip`, which needs the rights of root."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def delete_nodes() -> None:
    for node in NODES:
        subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)


@pytest.fixture
def link() -> Iterator[tuple[str, ...]]:
    """Two namespaces joined by a pair of virtual interfaces; words of `ip` that name one end."""
    try:
        delete_nodes()
        for node in NODES:
            ip("netns", "add", node)
        ends = zip(NODES, LINKS, strict=True)
        (first, one), (second, other) = ends
        ip("link", "add", one, "netns", first, "type", "veth", "peer", other, "netns", second)
        for node, end, address in zip(NODES, LINKS, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            for name in ("lo", end):
                ip("-n", node, "link", "set", name, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        delete_nodes()
        pytest.skip(f"no network namespaces here: {error}")
    yield ("-n", NODES[0], "link", "set", LINKS[0])
    delete_nodes()


def start(lab: Lab, name: str, world: int, *more: str) -> list[subprocess.Popen[str]]:
    """One rank a node, by the environment that Slurm's tasks have too."""
    rest = (f"training.steps={STEPS}", "training.keep_last=100", "training.timeout=8", *more)
    return [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                NODES[rank],
                sys.executable,
                COMMAND,
                *lab.arguments(name, *rest),
            ],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_SIZE": "1"}
            | {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}
            | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            | {"GLOO_SOCKET_IFNAME": LINKS[rank]},
            cwd=ranks.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def until_saved(lab: Lab, name: str, step: int, running: list[subprocess.Popen[str]]) -> None:
    """Wait for a checkpoint of that step or a later one."""
    began = time.monotonic()
    while max(lab.saved_steps(name), default=0) < step:
        assert all(node.poll() is None for node in running), running[0].communicate()[0]
        assert time.monotonic() - began < 120
        time.sleep(0.02)


def test_a_run_outlives_its_link_and_a_node(lab: Lab, link: tuple[str, ...]) -> None:
    nodes = start(lab, "cut", 2)
    until_saved(lab, "cut", CHECKPOINT_EVERY, nodes)
    ip(*link, "down")
    cut = time.monotonic()
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert time.monotonic() - cut < 30
    for rank, (node, words) in enumerate(zip(nodes, said, strict=True)):
        assert node.returncode == 1
        assert f"rank {rank} waited for another one longer than training.timeout" in words
        assert "Traceback" not in words
    two = max(lab.saved_steps("cut"))

    [alone] = start(lab, "cut", 1, "--resume")
    until_saved(lab, "cut", two + CHECKPOINT_EVERY, [alone])
    alone.kill()
    alone.communicate()
    one = max(lab.saved_steps("cut"))
    assert two < one < STEPS

    ip(*link, "up")
    nodes = start(lab, "cut", 2, "--resume")
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n\n".join(said)
    report = lab.report("cut")
    assert report["resumed_at_steps"] == [two, one]
    assert report["samples"] == report["trained_samples"] == 8 * STEPS

    # The same numbers of ranks, without faults, on one machine.
    more = (f"training.steps={STEPS}", "training.keep_last=100")
    ranks.run([COMMAND, *lab.arguments("cut_first", *more)], 2)
    lab.begin_with("cut_first", two, "cut_second")
    ranks.run([COMMAND, *lab.arguments("cut_second", *more, "--resume")], 1)
    lab.begin_with("cut_second", one, "cut_third")
    ranks.run([COMMAND, *lab.arguments("cut_third", *more, "--resume")], 2)
    found, expected = lab.weights("cut", STEPS), lab.weights("cut_third", STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_node_that_never_comes_is_said_so(lab: Lab, link: tuple[str, ...]) -> None:
    ip(*link, "down")
    [alone, absent] = start(lab, "alone", 2)
    absent.kill()
    said = alone.communicate(timeout=60)[0]
    assert alone.returncode == 1
    assert "rank 0 waited for another one longer than training.timeout" in said
    assert "Traceback" not in said
