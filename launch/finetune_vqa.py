"""Fine-tune on questions about images: VQA v2, easy-VQA, or the generated corpus.

    accelerate launch launch/finetune_vqa.py --config configs/finetune/vqa_v2.yaml --from DIR
    python launch/finetune_vqa.py --config FILE --from DIR training.batch=64           (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one; both hold the list of answers. `--resume` goes on from its newest good
checkpoint, on any number of ranks. `task.data.view: blank` trains and judges without the images.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.downstream.finetuning import finetuning_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one rank; returns the exit code."""
    return finetuning_command(__doc__, ("vqa",), arguments)


if __name__ == "__main__":
    sys.exit(main())
