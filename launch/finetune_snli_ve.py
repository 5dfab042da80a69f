"""Fine-tune on SNLI-VE: is a hypothesis about an image true, false, or not to be told?

    accelerate launch launch/finetune_snli_ve.py --config configs/finetune/snli_ve.yaml --from DIR
    python launch/finetune_snli_ve.py --config FILE --from DIR training.batch=64   (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of ranks.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("snli_ve",)))
