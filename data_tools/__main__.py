"""`python -m data_tools COMMAND ...`, also `vlp data COMMAND ...`: each command is a module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vlp.process.command_line import Group, ModuleCommand, run_app

# Name -> subpackage and one line of help.
COMMANDS = {
    "albef": ("converters.benchmarks", "ALBEF's JSON lists and images to shards"),
    "cc12m": ("converters.corpora", "Conceptual 12M to shards"),
    "cc3m": ("converters.corpora", "Conceptual Captions to shards"),
    "coco": ("converters.corpora", "COCO captions to shards"),
    "dedup": ("dedup", "list the images that come more than once"),
    "easy_vqa": ("converters.benchmarks", "easy-VQA to shards"),
    "features": ("features", "store a frozen image tower's features of shards"),
    "flickr30k": ("converters.corpora", "Flickr30k to shards"),
    "flickr8k": ("converters.corpora", "Karpathy-style JSON and images to shards"),
    "import": ("converters.own", "own images and captions, in any usual form, to shards"),
    "index": ("inspect", "write index.npz for shards somebody else made"),
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
# Commands whose module cannot have their name.
MODULES = {"import": "import_data"}


class DataCommand(ModuleCommand):
    """A data tool: wrong input and interruption end with one line."""

    def invoke(self, ctx: Any) -> int:
        """Run the tool; returns the exit code (1: lost data, 2: wrong input, 130: interrupted)."""
        from vlp.config import ConfigError
        from vlp.data.shards.bad_samples import DataError

        try:
            return super().invoke(ctx)
        except ConfigError as error:
            print(f"data_tools {self.name}: {error}", file=sys.stderr)
            return 2
        except DataError as error:
            print(f"data_tools {self.name}: {error.told}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(
                f"\ndata_tools {self.name}: interrupted; finished shards stay, run the same "
                "command again to go on",
                file=sys.stderr,
            )
            return 130


def data_commands() -> Group:
    """Return all data tools as one group of commands."""
    commands = [
        DataCommand(name, f"data_tools.{package}.{MODULES.get(name, name)}", summary)
        for name, (package, summary) in COMMANDS.items()
    ]
    return Group(
        name="data",
        commands=commands,
        help="Build, inspect and clean shards.",
        rich_markup_mode=None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    return run_app(data_commands(), "python -m data_tools", arguments)


if __name__ == "__main__":
    sys.exit(main())
