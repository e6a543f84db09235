"""The processes of one run, as ``torchrun`` starts them: who is who, and how their results come together.

    torchrun --nproc-per-node 2 -m quantize_state eval MODEL --sequences 8

Documents or questions are dealt out to the processes, and the first one merges what they measured; ``accelerate
launch`` starts them just as well. Without either there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ..quant.errors import InvalidValueError, QuantizeStateError

Value = TypeVar("Value")


class Team:
    """This process's ``rank`` among ``size`` processes. ``Team.join()`` gives the one of this process."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def join(cls) -> Team:
        """The team that the environment describes; the first call connects the processes.

        Through gloo on any device, as they exchange no tensors of a model, and for as long as it takes: one process
        may be hours behind the others, for which NCCL would give up.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        import torch
        from torch import distributed

        if not distributed.is_initialized():
            gpus, local = torch.cuda.device_count(), local_rank()
            if 0 < gpus <= local:
                raise InvalidValueError(
                    f"process {local} of this machine has no GPU of its own, as there are {gpus}; "
                    f"start torchrun with --nproc-per-node {gpus} or fewer"
                )
            if gpus:
                torch.cuda.set_device(local)
            distributed.init_process_group("gloo", timeout=timedelta(weeks=4))
        return cls(distributed.get_rank(), size)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> list[int]:
        """Which of ``count`` pieces of work are this process's."""
        return list(range(self.rank, count, self.size))

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, at the first one; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        from torch import distributed

        gathered: list[Any] = [None] * self.size if self.first else []
        self._together(lambda: distributed.gather_object(value, gathered if self.first else None))
        return gathered

    def agree(self, decide: Callable[[], Value]) -> Value:
        """What ``decide`` gives at the first process, at all of them; also where it raises QuantizeStateError."""
        if self.size == 1:
            return decide()
        from torch import distributed

        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = decide()
            except QuantizeStateError as error:
                box[1] = error
        self._together(lambda: distributed.broadcast_object_list(box))
        if box[1] is not None:
            raise box[1]
        return box[0]

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.size > 1:
            from torch import distributed

            self._together(distributed.barrier)

    def leave(self) -> None:
        """Disconnect, when all is done."""
        if self.size > 1:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()

    def _together(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # torch's DistBackendError among them
            raise QuantizeStateError(
                f"process {self.rank} of {self.size} lost the others ({str(error).splitlines()[0]}): one of them ended "
                "early, and its own message says why. What was finished is kept in --out; run the same again"
            ) from error


def local_rank() -> int:
    """This process's number on its machine, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
