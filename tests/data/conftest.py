import time
import tracemalloc
from contextlib import contextmanager

import pytest
from raw_images import raw_image

from vlp.data.config import DataConfig
from vlp.data.pretrain import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.stream.batch import Inputs, PatchMasking
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

INPUTS = Inputs(16, (4, 4), 10, 90, word_masking=0.15, patch_masking=PatchMasking(0.5, 2))
WORDS = ("red", "green", "blue", "dog", "cat", "house", "left", "runs")


def caption(number, which=0):
    first, second = WORDS[number % 8], WORDS[(number // 8 + which) % 8]
    return f"a {first} {second} number {number} {'again ' * which}".strip()


@pytest.fixture
def make_shards(tmp_path):
    def make(name="shards", count=23, per_shard=5, captions=2, kind="png"):
        with ShardWriter(tmp_path / name, per_shard) as writer:
            for number in range(count):
                writer.write(
                    f"{name}_{number:04d}",
                    raw_image(number, (20, 16), {"jpg": "jpeg"}.get(kind, kind)),
                    kind,
                    Annotation(
                        captions=[caption(number, which) for which in range(captions)],
                        source=name,
                        image_id=str(number),
                    ),
                )
        return tmp_path / name

    return make


@pytest.fixture
def make_data(vocabulary):

    def make(*sources, batch=8, seed=5, inputs=INPUTS, **options):
        pairs = [source if isinstance(source, tuple) else (source, 1.0) for source in sources]
        settings = {
            "sources": [{"path": str(path), "weight": weight} for path, weight in pairs],
            "vocabulary": str(vocabulary),
            "canonical_streams": 4,
            "shuffle_window": 6,
            "workers": 0,
        }
        return PretrainData(DataConfig.model_validate(settings | options), inputs, batch, seed)

    return make


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    captions = [caption(number, which) for number in range(64) for which in range(2)]
    TextProcessor(train_wordpiece(captions, 90), 12).save(folder)
    return folder


@pytest.fixture
def within():
    @contextmanager
    def limit(seconds, peak):
        tracemalloc.start()
        started = time.process_time()
        yield
        took = time.process_time() - started
        _, memory = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert took < seconds
        assert memory < peak

    return limit
