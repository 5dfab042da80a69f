import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.__main__ import main
from evaluation.samples import EvaluationError
from evaluation.suite.others import other_model
from evaluation.suite.suite import SuiteConfig, run_suite, suite_of
from vlp.config import ConfigError

transformers = pytest.importorskip("transformers")

TEXTS = ["a small red circle", "a blue square", "a cross"]
WORDS = sorted({word for text in TEXTS for word in text.split()})
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
SEEN = TOWER | {"image_size": 32, "patch_size": 16}


def tokenizer(kind):
    """A tokenizer of whole words; SigLIP's tells no padding, as the real one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    marks = ["<pad>", "<unk>", "<s>", "</s>"]
    ids = {word: number for number, word in enumerate([*marks, *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    names = ["input_ids"] + ["attention_mask"] * (kind != "siglip")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", model_max_length=16, model_input_names=names,
    )  # fmt: skip


def saved(kind, folder):
    torch.manual_seed(5)
    text = TOWER | {"vocab_size": 4 + len(WORDS), "max_position_embeddings": 16}
    text |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=SEEN, projection_dim=12)
        model = transformers.CLIPModel(config)
        images = transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
        processor = transformers.CLIPProcessor(images, tokenizer(kind))
    elif kind == "towers":
        config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
            transformers.ViTConfig(**SEEN), transformers.BertConfig(**text), projection_dim=12
        )
        model = transformers.VisionTextDualEncoderModel(config)
        images = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
        processor = transformers.VisionTextDualEncoderProcessor(images, tokenizer(kind))
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=SEEN)
        model = transformers.SiglipModel(config)
        images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
        processor = transformers.SiglipProcessor(images, tokenizer(kind))
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


@pytest.fixture(scope="module", params=["clip", "siglip", "towers"])
def other(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *saved(request.param, folder)


@pytest.fixture
def image():
    levels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def test_similarities_are_those_of_transformers(other, image):
    folder, model, processor = other
    loaded = other_model(f"transformers:{folder}").load()
    inputs = processor(
        text=TEXTS, images=image, return_tensors="pt", padding="max_length", max_length=16
    )
    with torch.no_grad():
        theirs = model(**inputs)
        seen = loaded.model.encode_image(loaded.preprocess(image)[None])
        said = loaded.model.encode_text(*loaded.text(TEXTS))
        ours = seen.feature @ said.feature.T / loaded.model.temperature()
    bias = getattr(model, "logit_bias", torch.zeros(1)).detach()
    torch.testing.assert_close(ours + bias, theirs.logits_per_image, atol=1e-4, rtol=1e-4)
    assert loaded.text.count_truncated([]) == 0
    assert loaded.text.count_truncated(["a blue square", "a " * 20]) == 1
    cut = int(loaded.text(TEXTS).attention_mask.sum(1).max())
    assert (cut == 16) == (model.config.model_type == "siglip"), "SigLIP reads its padding"
    few = (part[:, :cut] for part in loaded.text(TEXTS))
    with torch.no_grad():
        again = loaded.model.encode_text(*few).feature
    torch.testing.assert_close(again, said.feature, atol=1e-5, rtol=1e-5)


def test_a_suite_evaluates_them_beside_our_own(
    other, image, model_folder, scene_shards, tmp_path, capsys
):
    out, labelled, classes = (tmp_path / name for name in ("out", "labelled", "classes.txt"))
    for number, name in enumerate(("circle", "square")):
        (labelled / name).mkdir(parents=True)
        image.rotate(90 * number).save(labelled / name / "a.png")
    classes.write_text("circle\nsquare\n")
    models = [f"transformers:{other[0]}", str(model_folder)]
    command = ["suite", "--model", *models, "--shards", str(scene_shards), "--out", str(out)]
    command += ["--labelled", str(labelled), "--classes", str(classes), "--limit", "6"]
    assert main(command) == 0
    assert "R@1" in capsys.readouterr().out
    content = json.loads((out / "all.json").read_text())
    assert [one["name"] for one in content["results"]] == ["retrieval", "foils", "zeroshot"] * 2
    assert content["failures"] == []
    assert main(command) == 0
    assert capsys.readouterr().out.count(": reused") == 6, "nothing is evaluated again"


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"task": "retrieval", "rerank": 8}, "no cross-modal encoder: leave rerank"),
        ({"task": "pointing"}, "choose one of retrieval, zeroshot, swaps, foils"),
    ],
)
def test_what_needs_more_than_features_is_refused(other, scene_shards, tmp_path, task, told):
    job = task | {"shards": [str(scene_shards)]}
    models = [{"name": "theirs", "model": f"transformers:{other[0]}", "tasks": [job]}]
    result = run_suite(SuiteConfig.model_validate({"models": models}), tmp_path, "cpu")
    (failure,) = result.failures.values()
    assert told in failure


def test_mistakes_are_told(tmp_path, monkeypatch):
    assert other_model("runs/model") is None
    assert other_model("owner/name") is None
    with pytest.raises(EvaluationError, match="name a model after the colon"):
        other_model("open_clip:")
    (tmp_path / "bert").mkdir()
    config = transformers.BertConfig(**TOWER, vocab_size=20)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer("clip").save_pretrained(tmp_path / "bert")
    with pytest.raises(EvaluationError, match="not a dual encoder"):
        other_model(f"transformers:{tmp_path}/bert").load()
    with pytest.raises(ConfigError, match="--labelled and --classes go together"):
        suite_of(["a"], [], ["b"])
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(EvaluationError, match="pip install"):
        other_model("open_clip:ViT-B-32/openai").load()


def test_models_that_are_not_what_their_name_says_are_refused(tmp_path):
    """A BLIP for matching lacks the towers of a dual encoder; NaFlex reads more than pixels."""
    words = {"vocab_size": 4 + len(WORDS), "max_position_embeddings": 16}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    config = transformers.BlipConfig(
        text_config=TOWER | words | special | {"encoder_hidden_size": 16}, vision_config=SEEN
    )
    images = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    transformers.BlipForImageTextRetrieval(config).save_pretrained(tmp_path / "blip")
    transformers.BlipProcessor(images, tokenizer("towers")).save_pretrained(tmp_path / "blip")
    patches = TOWER | {"num_patches": 16, "patch_size": 8}
    config = transformers.Siglip2Config(text_config=TOWER | words, vision_config=patches)
    images = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    transformers.Siglip2Model(config).save_pretrained(tmp_path / "naflex")
    transformers.Siglip2Processor(images, tokenizer("siglip")).save_pretrained(tmp_path / "naflex")
    with pytest.raises(EvaluationError, match=r"lack these weights, .*logit_scale"):
        other_model(f"transformers:{tmp_path}/blip").load()
    with pytest.raises(EvaluationError, match="spatial_shapes"):
        other_model(f"transformers:{tmp_path}/naflex").load()


@pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="needs open_clip")
def test_similarities_are_those_of_open_clip(image, tmp_path):
    import open_clip

    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("ViT-S-32-alt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(EvaluationError, match="names no weights"):
        other_model("open_clip:ViT-S-32-alt").load()
    loaded = other_model(f"open_clip:ViT-S-32-alt/{tmp_path}/weights.pt").load()
    with torch.no_grad():
        ids = open_clip.get_tokenizer("ViT-S-32-alt")(TEXTS)
        theirs = model.eval()(transform(image)[None], ids)
        seen = loaded.model.encode_image(loaded.preprocess(image)[None])
        said = loaded.model.encode_text(*loaded.text(TEXTS))
    torch.testing.assert_close(seen.feature, theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(said.feature, theirs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(1 / loaded.model.temperature(), theirs[2], atol=1e-4, rtol=1e-5)
