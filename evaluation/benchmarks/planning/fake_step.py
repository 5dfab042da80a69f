"""A step of pretraining on fake tensors: nothing is computed, and other ranks are pretended.

Tensors have shapes and no contents (`FakeTensorMode`), and so takes a step of any size seconds and
no memory. The process group of `pretended_ranks` answers every collective call at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from evaluation.benchmarks.pretrain_step import random_batch
from vlp.compilation import gpu_form
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.blocks import checkpoint_activations

THRESHOLD = 0.05
"""Anchor threshold of a fake step, which has no similarities to take a quantile of."""


class Observer(Protocol):
    """Is told of operations."""

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operation of PyTorch, its arguments and its result."""


class Watched(TorchDispatchMode):
    """Tell observers of every operation inside it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self._observers = observers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, and pass it on."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for observer in self._observers:
            observer.see(func, args, kwargs, out)
        return out


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[None]:
    """Be rank 0 of a group of ranks that are not there; one rank needs no group."""
    if ranks == 1:
        yield
        return
    import torch.distributed._tools.fake_collectives  # noqa: F401 (of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_task(config: PretrainConfig) -> Pretraining:
    """Build the task of a configuration without memory for its weights, and with no public ones."""
    model, training = config.model, config.training
    anchor = model.cross.anchor.model_copy(update={"threshold": THRESHOLD})
    model = model.model_copy(
        update={
            "cross": model.cross.model_copy(update={"anchor": anchor}),
            "text": model.text.model_copy(update={"weights": None}),
            "image": model.image.model_copy(update={"weights": None}),
        }
    )
    with torch.device("meta"):
        return Pretraining(
            model,
            config.objectives,
            "",
            training.precision,
            log_every=10**6,
            grad_cache=training.grad_cache,
        )


def fake_step(
    config: PretrainConfig,
    rows: int,
    observers: Sequence[Observer] = (),
    words: int = 15,
    before: Callable[[Pretraining], None] = lambda task: None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Run forward and backward pass of a step, in the form for a GPU (`vlp.compilation`).

    Args:
        config: pretraining; its recomputation of activations is done.
        rows: pairs of this rank.
        observers: are told of every operation.
        words: of each text.
        before: is given the task whose step it is.
        between: is called between both passes.
    """
    task = meta_task(config)
    checkpoint_activations(task, config.training.activation_checkpointing)
    batch = random_batch(config.inputs, rows, words)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, gpu_form():
        for network in task.networks():
            network.to_empty(device="cpu")
        if task.teacher:
            task.teacher.average.to("cpu")  # which is no part of a step
        fields: dict[str, Any] = {
            name: fake.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch._asdict().items()
        }
        before(task)
        with Watched(observers):
            output = task(batch._replace(**fields), 1)
            between()
            output.loss.backward()
