"""A web server for a folder of shards that can be told to fail."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vlp.data.config import DataConfig
from vlp.data.pretrain import PretrainData
from vlp.data.shards.remote import DEFAULT_OUTAGES, CachedFile, OutageConfig, RemoteFolder
from vlp.data.stream.batch import Batch, Inputs, PatchMasking

MB = 10**6


class ShardServer:
    """What was asked for, and what to do about it.

    fails: by file name, how many requests are answered with `status`; halves: those whose answer
    breaks off in the middle; stalls: those whose answer stops in the middle until `go` is set;
    others: those that are answered with other bytes of that length; down_until: the time
    (monotonic) before which every request is answered with `status`; wants: user info and query
    without which nothing is given; seconds: that a shard takes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: Counter[str] = Counter()
        self.fails: Counter[str] = Counter()
        self.status = 500
        self.halves: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.down_until = 0.0
        self.go = threading.Event()
        self.wants: tuple[str, str] | None = None
        self.seconds = 0.0
        self.url = ""


@contextmanager
def serve(folder: Path) -> Iterator[ShardServer]:
    """Serve a folder on a port of this machine for as long as the context lasts."""
    told = ShardServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            name = path.rpartition("/")[2]
            told.asked[name] += 1
            user = self.headers.get("Authorization", "").removeprefix("Basic ")
            if told.wants not in (None, (base64.b64decode(user).decode(), query)):
                self.send_error(401)
                return
            if told.fails[name] > 0 or time.monotonic() < told.down_until:
                told.fails[name] -= 1
                self.send_error(told.status)
                return
            try:
                content = (told.folder / name).read_bytes()
            except OSError:
                self.send_error(404)
                return
            if told.others[name] > 0:
                told.others[name] -= 1
                content = content[::-1]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if name.endswith(".tar"):
                time.sleep(told.seconds)
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            if told.halves[name] > 0:
                told.halves[name] -= 1
                self.close_connection = True
                return
            if told.stalls[name] > 0:
                told.stalls[name] -= 1
                told.go.wait(30)
            self.wfile.write(content[half:])

        def do_HEAD(self) -> None:
            self.send_error(405)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}/shards"
    try:
        yield told
    finally:
        told.go.set()
        server.shutdown()
        server.server_close()


def file_of(
    server: ShardServer, number: int, outages: OutageConfig = DEFAULT_OUTAGES
) -> CachedFile:
    name = f"shard-{number:06d}.tar"
    size = (server.folder / name).stat().st_size
    return CachedFile(RemoteFolder(server.url, outages), name, size)


def content(handle: int) -> bytes:
    data = os.pread(handle, MB, 0)
    os.close(handle)
    return data


def manifest(server: ShardServer, *wrong: int) -> None:
    rows = []
    for number, path in enumerate(sorted(server.folder.glob("*.tar"))):
        digest = sha256(path.read_bytes() + b"x" * (number in wrong)).hexdigest()
        rows.append({"name": path.name, "sha256": digest})
    (server.folder / "manifest.json").write_text(json.dumps({"shards": rows}))


def batches(
    path: str, vocabulary: Path, cache: dict[str, Any] | None, **options: Any
) -> Iterator[tuple[Batch, int]]:
    config = DataConfig(
        **(
            {
                "sources": ({"path": path},),
                "vocabulary": str(vocabulary),
                "canonical_streams": 2,
                "shuffle_window": 4,
                "workers": 0,
                "cache": cache,
            }
            | options
        )
    )
    inputs = Inputs(16, (4, 4), 10, 90, word_masking=0.15, patch_masking=PatchMasking(0.5, 2))
    return PretrainData(config, inputs, 4, 3).batches(stop_after=14)
