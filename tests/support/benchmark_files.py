"""Small files in the layouts of benchmarks, and what a converter made of them."""

import io
import json
import tarfile

from PIL import Image

from vlp.data.shards.shard_reader import ShardIndex


def photo(width=12, height=8, kind="jpeg"):
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (90, 60, 200)).save(stream, kind)
    return stream.getvalue()


def tar_of(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def lines_of(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def json_of(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def samples_of(folder):
    index = ShardIndex.open(folder)
    numbers = [(n, row) for n, shard in enumerate(index.shards) for row in range(shard.samples)]
    return {sample.key: sample for sample in (index.read(*number) for number in numbers)}


def said_of(sample):
    return json.loads(sample.annotation.to_json())


def failures_of(folder):
    failures = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["failures"]
    return {kind: one["ids"] for kind, one in failures.items()}
