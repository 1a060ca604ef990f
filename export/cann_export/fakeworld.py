"""Process groups for tracing: the logical groups `tp`, `ep` and `world`, with no processes behind them.

Collectives are traced by group name, so the name in the graph is the logical one, and the runtime registers its real
groups under the same names. Nothing is ever sent: torch's own fake backend answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

GROUPS = ("tp", "ep", "world")


@contextlib.contextmanager
def fake_world(tp: int, ep: int = 1, world: int | None = None, rank: int = 0) -> Iterator[None]:
    """Make the groups `tp`, `ep` and `world` of those sizes resolvable while the context lasts.

    Args: tp, ep: group sizes; world: number of ranks, by default the larger of them; rank: whose graphs are traced.
    Raises RuntimeError where a real process group is already initialized in this process.
    """
    if dist.is_initialized():
        raise RuntimeError("tracing needs a process without an initialized process group")
    register: Any = torch._C._distributed_c10d._register_process_group
    unregister: Any = torch._C._distributed_c10d._unregister_process_group
    size = world or max(tp, ep)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    names = []
    try:
        for name, members in (("tp", tp), ("ep", ep), ("world", size)):
            first = rank // members * members
            group = dist.new_group(list(range(first, first + members)), backend="fake")
            register(name, group)
            names.append(name)
        yield
    finally:
        for name in names:
            unregister(name)
        dist.destroy_process_group()
