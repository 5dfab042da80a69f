import pytest
import ranks
import yaml
from launch_lab import COMMAND, FAILING, Lab
from shard_server import serve

VLP = ranks.ROOT / "launch" / "__main__.py"
USER, WORD, TOKEN = "planteduser", "planted/word", "planted-token"
NAMED = "${STORE_USER}:${STORE_WORD}@", "token=${STORE_TOKEN}"


@pytest.fixture
def store(lab, monkeypatch):
    for name, value in (("USER", USER), ("WORD", WORD), ("TOKEN", TOKEN)):
        monkeypatch.setenv(f"STORE_{name}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{TOKEN}-of-aws")
    with serve(lab.folder / "scenes" / "train") as message:
        message.wants = f"{USER}:{WORD}", f"token={TOKEN}"
        yield message


def configured(lab, store, folder, user, query):
    values = yaml.safe_load(lab.config.read_text())
    url = store.url.replace("://", f"://{user}") + f"?{query}"
    values["data"] |= {
        "sources": [{"path": url}],
        "cache": {"folder": str(folder / "out" / "cache"), "limit": "1GB"},
    }
    values["training"] |= {"steps": 4, "checkpoint_every": 2}
    values["output"] = str(folder / "out" / "run")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    return ["--config", str(config)]


def require_none(folder, *said):
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert {"config.yaml", "state.json", "report.json", "README.md", "report.html"} <= {
        path.name for path in files
    }
    for secret in (USER, WORD, WORD.replace("/", "%2F"), TOKEN):
        for path in files:
            assert secret.encode() not in path.read_bytes(), (secret, path)
            assert secret not in str(path)
        for text in said:
            assert secret not in text


def said(*command):
    ((_, text),) = ranks.finish(ranks.start([str(part) for part in command], 1))
    return text


@pytest.mark.nightly
def test_secrets_reach_no_output(lab, store, tmp_path):
    out = tmp_path / "out"
    literal = f"{USER}:planted%2Fword@", f"token={TOKEN}"
    arguments = configured(lab, store, tmp_path, *literal)
    secret = yaml.safe_load((tmp_path / "config.yaml").read_text())["data"]["sources"][0]["path"]

    texts = [said(FAILING, "raise", "0", "2", *arguments)]
    assert "the disaster of this test" in texts[-1]
    texts.append(said(COMMAND, *arguments, "--resume"))
    assert Lab(out, tmp_path).report("run")["ended"] == "finished"
    assert "changed setting" not in texts[-1]

    texts.append(said(COMMAND, "--config", str(out / "run" / "config.yaml"), "--resume"))
    assert "stands for a secret that was left out" in texts[-1]
    texts.append(said(COMMAND, *arguments, f"training.batch={secret}"))
    assert "***@" in texts[-1]
    store.wants = "other", "other"
    texts.append(said(COMMAND, *arguments, f"output={out / 'refused'}"))
    assert "401" in texts[-1]

    model = out / "run" / "model"
    shards = lab.folder / "scenes" / "train"
    texts.append(
        said(VLP, "evaluate", "retrieval", "--model", model, "--shards", shards, "--limit", 8)
    )
    texts.append(said(VLP, "evaluate", "retrieval", "--model", model, "--shards", secret))
    texts.append(said(VLP, "card", "--model", model))
    texts.append(said(VLP, "report", out / "run", "--out", out / "report.html"))
    assert "***@127.0.0.1" in (out / "report.html").read_text()
    assert "***@127.0.0.1" in (model / "README.md").read_text()
    require_none(tmp_path, *texts)


def test_secrets_of_the_environment_are_read_again_from_a_run_s_own_configuration(
    lab, store, tmp_path
):
    arguments = configured(lab, store, tmp_path, *NAMED)
    ranks.run([COMMAND, *arguments, "training.steps=2"])
    own = ["--config", str(tmp_path / "out" / "run" / "config.yaml"), "--resume"]
    ranks.run([COMMAND, *own, "training.steps=4"])
    assert "${STORE_TOKEN}" in (tmp_path / "out" / "run" / "config.yaml").read_text()
