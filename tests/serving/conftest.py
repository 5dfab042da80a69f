import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import tiny_config, tiny_text

from vlp.data.image.transforms import Preprocessing
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = tiny_config()
    model = VLPModel(config)
    for weights in model.cross_encoder.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    model.anchor_threshold.fill_(0.2)
    place = tmp_path_factory.mktemp("run") / "model"
    save_pretrained(place, config, model.state_dict(), tiny_text(), Preprocessing(16))
    return place


@pytest.fixture(scope="session")
def photo(tmp_path_factory):
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    levels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(levels).save(file)
    return file
