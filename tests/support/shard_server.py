"""A web server for a folder of shards that can be told to fail."""

import base64
import json
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vlp.data.shards.remote import DEFAULT_OUTAGES, CachedFile, RemoteFolder

MB = 10**6


class ShardServer:
    """Requests by file name, and how many of the next ones fail."""

    def __init__(self, folder):
        self.folder, self.url = folder, ""
        self.asked = Counter()
        self.fails, self.status = Counter(), 500
        self.halves = Counter()  # answers that break off in the middle
        self.stalls, self.go = Counter(), threading.Event()  # stop in the middle until `go`
        self.others = Counter()  # answers of other bytes of that length
        self.down_until = 0.0  # monotonic time before which every answer is `status`
        self.wants = None  # user info and query without which the answer is 401


@contextmanager
def serve(folder):
    """Serve a folder on a port of this machine for as long as the context lasts."""
    told = ShardServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
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

        def do_HEAD(self):
            self.send_error(405)

        def log_message(self, format, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
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


def file_of(server, number, outages=DEFAULT_OUTAGES):
    name = f"shard-{number:06d}.tar"
    size = (server.folder / name).stat().st_size
    return CachedFile(RemoteFolder(server.url, outages), name, size)


def content(handle):
    data = os.pread(handle, MB, 0)
    os.close(handle)
    return data


def manifest(server, *wrong):
    rows = []
    for number, path in enumerate(sorted(server.folder.glob("*.tar"))):
        digest = sha256(path.read_bytes() + b"x" * (number in wrong)).hexdigest()
        rows.append({"name": path.name, "sha256": digest})
    (server.folder / "manifest.json").write_text(json.dumps({"shards": rows}))
