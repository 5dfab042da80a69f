"""`python -m data_tools COMMAND ...`: each command is a module of this package."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from vlp.config import ConfigError

# Name -> subpackage and one line of help. A module is imported only when its
# command runs, so one command does not wait for what another one needs.
COMMANDS = {
    "albef": ("converters.benchmarks", "ALBEF's JSON lists and images to shards"),
    "cc12m": ("converters.corpora", "Conceptual 12M to shards"),
    "cc3m": ("converters.corpora", "Conceptual Captions to shards"),
    "coco": ("converters.corpora", "COCO captions to shards"),
    "dedup": ("dedup", "list the images that come more than once"),
    "easy_vqa": ("converters.benchmarks", "easy-VQA to shards"),
    "flickr30k": ("converters.corpora", "Flickr30k to shards"),
    "flickr8k": ("converters.corpora", "Karpathy-style JSON and images to shards"),
    "index": ("inspect", "write index.json for shards somebody else made"),
    "nlvr2": ("converters.benchmarks", "NLVR2 to shards"),
    "nlvr_v1": ("converters.benchmarks", "NLVR v1, with its permutations, to shards"),
    "overlap": ("dedup", "list the pretraining images that are in evaluation sets"),
    "peek": ("inspect", "draw samples as a contact sheet"),
    "refcoco": ("converters.benchmarks", "RefCOCO, RefCOCO+ and RefCOCOg to shards"),
    "reshard": ("inspect", "deal samples into shards of another size or order"),
    "sbu": ("converters.corpora", "SBU captions to shards"),
    "scenes": ("generate", "generate the built-in corpus"),
    "snli_ve": ("converters.benchmarks", "SNLI-VE to shards"),
    "stats": ("inspect", "count captions, words, images and sizes"),
    "verify": ("inspect", "check every tar, image and annotation, index and manifest"),
    "visual_genome": ("converters.corpora", "Visual Genome's regions to shards"),
    "vocabulary": ("generate", "train a WordPiece vocabulary on the texts of shards"),
    "vqa": ("converters.benchmarks", "VQA v2 and Visual Genome's questions to shards"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:13} {text}" for command, (_, text) in COMMANDS.items())
        print(f"usage: python -m data_tools COMMAND [options]\n\ncommands:\n{lines}")
        return 0 if given else 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"data_tools: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"data_tools.{COMMANDS[name][0]}.{name}")
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
