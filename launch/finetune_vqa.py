"""Fine-tune for visual question answering: the script of `vlp finetune vqa` for launchers.

accelerate launch launch/finetune_vqa.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("vqa"))
