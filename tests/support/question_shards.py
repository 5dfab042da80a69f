"""Shards of small plain images with questions and captions, and a small model for them."""

import io

import torch
from PIL import Image
from tests_support import tiny_config

from vlp.data.image.transforms import Preprocessing
from vlp.data.schema import Annotation, Answer, Question
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}
TEXTS = [
    "what colour is it? is it red green blue?",
    "yes no two 10:30 left right",
    "a red picture . a plain green one . all blue",
]
AUGMENT = {"randaugment": False, "crop_scale": [1.0, 1.0], "hflip": False}


def photo(colour="red", side=16):
    data = io.BytesIO()
    Image.new("RGB", (side, side), COLOURS[colour]).save(data, "PNG")
    return data.getvalue()


def question(number, text, answers, **extra):
    given = [Answer(answer=answer, count=count) for answer, count in answers.items()]
    return Question(id=str(number), question=text, answers=given, **extra)


def write_shards(folder, samples, per_shard=4):
    with ShardWriter(folder, samples_per_shard=per_shard) as writer:
        for number, (data, annotation) in enumerate(samples):
            writer.write(f"{number:03d}", data, "png", annotation)
    return folder


def coloured(count=12):
    """Images of one colour with two questions and two captions each."""
    samples = []
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        captions = [f"a {colour} picture", f"a plain {colour} one"]
        kinds = {"answer_type": "other", "question_type": "what"}
        red = {"yes" if colour == "red" else "no": 7, "left": 3}
        questions = [
            question(10 * number, "what colour is it?", {colour: 10}, **kinds),
            question(10 * number + 1, "is it red?", red, answer_type="yes/no"),
        ]
        annotation = Annotation(
            source="toy", image_id=str(number), captions=captions, questions=questions
        )
        samples.append((photo(colour), annotation))
    return samples


def toy_text(max_tokens=12):
    return TextProcessor(train_wordpiece(TEXTS, 90), max_tokens)


def toy_parts(heads=True, seed=0):
    """An untrained model of width 16 and what prepares its inputs."""
    text = toy_text()
    torch.manual_seed(seed)
    config = tiny_config(text={"vocab_size": text.vocab_size})
    model, head = VLPModel(config), MLMHead(16, text.vocab_size)
    torch.nn.init.normal_(head.bias)
    model.match_head.bias.data.fill_(0.1)  # as if it were trained; odds stay
    own = {f"mlm_head.{name}": value for name, value in head.state_dict().items()}
    return Loaded(model, text, Preprocessing(16), own if heads else {})
