import shutil
from operator import attrgetter

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, normalizers

import vlp
from vlp.data.image.decode import as_images
from vlp.serving.image_processor import VlpImageProcessor


@pytest.fixture(scope="module")
def processor(folder):
    return vlp.VlpProcessor.from_pretrained(folder)


def test_forms_of_one_image_are_prepared_alike(processor, photo, folder):
    image = Image.open(photo)
    levels = np.asarray(image)
    expected = vlp.load(folder).preprocess(image)[None]
    tensor = torch.from_numpy(levels.copy()).permute(2, 0, 1)
    for given in (
        photo, str(photo), image, levels, levels / 255, tensor, tensor / 255, tensor[None],
        levels.transpose(2, 0, 1), [photo], (levels,), levels.astype(np.int64),
    ):  # fmt: skip
        found = processor(images=given)["pixel_values"]
        if not isinstance(given, list | tuple) and getattr(given, "ndim", 3) == 3:
            assert torch.equal(vlp.load(folder).preprocess(given), expected[0])
        assert torch.equal(found, expected), type(given)
    several = processor(images=[photo, image, tensor])["pixel_values"]
    assert torch.equal(several, expected.expand(3, -1, -1, -1))
    grey = levels[..., 0]
    expected = processor(images=grey)["pixel_values"]
    for array in (grey.astype(np.int32), grey, (grey / 255).astype(np.float32)):
        image = Image.fromarray(array)
        assert torch.equal(processor(images=image)["pixel_values"], expected), image.mode
    assert processor(images=grey[..., None] > 100)["pixel_values"].shape == (1, 3, 16, 16)


def test_texts(processor, folder):
    one, several = processor(text="a star"), processor(text=["a star", "a red circle"])
    assert torch.equal(one["input_ids"][0], several["input_ids"][0])
    assert torch.equal(vlp.load(folder).text("a star").text_ids, one["input_ids"])
    ids, attention, words = vlp.load(folder).text(["a star", "a red circle"])
    assert torch.equal(several["input_ids"], ids)
    assert torch.equal(several["attention_mask"].bool(), attention)
    assert torch.equal(several["word_mask"], words)
    arrays = processor(text="a star", images=np.zeros((4, 4), np.uint8), return_tensors="np")
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


def test_the_processor_tokenises_by_tokenizer_json(folder, tmp_path):
    """A folder may name a class that transformers would make from its vocabulary."""
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = vlp.VlpProcessor.from_pretrained(tmp_path)(text=["A Star", "a star"])["input_ids"]
    assert torch.equal(found, vlp.load(tmp_path).text(["A Star", "a star"]).text_ids)
    assert not torch.equal(found[0], found[1])
    words = sorted((vocabulary := tokenizer.get_vocab()), key=vocabulary.__getitem__)
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    (tmp_path / "tokenizer.json").unlink()
    found = vlp.VlpProcessor.from_pretrained(tmp_path)(text=["A Star", "a star"])["input_ids"]
    assert torch.equal(found, vlp.load(tmp_path).text(["A Star", "a star"]).text_ids)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (3, TypeError, "an image is of type int; give a path, a PIL image"),
        (Image.fromarray(np.full((4, 4), -0.5, np.float32)), ValueError, "fractions in 0..1"),
        (b"bytes", TypeError, "an image is of type bytes"),
        ([], ValueError, "images is empty"),
        (np.zeros((4, 4, 7)), ValueError, r"shape \(4, 4, 7\); give \(height, width, 3\)"),
        (np.zeros((0, 4, 3)), ValueError, "shape"),
        (torch.randn(3, 8, 8) * 9, ValueError, "not normalised"),
        (np.full((4, 4, 3), 300), ValueError, "from 300 to 300; give whole numbers in 0..255"),
        ("https://me:secret@host/a.jpg", ValueError, r"URL https://\*\*\*@host/a.jpg; download"),
        ("nowhere.jpg", FileNotFoundError, "there is no image file nowhere.jpg"),
        (__file__, OSError, "this image cannot be used: .*test_inputs.py"),
    ],
)
def test_other_images_are_one_sentence(given, kind, message):
    with pytest.raises(kind, match=message) as raised:
        as_images(given)
    assert len(str(raised.value).splitlines()) == 1


def test_texts_that_are_none(processor, folder):
    with pytest.raises(ValueError, match="no valid Unicode at character 2: surrogates"):
        vlp.load(folder).text(["a star", "a \ud800"])
    with pytest.raises(ValueError, match="give images, text or both"):
        processor()
    with pytest.raises(ValueError, match="text is empty"):
        processor(text=[])


WANTED = r"give a tensor \(images, 3, 16, 16\)"


@pytest.fixture(scope="module")
def model(folder):
    return vlp.VlpModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["encode_image", "get_image_features", "model.encode_image"])
def test_images_that_are_none(model, name):
    encode, encoder = attrgetter(name)(model), model.model.image_encoder
    with pytest.raises(TypeError, match=f"pixels are of type Image; {WANTED}"):
        encode(Image.new("RGB", (16, 16)))
    for shape in ((3, 16, 16), (1, 3, 20, 20), (1, 1, 16, 16)):
        with pytest.raises(ValueError, match=WANTED):
            encode(torch.zeros(shape))
    pixels = torch.zeros(2, 3, 16, 16)
    assert torch.equal(encoder(encoder.tower(pixels)), encoder(pixels))


@pytest.mark.parametrize("kind", [vlp.VlpProcessor, VlpImageProcessor])
def test_options_of_processors(folder, kind):
    with pytest.raises(TypeError, match="no argument 'siez'"):
        kind.from_pretrained(folder, siez={"height": 64, "width": 64})
    kind.from_pretrained(folder, use_fast=True, trust_remote_code=True, local_files_only=True)
