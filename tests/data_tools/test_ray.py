"""A real Ray cluster of two nodes on this machine: equal results, and a node that is killed."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from every_tool import run_every_tool, sources

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]


class Nodes(NamedTuple):
    """A cluster, its second node, and the port for `ray://`."""

    cluster: Any
    second: Any
    port: int


@pytest.fixture(scope="module")
def nodes():
    ray = pytest.importorskip("ray", reason="wants Ray (pip install 'vlp[ray]')")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield Nodes(cluster, second, port)
    ray.shutdown()
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]


def test_a_command_from_outside_of_the_cluster(nodes, tmp_path):
    given, reports = sources(tmp_path), []
    for place in ("local", f"ray://127.0.0.1:{nodes.port}"):
        report = tmp_path / "report"
        command = ["verify", str(given / "first"), "--report", str(report), "--executor", place]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        del environment["RAY_ADDRESS"]
        done = subprocess.run([sys.executable, "-m", "data_tools", *command], env=environment)
        assert done.returncode == 1
        reports.append(report.read_text())
    assert reports[0] == reports[1]


def slow(job):
    """Leave a mark of every try, and say which node has done the job."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    with job.open("a") as file:
        file.write(f"{node}\n")
    time.sleep(0.2)
    return job.name, node


def test_an_error_of_the_work_is_its_own(nodes, tmp_path):
    from data_tools.executor import RayExecutor

    with pytest.raises(FileNotFoundError) as found:
        list(RayExecutor().map(Path.read_text, [tmp_path / "gone"]))
    assert found.value.filename == str(tmp_path / "gone")


def test_a_node_is_killed_in_the_middle(nodes, tmp_path):
    from data_tools.executor import RayExecutor

    jobs = [tmp_path / str(number) for number in range(60)]

    def kill():
        # Both have begun, and the second one is at a job.
        while len({line for job in jobs if job.exists() for line in job.read_text().split()}) < 2:
            time.sleep(0.05)
        nodes.cluster.remove_node(nodes.second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    found = list(RayExecutor().map(slow, jobs))
    killer.join()
    assert [name for name, _ in found] == [job.name for job in jobs]
    tries = [job.read_text().split() for job in jobs]
    assert max(map(len, tries)) > 1, "no job was lost with its node"
    assert len({node for each in tries for node in each}) == 2
    # The tools go on with what is left.
    given = sources(tmp_path / "tools")
    one = run_every_tool(given, tmp_path / "one", "--processes", "1")
    assert run_every_tool(given, tmp_path / "ray", "--executor", "ray") == one
