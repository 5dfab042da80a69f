"""Two launchers play two nodes: `pytest -m multinode tests/launch/cluster`.

Each is started by hand, as on machines without ssh between them; they share nothing but a port.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from launch_lab import CHECKPOINT_EVERY, STEPS, Lab
from safetensors.torch import load_file

pytestmark = pytest.mark.nightly

COMMAND = ranks.ROOT / "launch" / "pretrain.py"


def train(lab: Lab, outputs: tuple[str, str], *more: str) -> list[str]:
    """Run both nodes to the end; the second has an `output` of its own. Returns what they said."""
    hosts = lab.folder / "hosts"
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    port = str(ranks.free_port())
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK",)}
    launchers = [
        subprocess.Popen(
            [
                *(Path(sys.executable).with_name("deepspeed"), "--hostfile", hosts),
                *("--no_ssh", "--node_rank", str(node)),
                *("--master_addr", "127.0.0.1", "--master_port", port),
                *(COMMAND, *lab.arguments(output, *more)),
            ],
            env=environment
            | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            cwd=ranks.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, output in enumerate(outputs)
    ]
    try:
        said = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n\n".join(said)
    return said


def test_two_nodes_train_together_and_resume(lab: Lab) -> None:
    said = train(lab, ("node_a", "node_b"), f"training.steps={STEPS}", lab.zero(2))
    assert "nnodes=2, num_local_procs=1, node_rank=1" in said[1]
    report = lab.report("node_a")
    assert report["ended"] == "finished"
    assert report["ranks"] == 2
    assert report["samples"] == report["trained_samples"] == 8 * STEPS
    assert not lab.output("node_b").exists(), "only the first node writes"

    ranks.run([COMMAND, *lab.arguments("one_node", lab.zero(2))], world_size=1)
    step = f"checkpoints/step_{STEPS}/weights.safetensors"
    nodes, one = load_file(lab.output("node_a") / step), load_file(lab.output("one_node") / step)
    assert max(float((nodes[name] - one[name]).abs().max()) for name in one) < 1e-5

    # The checkpoint lies on the first node alone; the second gets its state through the network.
    more = STEPS + CHECKPOINT_EVERY
    train(lab, ("node_a", "node_b"), f"training.steps={more}", lab.zero(3), "--resume")
    assert lab.report("node_a")["resumed_at_steps"] == [STEPS]
    assert lab.report("node_a")["step"] == more
