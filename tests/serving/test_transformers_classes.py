import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from safetensors.torch import load_file

import vlp
from vlp.config import ConfigError
from vlp.tasks.vqa.task import VqaConfig, build

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


def in_clean_process(imports, *arguments):
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


@pytest.fixture(scope="module", autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def expected(folder, photo):
    """Logits (1, 3) and log-odds (3,) of `vlp.load`'s own calls."""
    model, text, preprocess, *_ = vlp.load(folder)
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
    out = model(**pairs, return_loss=True)
    log_p = [logits.log_softmax(-1).diagonal() for logits in (out[1], out[1].T)]
    torch.testing.assert_close(out.loss, -torch.cat(log_p).mean())
    with pytest.raises(ValueError, match="as many images as texts, not 1 and 3"):
        model(**processor(images=photo, text=TEXTS), return_loss=True)


def test_features_are_open_clips_and_clips(model, processor, inputs, folder):
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
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
    assert torch.equal(model.match(**inputs), expected[1])
    loaded, image = model.model, model.model.encode_image(inputs["pixel_values"])
    one = processor(images=[photo, photo], text=TEXTS[0])
    assert torch.allclose(model.match(**one), expected[1][:1].expand(2))
    three = processor(text=TEXTS)
    single = [loaded.match(image, model.text_features(three["input_ids"][n : n + 1],
              three["attention_mask"][n : n + 1])) for n in range(3)]  # fmt: skip
    torch.testing.assert_close(torch.cat(single), expected[1])
    with pytest.raises(ValueError, match="2 images and 3 texts cannot be paired"):
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
    inputs = processor(images=photo, text=["a red circle", "a star"])
    scores = model(**inputs).logits_per_image.softmax(-1)[0]
    wanted = dict(zip(["red circle", "star"], scores.tolist()))
    assert {one["label"]: one["score"] for one in found} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "float64"])
def test_types_of_weights(folder, inputs, expected, dtype):
    model = vlp.VlpModel.from_pretrained(folder, dtype=dtype, device_map="cpu")
    assert vlp.load(folder, dtype=dtype, device="cpu").model.match_head.weight.dtype == model.dtype
    assert torch.allclose(model.match(**inputs).float(), expected[1], atol=0.05)
    assert model.model.anchor_threshold.dtype == torch.float32


def test_options_of_from_pretrained(folder):
    changed = vlp.VlpModel.from_pretrained(folder, feature_dropout=0.5)
    assert changed.model.feature_dropout.p == 0.5
    half = vlp.VlpModel.from_pretrained(
        folder, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
    )
    assert half.dtype == torch.bfloat16
    for options in ({"dtype": "bfloat"}, {"device": "nowhere"}):
        with pytest.raises(ValueError, match=r"bfloat|nowhere"):
            vlp.load(folder, **options)
    with pytest.raises(TypeError, match="no argument 'revison'"):
        vlp.VlpModel.from_pretrained(folder, revison="main")
    with pytest.raises(ValueError, match=r"trained with text\.heads 2, not 4"):
        vlp.VlpModel.from_pretrained(folder, text={"heads": 4})
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
    assert torch.equal(found.eval().match(**inputs), model.match(**inputs))


@pytest.mark.parametrize("auto", [False, True])
def test_a_part_of_a_section_leaves_the_rest(folder, model, auto):
    from transformers import AutoModel

    options = {"anchor": {"threshold": 0.3}}
    kind = AutoModel if auto else vlp.VlpModel
    changed = kind.from_pretrained(folder, cross={"options": options})
    assert changed.model.anchor_threshold == pytest.approx(0.3)
    sizes = model.config.model_config
    cross = sizes.cross.model_copy(update={"options": options})
    assert changed.config.model_config == sizes.model_copy(update={"cross": cross})
    config = vlp.VlpConfig.from_pretrained(folder, temperature=0.5)
    both = vlp.VlpModel.from_pretrained(folder, config=config, feature_dropout=0.5)
    assert (both.config.temperature, both.config.feature_dropout) == (0.5, 0.5)


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
        with torch.enable_grad():
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


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder as `vlp finetune vqa` leaves it, with a decoder far from its start."""
    shards = write_shards(tmp_path_factory.mktemp("vqa"), coloured(12))
    data = {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT, "max_answer": 6}
    config = VqaConfig.model_validate({"data": data, "decoder": {"layers": 2}})
    task, _ = build(config, toy_parts(), 4, 0, "float32")
    torch.manual_seed(0)
    for weights in task.decoder.parameters():
        weights.add_(torch.randn_like(weights) * 0.2)
    place = tmp_path_factory.mktemp("tuned") / "model"
    task.save_model(place, task.state_dict())
    return place, task.eval(), shards


def test_answers_are_the_tasks(tuned, tmp_path):
    folder, task, shards = tuned
    data = task.dataset([shards])
    batch = data.collate([data.make(data.items.read(number), number) for number in range(5)])
    model = vlp.VlpForQuestionAnswering.from_pretrained(folder)
    inputs = {"pixel_values": batch.pixels, "input_ids": batch.text_ids}
    inputs |= {"attention_mask": batch.attention_mask.long(), "word_mask": batch.word_mask}
    expected = task.predict(batch)
    best = [rows[0].answer for rows in model.answer(**inputs)]
    assert best == expected
    assert list(model.config.id2label.values()) == list(task.answers)
    logits = model(**inputs).logits
    assert logits.shape == (5, len(task.answers))
    assert (logits.sigmoid() <= 1).all()
    (two,) = model.answer(**{name: one[:1] for name, one in inputs.items()}, top_k=2)
    assert two[0].score >= two[1].score > 0
    (every,) = model.answer(**{name: one[:1] for name, one in inputs.items()}, top_k=50)
    assert len(every) == len(task.answers)
    with pytest.raises(TypeError, match="no argument 'bogus'"):
        vlp.VlpForQuestionAnswering.from_pretrained(folder, bogus=3)
    model.save_pretrained(tmp_path)
    again = vlp.VlpForQuestionAnswering.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, logits)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_auto_classes_find_both_models_and_take_a_device_map(tuned, device_map):
    from transformers import AutoModel
    from transformers import AutoModelForVisualQuestionAnswering as Answering

    for auto, kind in ((AutoModel, vlp.VlpModel), (Answering, vlp.VlpForQuestionAnswering)):
        model = auto.from_pretrained(tuned[0], device_map=device_map)
        assert isinstance(model, kind)
        assert next(model.parameters()).device.type == "cpu"


def test_one_image_and_several_questions(tuned, photo):
    folder, task, _ = tuned
    model = vlp.VlpForQuestionAnswering.from_pretrained(folder)
    processor = vlp.VlpProcessor.from_pretrained(folder)
    questions, encoded = ["what colour ?", "how many ?"], []
    model.task.model.image_encoder.register_forward_pre_hook(
        lambda _, arguments: encoded.append(len(arguments[0]))
    )
    found = model.answer(**processor(images=photo, text=questions))
    assert encoded == [1]
    each = model(**processor(images=[photo, photo], text=questions)).logits
    torch.testing.assert_close(model(**processor(images=photo, text=questions)).logits, each)
    assert found[0][0].answer in task.answers
    one = model(**processor(images=[photo, photo], text=questions[0])).logits
    torch.testing.assert_close(one, each[:1].expand(2, -1))
    with pytest.raises(ValueError, match="2 images and 3 texts cannot be paired"):
        model.answer(**processor(images=[photo, photo], text=["a", "b", "c"]))
    longer = processor.tokenizer(["what colour " * 9], return_tensors="pt")
    assert len(model.answer(**processor(images=photo), **longer)) == 1
