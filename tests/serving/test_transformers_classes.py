"""transformers' classes compute, save and load exactly what `vlp.load` does."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vlp
from vlp.config import ConfigError

ROOT = Path(__file__).parents[2]
TEXTS = ["a red circle", "a small blue square", "a star"]

PROBE = """
import json, sys
{imports}
import torch
photo, *folders = sys.argv[1:]
for folder in folders:
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    with torch.no_grad():
        out = model(**processor(images=photo, text={texts!r}), match=True)
    print(json.dumps([out.logits_per_image.tolist(), out.itm_logits.tolist()]))
"""


def in_clean_process(imports: str, *arguments: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and log-odds of each folder, in a process that reaches no hub."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE.format(imports=imports, texts=TEXTS), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    both = [tuple(map(torch.tensor, line)) for line in lines]
    return [(logits, itm[:, 1] - itm[:, 0]) for logits, itm in both]


@pytest.fixture(scope="module")
def expected(folder, photo):
    """Logits (1, 3) and log-odds (3,) of `vlp.load`'s own calls."""
    model, text, preprocess, *_ = vlp.load(folder)
    with torch.no_grad():
        image = model.encode_image(preprocess(Image.open(photo))[None])
        words = model.encode_text(*text(TEXTS))
        return image.feature @ words.feature.T / model.temperature(), model.match(image, words)


@pytest.fixture(scope="module")
def model(folder):
    return vlp.VlpModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder):
    return vlp.VlpProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def inputs(processor, photo):
    return processor(images=photo, text=TEXTS, return_tensors="pt")


@pytest.mark.parametrize("vlp_first", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_logits_are_the_same_in_a_clean_process(
    folder, photo, expected, model, processor, tmp_path, vlp_first
):
    """Those of training's folder and of one that the classes saved, in either order of imports."""
    model.save_pretrained(tmp_path / "new")
    processor.save_pretrained(tmp_path / "new")
    here = {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()}
    assert here == {file.name: file.read_bytes() for file in folder.iterdir()}
    lines = ["import vlp", "from transformers import AutoModel, AutoProcessor"]
    imports = "\n".join(lines if vlp_first else reversed(lines))
    found = in_clean_process(imports, photo, folder, tmp_path / "new")
    assert len(found) == 2
    for logits, odds in found:
        assert torch.equal(logits, expected[0])
        assert torch.equal(odds, expected[1])


def test_outputs_have_names(model, inputs):
    with torch.no_grad():
        out = model(**inputs)
        assert set(out) == {"logits_per_image", "logits_per_text", "text_embeds", "image_embeds"}
        assert torch.equal(out.logits_per_text, out.logits_per_image.T)
        assert out[0] is out.logits_per_image
        assert set(model(pixel_values=inputs["pixel_values"])) == {"image_embeds"}
        more = model(**inputs, match=True, output_anchors=True)
        assert more.itm_logits.shape == (3, 2)
        assert more.similarity.shape == more.anchors.shape == more.path.shape == (3, 16, 12, 2)
        assert not more.anchors[~inputs["word_mask"][:, None, :, None].expand(-1, 16, -1, 2)].any()
        assert more.path[more.anchors].ge(1).all()
        assert isinstance(model(**inputs, return_dict=False), tuple)
        with pytest.raises(ValueError, match="pixel_values and input_ids"):
            model()
        with pytest.raises(ValueError, match="pixel_values and input_ids"):
            model(input_ids=inputs["input_ids"], match=True)


def test_the_loss_is_contrastive(model, processor, photo):
    pairs = processor(images=[photo] * 3, text=TEXTS)
    with torch.no_grad():
        out = model(**pairs, return_loss=True)
    log_p = [logits.log_softmax(-1).diagonal() for logits in (out[1], out[1].T)]
    torch.testing.assert_close(out.loss, -torch.cat(log_p).mean())
    with pytest.raises(ValueError, match="as many images as texts, not 1 and 3"):
        model(**processor(images=photo, text=TEXTS), return_loss=True)


def test_features_are_open_clips_and_clips(model, processor, inputs, folder):
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out = model(**inputs)
        image = model.encode_image(inputs["pixel_values"])
        assert not torch.allclose(image.norm(dim=-1), torch.ones(1))
        assert torch.equal(model.encode_image(inputs["pixel_values"], True), out.image_embeds)
        for tokens in (inputs, inputs["input_ids"], vlp.load(folder).text(TEXTS)):
            assert torch.equal(model.encode_text(tokens, normalize=True), out.text_embeds)
        assert torch.equal(model.get_image_features(inputs["pixel_values"]).pooler_output, image)
        text = model.encode_text(inputs)
        assert torch.equal(model.get_text_features(**ids).pooler_output, text)


def test_one_image_or_text_matches_all(model, processor, photo, expected, inputs):
    with torch.no_grad():
        assert torch.equal(model.match(**inputs), expected[1])
        loaded, image = model.model, model.image_features(inputs["pixel_values"])
        one = processor(images=[photo, photo], text=TEXTS[0])
        assert torch.allclose(model.match(**one), expected[1][:1].expand(2))
        three = processor(text=TEXTS)
        single = [loaded.match(image, model.text_features(three["input_ids"][n : n + 1],
                  three["attention_mask"][n : n + 1])) for n in range(3)]  # fmt: skip
        torch.testing.assert_close(torch.cat(single), expected[1])
    with pytest.raises(ValueError, match="2 images and 3 texts make no pairs"):
        model.match(**processor(images=[photo, photo], text=TEXTS))


def test_long_texts_are_cut_as_the_tokenizer_cuts(model, processor, photo):
    long = "a red circle " * 9
    theirs = processor.tokenizer([long, "a star"], padding=True, return_tensors="pt")
    longer = copy.deepcopy(processor)
    assert longer(text=long)["input_ids"].shape == (1, 12)
    longer.tokenizer.model_max_length = 20
    inputs = longer(images=photo, text=[long, "a star"])
    assert inputs["word_mask"].shape == (2, 20)
    assert theirs["input_ids"].shape[1] > 12
    assert set(theirs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        found = model(**theirs).text_embeds
        torch.testing.assert_close(found, model(**processor(text=[long, "a star"])).text_embeds)
        usual = processor(images=photo, text=[long, "a star"])
        assert torch.equal(model.match(**inputs), model.match(**usual))


def test_zero_shot_classification(folder, photo, model, processor):
    from transformers import pipeline

    classify = pipeline("zero-shot-image-classification", model=str(folder))
    template = "a {}"
    found = classify(
        str(photo), candidate_labels=["red circle", "star"], hypothesis_template=template
    )
    with torch.no_grad():
        inputs = processor(images=photo, text=["a red circle", "a star"])
        scores = model(**inputs).logits_per_image.softmax(-1)[0]
    wanted = dict(zip(["red circle", "star"], scores.tolist()))
    assert {one["label"]: one["score"] for one in found} == pytest.approx(wanted, rel=1e-5)


def test_threads_get_the_same(model, processor, photo, expected):
    def ask(_):
        with torch.no_grad():
            return model(**processor(images=photo, text=TEXTS)).logits_per_image

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected[0]) for found in pool.map(ask, range(16)))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "float64"])
def test_types_of_weights(folder, inputs, expected, dtype):
    model = vlp.VlpModel.from_pretrained(folder, dtype=dtype, device_map="cpu")
    assert vlp.load(folder, dtype=dtype, device="cpu").model.match_head.weight.dtype == model.dtype
    with torch.no_grad():
        assert torch.allclose(model.match(**inputs).float(), expected[1], atol=0.05)
    assert model.model.anchor_threshold.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat"}, "dtype 'bfloat' is none of float32"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used here; there are cpu"),
    ],
)
def test_impossible_places_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        vlp.load(folder, **options)


def test_options_of_from_pretrained(folder):
    changed = vlp.VlpModel.from_pretrained(folder, feature_dropout=0.5)
    assert changed.model.feature_dropout.p == 0.5
    half = vlp.VlpModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="no argument 'revison'"):
        vlp.VlpModel.from_pretrained(folder, revison="main")
    with pytest.raises(FileNotFoundError, match=r"no model folder \./nowhere"):
        vlp.VlpModel.from_pretrained("./nowhere")
    with pytest.raises(ConfigError, match=r"did you mean 'text\.width'"):
        vlp.VlpConfig(text={"widht": 3})


def test_weights_that_are_given_take_the_place_of_the_folders(folder):
    model = vlp.VlpModel.from_pretrained(folder)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    found, info = vlp.VlpModel.from_pretrained(folder, state_dict=zeros, output_loading_info=True)
    assert not any(value.any() for value in found.state_dict().values())
    assert not any(info.values())
    lost = zeros.pop("match_head.bias")
    _, info = vlp.VlpModel.from_pretrained(
        folder, state_dict={**zeros, "more": lost}, output_loading_info=True
    )
    assert (info["missing_keys"], info["unexpected_keys"]) == ({"match_head.bias"}, {"more"})


def test_padding_may_stand_anywhere(model, processor, photo):
    given = processor(images=photo, text=TEXTS, return_tensors="pt", padding="max_length")
    with torch.no_grad():
        wanted = model(**given, match=True)
        order = given["attention_mask"].int().argsort(dim=1, stable=True)
        left = {n: given[n].gather(1, order) for n in ("input_ids", "attention_mask", "word_mask")}
        found = model(pixel_values=given["pixel_values"], **left, match=True)
        alone = model.encode_text(left, normalize=True)
    assert torch.equal(found.logits_per_image, wanted.logits_per_image)
    assert torch.equal(found.itm_logits, wanted.itm_logits)
    torch.testing.assert_close(alone, wanted.text_embeds)


def test_accelerate_fills_an_empty_model_from_a_folder(folder, inputs, model):
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        empty = vlp.VlpModel(vlp.VlpConfig.from_pretrained(folder))
    found = accelerate.load_checkpoint_and_dispatch(empty, str(folder), device_map={"": "cpu"})
    with torch.no_grad():
        assert torch.equal(found.eval().match(**inputs), model.match(**inputs))


@pytest.mark.parametrize("auto", [False, True])
def test_a_part_of_a_section_leaves_the_rest(folder, auto):
    from transformers import AutoModel

    read = (AutoModel if auto else vlp.VlpModel).from_pretrained
    own, found = (
        read(folder).config.sizes,
        read(folder, cross={"options": {"anchor": {"threshold": 0.3}}}),
    )
    assert found.model.anchor_threshold == pytest.approx(0.3)
    cross = own.cross.model_copy(update={"options": {"anchor": {"threshold": 0.3}}})
    assert found.config.sizes == own.model_copy(update={"cross": cross})
    config = vlp.VlpConfig.from_pretrained(folder, temperature=0.5)
    both = vlp.VlpModel.from_pretrained(folder, config=config, feature_dropout=0.5)
    assert (both.config.temperature, both.config.feature_dropout) == (0.5, 0.5)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "flash_attention_2"])
def test_an_implementation_of_attention_is_ignored(folder, kind, inputs, expected):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation=kind)
    with torch.no_grad():
        assert torch.equal(model.match(**inputs), expected[1])


def test_a_trainer_loads_what_it_saved(folder, processor, photo, tmp_path):
    """`resume_from_checkpoint` and `load_best_model_at_end` read the file by themselves."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def collate(rows):
        return dict(processor(images=[photo] * len(rows), text=rows)) | {"return_loss": True}

    def trained(checkpoint=None):
        model = vlp.VlpModel.from_pretrained(folder)
        trainer = Trainer(
            model,
            TrainingArguments(
                str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=3,
                learning_rate=0.01, use_cpu=True, report_to=[], remove_unused_columns=False,
                disable_tqdm=True,
            ),
            train_dataset=TEXTS * 2,
            data_collator=collate,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        return model.state_dict()

    whole, resumed = trained(), trained(str(tmp_path / "checkpoint-1"))
    for name, weights in whole.items():
        torch.testing.assert_close(resumed[name], weights, msg=name)
    again = vlp.VlpModel.from_pretrained(folder)
    again.load_state_dict(load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    assert all(torch.equal(one, whole[name]) for name, one in again.state_dict().items())


def test_a_revision_is_asked_of_the_hub(monkeypatch, folder):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **options: asked.append((name, options)) or str(folder),
    )
    vlp.load("owner/name", revision="v1")
    vlp.VlpModel.from_pretrained("owner/name", revision="v2", token="secret")
    assert asked == [
        ("owner/name", {"revision": "v1"}),
        ("owner/name", {"revision": "v2", "token": "secret"}),
    ]
