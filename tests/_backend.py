"""Process groups of the backend "pipesgd", and the operations that it hands on to gloo."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from pipesgd.backend import HANDED_ON, BackendOptions
from pipesgd.ranks import Ranks


def join(ranks: Ranks, options: BackendOptions | None = None, *, backend: str = "pipesgd") -> None:
    """Make a process group of this backend the default one."""
    dist.init_process_group(
        backend,
        store=ranks.store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=ranks.timeout),
        pg_options=options,
    )


OPERATIONS = {name: of_torch for name, of_torch in HANDED_ON.items() if hasattr(dist.ProcessGroup, of_torch)}
"""The operations that are handed on and that this torch has, by the names that it looks for in the class."""


LACKED = {"start_coalescing", "end_coalescing"}
"""Operations that are handed on, and that gloo itself refuses."""
