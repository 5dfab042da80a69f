"""The command that makes a model folder read another vocabulary."""

from __future__ import annotations

import pytest
import torch
from pair_shards import tiny_folder
from tests_support import launch_script

from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.folder import from_pretrained, save_pretrained

SENTENCES = ["a tower of red blocks", "the red circle left of a tower", "no wall", "Ω ω Ω ω"]


@pytest.fixture(scope="module")
def command():
    return launch_script("change_vocabulary")


@pytest.fixture
def folders(tmp_path):
    """A model with heads, and a vocabulary that partly agrees with its own."""
    start = tiny_folder(tmp_path / "start")
    loaded = from_pretrained(start)
    heads = {"mlm_head.bias": torch.randn(loaded.text.vocab_size), "mlm_head.x": torch.ones(2)}
    save_pretrained(
        start, loaded.model.config, loaded.model.state_dict(), loaded.text, loaded.preprocess, heads
    )
    known = sorted(loaded.text.tokenizer.get_vocab())[:40]
    text = TextProcessor(train_wordpiece(SENTENCES + [" ".join(known)] * 3, 400), 10)
    text.save(tmp_path / "vocabulary")
    return start, tmp_path / "vocabulary", tmp_path / "made"


def test_known_pieces_stay_and_others_are_put_together(command, folders, capsys):
    start, vocabulary, out = folders
    arguments = ["--model", str(start), "--vocabulary", str(vocabulary), "--out", str(out)]
    assert command.main(arguments) == 0
    before, after = from_pretrained(start), from_pretrained(out)
    old, new = before.text.tokenizer, after.text.tokenizer
    was, now = (one.model.text_encoder.embedding.word.weight for one in (before, after))
    counts = {"known": 0, "composed": 0, "unknown": 0}
    for piece, number in new.get_vocab().items():
        if old.token_to_id(piece) is not None:
            kind, wanted = "known", [old.token_to_id(piece)]
        else:
            ids = old.encode(piece.removeprefix("##"), add_special_tokens=False).ids
            wanted = [one for one in ids if one != old.token_to_id("[UNK]")]
            kind = "composed" if wanted else "unknown"
            wanted = wanted or [old.token_to_id("[UNK]")]
        counts[kind] += 1
        direction = was[wanted].mean(0)
        length = was[wanted].norm(dim=-1).mean()
        torch.testing.assert_close(now[number], direction / direction.norm() * length)
        bias = after.heads["mlm_head.bias"][number]
        torch.testing.assert_close(bias, before.heads["mlm_head.bias"][wanted].mean(0))
    assert all(counts.values())
    assert torch.equal(after.heads["mlm_head.x"], before.heads["mlm_head.x"])
    said = capsys.readouterr().out
    assert f"{counts['known']} known, {counts['composed']} put together" in said
    assert f"{counts['unknown']} start as the unknown word" in said


def test_texts_cut_alike_mean_the_same(command, folders):
    start, _, out = folders
    loaded = from_pretrained(start)
    # The same pieces under other numbers.
    vocabulary = loaded.text.tokenizer
    pieces = sorted(vocabulary.get_vocab(), key=lambda piece: (piece[0] != "[", piece[::-1]))
    folder = out.parent / "turned"
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    arguments = ["--model", str(start), "--vocabulary", str(folder), "--out", str(out)]
    assert command.main(arguments) == 0
    made = from_pretrained(out)
    caption = ["a red circle left of a blue square"]
    ids = [one.text(caption).text_ids for one in (loaded, made)]
    assert not torch.equal(*ids)
    with torch.no_grad():
        features = [one.model.encode_text(*one.text(caption)).feature for one in (loaded, made)]
    torch.testing.assert_close(*features)


def test_what_cannot_be_used_is_one_line(command, folders, capsys):
    start, vocabulary, out = folders
    arguments = ["--vocabulary", str(vocabulary), "--out", str(out)]
    assert command.main(["--model", "/nowhere", *arguments]) == 2
    assert command.main(["--model", str(start), *arguments[:1], "/nowhere", *arguments[2:]]) == 2
    (start / "task.json").write_text("{}")
    assert command.main(["--model", str(start), *arguments]) == 2
    assert not out.exists()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "fine-tuned on a task" in said[2]
