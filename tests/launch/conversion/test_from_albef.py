import re

import pytest
import torch
from albef_names import TINY, albef_tensors
from PIL import Image
from tests_support import tiny_text

import vlp
from launch.cli.main import main
from vlp.models.pretrained.albef import MEAN, STD, albef_config, load_albef
from vlp.models.vlp import VLPModel
from vlp.tasks.downstream.task import start_parts


@pytest.fixture
def files(tmp_path):
    text = tiny_text()
    text.save(tmp_path / "vocabulary")
    state = albef_tensors(TINY._replace(vocabulary=text.vocab_size))
    torch.save({"model": state, "config": {"image_res": 16}, "epoch": 29}, tmp_path / "tiny.pth")
    return tmp_path, state


def arguments(folder, *more):
    options = {"checkpoint": "tiny.pth", "vocabulary": "vocabulary", "out": "model"}
    return [
        "convert-albef",
        *(word for key, name in options.items() for word in (f"--{key}", str(folder / name))),
        *more,
    ]


def test_the_folder_scores_as_the_checkpoint_does(files, capsys):
    folder, state = files
    assert main(arguments(folder)) == 0
    printed = capsys.readouterr().out
    assert printed.count("tiny.pth: ") == 1
    assert re.search(r"/model: [\d,]+ parameters\n$", printed)

    loaded = vlp.load(folder / "model")
    direct = VLPModel(albef_config(state)).eval()
    load_albef(direct, state, "tiny.pth")
    assert loaded.preprocess.image_size == 16
    assert tuple(loaded.preprocess.mean) == MEAN
    assert tuple(loaded.preprocess.std) == STD
    pixels = loaded.preprocess(Image.effect_noise((40, 30), 64))[None]
    tokens = loaded.text(["a red star left of a blue square"])
    with torch.no_grad():
        odds = [
            model.match(model.encode_image(pixels), model.encode_text(*tokens))
            for model in (loaded.model, direct)
        ]
    assert torch.equal(*odds)


def test_fine_tuning_starts_from_the_folder_without_further_settings(files):
    folder, _ = files
    assert main(arguments(folder)) == 0
    parts, _ = start_parts(str(folder / "model"), {"image": {"image_size": 24}})
    assert (parts.preprocess.mean, parts.preprocess.std) == (MEAN, STD)
    assert parts.model.config.image.statistics == (MEAN, STD)


def test_wrong_input_is_explained(files, capsys):
    folder, _ = files

    def refused(*more):
        assert main(arguments(folder, *more)) == 2
        return capsys.readouterr().err

    assert "the command line: unknown key 'cross.mode'" in refused("cross.mode=bias")
    assert "18 is not a multiple of patch_size 4" in refused("--image-size", "18")
    assert "there is no checkpoint" in refused("--checkpoint", str(folder / "none.pth"))
    torch.save(albef_tensors(), folder / "other.pth")
    assert re.search(
        r"has 64 word pieces and \S+other.pth 50: it was trained with another vocabulary",
        refused("--checkpoint", str(folder / "other.pth")),
    )
    assert not (folder / "model").exists()
    assert main(arguments(folder)) == 0
    assert "already holds a model" in refused()
