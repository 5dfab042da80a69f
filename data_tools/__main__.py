"""`python -m data_tools COMMAND ...`, also `vlp data COMMAND ...`: each command is a function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from vlp.command_line import START_HERE, Command, Group, require_output, run_app

# Name -> module and one line of help; the function is called like the command (see _FUNCTIONS).
COMMANDS = {
    "albef": ("converters.albef", "ALBEF's JSON lists and images to shards"),
    "cc12m": ("converters.web", "Conceptual 12M to shards"),
    "cc3m": ("converters.web", "Conceptual Captions to shards"),
    "coco": ("converters.captions", "COCO captions to shards"),
    "dedup": ("dedup.dedup", "list duplicate and near-duplicate images"),
    "easy_vqa": ("converters.questions", "easy-VQA to shards"),
    "features": ("features", "store a frozen image tower's features of shards"),
    "flickr30k": ("converters.captions", "Flickr30k to shards"),
    "flickr8k": ("converters.captions", "Karpathy-style JSON and images to shards"),
    "import": ("own.import_data", "own images and captions, in any usual form, to shards"),
    "index": ("verify", "write index.npz for shards of other tools"),
    "nlvr2": ("converters.statements", "NLVR2 to shards"),
    "nlvr_v1": ("converters.statements", "NLVR v1, with its permutations, to shards"),
    "overlap": ("dedup.dedup", "list the pretraining images that are in evaluation sets"),
    "peek": ("peek", "draw samples as a contact sheet"),
    "refcoco": ("converters.refcoco", "RefCOCO, RefCOCO+ and RefCOCOg to shards"),
    "reshard": ("reshard", "write the samples into shards of another size or order"),
    "sbu": ("converters.web", "SBU captions to shards"),
    "scenes": ("scenes", "generate the built-in corpus"),
    "snli_ve": ("converters.statements", "SNLI-VE to shards"),
    "stats": ("stats", "count captions, words, images and sizes"),
    "verify": ("verify", "check every tar, image and annotation, index and manifest"),
    "visual_genome": ("converters.captions", "Visual Genome's regions to shards"),
    "vocabulary": ("vocabulary", "train a WordPiece vocabulary on the texts of shards"),
    "vqa": ("converters.questions", "VQA v2 and Visual Genome's questions to shards"),
}
_FUNCTIONS = {"import": "import_data"}  # a command's name may be a keyword of Python


class LazyCommand(Command):
    """A command that imports its function and options only when called."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Let the imported command parse its arguments."""
        assert self.name is not None
        return load(self.name).make_context(info_name, args, parent, **extra)


class DataCommand(Command):
    """A data tool; errors and Ctrl-C end with one line."""

    def invoke(self, ctx: Any) -> int:
        """Run the tool; returns the exit code (1: bad data, 2: wrong input, 130: interrupted)."""
        from vlp.config import ConfigError
        from vlp.data.shards.sample_files import DataError

        try:
            for param in self.params:
                if param.name in ("out", "report") and ctx.params[param.name] is not None:
                    is_folder = str(param.metavar).startswith("DIR")
                    require_output(ctx.params[param.name], is_folder)
            return super().invoke(ctx) or 0
        except (ConfigError, typer.BadParameter) as error:
            print(f"vlp data {self.name}: {error}", file=sys.stderr)
            return 2
        except DataError as error:
            print(f"vlp data {self.name}: {error.plain_message}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(
                f"\nvlp data {self.name}: interrupted; finished shards stay, run the same "
                "command again to go on",
                file=sys.stderr,
            )
            return 130


def load(name: str) -> DataCommand:
    """Import a command's function and return the command."""
    from data_tools.options import command_of

    function = getattr(import_module(f"data_tools.{COMMANDS[name][0]}"), _FUNCTIONS.get(name, name))
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # \b keeps click from filling the lines of a paragraph: many show commands.
    help = "\b\n" + (inspect.getdoc(function) or "").replace("\n\n", "\n\n\b\n")
    app.command(name, cls=DataCommand, help=help)(command_of(function))
    command = typer.main.get_command(app)
    assert isinstance(command, DataCommand)
    return command


data_commands = Group(
    name="data",
    commands=[LazyCommand(name, short_help=about) for name, (_, about) in COMMANDS.items()],
    help="Build, inspect and clean shards.",
    rich_markup_mode=None,
    rich_help_panel=START_HERE,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    return run_app(data_commands, "vlp data", arguments)


if __name__ == "__main__":
    sys.exit(main())
