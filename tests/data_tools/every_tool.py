"""Every data tool that an executor serves, run over the same shards, and what they write."""

import json
import shutil

from made_shards import cut, encoded, jpeg, photo, write

from data_tools.__main__ import main


def sources(folder):
    """Two folders of shards with copies, a damaged shard and a repeated key, and loose images."""
    samples = {f"k{n:02d}": jpeg(n % 20, quality=90 - n) for n in range(30)}
    write(folder / "first", samples, 3)
    cut(folder / "first" / "shard-000004.tar")
    write(folder / "second", {"k00": jpeg(3), "other": jpeg(40)}, 1)
    loose = folder / "loose"
    loose.mkdir()
    for number in range(9):
        (loose / f"{number}.png").write_bytes(encoded(photo(number), "png"))
    rows = [{"image": f"{n}.png", "caption": f"number {n}"} for n in range(9)]
    (loose / "captions.json").write_text(json.dumps(rows))
    return folder


def run_every_tool(given, out, *place):
    out.mkdir()
    indexed = out / "indexed"
    shutil.copytree(given / "first", indexed)
    (indexed / "index.npz").unlink()
    first, second = str(given / "first"), str(given / "second")
    shards = ["--samples-per-shard", "4"]
    commands = [
        (1, "index", str(indexed)),
        (1, "verify", first, second, "--report", str(out / "report")),
        (0, "stats", first, second, "--out", str(out / "stats.json")),
        (1, "reshard", first, "--out", str(out / "dealt"), "--shuffle", "3", *shards),
        (0, "dedup", first, second, "--out", str(out / "dedup.txt")),
        (0, "overlap", "--pretraining", first, "--evaluation", second, "--out",
         str(out / "overlap.txt")),
        (0, "import", str(given / "loose"), "--out", str(out / "own"), "--split", "0.5", "0.25",
         "0.25", *shards),
    ]  # fmt: skip
    for code, *words in commands:
        assert main([*words, *place]) == code, words
    assert not list(out.glob("**/*tasks*"))
    return {
        path.relative_to(out).as_posix(): path.read_bytes().replace(str(out).encode(), b"OUT")
        for path in out.glob("**/*")
        if path.is_file()
    }
