"""Fine-tune for image-text retrieval (Flickr30K, COCO).

    accelerate launch launch/finetune_retrieval.py --config configs/finetune/flickr30k.yaml
    python launch/finetune_retrieval.py --config FILE --from DIR training.batch=64   (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of ranks.
`python -m evaluation retrieval --model OUTPUT/best --shards DIR --rerank 128` prints its recall.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.downstream.finetuning import finetuning_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one rank; returns the exit code."""
    return finetuning_command(__doc__, ("retrieval",), arguments)


if __name__ == "__main__":
    sys.exit(main())
