"""`python -m evaluation COMMAND ...`: each command is a module of `evaluation.commands`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import sys
from collections.abc import Sequence

from evaluation.core.samples import EvaluationError
from vlp import distributed
from vlp.config import ConfigError

# Name -> module and one line of help. A module is imported only when its command runs, so one
# command does not wait for what another one needs.
COMMANDS = {
    "retrieval": ("retrieval", "recall in both directions, re-ranked where asked for"),
    "snli_ve": ("task", "a model fine-tuned on SNLI-VE"),
    "nlvr2": ("task", "a model fine-tuned on NLVR2 or NLVR v1"),
    "vqa": ("task", "a model fine-tuned on questions"),
    "caption": ("task", "a model fine-tuned to write captions"),
    "grounding": ("grounding", "where lies what an expression means"),
    "all": ("all", "several models, each on several tasks; finished results are kept"),
    "compare": ("compare", "two results on the same items: differences with intervals and tests"),
    "predict": ("predict", "predictions without labels, as a benchmark's server takes them"),
    "zeroshot": ("zeroshot", "classes of images, told by prompts"),
    "embed": ("embed", "features of images and captions as .npy"),
    "card": ("card", "the model card of a model folder"),
    "report": ("report", "runs in one HTML page: figures, curves, cases, anchors"),
    "demo": ("demo", "a local page to try a model: search, ask, ground, anchors"),
    "pointing": ("pointing", "does a word find its object (generated corpus)"),
    "swaps": ("swaps", "is an arrangement told from its swap (generated corpus)"),
    "anchors": ("anchors", "draw where the anchors of each word lie"),
    "ablation": ("ablation", "train variants with several seeds, print tables"),
    "vision": ("vision", "a model of launch/train_vision.py on its test data"),
    "positions": ("positions", "train vision models with other encodings, print tables"),
    "encodings": ("encodings", "draw what each position encoding tells of patches"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors in what was asked for end with code 2 and one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:12} {text}" for command, (_, text) in COMMANDS.items())
        print(
            "usage: python -m evaluation COMMAND [options]\n\n"
            f"commands (torchrun shares their work):\n{lines}"
        )
        return 0 if given else 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"evaluation.commands.{COMMANDS[name][0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m evaluation {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(command=name)
    options = parser.parse_intermixed_args(given[1:])
    with distributed.process_group():
        try:
            code: int | None = module.run(options)
        except (ConfigError, EvaluationError, FileNotFoundError) as error:
            if distributed.rank() == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2
    return code or 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
