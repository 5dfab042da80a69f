"""PyTorch's DistributedDataParallel behind the `Engine` protocol: whole copies on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from vlp.config import ConfigError
from vlp.data.stream.batch import Slots
from vlp.tasks.task import StepOutput
from vlp.training.engines.native import NativeEngine


class DdpEngine(NativeEngine):
    """One task with a whole copy on every rank; gradients travel while the backward pass runs.

    They travel once a step, with the last micro-step. One rank alone runs the task as it is.

    Raises:
        ConfigError: `static_graph` with several micro-steps, which PyTorch cannot do.
    """

    def _spread(self, task: nn.Module) -> Callable[[Slots, int], StepOutput]:
        if self.world_size == 1:
            return task
        config = self._config
        if config.static_graph and config.gradient_accumulation_steps > 1:
            raise ConfigError("static_graph needs gradient_accumulation_steps=1 on several ranks")
        wrapped = DistributedDataParallel(
            task,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            # Heads leave parts of a pretrained model unused (its projections, say), and every rank
            # keeps buffers by itself: the loop puts them back after a skipped step.
            find_unused_parameters=not config.static_graph,
            static_graph=config.static_graph,
            broadcast_buffers=False,
        )
        if config.gradient_reduction == "bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)

        def forward(batch: Slots, step: int) -> StepOutput:
            last = self._micro_step == self._micro_steps
            with nullcontext() if last else wrapped.no_sync():
                output: StepOutput = wrapped(batch, step)
            return output

        return forward
