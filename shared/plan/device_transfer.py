"""Copies tensors from the host to the device without making the host wait."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; to a GPU through pinned memory, because only that is copied asynchronously."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def constant(values: Any, like: Tensor) -> Tensor:
    """A list of numbers as a tensor with the dtype and device of `like`; `like.new_tensor` would make the host wait."""
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)


def put_ahead(
    batches: Iterable[tuple[Any, Any]],
    put_on_device: Callable[[Any, Any, torch.device], dict[str, Tensor]],
    device: torch.device,
) -> Generator[tuple[Any, dict[str, Tensor]]]:
    """Yield each micro-batch with the result of `put_on_device(micro_batch, batch, device)`, computed one ahead.

    `put_on_device` runs in a thread and, on a GPU, in a stream of its own. It may wait for that stream. The training
    loop and the training stream then wait only for what is not ready.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(micro_batch: Any, batch: Any) -> tuple[Any, dict[str, Tensor], torch.cuda.Event | None]:
        with torch.cuda.stream(stream) if stream else nullcontext():
            on_device = put_on_device(micro_batch, batch, device)
            return micro_batch, on_device, stream.record_event() if stream else None

    def ready(
        micro_batch: Any, on_device: dict[str, Tensor], done: torch.cuda.Event | None
    ) -> tuple[Any, dict[str, Tensor]]:
        if done:
            training = torch.cuda.current_stream(device)
            training.wait_event(done)
            for tensor in on_device.values():
                tensor.record_stream(training)  # or the other stream would reuse the memory too early
        return micro_batch, on_device

    with ThreadPoolExecutor(1) as thread:
        pending: deque[Future[Any]] = deque()
        for micro_batch, batch in batches:
            pending.append(thread.submit(put, micro_batch, batch))
            if len(pending) > 1:
                yield ready(*pending.popleft().result())
        while pending:
            yield ready(*pending.popleft().result())
