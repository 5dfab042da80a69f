r"""Fine-tune on captioned images, to write captions.

    accelerate launch launch/finetune_caption.py --config configs/finetune/coco_caption.yaml \
        --from runs/base/model
    python launch/finetune_caption.py --config FILE --from DIR training.batch=64       (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data (by
CIDEr), `model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of
ranks. Scores need Java, or `task.java=false`.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("caption",)))
