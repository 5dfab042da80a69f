import io
import tarfile
import zipfile

import pytest
from benchmark_files import tar_of

from data_tools import originals as data_tools_originals
from data_tools.originals import unpack_archives
from data_tools.own.file_tree import FileTree
from vlp.config import ConfigError
from vlp.data.file_names import FileNames
from vlp.data.shards.sample_files import BadSample


class Originals(data_tools_originals.Originals):
    def read(self, name):
        location = self.find(name)
        return None if location is None else location.read()


def test_folders_two_levels_deep(tmp_path):
    for name in ("a.jpg", "ab/b.jpg", "ab/cd/c.jpg", "ab/cd/ef/deep.jpg", ".hidden.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "a.txt").write_text("a caption beside the image")
    originals = Originals([tmp_path])
    assert originals.read("a.jpg") == b"a.jpg"
    assert originals.read("b.jpg") == b"ab/b.jpg"
    assert originals.read("c.jpg") == originals.read("cd/c.jpg") == b"ab/cd/c.jpg"
    assert originals.read("deep.jpg") is None


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zips(tmp_path, compression):
    path = tmp_path / "train2017.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("train2017/", b"")
        archive.writestr("train2017/1.jpg", b"one" * 99)
        archive.writestr("train2017/2.jpg", b"two")
    for places in ([path], [tmp_path]):
        originals = Originals(places)
        assert originals.read("1.jpg") == b"one" * 99
        assert originals.read("train2017/2.jpg") == b"two"
        assert originals.read("3.jpg") is None


def test_the_first_place_wins_and_folders_tell_equal_names_apart(tmp_path):
    first = tar_of(tmp_path / "1.tar", {"./train/a.jpg": b"train", "val/a.jpg": b"val"})
    second = tar_of(tmp_path / "2.tar", {"train/a.jpg": b"later", "b.jpg": b"b"})
    originals = Originals([first, second])
    assert originals.read("a.jpg") is None  # one of two
    assert "does not tell which of several a.jpg it means" in originals.problems[0]
    assert originals.read("val/a.jpg") == originals.read("val\\a.jpg") == b"val"
    assert originals.read("data/val/a.jpg") == b"val"
    assert originals.read("train/a.jpg") == b"train"
    assert originals.read("elsewhere/b.jpg") == b"b"
    assert Originals([second, first]).read("train/a.jpg") == b"later"


CAMERAS = {"cam1/1.jpg": b"1", "cam2/1.jpg": b"2", "cam2/2.jpg": b"3", "cafe\u0301/A.JPG": b"4"}
CAMERAS["cam2/4.jpg"] = b"5"
CAMERAS |= {f"cam1/{name}/9.jpg": b"6" for name in (".thumbnails", "@eaDir", "__MACOSX")}


@pytest.mark.parametrize("kind", ["folder", "folders", "tar", "zip", "file tree", "file trees"])
def test_the_whole_path_of_a_name_counts(tmp_path, kind):
    for name, data in CAMERAS.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(data)
    places = [tmp_path / "set"]
    if kind in ("folders", "file trees"):
        places = sorted((tmp_path / "set").iterdir())
    elif kind == "tar":
        places = [tar_of(tmp_path / "set.tar", CAMERAS)]
    elif kind == "zip":
        places = [tmp_path / "set.zip"]
        with zipfile.ZipFile(places[0], "w") as archive:
            for name, data in CAMERAS.items():
                archive.writestr(name, data)
    if kind.startswith("file"):
        (tmp_path / "room").mkdir()
        tree = FileTree(places, tmp_path / "room")

        def read(name):
            path = tree.path_of(name)
            place = None if path is None else tree.find(path)
            return None if place is None else place.read()
    else:
        read = Originals(places).read

    expected = {**CAMERAS, "cam1/2.jpg": None, "cam1/3.jpg": None, "1.jpg": None, "2.jpg": b"3"}
    expected |= {"caf\u00e9/a.jpg": b"4", "A.jpg": b"4", "/far/set/cam1/1.jpg": b"1"}
    expected["other/2.jpg"] = None  # the file is named by its path
    del expected["cam2/4.jpg"]
    expected |= {name: None for name in CAMERAS if "9" in name} | {"9.jpg": None}
    # The folder of accents lacks 2.jpg, and two forms of a name are one name.
    expected |= {"caf\u00e9/2.jpg": None, "CAM1/2.jpg": None}
    expected |= {"ol\u00e9/4.jpg": b"5", "ole\u0301/4.jpg": b"5"}
    expected["another/4.jpg"] = None  # two names, and one file
    assert {name: read(name) for name in expected} == expected


@pytest.mark.parametrize("room", [False, True])
def test_equal_base_names_under_another_prefix_are_found_in_linear_time(
    room, tmp_path, monkeypatch
):
    files = {f"set/{number}/0.jpg": b"%d" % number for number in range(200)}
    archive, comparisons = tar_of(tmp_path / "images.tar", files), []
    if room:
        (tmp_path / "room").mkdir()
        tree = FileTree([archive], tmp_path / "room")
        matches = FileNames._matches
        monkeypatch.setattr(
            FileNames, "_matches", lambda *inputs: comparisons.append(inputs) or matches(*inputs)
        )
        assert all(tree.path_of(f"/old/{name}") == name for name in files)
    else:
        originals, agrees = Originals([archive]), Originals._is_in
        monkeypatch.setattr(
            Originals, "_is_in", lambda *inputs: comparisons.append(inputs) or agrees(*inputs)
        )
        assert all(originals.read(f"/old/{name}") == data for name, data in files.items())
    assert len(comparisons) == len(files)


def test_the_later_of_two_members_counts_and_copies_are_one_image(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in (("1.jpg", b"first"), ("b/1.jpg", b"other"), ("1.jpg", b"mended")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    copy = tar_of(tmp_path / "copy.tar", {"c/2.jpg": b"2", "d/2.jpg": b"2"})
    originals = Originals([path, copy])
    assert (originals.read("1.jpg"), originals.read("b/1.jpg")) == (b"mended", b"other")
    assert originals.read("2.jpg") == b"2"


def test_what_is_damaged_or_gone(tmp_path):
    with pytest.raises(ConfigError, match="no such folder, tar or zip"):
        Originals([tmp_path / "nowhere"])
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match="neither a readable tar nor a zip"):
        Originals([tmp_path / "a.tar"])
    path = tar_of(tmp_path / "b.tar", {"1.jpg": b"1" * 900, "2.jpg": b"2" * 900})
    path.write_bytes(path.read_bytes()[:2000])
    originals = Originals([path])
    assert originals.read("1.jpg") == b"1" * 900
    assert originals.read("2.jpg") is None
    assert len(originals.problems) == 1
    path.write_bytes(path.read_bytes()[:1000])  # cut while the build runs
    with pytest.raises(BadSample, match=r"unreadable image: .*b.tar: truncated at byte 512"):
        originals.read("1.jpg")


def test_a_damaged_member_of_a_zip(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1.jpg", b"first image")
    data = bytearray(path.read_bytes())
    data[data.index(b"first")] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSample, match="Bad CRC-32"):
        Originals([path]).read("1.jpg")


FILES = {"a/one.jpg": b"1" * 700, "two.jpg": b"2", "../three.jpg": b"3" * 512}


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
def test_compressed_tars_become_places(tmp_path, kind):
    # Told by its bytes, not by its name.
    archive = tar_of(tmp_path / "images.bin", FILES, f"w:{kind}")
    room = tmp_path / "deep" / "room"
    with unpack_archives([archive], room) as places:
        found = Originals(places)
        assert {name: found.read(name) for name in FILES} == FILES
        assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "images.bin"]
    assert not room.exists()


def test_other_places_stay_and_folders_bring_their_archives(tmp_path):
    plain = tar_of(tmp_path / "plain.tar", {"p.jpg": b"p"})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "loose.jpg").write_bytes(b"loose")
    tar_of(folder / "x.tar.xz", {"x.jpg": b"x"}, "w:xz")
    tar_of(folder / "y.tgz", {"y.jpg": b"y"}, "w:gz")
    other = tar_of(tmp_path / "y.tgz", {"z.jpg": b"z"}, "w:gz")
    with unpack_archives([plain, folder, other, tmp_path / "nowhere"], tmp_path / "room") as places:
        assert places[:2] == [plain, folder]
        assert places[-1] == tmp_path / "nowhere"
        found = Originals(places[:-1])
        names = ("p.jpg", "loose.jpg", "x.jpg", "y.jpg", "z.jpg")
        assert [found.read(name) for name in names] == [b"p", b"loose", b"x", b"y", b"z"]


def test_what_a_killed_run_left_goes(tmp_path):
    leftover = tmp_path / ".unpacked-abc"
    leftover.mkdir()
    (leftover / "half.tar").write_bytes(b"half")
    (tmp_path / "shard-000000.tar").write_bytes(b"")
    with unpack_archives([], tmp_path) as places:
        assert places == []
        assert not leftover.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_damaged_archives(tmp_path, kind, harm):
    archive = tar_of(tmp_path / f"images.tar.{kind}", FILES, f"w:{kind}")
    data = bytearray(archive.read_bytes())
    if harm == "cut":
        del data[-20:]
    else:
        data[len(data) // 2] ^= 0xFF
    archive.write_bytes(data)
    with (
        pytest.raises(ConfigError, match=rf"images\.tar\.{kind}: .*(damaged|cannot be unpacked)"),
        unpack_archives([archive], tmp_path / "room"),
    ):
        raise AssertionError("a damaged archive was taken for a whole one")
    assert not (tmp_path / "room").exists()
