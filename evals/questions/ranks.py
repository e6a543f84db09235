"""The processes of one run, as torchrun and ``accelerate launch`` start them: each answers its share of questions.

They never exchange answers, which are on disk; they only wait for each other at the start and at the end.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


class Ranks:
    """This process's place among those that torchrun or accelerate started; alone without them."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        if self.world > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                # Only for waiting, so gloo on any device; a slow rank may be hours behind.
                dist.init_process_group("gloo", timeout=timedelta(weeks=4))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, device: str) -> str:
        """``auto`` on a machine with several GPUs is this process's own."""
        import torch

        if device == "auto" and self.world > 1 and torch.cuda.is_available():
            return f"cuda:{self.local % torch.cuda.device_count()}"
        return device

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def same(self, value: Any) -> Any:
        """The first process's ``value``, in all of them."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def leave(self) -> None:
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
