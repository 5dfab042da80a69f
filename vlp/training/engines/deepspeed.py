"""DeepSpeed ZeRO 0-3 as an `Engine`; the YAML file configures training, a JSON file ZeRO."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlp import distributed
from vlp.config import ConfigError
from vlp.data.stream.batch import RankBatch
from vlp.distributed import host_copy
from vlp.io import parse_json
from vlp.tasks.task import StepOutput
from vlp.training.config import TrainingConfig
from vlp.training.engines.engine import (
    LOSS_SCALE,
    OPTIMISER,
    WEIGHTS,
    LossScale,
    Update,
    read_tensors,
    saved_buffers,
)
from vlp.training.optimiser import MOMENTS, STEP, build_adamw, create_moments, set_learning_rate


def deepspeed_file(name: str) -> Path:
    """Return the JSON file of `training.engine`: a path, or a name in configs/deepspeed."""
    if name.endswith(".json") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"training.engine: there is no file {path}")
        return path
    folder = Path(str(resources.files("configs"))) / "deepspeed"
    path = folder / f"{name}.json"
    if not path.is_file():
        names = ["ddp", "ddp-bf16", "deepspeed", *sorted(f.stem for f in folder.glob("*.json"))]
        raise ConfigError(f"training.engine: unknown name {name!r}; known are {', '.join(names)}")
    return path


def deepspeed_config(config: TrainingConfig, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings: batch and clipping of the YAML file, ZeRO of the JSON file."""
    assert config.deepspeed is not None
    path = deepspeed_file(config.deepspeed)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    for key in values:
        if not key.startswith("zero_"):
            raise ConfigError(
                f"{path}: '{key}' is not about ZeRO; batch, optimiser and precision are keys of "
                "`training` in the YAML file"
            )
    zero = values.get("zero_optimization", {})
    if zero.get("stage") not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3")
    for key, value in zero.items():
        if key.startswith("offload_") and value:
            raise ConfigError(f"{path}: {key} is not supported; the state stays on the device")
    config.require_equal_shares(world_size)
    clip = config.optimiser.clip
    # No precision: parameters and optimiser state stay float32, and the task autocasts itself.
    return values | {
        "train_batch_size": config.batch * config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": config.batch // world_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        # At stage 0 the engine clips, by DeepSpeed's formula for the other stages.
        "gradient_clipping": 0.0 if clip is None or zero["stage"] == 0 else clip,
        "steps_per_print": None,
    }


def shards_parameters(training: TrainingConfig) -> bool:
    """Return whether each rank holds only a part of the parameters (ZeRO-3)."""
    if training.deepspeed is None:
        return False
    settings = deepspeed_config(training, distributed.world_size())
    return bool(settings["zero_optimization"]["stage"] == 3)


@contextmanager
def _broadcast_scalars(task: nn.Module, stage: int) -> Iterator[None]:
    """Broadcast scalar parameters (temperatures) and hide them from the `initialize` within."""
    # DeepSpeed 0.19 broadcasts parameters as bytes, and PyTorch cannot view a scalar as bytes.
    # Stages 0 to 2 skip parameters that are marked as differing between ranks; stage 3 has no such
    # mark and gets vectors of one element.
    scalars: list[Any] = [parameter for parameter in task.parameters() if parameter.ndim == 0]
    for parameter in scalars:
        parameter.data.copy_(distributed.broadcast_tensor(parameter.detach().cpu()))
        if stage == 3:
            parameter.data = parameter.data.view(1)
        else:
            parameter.ds_optim_param = True
    yield
    for parameter in scalars:
        if stage < 3:
            del parameter.ds_optim_param
            continue
        parameter.ds_shape = torch.Size(())
        if parameter.numel() == 1:  # small parameters stay gathered
            parameter.data = parameter.data.view(())


class DeepSpeedEngine:
    """One task on DeepSpeed; the process group must be up (`distributed.start`)."""

    def __init__(self, task: nn.Module, config: TrainingConfig) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        self._utils: Any = deepspeed.utils
        self._gather: Any = deepspeed.zero.GatheredParameters
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        settings = deepspeed_config(config, self.world_size)
        self.stage: int = settings["zero_optimization"]["stage"]
        self.device = torch.device(get_accelerator().current_device_name())
        self.module = task.to(self.device)
        self._clip = config.optimiser.clip
        self._adamw = build_adamw(task, config.optimiser)
        # Names and full shapes, before stage 3 empties the parameters.
        self._trainable = {n: p for n, p in task.named_parameters() if p.requires_grad}
        self._frozen = {n: p for n, p in task.named_parameters() if not p.requires_grad}
        with _broadcast_scalars(task, self.stage):
            self._deepspeed, *_ = deepspeed.initialize(
                model=task, optimizer=self._adamw, config=settings, dist_init_required=False
            )
        self._zero: Any = self._deepspeed.optimizer  # ZeRO's wrapper of `_adamw` from stage 1 on
        self._scale = LossScale(config.precision)
        self._create_moments()

    def forward(self, batch: RankBatch, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""
        return self._deepspeed(batch, step)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, averaged over ranks and micro-steps."""
        if self.stage == 0:
            loss = loss * self._scale.value
        else:
            self._zero.loss_scale = self._scale.value
        self._deepspeed.backward(loss)
        if not self._deepspeed.is_gradient_accumulation_boundary():
            self._deepspeed.step()  # only counts the micro-step

    def step(self, learning_rate: float) -> Update:
        """Clip gradients, apply AdamW unless a gradient is not finite, and clear the gradients."""
        set_learning_rate(self._adamw, learning_rate)
        if self.stage == 0:
            norm = self._clip_gradients()
            self._deepspeed.step()
            applied = norm != float("inf")
        else:
            self._deepspeed.step()
            applied = self._deepspeed.was_step_applied()
            norm = float(self._deepspeed.get_global_grad_norm()) if applied else float("inf")
        return Update(applied, norm, self._scale.update(applied))

    def parameters(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""
        parameters = self._frozen | self._trainable
        if self.stage < 3:
            return {name: parameter.detach() for name, parameter in parameters.items()}
        with self._gather(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""
        state = {}
        for name, parameter in (self._frozen | self._trainable).items():
            value = self._read_parameter(parameter)  # collective
            if self.rank == 0:
                state[name] = host_copy(value)
        return state | distributed.rank_0_copies(saved_buffers(self.module))

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name on rank 0's CPU; empty elsewhere."""
        # DeepSpeed's own checkpoints require the same number of ranks. Full-size float32 tensors
        # fit any number of ranks and any ZeRO stage, bit for bit.
        weights = self.state_dict()
        moments: dict[str, Tensor] = {}
        for moment in MOMENTS:
            for name, parameter in self._trainable.items():
                value = self._read_moment(parameter, moment)  # collective
                if self.rank == 0:
                    moments[f"{moment}.{name}"] = host_copy(value)
        if self.rank == 0:
            applied_steps = next(iter(self._adamw.state.values()))[STEP]
            moments |= {STEP: applied_steps.detach().cpu().clone(), **self._scale.state()}
        return {WEIGHTS: weights, OPTIMISER: moments}

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        """Restore the files of `snapshot` on any ranks and stage; KeyError for another model."""
        parameters, buffers = self._frozen | self._trainable, saved_buffers(self.module)
        for name, value in read_tensors(folder, WEIGHTS, parameters.keys() | buffers.keys()):
            if name in buffers:
                buffers[name].copy_(value)
            else:
                self._write_parameter(parameters[name], value.to(self.device))
        moments = [f"{moment}.{name}" for moment in MOMENTS for name in self._trainable]
        for name, value in read_tensors(folder, OPTIMISER, [*moments, STEP]):
            if name == LOSS_SCALE:
                self._scale.load(value)
            elif name == STEP:
                for state in self._adamw.state.values():
                    state[STEP].copy_(value)
            else:
                moment, _, parameter = name.partition(".")
                self._write_moment(self._trainable[parameter], moment, value.to(self.device))

    # The following methods alone depend on where a stage keeps its partitions.

    def _create_moments(self) -> None:
        """Create zero moments, so that a checkpoint can be loaded before the first step."""
        create_moments(self._adamw, self._flat_parameters())
        if self.stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_parameters(self) -> list[Tensor]:
        """Return the tensors that AdamW updates: parameters, or flat float32 shards of them."""
        if self.stage == 0:
            return list(self._trainable.values())
        if self.stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups)

    def _read_parameter(self, parameter: nn.Parameter) -> Tensor:
        if self.stage < 3:
            return parameter.detach()
        with self._gather([parameter]):
            return parameter.detach().clone()

    def _read_moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        if self.stage == 0:
            return self._adamw.state[parameter][moment]
        return self._utils.safe_get_full_optimizer_state(parameter, moment)

    def _write_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self.stage < 3:
            parameter.data.copy_(value)
            if self.stage > 0 and parameter.requires_grad:
                self._utils.safe_set_full_fp32_param(parameter, value)
            return
        zero_parameter: Any = parameter
        zero_parameter.ds_tensor.data.copy_(self._partition(parameter, value))
        if parameter.shape == value.shape:  # a small parameter that stays gathered
            parameter.data.copy_(value)
        if parameter.requires_grad:
            self._utils.safe_set_local_fp32_param(parameter, self._partition(parameter, value))

    def _write_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if self.stage == 0:
            self._adamw.state[parameter][moment].copy_(value)
        elif self.stage == 3:
            part = self._partition(parameter, value)
            self._utils.safe_set_local_optimizer_state(parameter, part, moment)
        else:
            self._utils.safe_set_full_optimizer_state(parameter, value, moment)

    def _partition(self, parameter: Any, value: Tensor) -> Tensor:
        """Return this rank's slice of a flattened tensor at stage 3; zeros pad the last slices."""
        length = parameter.ds_tensor.numel()
        flat = value.new_zeros(length * self.world_size)
        flat[: value.numel()] = value.flatten()
        return flat[length * self.rank : length * (self.rank + 1)]

    def _clip_gradients(self) -> float:
        """Unscale and clip gradients at stage 0; return their norm, inf if it is not finite."""
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        if self._scale.enabled:
            torch._foreach_mul_(gradients, 1 / self._scale.value)
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        value = float(norm)
        if not torch.isfinite(norm):
            for parameter in self._trainable.values():
                parameter.grad = None  # AdamW skips parameters without a gradient
            return float("inf")
        if self._clip is not None and (value + 1e-6) / self._clip > 1.0:
            scale = 1.0 / ((norm + 1e-6) / self._clip)
            for gradient in gradients:
                gradient.mul_(scale)
        return value
