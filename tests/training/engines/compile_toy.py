"""A pretraining of a few thousand parameters, for tests of compiled steps."""

import torch

from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig

ROWS = 4


def configuration(*, masked=True, layers=1, **text):
    sizes = {"layers": layers, "heads": 2, "intermediate": 16}
    return PretrainConfig.model_validate(
        {
            "model": {
                "text": sizes | {"width": 16, "vocab_size": 64, "max_tokens": 8} | text,
                "image": sizes | {"width": 16, "image_size": 16, "patch_size": 8},
                "cross": sizes | {"anchor": {"groups": 2}},
                "embed_dim": 16,
            },
            "data": {
                "sources": [{"path": "unused"}],
                "vocabulary": "unused",
                "canonical_streams": 1,
            },
            "objectives": {
                "itm": {"group": ROWS} if masked else None,
                "mlm": {} if masked else None,
                "mim": {} if masked else None,
                "teacher": None,
            },
            "training": {"batch": ROWS, "precision": "float32"},
        }
    )


def task_of(config):
    torch.manual_seed(0)
    return Pretraining(config.model, config.objectives, "", "float32", log_every=10**6)
