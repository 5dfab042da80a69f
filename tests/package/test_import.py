import os
import subprocess
import sys

import pytest
import torch
from tests_support import tiny_config, tiny_text

from vlp.data.image.transforms import Preprocessing
from vlp.io import write_text
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel

PROBE = """
import socket, subprocess, sys, time
def refuse(*arguments, **options):
    raise AssertionError("import vlp must not reach out")
import torch
subprocess.Popen.__init__ = refuse
socket.socket.connect = refuse
start = time.perf_counter()
import vlp
print(time.perf_counter() - start)
print(sorted(m for m in ("timm", "transformers", "deepspeed") if m in sys.modules))
"""


def test_import_is_quick_and_reaches_nothing():
    seconds, heavy = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert float(seconds) < 1.0
    assert heavy == "[]"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_users_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        text = tiny_text()
        config = tiny_config()
        state = VLPModel(config).state_dict()
        heads = {"head": torch.zeros(2)}
        save_pretrained(tmp_path / "model", config, state, text, Preprocessing(16), heads)
        write_text(tmp_path / "model" / "text", "x", durable=True)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert len(modes) == 8
    assert set(modes.values()) == {0o666 & ~umask}
