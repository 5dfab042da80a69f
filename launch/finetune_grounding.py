"""Fine-tune for visual grounding: the script of `vlp finetune grounding` for launchers.

accelerate launch launch/finetune_grounding.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("grounding"))
