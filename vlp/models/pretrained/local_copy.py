"""Paths of model folders: local folders, and local copies of folders on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp.io import check_hub, may_be_on_hub, similar_path

CONFIG = "config.json"
RESULTS = "evaluation"

# Names of the model folders in a run folder.
_RUN_MODELS = ("model", "best")
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def is_local(folder_or_name: str | Path) -> bool:
    """Return whether a name means a local folder, not a model on the hub."""
    folder = Path(folder_or_name)
    if not folder.is_dir():
        return False
    # A folder OWNER/NAME that is empty or has results only does not hide a hub model of that name.
    # Any other folder does, even without `config.json`: a wrong path is an error, not a download.
    return not _may_be_on_hub(folder_or_name) or any(
        path.name != RESULTS for path in folder.iterdir()
    )


def results_folder(folder_or_name: str | Path) -> Path:
    """Return the folder for evaluation results of a model.

    `RUN/evaluation/model` and `RUN/evaluation/best` for a run, `FOLDER/evaluation` for other
    folders, `evaluation/OWNER--NAME` for a hub name.
    """
    folder = Path(folder_or_name)
    if not is_local(folder_or_name):
        return Path(RESULTS) / str(folder_or_name).replace("/", "--")
    resolved = folder.resolve()
    if resolved.name not in _RUN_MODELS or not (resolved.parent / "config.yaml").is_file():
        return folder / RESULTS
    # Training replaces the model folders of a run, so results lie beside them. A relative path
    # stays relative unless it leads through links.
    run = folder.parent if folder.absolute() == resolved else resolved.parent
    return run / RESULTS / resolved.name


def local_folder(folder_or_name: str | Path, revision: str | None = None, **options: Any) -> Path:
    """Return a local folder (see `is_local`), or download a hub name and return its copy."""
    folder = Path(folder_or_name)
    if is_local(folder):
        inner = folder / "model"
        if (inner / CONFIG).is_file() and not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is a run folder; its model is in {inner}")
        return folder
    name = str(folder_or_name)
    if not _may_be_on_hub(name):
        raise FileNotFoundError(f"there is no model folder {name}{similar_path(name)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    check_hub()
    try:
        return Path(snapshot_download(name, revision=revision, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"{name} is neither a model folder nor found on the hub{at}{similar_path(name)}"
        ) from error


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Pop private options and hub options from `options`; return the hub options."""
    hub = {name: options.pop(name) for name in _HUB_OPTIONS if name in options}
    # transformers' Auto classes add private options.
    for name in [name for name in options if name.startswith("_")]:
        del options[name]
    return {name: value for name, value in hub.items() if value is not None}


def _may_be_on_hub(folder_or_name: str | Path) -> bool:
    """Return whether a name has the form OWNER/NAME of a model on the hub."""
    name = str(folder_or_name)
    return "/" in name and may_be_on_hub(name)
