"""Memory for the state, and the process that writes it, on each process of a run that writes a share of a checkpoint.

The processes set this up together. Then each one copies and writes its share, without exchanging anything with the
other training processes.
"""

import os
from collections.abc import Callable, Collection
from typing import Any

import torch

from shared.checkpoints import files
from shared.checkpoints.buffers import Buffers, Copy, Values, require_memory
from shared.checkpoints.layout import Layout, divide, flatten, lay_out
from shared.checkpoints.writer import Writer
from shared.config.options import Options
from shared.processes.collectives import gather, on_main_process
from shared.processes.writers import partners, writes


class Staging:
    """What a process needs to write its share of checkpoints in the background; created on every process.

    `buffers` and `writer` are None before `lay_out` and `connect`, after `close`, and on a process without a share.
    """

    def __init__(self, accelerator: Any, config: Options) -> None:
        self.accelerator, self.config = accelerator, config
        self.leads = writes(accelerator, config)
        self.partners: list[int] = []  # ranks of the machine that may have a share
        self.laid_out = False
        self._values: Values | None = None
        self.buffers: Buffers | None = None
        self.writer: Writer | None = None

    def has_memory(self) -> bool:
        """Whether this process has memory for its share, or none is needed."""
        return self.laid_out and bool(self.buffers or not self.leads)

    def has_writer(self) -> bool:
        """Whether this process has a writer, or none is needed."""
        return self.writer is not None or (self.has_memory() and not self.buffers)

    def is_ready(self, states: dict[str, Any]) -> tuple[bool, bool]:
        """Whether state dicts, by file name, fit the memory of this process, and whether it has a writer.

        Their values are kept for the next `copy`.
        """
        self._values = self.buffers.values_of(states) if self.buffers else None
        return self.has_memory() and (self._values is not None or not self.buffers), self.has_writer()

    def set_up(self, models: dict[str, Any], archives: dict[str, Any], fit: bool, connected: bool) -> str:
        """Set up what is missing; every process calls it.

        Args:
            models: the state dicts that safetensors writes, by file name.
            archives: the state dicts that torch.save writes, by file name.
            fit: whether the states fit the memory of all processes.
            connected: whether all processes have a writer.

        Returns:
            Why that is impossible on some process, or "".
        """
        problem = "" if fit else self.lay_out(models, archives)
        return problem or ("" if fit and connected else self.connect())

    def copy(self, lasting: Collection[int]) -> Copy | None:
        """Start to copy this process's share of the states of `is_ready`; None without a share. See `Buffers.copy`."""
        values, self._values = self._values, None
        return self.buffers.copy(values, lasting) if self.buffers and values else None

    def lay_out(self, models: dict[str, Any], archives: dict[str, Any]) -> str:
        """Lay out the files, and allocate memory for this process's share; every process calls it.

        Args:
            models: the state dicts that safetensors writes, by file name.
            archives: the state dicts that torch.save writes, by file name.

        Returns:
            Why that is impossible on some process, or "".
        """
        self.close()
        self.partners = partners(self.accelerator, self.config)
        states = models | archives
        tensors = [tensor for state in states.values() for tensor in flatten(state).tensors]
        layouts: dict[str, Layout] = {}

        def find_layouts() -> None:
            require_memory(sum(tensor.nbytes for tensor in tensors))
            layouts.update(lay_out(models, archives))

        def allocate() -> None:
            shares = divide(layouts, len(self.partners))
            share = shares[self.partners.index(self.accelerator.process_index)]
            if self.leads or any(share.values()):
                self.buffers = Buffers(layouts, share, on_gpu=any(tensor.is_cuda for tensor in tensors))
                self._values = self.buffers.values_of(states)

        layouts, problem = on_main_process(self.accelerator, lambda: (layouts, problem_of(find_layouts)))
        if not problem and self.partners:
            problem = problem_of(allocate)
            if self.buffers and not self._values:
                problem = f"the state of process {self.accelerator.process_index} differs from that of process 0"
        problem = next(filter(None, gather(self.accelerator, problem)), "")
        self.laid_out = not problem
        return problem

    def connect(self) -> str:
        """Start the writers of all processes with a share, and connect them; every process calls it.

        Returns:
            Why that is impossible on some process, or "".
        """
        if self.writer:
            self.writer.end()
            self.writer = None
        problem, pipe = "", None
        having = gather(self.accelerator, self.buffers is not None)
        team = [rank for rank in self.partners if having[rank]]
        pipes, addresses = files.offer(len(team) - 1) if self.leads else ([], [])
        offered = gather(self.accelerator, addresses)
        if self.buffers and not self.leads:
            try:
                pipe = files.accept(offered[team[0]][team.index(self.accelerator.process_index) - 1])
            except OSError as error:
                problem = f"process {self.accelerator.process_index} cannot open the pipes of {team[0]}: {error}"
        problem = next(filter(None, gather(self.accelerator, problem)), "")
        for _, *theirs in addresses:
            for descriptor in theirs:
                os.close(descriptor)
        if self.buffers and not problem:
            self.writer = Writer(self.buffers.images, pipes, pipe, len(team))
        return problem

    def close(self) -> None:
        """End the writer, which must have no job, and free the memory."""
        if self.writer:
            self.writer.end()
        if self.buffers:
            self.buffers.close()
        self.writer = self.buffers = None
        self.laid_out = False


def problem_of(function: Callable[[], object]) -> str:
    """Call `function`, which lays out files; return why that is impossible, or ""."""
    try:
        function()
    except (MemoryError, OSError) as error:
        return str(error)
    except Exception as error:  # the layout is not documented by torch: a new version must not end the run
        return (
            f"torch {torch.__version__} or safetensors may lay files out in a new way "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        )
    return ""
