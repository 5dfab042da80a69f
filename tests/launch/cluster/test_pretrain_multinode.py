"""Nodes played by processes here: together, cut off, dying, silent; launchers without ssh.

The tests of a cut link join two network namespaces and need the rights of root.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
import torch
from launch_lab import CHECKPOINT_EVERY, COMMAND, STEPS, started, until

pytestmark = pytest.mark.nightly
PROGRAMS = Path(sys.executable).parent


def require_equal_weights(lab, name, other, step):
    result, expected = lab.weights(name, step), lab.weights(other, step)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[key], value) for key, value in expected.items())


def until_saved(lab, name, step, nodes):

    def saved():
        assert all(node.poll() is None for node in nodes)
        return max(lab.saved_steps(name), default=0) >= step

    until(saved)


def train(lab, outputs, *more):
    """Run both nodes to the end; the second has an `output` of its own. Returns what they said."""
    hosts = lab.folder / "hosts"
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    port = str(ranks.free_port())
    launchers = [
        started([
            *(PROGRAMS / "deepspeed", "--hostfile", hosts, "--no_ssh", "--node_rank", str(node)),
            *("--master_addr", "127.0.0.1", "--master_port", port),
            *(COMMAND, *lab.arguments(output, *more)),
        ])
        for node, output in enumerate(outputs)
    ]  # fmt: skip
    try:
        printed = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n\n".join(printed)
    return printed


def test_two_nodes_train_together_and_resume(lab):
    printed = train(lab, ("node_a", "node_b"), f"training.steps={STEPS}", lab.zero(2))
    assert "nnodes=2, num_local_procs=1, node_rank=1" in printed[1]
    report = lab.report("node_a")
    assert (report["ended"], report["ranks"]) == ("finished", 2)
    assert report["samples"] == report["trained_samples"] == 8 * STEPS
    assert not lab.output("node_b").exists(), "only the first node writes"

    lab.train("one_node", lab.zero(2))
    nodes, one = lab.weights("node_a", STEPS), lab.weights("one_node", STEPS)
    assert max(float((nodes[name] - one[name]).abs().max()) for name in one) < 1e-5

    # The checkpoint lies on the first node alone; the second gets its state through the network.
    more = STEPS + CHECKPOINT_EVERY
    train(lab, ("node_a", "node_b"), f"training.steps={more}", lab.zero(3), "--resume")
    assert lab.report("node_a")["resumed_at_steps"] == [STEPS]
    assert lab.report("node_a")["step"] == more


def kill(process):
    """Kill a process and all below it, as when a machine fails."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    process.wait()


def test_a_run_goes_on_without_a_node(lab):
    """Two agents of torchrun, the first with the rendezvous; one dies."""
    steps = 80
    length = (f"training.steps={steps}", "training.keep_last=100")
    endpoint = f"127.0.0.1:{ranks.free_port()}"
    agents = [
        started([
            *(PROGRAMS / "torchrun", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--rdzv-id", "elastic", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", endpoint),
            *("--rdzv-conf", f"is_host={str(node == 0).lower()},last_call_timeout=5"),
            *(COMMAND, *lab.arguments("elastic", *length, "--resume")),
        ], stdout=(lab.folder / f"said_{node}.txt").open("wb"))
        for node in range(2)
    ]  # fmt: skip
    try:
        until_saved(lab, "elastic", CHECKPOINT_EVERY, agents[:1])
        kill(agents[1])
        assert agents[0].wait(timeout=200) == 0, (lab.folder / "said_0.txt").read_text()
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill(agent)
    report = lab.report("elastic")
    [step] = report["resumed_at_steps"]
    assert CHECKPOINT_EVERY <= step < steps
    assert report["ranks"] == 1
    assert report["samples"] == report["trained_samples"] == 8 * steps

    # Two ranks to that step and one from there, without faults.
    more = (*length, "training.checkpoint_every=1")
    lab.train("elastic_before", *more, world_size=2)
    lab.begin_with("elastic_before", step, "elastic_after")
    lab.train("elastic_after", *more, "--resume")
    require_equal_weights(lab, "elastic", "elastic_after", steps)


NODES = ("vlp-node-0", "vlp-node-1")
LINKS = ("vlp0", "vlp1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CUT_STEPS = 60
CUT_LENGTH = (f"training.steps={CUT_STEPS}", "training.keep_last=100")
LATE = "waited for another rank longer than training.timeout"


def ip(*words):
    """Call `ip`, which needs the rights of root."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def delete_nodes():
    for node in NODES:
        subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)


@pytest.fixture
def link():
    """Two namespaces joined by a pair of virtual interfaces; words of `ip` that name one end."""
    try:
        delete_nodes()
        for node in NODES:
            ip("netns", "add", node)
        (first, one), (second, other) = zip(NODES, LINKS)
        ip("link", "add", one, "netns", first, "type", "veth", "peer", other, "netns", second)
        for node, end, address in zip(NODES, LINKS, ADDRESSES):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            for name in ("lo", end):
                ip("-n", node, "link", "set", name, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        delete_nodes()
        pytest.skip(f"no network namespaces here: {error}")
    yield ("-n", NODES[0], "link", "set", LINKS[0])
    delete_nodes()


def start_nodes(lab, name, world, *more):
    """One rank a node, by the environment that Slurm's tasks have too."""
    arguments = lab.arguments(name, *CUT_LENGTH, "training.timeout=8", *more)
    shared = {"LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_SIZE": "1"}
    shared |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    return [
        started(
            ["ip", "netns", "exec", NODES[rank], sys.executable, COMMAND, *arguments],
            environment=shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": LINKS[rank]},
        )
        for rank in range(world)
    ]


def test_a_run_outlives_its_link_and_a_node(lab, link):
    nodes = start_nodes(lab, "cut", 2)
    until_saved(lab, "cut", CHECKPOINT_EVERY, nodes)
    ip(*link, "down")
    cut = time.monotonic()
    printed = [node.communicate(timeout=60)[0] for node in nodes]
    assert time.monotonic() - cut < 30
    for rank, (node, words) in enumerate(zip(nodes, printed, strict=True)):
        assert node.returncode == 1
        assert f"rank {rank} {LATE}" in words
        assert "Traceback" not in words
    two = max(lab.saved_steps("cut"))

    [alone] = start_nodes(lab, "cut", 1, "--resume")
    until_saved(lab, "cut", two + CHECKPOINT_EVERY, [alone])
    alone.kill()
    alone.communicate()
    one = max(lab.saved_steps("cut"))
    assert two < one < CUT_STEPS

    ip(*link, "up")
    nodes = start_nodes(lab, "cut", 2, "--resume")
    printed = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n\n".join(printed)
    report = lab.report("cut")
    assert report["resumed_at_steps"] == [two, one]
    assert report["samples"] == report["trained_samples"] == 8 * CUT_STEPS

    # The same numbers of ranks, without faults, on one machine.
    lab.train("cut_first", *CUT_LENGTH, world_size=2)
    lab.begin_with("cut_first", two, "cut_second")
    lab.train("cut_second", *CUT_LENGTH, "--resume")
    lab.begin_with("cut_second", one, "cut_third")
    lab.train("cut_third", *CUT_LENGTH, "--resume", world_size=2)
    require_equal_weights(lab, "cut", "cut_third", CUT_STEPS)


def test_a_stopped_rank_is_named_and_the_others_say_where_they_wait(lab):
    more = ("training.steps=100000", "training.engine=ddp")
    both = ranks.start([COMMAND, *lab.arguments("silent", *more)], 2)
    pid = [rank.process.pid for rank in both]
    hang = lab.output("silent") / "hang"

    def said(rank):
        return both[rank].output.read_text(errors="replace")

    try:
        until(lambda: lab.steps("silent") > 3, said=lambda: said(0))
        os.kill(pid[1], signal.SIGSTOP)
        named = re.compile(r"rank 1 \(\S+\) is silent for (\d+) s; it was in step \d+, \w+")
        until(lambda: named.search(said(0)))
        until(lambda: any(hang.glob("*/rank_0.txt")), 60)
        [stacks] = hang.glob("*/rank_0.txt")
        until(lambda: "last collective calls" in stacks.read_text(), 60)
        assert "vlp/training/loop.py" in stacks.read_text()
        assert "gloo:all_gather" in stacks.read_text()
        os.kill(pid[1], signal.SIGCONT)
        until(lambda: re.search(r"rank 1 \(\S+\) is back after \d+ s", said(0)), 60)
        until(lambda: stacks.with_name("rank_1.txt").exists(), 60)

        # The store is rank 0's own here.
        os.kill(pid[0], signal.SIGSTOP)
        until(lambda: "the store at rank 0" in said(1))
        os.kill(pid[0], signal.SIGCONT)
        steps = lab.steps("silent")
        until(lambda: lab.steps("silent") > steps + 2, 60)
        os.kill(pid[0], signal.SIGTERM)
        assert [code for code, _ in ranks.finish(both, 60)] == [75, 75]
        assert lab.report("silent")["ended"] == "stopped"
    finally:
        for rank in both:
            rank.process.kill()
