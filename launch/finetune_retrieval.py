"""Fine-tune for image-text retrieval (Flickr30K, COCO).

    accelerate launch launch/finetune_retrieval.py --config configs/finetune/flickr30k.yaml
    python launch/finetune_retrieval.py --config FILE --from DIR training.batch=64   (one process)

The run's folder is the key `output`: `best/` is the model that did best on the validation data,
`model/` the last one. `--resume` goes on from its newest good checkpoint, on any number of ranks.
`python -m evaluation retrieval --model OUTPUT/best --shards DIR --rerank 128` prints its recall.
"""

import sys

from evaluation.downstream.finetuning import finetuning_command

if __name__ == "__main__":
    sys.exit(finetuning_command(__doc__, ("retrieval",)))
