"""Fine-tune on referring expressions (RefCOCO, RefCOCO+, RefCOCOg), to ground them without boxes.

    accelerate launch launch/finetune_grounding.py --config configs/finetune/refcoco_plus.yaml
    python launch/finetune_grounding.py --config FILE --from DIR training.batch=64   (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of ranks.
`python -m evaluation grounding --model OUTPUT/best --shards DIR` tells where expressions point.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("grounding",)))
