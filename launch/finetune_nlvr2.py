"""Fine-tune for NLVR2, NLVR v1 or text assignment: the script of `vlp finetune nlvr2`.

accelerate launch launch/finetune_nlvr2.py --config FILE --from DIR KEY.SUB=VALUE
"""

import sys

from launch.cli.train import finetune_script

if __name__ == "__main__":
    sys.exit(finetune_script("nlvr2"))
