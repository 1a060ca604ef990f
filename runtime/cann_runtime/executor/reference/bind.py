"""Fills into a neutral graph what only a rank knows: its experts and its number in the expert-parallel group.

Group names stay logical here; the communicator knows them. The same rules hold for graphs that go to a device
(`executor/ge/bind.py`).
"""

from __future__ import annotations

from dataclasses import replace

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.graph import Attr, Graph, Op


def bind_rank(graph: Graph, ep_rank: int) -> Graph:
    """The graph of rank `ep_rank` of its ep group: `ep_rank_id` is stored as 0, `active_expert_range` as [0, n].

    Raises ArtifactError where the stored form is not neutral.
    """
    if ep_rank == 0:
        return graph
    return replace(graph, ops=tuple(_bind_op(op, ep_rank) for op in graph.ops))


def _bind_op(op: Op, ep_rank: int) -> Op:
    attrs = dict(op.attrs)
    if "ep_rank_id" in attrs:
        attrs["ep_rank_id"] = Attr("i", ep_rank)
    experts = attrs.get("active_expert_range")
    if experts is not None and isinstance(experts.value, tuple) and len(experts.value) == 2:
        first, count = experts.value
        if first != 0:
            raise ArtifactError(f"{op.source}: active_expert_range {list(experts.value)} is not stored from 0")
        attrs["active_expert_range"] = Attr("list_i", (ep_rank * count, (ep_rank + 1) * count))
    return replace(op, attrs=attrs)
