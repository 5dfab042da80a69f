"""Fine-tune for image-text retrieval: the script of `vlp finetune retrieval` for launchers.

accelerate launch launch/finetune_retrieval.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("retrieval"))
