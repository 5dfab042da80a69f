"""Fine-tune for SNLI-VE: the script of `vlp finetune snli_ve` for launchers.

accelerate launch launch/finetune_snli_ve.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("snli_ve"))
