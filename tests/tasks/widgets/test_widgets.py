import csv
import json
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.loader import indexed_data
from vlp.data.text.tokenizer import TextProcessor
from vlp.positions.fourier import kl_regulariser
from vlp.tasks.widgets.data import (
    Collate,
    GeneratedScreensConfig,
    RicoScreensConfig,
    WidgetDataConfig,
    WidgetSamples,
    encode_screen,
    open_screens,
    read_tokenizer,
    widget_text,
)
from vlp.tasks.widgets.screens import KINDS, generate_screen, read_screen
from vlp.tasks.widgets.task import WidgetsConfig, build


def node(bounds=(0, 0, 100, 100), children=(), **more):
    return {"bounds": list(bounds), "class": "a.b.View", "children": list(children), **more}


def tree():
    return node(
        (0, 0, 1440, 2560),
        [
            node((0, 0, 720, 256), [node((0, 0, 144, 256), text=" Ok\nnow "), None, node()]),
            node((-100, 2000, 1600, 2700), **{"content-desc": [None, "down there"]}),
            node((9, 9, 9, 50)),
            node(**{"visible-to-user": False}),
        ],
    )


def small(**options):
    sizes = {"vocabulary_size": 300, "max_caption": 8, "canonical_streams": 2}
    generated = {"screens": {"kind": "generated", "train": 24, "test": 6}}
    config = WidgetDataConfig.model_validate(sizes | generated | options)
    screens = open_screens(config.screens, "train")
    text = widget_text(
        screens, config.vocabulary, config.vocabulary_size, config.max_words, config.max_caption
    )
    return screens, text, config


class TestHierarchy:
    def test_widgets_of_a_small_tree(self):
        screen = read_screen({"activity": {"root": tree()}}, "one", {})
        assert [widget.path for widget in screen.widgets] == ["0", "0.0", "0.0.0", "0.0.2", "0.1"]
        boxes = {widget.path: widget.box for widget in screen.widgets}
        assert boxes["0.0"] == (0, 0, 0.5, 0.1)
        assert boxes["0.1"] == (0, 2000 / 2560, 1, 1)  # clipped
        texts = {widget.path: widget.text for widget in screen.widgets if widget.text}
        assert texts == {"0.0.0": "Ok now", "0.1": "down there"}
        # Hidden nodes keep their place in both orders.
        orders = {widget.path: widget.tree for widget in screen.widgets}
        assert orders == {
            "0": (1, 1, 7), "0.0": (2, 2, 3), "0.0.0": (3, 3, 1), "0.0.2": (3, 4, 2),
            "0.1": (2, 5, 4),
        }  # fmt: skip
        leaves = read_screen(tree(), "one", {}, "leaves")
        assert [widget.path for widget in leaves.widgets] == ["0.0.0", "0.0.2", "0.1"]

    def test_captions_keep_their_widgets(self):
        captions = {"0.3": ["hidden ", " "], "0.0": ["inner"], "0.2": ["flat"], "0.1": [" "]}
        screen = read_screen(tree(), "one", captions, "leaves")
        said = {screen.widgets[number].path: said for number, said in screen.captions.items()}
        assert said == {"0.3": ("hidden",), "0.0": ("inner",), "0.2": ("flat",)}
        with pytest.raises(BadSample, match=r"captions without their widget: one \(nodes 0.0.1\)"):
            read_screen(tree(), "one", {"0.0.1": ["a null child"]})

    def test_kind_and_resource(self):
        root = node((0, 0, 1440, 2560), [
            node(**{"class": "x.MyButton", "ancestors": ["a.TextView", "android.widget.Button"]}),
            node(**{"class": None, "resource-id": "com.app:id/btnShareURL_2go"}),
            node(**{"class": "android.widget.ImageButton", "clickable": True}),
        ])  # fmt: skip
        _, first, second, third = read_screen(root, "one", {}).widgets
        assert KINDS[first.kind] == "button"
        assert (KINDS[second.kind], second.resource) == ("unknown", "btn share url 2 go")
        assert (KINDS[third.kind], third.clickable) == ("imagebutton", True)

    def test_a_wide_screen_swaps_its_sides(self):
        root = node((0, 0, 2560, 1440), [node((1280, 720, 2560, 1440))])
        assert read_screen(root, "one", {}).widgets[1].box == (0.5, 0.5, 1, 1)

    @pytest.mark.parametrize(
        ("hierarchy", "message"),
        [
            (None, "no view hierarchy: one"),
            ({"activity": None}, "no view hierarchy"),
            ({"activity": {"root": []}}, "no view hierarchy"),
            (node((0, 0, 1)), r"bad bounds: one, node 0 \(bounds \[0, 0, 1\]\)"),
            (node(children=[node((0, "a", 1, 1))]), r"node 0.0 \(bounds \[0, 'a', 1, 1\]\)"),
            (node((0, 0, float("nan"), 1)), "bad bounds"),
            ({"class": "no bounds"}, "bounds None"),
            ({**node(), "children": 5}, r"bad children: one, node 0 \(5\)"),
        ],
    )
    def test_bad_hierarchies(self, hierarchy, message):
        with pytest.raises(BadSample, match=message):
            read_screen(hierarchy, "one", {})

    def test_leaves_of_rico_as_they_were_derived(self, shared, tmp_path):
        """The derived table was made from the same files by other code."""
        folder = shared / "data_tasks/rico_widget"
        with tarfile.open(folder / "rico_view_hierarchies.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        rows = [
            json.loads(row) for row in (folder / "rico_leaf_boxes.jsonl").read_text().splitlines()
        ]
        assert len(rows) == 98
        count = 0
        for row in rows:
            file = tmp_path / "view_hierarchies" / f"{row['screen']}.json"
            screen = read_screen(json.loads(file.read_text()), row["screen"], {}, "leaves")
            found = {widget.path: widget for widget in screen.widgets}
            left, top, right, bottom = row["root_bounds"]
            sides = (2560, 1440) if right - left > bottom - top else (1440, 2560)
            for leaf in row["widgets"]:
                box = [min(max(b / s, 0), 1) for b, s in zip(leaf["bounds"], sides * 2)]
                if box[2] <= box[0] or box[3] <= box[1]:
                    assert leaf["path"] not in found
                    continue
                widget = found.pop(leaf["path"])
                assert widget.box == pytest.approx(box)
                assert widget.clickable == leaf["clickable"]
                assert widget.text == " ".join((leaf["text"] or widget.text).split())
                count += 1
            assert not found  # nor any that is not in the table
        assert count > 1000


class TestGenerated:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**31))
    def test_every_screen_is_sound(self, number):
        hierarchy, captions = generate_screen(np.random.default_rng(number))
        screen = read_screen(hierarchy, str(number), captions)
        assert len(screen.captions) == len(captions) >= 2
        assert all(len(said) == 2 for said in screen.captions.values())
        said = Counter(one for both in screen.captions.values() for one in both)
        assert max(said.values()) == 1  # a caption means one widget
        for widget in screen.widgets:
            x0, y0, x1, y1 = widget.box
            assert 0 <= x0 < x1 <= 1
            assert 0 <= y0 < y1 <= 1
        assert not any(screen.widgets[place].text for place in screen.captions)

    def test_names_stand_in_the_same_row(self):
        """An independent reading of a caption: the text that overlaps the button vertically."""
        seen = 0
        for number in range(100):
            hierarchy, captions = generate_screen(np.random.default_rng(number))
            screen = read_screen(hierarchy, str(number), captions)
            for place, both in screen.captions.items():
                if not both[0].startswith("delete the message from"):
                    continue
                _, y0, _, y1 = screen.widgets[place].box
                middle = (y0 + y1) / 2
                texts = [w.text for w in screen.widgets if w.text and w.box[1] < middle < w.box[3]]
                assert both[0].split()[-1] in texts
                seen += 1
        assert seen > 20

    def test_parts_are_different_and_repeatable(self):
        config = GeneratedScreensConfig(train=5, test=4)
        train, test = (open_screens(config, part) for part in ("train", "test"))
        assert (len(train), len(test)) == (5, 4)
        assert train.read(1) == open_screens(config, "train").read(1)
        assert train.read(1).widgets != test.read(1).widgets
        other = open_screens(config.model_copy(update={"seed": 1}), "train")
        assert train.read(1).widgets != other.read(1).widgets


class TestRico:
    def folder(self, tmp_path, count=6):
        place = tmp_path / "rico"
        place.mkdir()
        rows = []
        for number in range(count):
            hierarchy, captions = generate_screen(np.random.default_rng(number))
            (place / f"{number}.json").write_text(json.dumps(hierarchy))
            rows += [(number, path, "|".join(said)) for path, said in captions.items()]
        with (tmp_path / "widget_captions.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("screenId", "nodeId", "captions"), *rows])
        (tmp_path / "train.txt").write_text("0\n1\n2\n3\n99\n")
        (tmp_path / "test.txt").write_text("4\n5\n")
        names = ("captions", "widget_captions.csv"), ("train", "train.txt"), ("test", "test.txt")
        files = {key: str(tmp_path / name) for key, name in names}
        return RicoScreensConfig(hierarchies=str(place), **files)

    def test_written_screens_come_back(self, tmp_path):
        config = self.folder(tmp_path)
        train, test = open_screens(config, "train"), open_screens(config, "test")
        assert (len(train), len(test)) == (4, 2)
        hierarchy, captions = generate_screen(np.random.default_rng(5))
        wanted = read_screen(hierarchy, "", captions)
        assert test.read(1)._replace(name="") == wanted
        with tarfile.open(tmp_path / "rico.tar.xz", "w:xz") as archive:
            archive.add(config.hierarchies, "combined")
        packed = config.model_copy(update={"hierarchies": str(tmp_path / "rico.tar.xz")})
        assert open_screens(packed, "test").read(1)._replace(name="") == wanted

    def test_bad_screens_are_named(self, tmp_path):
        config = self.folder(tmp_path)
        (tmp_path / "rico/1.json").write_text("{")
        (tmp_path / "rico/2.json").unlink()
        train = open_screens(config, "train")
        with pytest.raises(BadSample, match=r"damaged view hierarchy: .*rico, 1"):
            train.read(1)
        with pytest.raises(BadSample, match=r"missing view hierarchy: .*rico, 2"):
            train.read(2)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda f: (f / "train.txt").unlink(), "train.txt: cannot be read"),
            (lambda f: (f / "train.txt").write_text("98\n99\n"), "none of the 2 screens of"),
            (lambda f: (f / "widget_captions.csv").write_text("a,nodeId\n"), "captions, screenId"),
            (
                lambda f: (f / "widget_captions.csv").write_text("screenId,nodeId,captions\n1,0\n"),
                "line 2: too few columns",
            ),
            (lambda f: (f / "rico").rename(f / "gone"), "neither a folder nor a tar file"),
        ],
    )
    def test_files_that_do_not_fit(self, tmp_path, spoil, message):
        config = self.folder(tmp_path)
        spoil(tmp_path)
        with pytest.raises(ConfigError, match=message):
            open_screens(config, "train")


class TestBatches:
    def test_what_a_screen_becomes(self):
        screens, text, config = small()
        screen = screens.read(0)
        place = next(iter(screen.captions))
        encoded = encode_screen(screen, text, [(place, screen.captions[place][1])], 99)
        assert encoded.boxes.shape == (len(screen.widgets), 4)
        assert encoded.targets.tolist() == [place]
        assert text.decode(encoded.captions[0].tolist()) == screen.captions[place][1]
        for row, widget in zip(encoded.words, screen.widgets):
            assert text.decode(row.tolist()) == widget.text
        assert encoded.captions[0, 0] == text.cls_id
        assert text.sep_id in encoded.captions[0]
        assert config.max_caption + 2 == encoded.captions.shape[1]

    def test_spoken_widgets_stay_where_a_screen_is_cut(self):
        screens, text, _ = small()
        screen = screens.read(0)
        last = len(screen.widgets) - 1
        encoded = encode_screen(screen, text, [(last, "a")], 3)
        assert encoded.targets.tolist() == [2]
        boxes = [screen.widgets[number].box for number in (0, 1, last)]
        torch.testing.assert_close(encoded.boxes, torch.tensor(boxes))
        with pytest.raises(BadSample, match="too many widgets"):
            encode_screen(screen, text, [(0, "a"), (1, "b"), (2, "c"), (3, "d")], 3)
        with pytest.raises(BadSample, match="no widgets"):
            encode_screen(screen._replace(widgets=()), text, [], 3)

    def test_padding_is_marked(self):
        screens, text, _ = small()
        several = [screens.read(number) for number in range(3)]
        encoded = [
            encode_screen(one, text, [(n, "x") for n in one.captions], 99) for one in several
        ]
        batch = Collate(text)(encoded)
        assert batch.widget_mask.sum(1).tolist() == [len(one.widgets) for one in several]
        assert (batch.boxes[~batch.widget_mask] == 0).all()
        assert (batch.words[~batch.widget_mask] == text.pad_id).all()
        rows, widgets = batch.targets.unbind(-1)
        assert rows.bincount().tolist() == [len(one.captions) for one in several]
        assert batch.widget_mask[rows, widgets].all()
        assert widgets.tolist() == [n for one in several for n in one.captions]

    def test_a_screen_without_captions_is_skipped(self, monkeypatch):
        screens, text, config = small()
        read, bare = screens.read, screens.read(7)._replace(captions={})
        monkeypatch.setattr(screens, "read", lambda number: bare if number == 7 else read(number))
        samples = WidgetSamples(screens, text, config)
        data = indexed_data(len(screens), samples, Collate(text), config, 24, 0)
        batch, _ = next(iter(data.batches()))
        assert [skip.kind for skip in batch.skipped] == ["no captions"]
        assert int(batch.valid.sum()) == 23

    def test_vocabularies(self, tmp_path):
        _, text, _ = small()
        again = read_tokenizer(text.to_json())
        assert again.get_vocab() == small()[1]._tokenizer.get_vocab()
        TextProcessor(again, 12).save(tmp_path)
        stored = small(vocabulary=str(tmp_path))[1]
        assert stored.text_ids("inbox").tolist() == text.text_ids("inbox").tolist()
        with pytest.raises(ValueError, match="stored tokenizer"):
            read_tokenizer("{")
        with pytest.raises(ConfigError, match="too small"):
            small(vocabulary_size=7)


FOURIER = {"dimensions": 4, "groups": 4, "extent": 100, "gamma": 10, "features": 16}

MODEL = {"width": 32, "heads": 4, "layers": 1, "decoder_layers": 1, "intermediate": 64}
SCREENS = {"kind": "generated", "train": 64, "test": 4, "nodes": "leaves"}
SIZES = {"vocabulary_size": 300, "max_words": 3, "max_caption": 8}
DATA = SIZES | {"screens": SCREENS, "canonical_streams": 2}


def task_config(name="fourier", options=FOURIER, **more):
    positions = [{"name": name, "options": options}] if name else []
    return WidgetsConfig.model_validate(
        {
            "model": MODEL | {"dropout": 0.0, "positions": positions},
            "data": DATA,
            "java": False,
            **more,
        }
    )


def batches(data, count):
    return [batch for (batch, _), _ in zip(data.batches(), range(count))]


def test_the_task_is_one_and_its_loss_the_cross_entropy_of_words():
    task, data = build(task_config(), 8, 0, "float32")
    (batch,) = batches(data, 1)
    out = task(batch, 0)
    logits = task.model(batch).log_softmax(-1)
    total = count = hits = 0
    for row, caption in enumerate(batch.captions.tolist()):
        said = caption[1 : caption.index(task.text.sep_id) + 1]
        for place, word in enumerate(said):
            total -= logits[row, place, word]
            hits += int(logits[row, place].argmax()) == word
            count += 1
    torch.testing.assert_close(out.losses["words"], total / count)
    torch.testing.assert_close(out.statistics["accuracy"].item(), hits / count)
    assert set(out.losses) == {"words"}
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.parameters())


def test_the_regulariser_pulls_on_regularised_encodings():
    options = {**FOURIER, "regularised": True}
    task, data = build(task_config(options=options, regulariser=0.5), 8, 0, "float32")
    (batch,) = batches(data, 1)
    out = task(batch, 0)
    (encoding,) = task.model.encoder.positions
    wanted = kl_regulariser(encoding.frequencies, encoding.log_variance)
    torch.testing.assert_close(out.losses["regulariser"], wanted)
    torch.testing.assert_close(out.loss, out.losses["words"] + 0.5 * wanted)
    without, _ = build(task_config(regulariser=0.5), 8, 0, "float32")
    assert without(batch, 0).losses["regulariser"] == 0
