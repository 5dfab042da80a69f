"""A local page to try a model by hand: search, ask, caption, judge, ground a phrase, see anchors.

What the page offers depends on what the folder was fine-tuned for; searching needs --shards. Only
this machine reaches the page, unless --host says otherwise.

  python -m evaluation demo --model runs/ace/model --shards shards/scenes/val
"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_model, one_process, positive
from evaluation.demo.page import HOST, PORT, gradio_module, serve
from evaluation.demo.session import TryIt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    parser.add_argument("--shards", nargs="+", default=(), metavar="DIR", help="to search")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="search the first N samples only"
    )
    parser.add_argument("--host", default=HOST, help=f"default {HOST}")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}")


def run(options: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    one_process("the page is served by one process, without torchrun")
    # Before minutes are spent on images.
    gradio_module()
    tried = TryIt(options.model, options.shards, limit=options.limit, device=options.device)
    print(f"http://{options.host}:{options.port}, end it with Ctrl-C", flush=True)
    serve(tried, options.host, options.port)
