"""Fine-tune for image captioning: the script of `vlp finetune caption` for launchers.

accelerate launch launch/finetune_caption.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("caption"))
