"""Fine-tune on NLVR2: is a statement true of two images? (NLVR v1: of one image.)

    accelerate launch launch/finetune_nlvr2.py --config configs/finetune/nlvr2.yaml --from DIR
    python launch/finetune_nlvr2.py --config FILE --from DIR training.batch=64   (one process)

`task.kind: nlvr2_assignment` prepares for it with captioned shards: which of two images, if any,
does a caption tell of? (configs/finetune/nlvr2_assignment.yaml; then `--from` its model.)
The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of ranks.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("nlvr2", "nlvr2_assignment")))
