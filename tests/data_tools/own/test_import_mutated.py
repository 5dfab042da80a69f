"""Mutated files of every form end in shards or in one line; VLP_FUZZ_IMPORT says how many."""

import os

import numpy as np
import own_forms
import pytest
from mutations import mutated

from data_tools.__main__ import main

TRIES = int(os.environ.get("VLP_FUZZ_IMPORT", "6"))
FORMS = [
    own_forms.folder,
    own_forms.imagefolder_jsonl,
    own_forms.csv_file,
    own_forms.json_list,
    own_forms.parquet_structs,
    own_forms.saved,
    own_forms.tar_gz,
    own_forms.zip_of_imagefolder,
    own_forms.unsorted_tar,
    own_forms.karpathy,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_mutated_files(form, tmp_path, capsys):
    place = form(tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    tables = [path for path in files if path.suffix not in (".jpg", ".png", ".webp")] or files
    for number in range(TRIES):
        rng = np.random.default_rng((number, len(form.__name__)))
        path = tables[int(rng.integers(len(tables)))]
        before = path.read_bytes()
        if not before:
            continue
        other = files[int(rng.integers(len(files)))].read_bytes()
        path.write_bytes(mutated(rng, path.name, before, other))
        out = tmp_path / f"out-{number}"
        code = main(["import", *place, "--out", str(out), "--processes", "1"])
        said = capsys.readouterr().err.strip().splitlines()
        assert code in (0, 1, 2)
        assert code != 2 or said[-1].startswith("data_tools import: ")
        path.write_bytes(before)
