"""The same images and captions in every form that people have them in."""

import csv
import gzip
import io
import json
import zipfile
from functools import cache

import numpy as np
from benchmark_files import tar_of
from made_shards import encoded, photo

COUNT = 16
"""Images of a form, unless a test wants more: `monkeypatch.setattr(own_forms, "COUNT", 300)`."""


def images():
    return dict(_images(COUNT))


@cache
def _images(count):
    kinds = {"jpg": "jpeg", "png": "png", "webp": "webp"}
    suffixes = ["jpg"] * (count - 2) + ["png", "webp"]
    return {
        f"photo {seed:02}.{suffix}": encoded(photo(seed, (48, 32)), kinds[suffix])
        for seed, suffix in enumerate(suffixes)
    }


def captions_of(name):
    """Two captions of every third image, else one; one of them has a comma and quotes."""
    number = name.split()[1].split(".")[0]
    said = [f'a "big" dog, number {number}']
    return [*said, f"number {number} runs"] if int(number) % 3 == 0 else said


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def as_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def pairs(json_too=False):
    files = {}
    for name, data in images().items():
        stem = name.rpartition(".")[0]
        files[name] = data
        files[f"{stem}.txt"] = "\n".join(captions_of(name)).encode()
        if json_too:
            about = {"url": f"http://x.org/{name}", "key": stem, "status": "success", "width": 48}
            files[f"{stem}.json"] = json.dumps(about | {"caption": captions_of(name)[0]}).encode()
    return files


def rows(image="image", caption="caption"):
    return [
        {image: name, "number": number, caption: text}
        for number, name in enumerate(images())
        for text in captions_of(name)
    ]


def as_csv(table, delimiter=",", bom=False):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(table[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode("utf-8-sig" if bom else "utf-8")


def as_lines(table):
    return b"".join(json.dumps(row).encode() + b"\n" for row in table)


def listed():
    return [{"file_name": name, "captions": captions_of(name)} for name in images()]


def structs():
    return [
        {"image": {"bytes": data, "path": name}, "caption": captions_of(name)}
        for name, data in images().items()
    ]


def folder(root):
    return [str(write(root / "photos", pairs()))]


def imagefolder_jsonl(root):
    return [str(write(root / "set", {**images(), "metadata.jsonl": as_lines(listed())}))]


def imagefolder_csv(root):
    table = as_csv(rows("file_name", "text"))
    return [str(write(root / "set", {**images(), "metadata.csv": table}))]


def csv_file(root):
    write(root, {f"images/{name}": data for name, data in images().items()})
    table = [{**row, "image": f"images/{row['image']}"} for row in rows()]
    write(root, {"captions.csv": as_csv(table, bom=True)})
    return [str(root / "captions.csv")]


def csv_in_folder(root):
    files = {f"Images/{name}": data for name, data in images().items()}
    return [str(write(root / "kaggle", {**files, "captions.txt": as_csv(rows())}))]


def csv_gz_with_windows_paths(root):
    table = [{**row, "image": f"C:\\data\\img\\{row['image']}"} for row in rows()]
    files = {f"img/{name}": data for name, data in images().items()}
    return [str(write(root / "set", {**files, "captions.csv.gz": gzip.compress(as_csv(table))}))]


def tar_of_a_table(root):
    files = {f"set/img/{name}": data for name, data in images().items()}
    return [str(tar_of(root / "set.tar.xz", {**files, "set/all.csv": as_csv(rows())}, "w:xz"))]


def csv_of_lists(root):
    table = [{"img": name, "raw": json.dumps(captions_of(name))} for name in images()]
    write(root / "photos", images())
    write(root, {"lists.csv": as_csv(table, ";")})
    return [str(root / "lists.csv"), "--images", str(root / "photos")]


def csv_of_arrays(root):
    """As pandas writes a column of NumPy's arrays: no commas."""
    table = [
        {"img": name, "captions": str(np.array(captions_of(name), object))} for name in images()
    ]
    return [str(write(root / "set", {**images(), "arrays.csv": as_csv(table)}))]


def tsv_named(root):
    write(root / "photos", images())
    write(root, {"table.tsv": as_csv(rows("which", "what"), "\t")})
    named = ["--image", "which", "--caption", "what"]
    return [str(root / "table.tsv"), "--images", str(root / "photos"), *named]


def tokens(root):
    lines = [f"{row['image']}#0\t{row['caption']}" for row in rows()]
    write(root / "photos", images())
    write(root, {"all.token": "\n".join(lines).encode()})
    return [str(root / "all.token"), "--images", str(root / "photos")]


def jsonl(root):
    write(root, {**images(), "table.jsonl": as_lines(listed())})
    return [str(root / "table.jsonl")]


def json_rows(root):
    table = [{"image": name, "caption": captions_of(name)} for name in images()]
    write(root, {**images(), "table.json": json.dumps(table).encode()})
    return [str(root / "table.json")]


def json_mapping(root):
    table = {name: captions_of(name) for name in images()}
    write(root, {**images(), "table.json": json.dumps(table).encode()})
    return [str(root / "table.json")]


def json_under_a_key(root):
    content = json.dumps({"info": {"version": 1}, "annotations": rows()}).encode()
    return [str(write(root / "set", {**images(), "captions.json": content}))]


def json_by_column(root):
    """As pandas writes it where it is not told otherwise."""
    columns = {name: {str(n): row[name] for n, row in enumerate(rows())} for name in rows()[0]}
    return [str(write(root / "set", {**images(), "table.json": json.dumps(columns).encode()}))]


def as_parquet(path, table, **options):
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(table), path, **options)
    return path


def parquet_paths(root):
    write(root / "photos", images())
    table = as_parquet(root / "table.parquet", rows("path", "text"))
    return [str(table), "--images", str(root / "photos")]


def parquet_bytes(root):
    """One row a caption, the bytes again and again."""
    data = images()
    table = [{"jpg": data[row["image"]], "txt": row["caption"]} for row in rows()]
    return [str(as_parquet(root / "set" / "table.parquet", table).parent)]


def parquet_structs(root):
    as_parquet(root / "set/data/train-00000-of-00001.parquet", structs(), row_group_size=5)
    return [str(root / "set")]


def saved(root):
    datasets_of(structs()).save_to_disk(root / "saved")
    return [str(root / "saved")]


def datasets_of(table):
    import datasets

    made = datasets.Dataset.from_list(table)
    return made.cast_column("image", datasets.Image(decode=False))


def streamed(root):
    parquet_structs(root)
    return [f"hub:{root / 'set'}"]


def img2dataset_tars(root):
    files = sorted(pairs(json_too=True).items())
    (root / "out").mkdir()
    for number in range(2):
        half = len(files) // 2
        tar_of(root / "out" / f"0000{number}.tar", dict(files[number * half :][:half]))
        stats = json.dumps({"count": half // 3, "successes": half // 3}).encode()
        write(root / "out", {f"0000{number}_stats.json": stats})
    return [str(root / "out")]


def img2dataset_files(root):
    files = {f"00000/{name}": data for name, data in pairs(json_too=True).items()}
    return [str(write(root / "out", {**files, "00000_stats.json": b"{}"}))]


def tar_gz(root):
    files = {f"./photos/{name}": data for name, data in pairs().items()}
    return [str(tar_of(root / "photos.tar.gz", files, "w:gz"))]


def zip_of_imagefolder(root):
    files = {**images(), "metadata.jsonl": as_lines(listed()), "__MACOSX/._photo 00.jpg": b"x"}
    return [str(as_zip(root / "set.zip", {f"set/{name}": data for name, data in files.items()}))]


def unsorted_tar(root):
    files = sorted(pairs().items(), key=lambda item: item[0].endswith(".txt"))
    return [str(tar_of(root / "unsorted.tar", dict(files)))]


def karpathy(root):
    entries = [
        {
            "filename": name,
            "split": "val" if place == 3 else "restval",
            "sentences": [{"raw": text} for text in captions_of(name)],
        }
        for place, name in enumerate(images())
    ]
    write(root / "photos", images())
    content = json.dumps({"dataset": "coco", "images": entries}).encode()
    write(root, {"dataset_own.json": content})
    return [str(root / "dataset_own.json"), "--images", str(root / "photos")]


FORMS = (
    *(folder, imagefolder_jsonl, imagefolder_csv, csv_file, csv_in_folder, tar_of_a_table),
    *(csv_gz_with_windows_paths, csv_of_lists, csv_of_arrays, tsv_named, tokens, jsonl, json_rows),
    *(json_mapping, json_under_a_key, json_by_column, parquet_paths, parquet_bytes),
    *(parquet_structs, saved, streamed, img2dataset_tars, img2dataset_files, tar_gz),
    *(zip_of_imagefolder, unsorted_tar, karpathy),
)
