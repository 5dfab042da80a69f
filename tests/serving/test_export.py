import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import ace, tiny_config, tiny_text

import vlp
from launch.cli.main import main
from vlp.data.image.transforms import Preprocessing
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.positions import list_positions
from vlp.serving import export as module
from vlp.serving.export import export_parts, exported_program


@pytest.fixture(scope="module")
def examples(folder):
    parts = export_parts(vlp.load(folder))
    found = {}
    for part in parts:
        inputs = {name: tensor[:2] for name, tensor in part.inputs.items()}
        with torch.no_grad():
            out = part.module(**inputs)
        found[part.name] = inputs, out if isinstance(out, tuple) else (out,), part.outputs
    return found


def test_the_parts_are_the_model(folder, examples):
    model, text, *_ = vlp.load(folder)
    pixels = examples["image"][0]["pixel_values"]
    ids = examples["text"][0]["input_ids"]
    tokens = [tokens[:2] for tokens in text(["a", "a b c d e", ""])]
    assert torch.equal(tokens[0], ids)
    with torch.no_grad():
        image, words = model.encode_image(pixels), model.encode_text(*tokens)
        assert torch.equal(examples["image"][1][0], image.feature)
        assert torch.equal(examples["text"][1][0], words.feature)
        assert torch.equal(examples["match"][1][0], model.match(image, words))


@pytest.mark.nightly
def test_onnx(folder, tmp_path, examples, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", "--model", str(folder), "--out", str(tmp_path)]) == 0
    assert "match.onnx" in capsys.readouterr().out
    for name, (inputs, expected, outputs) in examples.items():
        session = onnxruntime.InferenceSession(
            tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"]
        )
        assert [one.name for one in session.get_inputs()] == list(inputs)
        assert [one.name for one in session.get_outputs()] == list(outputs)
        for rows in (1, 2):
            given = {key: tensor[:rows].numpy() for key, tensor in inputs.items()}
            for ours, theirs in zip(expected, session.run(None, given)):
                np.testing.assert_allclose(theirs, ours[:rows].numpy(), atol=1e-4, rtol=0)
    assert {"tokenizer.json", "processor_config.json"} <= {f.name for f in tmp_path.iterdir()}


def test_torch_export(folder, tmp_path, examples, monkeypatch, capsys):
    monkeypatch.setattr(module, "export_parts", lambda loaded: export_parts(loaded)[:1])
    arguments = ["--model", str(folder), "--out", str(tmp_path), "--format", "torch"]
    assert main(["export", *arguments]) == 0
    assert "not exported" not in capsys.readouterr().err
    (folder / "task.json").write_text("{}")  # as fine-tuning leaves it
    assert main(["export", *arguments]) == 0
    (folder / "task.json").unlink()
    assert "head is not exported" in capsys.readouterr().err
    inputs, expected, _ = examples["image"]
    for ours, theirs in zip(expected, torch.export.load(tmp_path / "image.pt2").module()(**inputs)):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


@pytest.mark.nightly
def test_a_full_disk_is_said_and_leaves_what_was_there(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "export_parts", lambda loaded: export_parts(loaded)[:1])
    (tmp_path / "image.pt2").write_text("of before")
    arguments = ["--model", str(folder), "--out", str(tmp_path), "--format", "torch"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code = main(["export", *arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert code == 2
    assert "File too large" in capfd.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["image.pt2"]
    assert (tmp_path / "image.pt2").read_text() == "of before"


def test_a_missing_package_is_named(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_ONNX_PACKAGES", ("no_such_package",))
    assert main(["export", "--model", str(folder), "--out", str(tmp_path)]) == 2
    assert "pip install 'vlp[export]'" in capsys.readouterr().err
    assert main(["export", "--model", "./nowhere", "--out", str(tmp_path)]) == 2
    assert "there is no model folder ./nowhere" in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cross",
    [
        *({"position": [name]} for name in (*list_positions(), "ape", "rpe")),
        *({"position": position, "layout": layout}
          for position in (["anchor"], []) for layout in ("text", "albef")),
        ace(groups=2, mode="bias"),
        ace(groups=2, tau=10),
        ace(groups=2, text_window=None, patch_window=None),
    ],
    ids=str,
)  # fmt: skip
def test_every_cross_modal_encoder_exports_to_onnx(cross, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = VLPModel(tiny_config(cross={"layers": 1} | cross)).eval()
    for weights in model.cross_encoder.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    loaded = Loaded(model, tiny_text(), Preprocessing(16))
    match = export_parts(loaded)[2]
    module.write_onnx(exported_program(match), match, tmp_path / "match.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "match.onnx", providers=["CPUExecutionProvider"]
    )
    given = {name: tensor[:2] for name, tensor in match.inputs.items()}
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    with torch.no_grad():
        np.testing.assert_allclose(found, match.module(**given), atol=1e-4, rtol=0)
