"""Makes the HCCL communicators that a rank's graphs name, with names that are the same at every start.

GE compiles a communicator's name into the graph, so a compiled graph can be used again only where the name comes back.
Which ranks talk to each other otherwise, and over what the ranks are started, is `parallel.py`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from cann_runtime.artifact.manifest import World
from cann_runtime.errors import CannError
from cann_runtime.executor.ge.bind import GROUP_ATTRS, LOGICAL_GROUPS, GraphDef, RankBinding


def used_groups(graphs: Iterable[GraphDef]) -> set[str]:
    """The logical groups that the neutral graphs name."""
    ops = (op for graph in graphs for op in graph.op)
    return {op.attr[key].s.decode() for op in ops for key in GROUP_ATTRS if key in op.attr} - {""}


def group_ranks(world: World, name: str) -> list[list[int]]:
    """Members of every group of that logical name: consecutive ranks, so that a group stays on one server if it can."""
    size = {"tp": world.tp, "ep": world.ep, "world": world.size}[name]
    return [list(range(start, start + size)) for start in range(0, world.size, size)]


def bind_groups(world: World, rank: int, names: set[str]) -> RankBinding:
    """Create the communicators `names` (a subset of LOGICAL_GROUPS) and initialize them; all ranks call it alike.

    Each logical group gets a communicator of its own even where the members are equal: MoE dispatch and combine ask for
    one that carries nothing else. Raises CannError where the ranks have not been connected yet.
    """
    communicators = {}
    if names and not dist.is_initialized():
        raise CannError(f"the graphs communicate over {', '.join(sorted(names))}: start {world.size} ranks together")
    for name in LOGICAL_GROUPS:
        if name not in names:
            continue
        for ranks in group_ranks(world, name):
            group = dist.new_group(ranks, backend="hccl")  # every rank takes part in the creation of every group
            if rank in ranks:
                communicators[name] = _communicator(group, f"cann_{name}_{ranks[0]}", rank)
    return RankBinding(communicators, ep_rank=rank % world.ep)


def names_are_stable() -> bool:
    """Can this CANN take a communicator's name from us? If not it makes a new one at every start."""
    import torch_npu

    return bool(torch_npu.distributed._is_support_hccl_comm_name())


def _communicator(group: dist.ProcessGroup, name: str, rank: int) -> str:
    backend = group._get_backend(torch.device("npu"))
    if names_are_stable():
        backend._set_hccl_comm_name(name)  # type: ignore[attr-defined]  # torch_npu's ProcessGroupHCCL
    return str(backend.get_hccl_comm_name(rank, init_comm=True))  # type: ignore[attr-defined]
