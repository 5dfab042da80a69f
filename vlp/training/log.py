"""Logs of a run: JSON lines, TensorBoard, Weights & Biases, MLflow, and a progress bar."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from vlp.config import ConfigError, parse_yaml
from vlp.io import open_nofollow, redact, write_text
from vlp.training.run_folder import RunFolder, flatten, read_log, tracker_id

TrackerName = Literal["tensorboard", "wandb", "mlflow"]

# Group of runs at Weights & Biases and MLflow; a run has its folder's name there.
PROJECT = "vlp"

_MLFLOW_BATCH = 1000  # metrics of one request, by MLflow's limit


class TensorBoardTracker:
    """Event files in the run's folder."""

    def __init__(self, folder: RunFolder, step: int, validated_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, has_failed: bool) -> None:
        """Write the remaining metrics."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, offline with WANDB_MODE; a resumed run continues it."""

    def __init__(self, folder: RunFolder, step: int, validated_step: int) -> None:
        import wandb

        records = read_log(folder.log)[0]
        earlier = [record for record in records if _is_earlier(record, step, validated_step)]
        # A run cannot drop metrics that will be logged again: a new run gets the earlier ones.
        renew = len(earlier) < len(records)
        self._run = wandb.init(
            project=PROJECT,
            name=_name(folder),
            id=tracker_id(folder, "wandb", lambda: secrets.token_hex(4), renew),
            resume="allow",
            dir=str(folder.path),
            config=_settings(folder),
            # `run.json` has the same facts with redacted URLs.
            settings=wandb.Settings(
                console="off", x_disable_meta=True, save_code=False, disable_git=True
            ),
        )
        # Plotted over `step`, as wandb's own step counts calls.
        self._run.define_metric("*", step_metric="step")
        for record in earlier if renew else ():
            self.log(_numbers(record), record["step"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store metrics of a step."""
        self._run.log({**metrics, "step": step})

    def close(self, has_failed: bool) -> None:
        """Upload the remaining metrics."""
        self._run.finish(exit_code=int(has_failed))


class MlflowTracker:
    """A run of MLflow; without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""

    def __init__(self, folder: RunFolder, step: int, validated_step: int) -> None:
        self._file = None if _mlflow_server() else folder.path.resolve() / "mlflow.db"
        self._client = _mlflow(_mlflow_server() or f"sqlite:///{self._file}")

        def create() -> str:
            experiment = self._client.get_experiment_by_name(PROJECT)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
            )
            run = self._client.create_run(experiment_id, run_name=_name(folder))
            return str(run.info.run_id)

        self._run_id = tracker_id(folder, "mlflow", create)
        self._drop_later_metrics(folder, step, validated_step, create)
        self._client.update_run(self._run_id, status="RUNNING")
        for name, value in _flat_tags(_settings(folder)):
            self._client.set_tag(self._run_id, name, value)

    def _drop_later_metrics(
        self, folder: RunFolder, step: int, validated_step: int, create: Callable[[], str]
    ) -> None:
        """If the run has metrics that will be logged again, replace it by one without them."""
        # MLflow cannot delete a metric.
        previous = self._run_id
        metrics = [
            metric
            for name in self._client.get_run(previous).data.metrics
            for metric in self._client.get_metric_history(previous, name)
        ]
        earlier = [
            metric
            for metric in metrics
            if _is_earlier({"step": metric.step, metric.key: metric.value}, step, validated_step)
        ]
        if len(earlier) == len(metrics):
            return
        self._run_id = tracker_id(folder, "mlflow", create, renew=True)
        for start in range(0, len(earlier), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=earlier[start : start + _MLFLOW_BATCH])
        self._client.delete_run(previous)
        # A deleted run's rows would stay in the file.
        if self._file is not None:
            with closing(sqlite3.connect(self._file)) as database, database:
                database.execute("delete from metrics where run_uuid = ?", (previous,))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                Metric(_metric_name(name), value, now, step) for name, value in metrics.items()
            ],
        )

    def close(self, has_failed: bool) -> None:
        """Mark the run as ended or failed."""
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")


Tracker = TensorBoardTracker | WandbTracker | MlflowTracker
_TRACKERS: dict[TrackerName, Callable[[RunFolder, int, int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Require that the packages of trackers are installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # A folder of that name is found, too, but has no origin.
        if spec is None or spec.origin is None:
            raise ValueError(f"{name} is not installed: pip install 'vlp[track]'")


def require_access(names: Sequence[TrackerName]) -> None:
    """Require that trackers can be reached, before a run writes anything."""
    for name in names:
        with _config_errors(name):
            if name == "wandb":
                import wandb

                if wandb.setup().settings.mode == "online":
                    wandb.login(verify=True)
            elif name == "mlflow" and (server := _mlflow_server()):
                _mlflow(server).search_experiments(max_results=1)


def open_trackers(
    names: Sequence[TrackerName], folder: RunFolder, step: int, validated_step: int = 0
) -> dict[TrackerName, Tracker]:
    """Open a run's trackers by name, before `RunLog` rewrites the log; arguments as of `RunLog`."""
    trackers: dict[TrackerName, Tracker] = {}
    for name in names:
        with _config_errors(name):
            trackers[name] = _TRACKERS[name](folder, step, validated_step)
    return trackers


@contextmanager
def _config_errors(name: TrackerName) -> Iterator[None]:
    """Turn every error of this context into a ConfigError that names the tracker."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"training.trackers: {name} cannot be used ({message})") from error


def _mlflow_server() -> str | None:
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def _mlflow(uri: str) -> Any:
    from mlflow import MlflowClient

    # A lost server must not stop the training for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    return MlflowClient(uri)


def _name(folder: RunFolder) -> str:
    return folder.path.resolve().name


def _settings(folder: RunFolder) -> dict[str, Any]:
    """Return the values of the run's config.yaml, which has no secrets."""
    return dict(parse_yaml(folder.config.read_text(encoding="utf-8")))


def _flat_tags(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return dotted keys and values as texts that MLflow accepts, of at most 5000 characters."""
    if not isinstance(values, Mapping):
        return [(_metric_name(prefix.rstrip(".")), str(values)[:5000])]
    return [pair for key, value in values.items() for pair in _flat_tags(value, f"{prefix}{key}.")]


def _metric_name(name: str) -> str:
    """Replace characters that MLflow refuses in a name, such as the @ of R@1."""
    return "".join(
        character if character.isalnum() or character in "_-. /:" else "_" for character in name
    )


_VALIDATION = "validation/"


class _StandardError:
    """Standard error without BrokenPipeError: its reader (`| tee`) may end before the run."""

    def write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class RunLog:
    """Log of a run, written on rank 0; on other ranks every method does nothing.

    `last_record` is the last training record of an earlier start, on rank 0; else empty.

    Args:
        folder: the run's folder; None on other ranks.
        step: steps already done.
        trackers: trackers by name, which close with the log.
        validated_step: last validated step.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        step: int,
        total_steps: int,
        trackers: Mapping[TrackerName, Tracker] | None = None,
        validated_step: int = 0,
    ) -> None:
        self._folder, self._trackers = folder, dict(trackers or {})
        self.last_record: dict[str, Any] = {}
        if folder is None:
            return
        records = _drop_later(folder.log, step, validated_step)
        self.last_record = next((r for r in reversed(records) if "samples" in r), {})
        self._file = open(folder.log, "a", encoding="utf-8", opener=open_nofollow)  # noqa: SIM115
        # Redraw the bar rarely in a file or in CI output.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._stderr = _StandardError()
        self._bar = tqdm(
            total=total_steps, initial=step, unit="step", mininterval=interval, file=self._stderr
        )

    def advance(self) -> None:
        """Move the progress bar by one step."""
        if self._folder is not None:
            self._bar.update()

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a record: `step`, and numbers by name; nested names become `outer/inner`."""
        if self._folder is None:
            return
        flat = self._append(record)
        columns = {"loss": "loss/total", "samples/s": "samples_per_second", "lr": "learning_rate"}
        self._bar.set_postfix(
            {
                label: f"{flat[name]:.4g}"
                for label, name in columns.items()
                if flat.get(name) is not None
            },
            refresh=False,
        )

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log and print the metrics of a validation after a step."""
        if self._folder is None:
            return
        record = {f"{_VALIDATION}{name}": value for name, value in metrics.items()}
        self._append({"step": step, **record})
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.info(f"step {step}, validation: {text}")

    def _append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record to `log.jsonl` and trackers; return it flat, without `step`."""
        flat = flatten(record)
        self._file.write(json.dumps(flat) + "\n")
        self._file.flush()
        step = flat.pop("step")
        self._call_trackers(lambda tracker: tracker.log(_numbers(flat), step))
        return flat

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        """Call `call` for every tracker; drop a tracker that fails, with a message."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                # TensorBoard writes to the run's folder: if that fails, checkpoints fail, too.
                if name == "tensorboard":
                    raise
                del self._trackers[name]
                self.info(redact(f"{name} gets no more figures: {error}"))

    def info(self, message: str) -> None:
        """Print a line above the bar."""
        if self._folder is not None:
            self._bar.write(message, file=self._stderr)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._folder is not None:
            self._call_trackers(lambda tracker: tracker.close(kind is not None))
            self._bar.close()
            self._file.close()


def _drop_later(path: Path, step: int, validated_step: int) -> list[dict[str, Any]]:
    """Rewrite a log without records that will be logged again; return the others."""
    # After a kill the log has records of steps after the last checkpoint.
    if not path.exists():
        return []
    earlier = [r for r in read_log(path)[0] if _is_earlier(r, step, validated_step)]
    write_text(path, "".join(json.dumps(record) + "\n" for record in earlier))
    return earlier


def _is_earlier(record: Mapping[str, Any], step: int, validated_step: int) -> bool:
    """Return whether a run that resumes at `step` will not log the record again."""
    is_validation = any(name.startswith(_VALIDATION) for name in record)
    return bool(record["step"] <= (validated_step if is_validation else step))


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a flat record, without `step`."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    }
