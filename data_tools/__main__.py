"""`python -m data_tools COMMAND ...`: each command is a module of this package."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from vlp.config import ConfigError

# Name -> one line of help. A module is imported only when its command runs, so one command does
# not wait for what another one needs.
COMMANDS = {
    "albef": "ALBEF's JSON lists and pictures to shards",
    "cc12m": "Conceptual 12M to shards",
    "cc3m": "Conceptual Captions to shards",
    "coco": "COCO captions to shards",
    "dedup": "list the pictures that come more than once",
    "easy_vqa": "easy-VQA to shards",
    "flickr30k": "Flickr30k to shards",
    "flickr8k": "Karpathy-style JSON and pictures to shards",
    "index": "write index.json for shards somebody else made",
    "nlvr2": "NLVR2 to shards",
    "nlvr_v1": "NLVR v1, with its permutations, to shards",
    "overlap": "list the pretraining pictures that are in evaluation sets",
    "peek": "draw samples as a contact sheet",
    "refcoco": "RefCOCO, RefCOCO+ and RefCOCOg to shards",
    "reshard": "deal samples into shards of another size or order",
    "sbu": "SBU captions to shards",
    "scenes": "generate the built-in corpus",
    "snli_ve": "SNLI-VE to shards",
    "stats": "count captions, words, pictures and sizes",
    "verify": "check every tar, picture and annotation, index and manifest",
    "visual_genome": "Visual Genome's regions to shards",
    "vocabulary": "train a WordPiece vocabulary on the texts of shards",
    "vqa": "VQA v2 and Visual Genome's questions to shards",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:13} {text}" for command, text in COMMANDS.items())
        print(f"usage: python -m data_tools COMMAND [options]\n\ncommands:\n{lines}")
        return 0 if given else 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"data_tools: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"data_tools.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m data_tools {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args(given[1:])) or 0)
    except ConfigError as error:
        print(f"data_tools {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\ndata_tools {name}: interrupted; finished shards stay, run the same command again "
            "to go on",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
