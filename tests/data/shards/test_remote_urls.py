"""Values of the environment in URLs of remote folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shard_server import serve

from vlp.data.shards.remote import RemoteFolder, connected

WORD = "a/b@c&d=e %2F"


def test_a_path_of_the_environment_is_inserted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b" / "c%d"
    folder.mkdir(parents=True)
    digest = "ab" * 32
    (folder / "manifest.json").write_text(
        f'{{"shards": [{{"name": "0.tar", "sha256": "{digest}"}}]}}'
    )
    monkeypatch.setenv("D", str(folder))
    names = np.array([b"0.tar"])
    assert RemoteFolder("file://${D}").digests(names) == {"0.tar": digest}
    assert connected("memory://${D}/x")[1] == f"{folder}/x"
    monkeypatch.setenv("D", "shards")
    with serve(folder) as server:
        url = server.url.replace("shards", "${D}")
        assert RemoteFolder(url).digests(names) == {"0.tar": digest}


def test_secrets_of_the_environment_may_hold_any_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORD", WORD)
    monkeypatch.setenv("D", "a/b")
    files, path = connected("https://me:${WORD}@host/${D}/x?token=${WORD}")
    assert path == "https://host/a/b/x"
    assert files.kwargs["params"] == [("token", WORD)]
    assert files.client_kwargs["auth"].password == WORD
