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

_cpu_group: Any = None
_in_collective = False

# By name in a safetensors file.
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

# Parts of messages of collective calls, and of the store at start, if another rank is lost, or does
# not answer in time.
_LOST = ("by peer", "Broken pipe", "Connection was likely closed")
_LATE = ("Timed out waiting", "waiting for clients", "wait timeout after")


def start(
    timeout: timedelta = timedelta(minutes=30),
    start_group: Callable[[timedelta], None] | None = None,
) -> None:
    """Join the other ranks by the launcher's environment variables.

    timeout: limit of collective calls. start_group: function that starts the process group, such as
    `start_deepspeed`; None: PyTorch's, with NCCL or Gloo.
    """
    global _cpu_group
    # Collectives that the flight recorder of NCCL and Gloo remembers (`last_calls`).
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "512")
    if start_group is not None:
        start_group(timeout)
    else:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    # Python objects and CPU tensors go through gloo, so that they never wait for a GPU's queue.
    _cpu_group = dist.new_group(backend="gloo", timeout=timeout)


def end() -> None:
    """Leave the process group after a run that all ranks finished."""
    global _cpu_group
    _cpu_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks of `torchrun` or `accelerate launch` by gloo within this context.

    Does nothing without such a launcher, or inside a running group.
    """
    # gloo's threads must end with the block, as one that releases a tensor while the interpreter
    # exits aborts the process. They end with the last reference to the group; importing
    # `torch.distributed.nn` inside the block would make one, as a default argument.
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another rank has died."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


def is_late_peer(error: BaseException) -> bool:
    """Return whether an error means that another rank did not answer within the timeout."""
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
    """Return whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def _waiting() -> Iterator[None]:
    """Make `in_collective` return True within this context or decorated function."""
    global _in_collective
    _in_collective = True
    try:
        yield
    finally:
        _in_collective = False


def in_collective() -> bool:
    """Return whether this rank is in a collective call of this module."""
    return _in_collective


def clone_store() -> Any:
    """Return a connection to the process group's store for another thread; None for one rank."""
    return dist.distributed_c10d._get_default_store().clone() if is_distributed() else None


def last_calls(number: int) -> list[str]:
    """Return the last `number` collective calls of this rank as JSON lines, oldest first."""
    module = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, of Gloo
    dumps = [json.loads(dump()) for name in names if (dump := getattr(module, name, None))]
    entries = [entry for dump in dumps for entry in dump.get("entries", [])]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return [json.dumps(entry) for entry in entries[-number:]]


def global_sum(x: Tensor) -> Tensor:
    """Return the sum over all ranks of a tensor of any shape, without gradient; collective."""
    total = x.detach().clone()
    if is_distributed():
        with _waiting():
            dist.all_reduce(total)
    return total


def gather(x: Tensor) -> Tensor:
    """Concatenate all ranks' rows with gradients, (rows, ...) -> (world_size * rows, ...).

    Collective, with equal shapes on all ranks. A row's gradient is summed over all ranks' losses.
    With losses scaled as in `vlp.objectives.loss.normalise`, averaging parameter gradients over
    ranks (DeepSpeed, DDP) gives the gradient of the global mean.
    """
    if not is_distributed():
        return x
    if x.dtype == torch.bool:  # not every backend moves booleans
        return _Gather.apply(x.to(torch.uint8)).to(torch.bool)
    return _Gather.apply(x)


def start_gather(x: Tensor) -> Callable[[], Tensor]:
    """Start a `gather` without gradients; return a function that waits for its result.

    Every rank must call both functions, in the same order.
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


def rank_0_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of rank 0's tensors on its CPU; empty on other ranks."""
    if rank() > 0:
        return {}
    return {name: host_copy(tensor.detach()) for name, tensor in tensors.items()}


def host_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy of any shape on the CPU, in pinned memory if it is a GPU's."""
    options: dict[str, Any] = {"memory_format": torch.contiguous_format, "pin_memory": x.is_cuda}
    return torch.empty_like(x, device="cpu", **options).copy_(x)


def ring_exchange(tensors: list[Tensor]) -> list[Tensor]:
    """Send tensors to the next rank of a ring and return the previous rank's tensors.

    Collective, with equal shapes and dtypes on all ranks; without gradients.
    """
    ranks, index = world_size(), rank()
    if ranks == 1:
        return tensors
    results = [torch.empty_like(tensor) for tensor in tensors]
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, t.contiguous(), (index + 1) % ranks) for t in tensors]
        + [dist.P2POp(dist.irecv, t, (index - 1) % ranks) for t in results]
    )
    with _waiting():
        for request in work:
            request.wait()
    return results


def barrier() -> None:
    """Wait until every rank has called this function."""
    max_over_ranks([0.0])


@_waiting()
def max_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    """Return the maximum over ranks of each value."""
    # On a GPU's device, values go through NCCL as gradients do, and wait for the GPU's queue.
    if world_size() == 1:
        return list(values)
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    group = _cpu_group if maxima.device.type == "cpu" else None
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in maxima.tolist()]


@_waiting()
def mean_over_ranks(values: Tensor) -> Tensor:
    """Overwrite a CPU vector by its mean over ranks, and return it."""
    if world_size() > 1:
        dist.all_reduce(values, group=_cpu_group)
        values /= world_size()
    return values


@_waiting()
def broadcast_object(value: Any) -> Any:
    """Return rank 0's picklable value, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_cpu_group)
    return values[0]


@_waiting()
def all_gather_object(value: Any) -> list[Any]:
    """Return every rank's picklable value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_cpu_group)
    return values


@contextmanager
def raise_on_all_ranks(kind: type[ValueError]) -> Iterator[None]:
    """Run a block on all ranks; if any rank raises `kind`, raise it on every rank.

    The error has the messages of all ranks. The block must not contain collective calls.
    """
    problem: str | None = None
    try:
        yield
    except kind as error:
        problem = str(error)
    problems = [message for message in all_gather_object(problem) if message is not None]
    if problems:
        raise kind("\n".join(dict.fromkeys(problems)))


@_waiting()
def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Overwrite a CPU tensor by rank 0's of the same shape and dtype, and return it; collective."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0, group=_cpu_group)
    return tensor


def broadcast_tensors(path: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of rank 0's safetensors file, one by one, on every rank's CPU.

    path: None on other ranks, as a run folder may lie on the first node's disk.
    """
    file = safe_open(path, framework="pt") if path is not None else None
    headers: list[tuple[str, list[int], str]] = []
    if file is not None:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            header = file.get_slice(name)
            headers.append((name, header.get_shape(), header.get_dtype()))
    for name, shape, dtype in broadcast_object(headers):
        if file is not None:
            tensor = file.get_tensor(name)
        else:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        yield name, broadcast_tensor(tensor)
