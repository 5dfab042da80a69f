"""A web server for a folder of shards that can be told to fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ShardServer:
    """What was asked for, and what to do about it.

    fails: by file name, how many requests are answered with `status`; halves: those whose answer
    breaks off in the middle; stalls: those whose answer stops in the middle until `go` is set.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: Counter[str] = Counter()
        self.fails: Counter[str] = Counter()
        self.status = 500
        self.halves: Counter[str] = Counter()
        self.stalls: set[str] = set()
        self.go = threading.Event()
        self.url = ""


@contextmanager
def serve(folder: Path) -> Iterator[ShardServer]:
    """Serve a folder on a port of this machine for as long as the context lasts."""
    told = ShardServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            told.asked[name] += 1
            if told.fails[name] > 0:
                told.fails[name] -= 1
                self.send_error(told.status)
                return
            try:
                content = (told.folder / name).read_bytes()
            except OSError:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            if told.halves[name] > 0:
                told.halves[name] -= 1
                self.close_connection = True
                return
            if name in told.stalls:
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
