import subprocess
import sys
from pathlib import Path

import pytest
from launch_lab import CHECKPOINT_EVERY, STEPS, Lab

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "training"))  # the helper `ranks` lives there


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """200 scenes of 32 pixels, their vocabulary, and a model of one narrow layer each."""
    folder = tmp_path_factory.mktemp("launch")

    def tool(*arguments):
        command = [sys.executable, "-m", "data_tools", *map(str, arguments)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    scenes, vocabulary = folder / "scenes", folder / "vocabulary"
    tool("scenes", "--out", scenes, "--train", 200, "--val", 0, "--image-size", 32)
    tool("vocabulary", "--shards", scenes / "train", "--size", 200, "--out", vocabulary)
    layer = "layers: 1, heads: 2, intermediate: 64"
    config = folder / "tiny.yaml"
    config.write_text(f"""
model:
  text: {{vocab_size: 256, width: 32, max_positions: 32, max_tokens: 24, {layer}}}
  image: {{image_size: 32, patch_size: 8, width: 32, {layer}}}
  cross: {{anchor: {{groups: 4}}, {layer}}}
  embed_dim: 32
data:
  sources: [{{path: {scenes / "train"}}}]
  vocabulary: {vocabulary}
  canonical_streams: 2
  workers: 0
objectives:
  contrastive: {{token: {{group: 4}}}}
  itm: {{group: 4}}
  teacher: {{queue: 24, warmup_steps: 4}}
training:
  {{batch: 8, steps: {STEPS}, precision: float32, log_every: 1, keep_last: 10,
  checkpoint_every: {CHECKPOINT_EVERY}, optimiser: {{learning_rate: 3e-4, warmup_steps: 2,
  lr_multipliers: {{model.text_encoder: 0.5}}}}}}
""")
    return Lab(folder, config)
