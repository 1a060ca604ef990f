"""Order of execution, and what may share memory: ops that write an input in place, and ops that are views.

GE gives an order only by edges. An op that reads a value which another op overwrites, with no path between the two,
gives one result or another depending on the schedule; such a graph is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.graph import Edge, Op
from cann_runtime.executor.reference.prototype import prototypes

VIEWS = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze", "ExpandDims", "FlattenV2"})
"""Ops whose output is their input's memory: GE deletes them from static graphs."""


def in_order(ops: Sequence[Op]) -> list[Op]:
    """The ops with every producer before its readers, otherwise as they stand. ArtifactError for a cycle."""
    by_name = {op.name: op for op in ops}
    done: set[str] = set()
    open_: set[str] = set()
    ordered: list[Op] = []
    for op in ops:
        stack = [op.name]
        while stack:
            name = stack[-1]
            if name in done:
                stack.pop()
                continue
            waiting = [edge.producer for edge in _edges(by_name[name]) if edge.producer not in done]
            if waiting:
                if name in open_:
                    raise ArtifactError(f"the GE graph has a cycle through {by_name[name].source}")
                open_.add(name)
                stack.extend(reversed(waiting))
            else:
                done.add(name)
                ordered.append(by_name[name])
                stack.pop()
    return ordered


def written_values(ordered: Sequence[Op]) -> list[Edge]:
    """The values, named by what first produced them, that ops write in place. ArtifactError for a race (see above)."""
    origin: dict[Edge, Edge] = {}
    through: dict[Edge, set[str]] = defaultdict(set)  # edge -> writers that the value has passed
    readers: dict[Edge, list[tuple[Op, frozenset[str]]]] = defaultdict(list)
    writers: dict[Edge, list[Op]] = defaultdict(list)
    for op in ordered:
        inputs = {name: edge for name, edge in op.inputs if edge is not None}
        for edge in inputs.values():
            readers[origin.get(edge, edge)].append((op, frozenset(through[edge])))
        if op.type in VIEWS and "x" in inputs:
            output = Edge(op.name, 0)
            origin[output] = origin.get(inputs["x"], inputs["x"])
            through[output] = set(through[inputs["x"]])
        prototype = prototypes().get(op.type)
        for port, name in prototype.written.items() if prototype else ():
            if name in inputs:
                output, edge = Edge(op.name, port), inputs[name]
                origin[output] = origin.get(edge, edge)
                through[output] = through[edge] | {op.name}
                writers[origin[output]].append(op)
    _refuse_races(ordered, readers, writers)
    return list(writers)


def _refuse_races(
    ordered: Sequence[Op],
    readers: dict[Edge, list[tuple[Op, frozenset[str]]]],
    writers: dict[Edge, list[Op]],
) -> None:
    by_name = {op.name: op for op in ordered}
    position = {op.name: i for i, op in enumerate(ordered)}
    for value, writing in writers.items():
        for writer in writing:
            for reader, passed in readers[value]:
                if reader is writer or writer.name in passed or reader.type in VIEWS:
                    continue
                early, late = sorted((reader, writer), key=lambda op: position[op.name])
                if not _depends(late, early, by_name, position):
                    raise ArtifactError(
                        f"{reader.source} reads what {writer.source} writes in place, and no edge orders the two"
                    )


def _depends(late: Op, early: Op, by_name: dict[str, Op], position: dict[str, int]) -> bool:
    """Is there a path of edges from `early` to `late`?"""
    limit, seen, stack = position[early.name], {late.name}, [late]
    while stack:
        for edge in _edges(stack.pop()):
            if edge.producer == early.name:
                return True
            if edge.producer not in seen and position[edge.producer] > limit:
                seen.add(edge.producer)
                stack.append(by_name[edge.producer])
    return False


def _edges(op: Op) -> Iterable[Edge]:
    yield from (edge for _, edge in op.inputs if edge is not None)
    yield from op.controls
