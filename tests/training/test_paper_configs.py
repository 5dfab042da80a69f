from pathlib import Path

import pytest

from evaluation.ablations.config import AblationConfig, ResultsConfig
from evaluation.ablations.grid import check, plan
from vlp.config import load_config
from vlp.training.config import FinetuneConfig, PretrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
# ACE-RPE, "Implementation Details"; where it is silent, ALBEF's Pretrain.yaml and transforms.
PAPER = {
    "model.image.image_size": 256,
    "model.embed_dim": 256,
    "model.cross.position": ("anchor",),
    "model.cross.anchor_options.text_window": 5,
    "model.cross.anchor_options.patch_window": 9,
    "model.cross.anchor_options.threshold": 0.05,
    "model.cross.anchor.groups": 8,
    "data.captions": "all",
    "data.augment.randaugment": True,
    "data.augment.crop_scale": (0.2, 1.0),
    "objectives.contrastive.kind": "paper",
    "objectives.contrastive.scale": 2.0,
    "objectives.itm.group": 64,
    "objectives.itm.listwise": None,
    "objectives.mlm.probability": 0.15,
    "objectives.teacher.queue": 65536,
    "objectives.teacher.momentum": 0.995,
    "training.batch": 512,
    "training.epochs": 30,
    "training.optimiser.learning_rate": 1e-4,
    "training.optimiser.final_learning_rate": 1e-6,
    "training.optimiser.weight_decay": 0.02,
}
# ALBEF's Retrieval_flickr, VE, VQA, NLVR_pretrain, NLVR and Grounding: epochs, batch, rate, pixels.
FINETUNED = {
    "flickr30k": (10, 256, 1e-5, 384),
    "snli_ve": (5, 256, 2e-5, 384),
    "vqa_v2": (8, 256, 2e-5, 384),
    "nlvr2_assignment": (1, 512, 2e-5, 256),
    "nlvr2": (10, 128, 2e-5, 384),
    "refcoco_plus": (5, 256, 1e-5, 384),
}


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_paper_yaml_has_the_papers_settings():
    config = load_config(CONFIGS / "pretrain/paper.yaml", PretrainConfig)
    assert {path: at(config, path) for path in PAPER} == PAPER
    assert 8 in config.world_sizes()
    sizes = (config.model.text, config.model.image, config.model.cross)
    assert [one.layers for one in sizes] == [6, 6, 6]
    assert [one.heads for one in sizes] == [12, 12, 12]
    assert (config.model.text.width, config.model.image.width) == (768, 768)


@pytest.mark.parametrize("name", FINETUNED)
def test_fine_tunings_have_albefs_settings(name):
    config = load_config(CONFIGS / f"finetune/{name}.yaml", FinetuneConfig)
    training = config.training
    pixels = config.model.get("image", {}).get("image_size", 256)
    rate = training.optimiser.learning_rate
    assert (training.epochs, training.batch, rate, pixels) == FINETUNED[name]


def test_grounding_does_not_crop():
    config = load_config(CONFIGS / "finetune/refcoco_plus.yaml", FinetuneConfig)
    assert at(config.task, "data.augment.crop_scale") == (1.0, 1.0)


def test_seven_rows_of_table_1():
    source = CONFIGS / "ablation/paper_table1.yaml"
    config = load_config(source, AblationConfig)
    runs = plan(config, source)
    check(runs)
    read = {run.variant: run.read() for run in runs}
    assert {
        name: (at(one, "model.cross.position"), at(one, "objectives.contrastive.kind"))
        for name, one in read.items()
    } == {
        "none": ((), "itc"),
        "ape": (("ape",), "itc"),
        "rpe": (("rpe",), "itc"),
        "ape-rpe": (("ape", "rpe"), "itc"),
        "uniform": (("uniform",), "itc"),
        "ace": (("anchor",), "itc"),
        "ace-l_ace": (("anchor",), "paper"),
    }


def test_sapes_table_1_as_printed():
    """SaPE^2, section 4: ViT with hidden size 384, patches of 4, batch 128, 400 epochs."""
    registry = load_config(CONFIGS / "ablation/results/tables.yaml", ResultsConfig).tables
    for name in ("sape_cifar10_400", "sape_cifar100_400"):
        result = registry[name]
        source = CONFIGS / "ablation" / str(result.ablation)
        config = load_config(source, AblationConfig, result.overrides)
        for run in plan(config, source, result.variants):
            read = run.read()
            training = read.training
            assert (training.epochs, training.batch, training.steps) == (400, 128, None)
            model = at(read, "task.model")
            assert (model.name, model.options) == ("vit_small_patch16_224", {"patch_size": 4})
            assert name.split("_")[1] in at(read, "task.data.train")


SIZES = {"base": (512, 64), "base_8": (960, 120), "base_64": (7680, 960),
         "base_256": (30_720, 3840), "base_1024": (122_880, 15_360)}  # fmt: skip
"""Batch and most GPUs; every divisor of the latter can train."""


@pytest.mark.parametrize(("name", "batch", "most"), [(name, *two) for name, two in SIZES.items()])
def test_promised_gpus_share_streams_and_hold_whole_groups(name, batch, most):
    config = load_config(CONFIGS / f"pretrain/{name}.yaml", PretrainConfig)
    assert config.training.batch == batch
    sizes = [size for size in range(1, most + 1) if most % size == 0]
    assert config.world_sizes() == sizes


def test_world_sizes_are_those_that_no_rule_refuses():
    objectives = {"itm": {"group": 8}, "contrastive": {"token": {"group": 6}}}
    base = {"objectives": objectives, "data": {"sources": ["none"], "canonical_streams": 24}}
    config = PretrainConfig.model_validate(base | {"training": {"batch": 144}})
    able = [n for n in range(1, 145) if 24 % n == 0 and 144 % (24 * n) == 0]
    assert config.world_sizes() == able == [1, 2, 3, 6]
    chunked = config.training.model_copy(update={"grad_cache": 32})
    assert config.model_copy(update={"training": chunked}).world_sizes() == [6]


@pytest.mark.parametrize(("given", "read"), [(True, "blocks"), (False, "none"), (2, 2)])
def test_checkpointing_of_activations_may_be_true_or_false(given, read):
    training = {"activation_checkpointing": given}
    config = PretrainConfig.model_validate({"data": {"sources": ["none"]}, "training": training})
    assert config.training.activation_checkpointing == read


def test_a_resampled_stream_knows_no_streams():
    data = {"sources": ["none"], "epoch_samples": 1000, "canonical_streams": 4}
    objectives = {"contrastive": {"kind": "itc"}, "itm": {"group": 2}}
    values = {"data": data, "objectives": objectives, "training": {"batch": 24}}
    assert PretrainConfig.model_validate(values).world_sizes() == [1, 2, 3, 4, 6, 12]
