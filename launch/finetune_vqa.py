"""Fine-tune on questions about images: VQA v2, easy-VQA, or the generated corpus.

    accelerate launch launch/finetune_vqa.py --config configs/finetune/vqa_v2.yaml --from DIR
    python launch/finetune_vqa.py --config FILE --from DIR training.batch=64           (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one; both hold the list of answers. `--resume` goes on from its newest good
checkpoint, on any number of ranks. `task.data.view: blank` trains and validates without the images.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("vqa",)))
