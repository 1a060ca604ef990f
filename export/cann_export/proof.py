"""Proves from the weight plan and the graphs alone that all ranks together compute the whole model, without weights.

Every byte of every source tensor is used exactly once over the tensor-parallel ranks, or replicated or padded on
purpose, which the report says; ranks take part in the same collectives; and what a cut weight makes partial is summed.
Numbers are `verify`'s work, and what one device asks for is `lint.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cann_export.lint_types import View, attr
from cann_runtime.artifact.manifest import Signature
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.executor.reference.graph import Edge, Graph, Op

_COLLECTIVES = ("group", "group_ep", "group_tp")


@dataclass
class Proof:
    """What was proven. sources: how each source tensor is used, in words; problems: what is wrong and where."""

    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def summary(self) -> dict[str, int]:
        """Number of source tensors by how they are used (the layer numbers left out)."""
        counts: dict[str, int] = defaultdict(int)
        for how in self.sources.values():
            counts[how] += 1
        return dict(counts)


def prove_plan(
    plan: WeightPlan, kv_heads: int | None = None, checkpoint: Mapping[str, Sequence[int]] | None = None
) -> Proof:
    """Coverage of every source tensor over the ranks.

    kv_heads: of the model; where they are fewer than ranks, each may be held by tp / kv_heads ranks. checkpoint: names
    and shapes of a checkpoint's (or a model's) tensors; each must be used.
    """
    proof = Proof()
    uses: dict[str, list[tuple[Param, Part]]] = defaultdict(list)
    for param in plan.params.values():
        proof.problems.extend(_shape_problems(plan, param))
        for part in param.parts:
            uses[part.source].append((param, part))
        if param.kind == "rank_offset":
            proof.problems.extend(_offset_problems(plan, param))
    for source, used in uses.items():
        if len(used) > 1:
            holders = ", ".join(param.name for param, _ in used)
            proof.problems.append(f"{source} is used {len(used)} times: {holders}")
            continue
        param, part = used[0]
        how, problems = _coverage(plan.tp, part, kv_heads)
        proof.sources[source] = how
        proof.problems.extend(f"{param.name}: {source}: {problem}" for problem in problems)
    if checkpoint is not None:
        known = {name for used in uses.values() for _, part in used for name in (part.source, *part.alternatives)}
        for name, shape in checkpoint.items():
            if name not in known:
                proof.problems.append(f"{name} {list(shape)} of the checkpoint is not used")
    return proof


def _shape_problems(plan: WeightPlan, param: Param) -> Iterable[str]:
    if param.kind != "weight":
        return
    if not param.parts:
        yield f"{param.name} is made of nothing"
        return
    for part in param.parts:
        if part.dim is not None and (part.ranges is None or len(part.ranges) != plan.tp):
            yield f"{param.name}: {part.source} has {len(part.ranges or [])} ranges for {plan.tp} ranks"
            return
        sizes = {stop - start for start, stop in part.ranges or []}
        if len(sizes) > 1:
            yield f"{param.name}: ranks take different sizes of {part.source}: {sorted(sizes)}"
            return
    shapes = [part.local_shape() for part in param.parts]
    total = list(shapes[0])
    if len({tuple(s[: param.cat_dim] + s[param.cat_dim + 1 :]) for s in shapes}) != 1:
        yield f"{param.name}: its parts {shapes} cannot be put together along dimension {param.cat_dim}"
        return
    if total:
        total[param.cat_dim] = sum(s[param.cat_dim] for s in shapes)
    if param.transpose:
        total[-2:] = total[-2:][::-1]
    if total != param.shape:
        yield f"{param.name} is {param.shape}, its parts give {total}"


def _offset_problems(plan: WeightPlan, param: Param) -> Iterable[str]:
    table = plan.params.get(param.name.rpartition(".")[0] + ".weight")
    if table is None or param.step != table.shape[0]:
        rows = None if table is None else table.shape[0]
        yield f"{param.name}: ranks are {param.step} rows apart, the table has {rows} on each"


def _coverage(tp: int, part: Part, kv_heads: int | None) -> tuple[str, list[str]]:
    """(how the ranks share one tensor, what is wrong with that)."""
    if part.dim is None or part.ranges is None:
        if tp == 1:
            return "whole on the only rank", []
        if len(part.shape) == 1:
            return f"replicated on purpose on {tp} ranks (vector)", []
        return "replicated", [f"{part.shape} is whole on each of {tp} ranks, but only vectors may be"]
    size = part.shape[part.dim]
    distinct = list(dict.fromkeys(map(tuple, part.ranges)))
    problems = []
    if part.ranges != sorted(part.ranges):
        problems.append(f"ranks take pieces out of order along dimension {part.dim}: {part.ranges}")
    at = 0
    for start, stop in sorted(distinct):
        if start > at:
            problems.append(f"{at}..{start} along dimension {part.dim} is on no rank")
        elif start < at:
            problems.append(f"{start}..{min(at, stop)} along dimension {part.dim} is on more than one rank")
        at = max(at, stop)
    if at < size:
        problems.append(f"{at}..{size} along dimension {part.dim} is on no rank")
    how = f"cut in {len(distinct)} along dimension {part.dim}"
    copies = {sum(tuple(r) == d for r in part.ranges) for d in distinct}
    if copies != {1}:
        shared = kv_heads is not None and len(distinct) == kv_heads < tp and copies == {tp // kv_heads}
        how += f", each piece on {tp // len(distinct)} ranks on purpose (kv heads)"
        if not shared:
            problems.append(f"its {len(distinct)} pieces are on {sorted(copies)} ranks; there are {kv_heads} kv heads")
    if at > size:
        how += f", padded from {size} to {at}"
        if at - size >= tp and at - size >= distinct[0][1] - distinct[0][0]:
            problems.append(f"padded from {size} to {at}: a whole rank holds padding only")
    return how, problems


# Graphs ---------------------------------------------------------------------------------------------------------------


def collectives(graph: Graph, view: View | None = None) -> list[tuple[object, ...]]:
    """What a graph communicates, in order: op type, groups, attributes, dtype and shape."""
    view = view or View.of(graph)
    found: list[tuple[object, ...]] = []
    for op in graph.ops:
        if any(attr(op, name) for name in _COLLECTIVES):
            values = tuple(sorted((k, str(a.value)) for k, a in op.attrs.items() if k not in ("ep_rank_id",)))
            found.append((op.type, values, *view.type(op, "x")))
    return found


def prove_ranks(graphs: Mapping[int, Graph]) -> list[str]:
    """What differs in the collectives of one bucket's graphs, by rank: ranks would wait for ever, or sum other data."""
    problems: list[str] = []
    first_rank = min(graphs)
    same: dict[int, list[tuple[object, ...]]] = {}
    wanted = same.setdefault(id(graphs[first_rank]), collectives(graphs[first_rank]))
    for rank, graph in sorted(graphs.items()):
        if id(graph) not in same:
            same[id(graph)] = collectives(graph)
        got = same[id(graph)]
        if got != wanted:
            at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
            theirs = got[at][0] if at < len(got) else "nothing"
            problems.append(
                f"rank {rank}: its collective {at} is {theirs} where rank {first_rank} has "
                f"{wanted[at][0] if at < len(wanted) else 'nothing'}, or one of another group, type or shape"
            )
    return problems


def prove_sums(graph: Graph, signature: Signature, plan: WeightPlan) -> list[str]:
    """Products with a weight that is cut along its inner dimension are partial: each must go to an all-reduce over tp.

    A table whose rows are cut gives partial rows likewise, and a head cut along its output must be gathered.
    """
    if plan.tp == 1:
        return []
    view = View.of(graph)
    names = {attr(op, "index"): op.name for op in graph.ops if op.type == "Data"}
    problems = []
    for index, ref in enumerate(signature.inputs):
        param = plan.params.get(ref.name) if ref.kind == "param" else None
        if param is None or len(param.shape) != 2 or len(param.parts) != 1:
            continue
        dim = param.parts[0].dim
        for op in view.readers.get(Edge(names[index], 0), []):
            what = None
            if op.type in ("MatMul", "MatMulV2"):
                inner = 1 if attr(op, "transpose_x2", False) != param.transpose else 0
                what = "sum" if dim == inner else None
            elif op.type.startswith("Gather") and dim == 0:
                what = "sum"
            if what and not _reduced(view, Edge(op.name, 0)):
                problems.append(
                    f"{op.name}: its result is partial ({ref.name} is cut over the ranks), but no HcomAllReduce over "
                    "tp sums it before it is used"
                )
    return problems


_LINEAR = frozenset({"Reshape", "Cast", "Identity", "Mul", "Squeeze", "Unsqueeze"})


def _reduced(view: View, edge: Edge) -> bool:
    """Does every path from a value pass an all-reduce or a reduce-scatter over tp, with only linear ops before it?"""
    readers = view.readers.get(edge, [])
    return bool(readers) and all(_sums(view, op) for op in readers)


def _sums(view: View, op: Op) -> bool:
    if op.type in ("HcomAllReduce", "HcomReduceScatter"):
        return bool(attr(op, "group") == "tp" and attr(op, "reduction") == "sum")
    return op.type in _LINEAR and _reduced(view, Edge(op.name, 0))
