"""Run commands of documents one after the other in one process, in a folder of small data each.

usage: run_commands.py FOLDER < {"PAGE": [["vlp", ...], ...]}   (JSON; a line of JSON per command comes out)
"""  # noqa: E501

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

from made_shards import jpeg

from launch.cli.main import main
from vlp.training.engines.environment import free_port

# All that commands import, once for all of them.
MODULES = (
    *("launch.align", "launch.finetune", "launch.pretrain", "vlp.training.loop"),
    *("vlp.training.engines.deepspeed", "vlp.training.engines.ddp"),
    *("vlp.data.pretrain", "vlp.tasks.pretraining", "vlp.models.folder"),
)
COUNT = 40
OWN = 300  # images of one's own, as the page on them promises to work with
ASK = """
import sys, time
from gradio_client import Client, handle_file

for _ in range(300):
    try:
        page = Client(sys.argv[1], verbose=False, analytics_enabled=False)
        break
    except Exception as error:
        last = error
        time.sleep(0.2)
else:
    raise last
offered = page.view_api(return_format="dict", print_info=False)["named_endpoints"]
if "/match" in offered:
    print("match", page.predict(handle_file("photo.jpg"), "number 3 runs", api_name="/match"))
if "/search" in offered:
    print("search", len(page.predict("number 3 runs", api_name="/search")))
"""
TOWER = '{"name":"vit_small_patch14_dinov2","embed_dim":24,"depth":2,"num_heads":2}'

TINY = "training.steps=2 training.optimiser.warmup_steps=1"
# What makes a command small: by a part of it, what is added.
SMALLER = {
    "from_towers.yaml": "objectives.contrastive.token.group=8",
    "configs/pretrain/from_towers": f"model.image.weights=null model.image.architecture={TOWER}"
    " model.image.image_size=56 model.image.width=24 data.vocabulary=words"
    " model.image.pooled_layers=2 model.text.weights=null"
    " model.text.vocab_size=200 model.text.layers=1 model.text.heads=2 model.text.intermediate=64"
    " model.text.width=24 model.text.trainable=all model.cross.weights=null model.cross.layers=1"
    " model.cross.heads=2 training.batch=8 data.workers=0",
    "flickr8k_small.yaml": "model.image.image_size=32 model.image.layers=1 model.text.layers=1"
    " model.cross.layers=1 training.batch=16 objectives.itm.group=8 data.workers=0",
    "scenes_tiny.yaml": "model.image.layers=1 model.cross.layers=1 training.batch=16"
    " objectives.itm.group=8 data.workers=0",
    "scenes_vqa.yaml": "training.batch=8 task.data.workers=0",
    "vlp train": TINY,
    "vlp finetune": TINY,
}


def small_data():
    """Write what the pages take as given, into the current folder."""
    for folder in ("photos", "images"):
        Path(folder).mkdir()
    table, entries, urls = ["file,text"], [], []
    with contextlib.ExitStack() as stack:
        Path("FOLDER").mkdir()
        archive = stack.enter_context(tarfile.open("FOLDER/00000.tar", "w"))
        for number in range(OWN):
            data, name = jpeg(number), f"{number:03}.jpg"
            said = [f"a dog, number {number}", f"number {number} runs"]
            Path("photos", name).write_bytes(data)
            Path("photos", f"{number:03}.txt").write_text("\n".join(said))
            if number >= COUNT:
                continue
            table.append(f'{name},"{said[0]}"')
            Path("images", name).write_bytes(data)
            split = ("train", "val", "test")[number % 3]
            sentences = [{"raw": text} for text in said]
            entries.append({"filename": name, "split": split, "sentences": sentences})
            url = f"http://x.org/{name}"
            urls.append(f"{said[0]}\t{url}")
            about = json.dumps({"url": url}).encode()
            for suffix, content in (("jpg", data), ("json", about)):
                info = tarfile.TarInfo(f"{number:09}.{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    Path("captions.csv").write_text("\n".join(table))
    Path("dataset_flickr8k.json").write_text(json.dumps({"dataset": "f8k", "images": entries}))
    Path("Train_GCC-training.tsv").write_text("\n".join(urls))
    Path("photo.jpg").write_bytes(jpeg(0))


def demo_model():
    made = "runs/demo/shards"
    words = f"vlp data vocabulary --shards {made}/train --size 200"
    train = "vlp train --config configs/pretrain/scenes_tiny.yaml output=runs/demo/run"
    require(f"vlp data scenes --out {made} --train 64 --val 16 --image-size 64".split())
    require(f"{words} --out words".split())
    require([*train.split(), f"data.sources=[{{path: {made}/train}}]", "data.vocabulary=words"])


def require(command):
    code, said = in_child(command)
    assert code == 0, f"{command}: {said}"


def in_child(command):
    """Run a command in a process of its own, which has all modules already; its code and output."""
    with tempfile.TemporaryFile("w+b") as said:
        return ended(start([*command, *added(" ".join(command))], said), said)


def start(command, said):
    child = os.fork()
    if child == 0:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        code = 1
        try:
            code = main(command[1:])
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return child


def ended(child, said):
    status = os.waitpid(child, 0)[1]
    said.seek(0)
    return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


def asked(command):
    """Serve a page, ask it as a program would, and end it with Ctrl-C; its code and its answers."""
    port = str(free_port())
    with tempfile.TemporaryFile("w+b") as said:
        child = start([*command, "--port", port], said)
        ask = [sys.executable, "-c", ASK, f"http://127.0.0.1:{port}"]
        answers = subprocess.run(ask, capture_output=True, text=True, check=False)
        os.kill(child, signal.SIGINT)
        code, shown = ended(child, said)
    return code or answers.returncode, answers.stdout + answers.stderr[-2000:] + shown


def added(command):
    return [
        more for part, options in SMALLER.items() if part in command for more in options.split()
    ]


def run(folder, pages):
    for module in MODULES:
        importlib.import_module(module)
    made = folder / "made"
    made.mkdir()
    os.chdir(made)
    small_data()
    if any("runs/demo" in word for found in pages.values() for one in found for word in one):
        demo_model()
    for number, (page, commands) in enumerate(pages.items()):
        place = folder / str(number)
        place.mkdir()
        for path in made.iterdir():
            (place / path.name).symlink_to(path)
        # New runs are the page's own.
        (place / "runs").unlink(missing_ok=True)
        (place / "runs").mkdir()
        if (made / "runs").exists() and not any("scenes" in command for command in commands):
            (place / "runs" / "demo").symlink_to(made / "runs" / "demo")
        os.chdir(place)
        for command in commands:
            began = time.monotonic()
            code, said = (asked if command[1] == "app" else in_child)(command)
            seconds = round(time.monotonic() - began, 1)
            found = {"page": page, "command": command, "code": code, "seconds": seconds}
            print(json.dumps(found | {"said": said[-4000:]}), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.load(sys.stdin))
