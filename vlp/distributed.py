"""Process group and collectives; without a process group, one process is rank 0 of 1."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # before any group, see `process_group`
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist

_control: Any = None
_waits = False

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# PyTorch 2.14 has new names for both, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What a collective call, or the store at the start, says of a rank that has gone.
_LOST = ("by peer", "Broken pipe", "Connection was likely closed")

# What gloo says when the others' part of a collective call does not come, and the store at start.
_LATE = ("Timed out waiting", "waiting for clients", "wait timeout after")

# Collectives that the flight recorder of NCCL and Gloo remembers.
_RECORDED = "512"


def start(
    timeout: timedelta = timedelta(minutes=30), join: Callable[[timedelta], None] | None = None
) -> None:
    """Join the other ranks, as the launcher's environment describes them.

    timeout: of collective calls. join: joins otherwise than PyTorch does (`start_deepspeed`).
    """
    global _control
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)
    if join is not None:
        join(timeout)
    else:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    # Agreements go through the CPU, so that they never wait for the GPU's queue.
    _control = dist.new_group(backend="gloo", timeout=timeout)


def end() -> None:
    """Leave the process group after a run that all ranks finished."""
    global _control
    _control = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that `torchrun` or `accelerate launch` announces in the environment, by gloo.

    Does nothing without them, or inside a running group.
    """
    # The threads of gloo end with the block, since no reference to the group remains: a thread that
    # releases a tensor while the interpreter ends would abort the process. `torch.distributed.nn`
    # keeps the group of its first import as a default argument, so it is imported above.
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means a lost rank, in a collective call or at start."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


def is_late_peer(error: BaseException) -> bool:
    """Return whether an error means a late rank, in a collective call or at start."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LATE)


def default_device() -> torch.device:
    """Return this rank's GPU when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def is_distributed() -> bool:
    """Return whether more than one rank takes part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def _waiting() -> Iterator[None]:
    """Note that a collective call is under way."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False


def in_collective() -> bool:
    """Return whether one of this module's collective calls runs (on a GPU, is being launched)."""
    return _waits


def clone_store() -> Any:
    """Return another thread's connection to the process group's store; None for a single rank."""
    return dist.distributed_c10d._get_default_store().clone() if is_distributed() else None


def last_calls(number: int) -> list[str]:
    """Return lines of JSON on the last collective calls that this rank has begun, oldest first."""
    module = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, of Gloo
    dumps = [json.loads(dump()) for name in names if (dump := getattr(module, name, None))]
    entries = [entry for dump in dumps for entry in dump.get("entries", [])]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return [json.dumps(entry) for entry in entries[-number:]]


def global_sum(x: Tensor) -> Tensor:
    """Sum over all ranks, without gradient, into a new tensor; collective, with equal shapes."""
    total = x.detach().clone()
    if is_distributed():
        with _waiting():
            dist.all_reduce(total)
    return total


def gather(x: Tensor) -> Tensor:
    """Gather rows in rank order, (rows, ...) -> (world_size * rows, ...), differentiably;
    collective.

    A row's gradient is the sum over all ranks' losses. With losses scaled as in
    `vlp.objectives.loss.normalise`, averaging parameter gradients over ranks (DeepSpeed, DDP) gives
    the gradient of the global mean. Shapes are equal on all ranks.
    """
    if not is_distributed():
        return x
    if x.dtype == torch.bool:  # not every backend moves booleans
        return _Gather.apply(x.to(torch.uint8)).to(torch.bool)
    return _Gather.apply(x)


def start_gather(x: Tensor) -> Callable[[], Tensor]:
    """Start gathering rows as `gather`, without gradients; the returned function waits for them.

    Every rank must call both, in the same order.
    """
    if not is_distributed():
        return lambda: x
    x = x.detach().contiguous()
    gathered = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    with _waiting():
        work: Any = _all_gather(gathered, x, async_op=True)

    def finish() -> Tensor:
        with _waiting():
            work.wait()
        return gathered

    return finish


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return start_gather(x)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        local_gradient = gradient.new_empty((ctx.rows, *gradient.shape[1:]))
        with _waiting():
            _reduce_scatter(local_gradient, gradient)
        return local_gradient


def on_rank_0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to rank 0's CPU; empty elsewhere."""
    if rank() > 0:
        return {}
    return {name: host_copy(tensor.detach()) for name, tensor in tensors.items()}


def host_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy of any shape on the CPU, in pinned memory if it is a GPU's."""
    options: dict[str, Any] = {"memory_format": torch.contiguous_format, "pin_memory": x.is_cuda}
    return torch.empty_like(x, device="cpu", **options).copy_(x)


def pass_on(tensors: list[Tensor]) -> list[Tensor]:
    """Send tensors to the next rank of a ring and return the previous one's, without gradient.

    Every rank must call it, with the same shapes and types.
    """
    ranks, index = world_size(), rank()
    if ranks == 1:
        return tensors
    received = [torch.empty_like(tensor) for tensor in tensors]
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, t.contiguous(), (index + 1) % ranks) for t in tensors]
        + [dist.P2POp(dist.irecv, t, (index - 1) % ranks) for t in received]
    )
    with _waiting():
        for request in work:
            request.wait()
    return received


def barrier() -> None:
    """Wait until every rank has come here."""
    max_over_ranks([0.0])


def max_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    """Return the maximum over ranks of each value."""
    # A GPU sends values as it does gradients, without TCP, and waits for its queue.
    if world_size() == 1:
        return list(values)
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    group = _control if maxima.device.type == "cpu" else None
    with _waiting():
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return [float(value) for value in maxima.tolist()]


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average a CPU vector over ranks."""
    if world_size() > 1:
        dist.all_reduce(values, group=_control)
        values /= world_size()
    return values


def from_rank_0(value: Any) -> Any:
    """Return rank 0's picklable value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def gather_to_all(value: Any) -> list[Any]:
    """Return every rank's picklable value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


@contextmanager
def raise_on_all_ranks(kind: type[ValueError]) -> Iterator[None]:
    """Run a block without collective calls on all ranks; a `kind` error on one fails all.

    Each rank then gets all messages in one error.
    """
    problem: str | None = None
    try:
        yield
    except kind as error:
        problem = str(error)
    problems = [message for message in gather_to_all(problem) if message is not None]
    if problems:
        raise kind("\n".join(dict.fromkeys(problems)))


def tensor_from_rank_0(tensor: Tensor) -> Tensor:
    """Return rank 0's content of a CPU tensor that has the same shape and dtype on every rank."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0, group=_control)
    return tensor


def broadcast_tensors(path: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors one by one on every rank's CPU."""
    # Only rank 0 needs the path, as a run folder may lie on the first node's disk.
    file = safe_open(path, framework="pt") if path is not None else None
    described: list[tuple[str, list[int], str]] = []
    if file is not None:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_slice(name)
            described.append((name, tensor.get_shape(), tensor.get_dtype()))
    described = from_rank_0(described)
    for name, shape, kind in described:
        if file is not None:
            tensor = file.get_tensor(name)
        else:
            tensor = torch.empty(shape, dtype=_DTYPES[kind])
        yield name, tensor_from_rank_0(tensor)
