"""How ranks exchange tensors: alone, as threads of one process, or as processes over gloo.

Collective ops are built on two exchanges only, so that the order of summation is the same everywhere (rank 0 first) and
every rank gets the same bits. The ops themselves are in `ops/collectives.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cann_runtime.artifact.manifest import World
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.ge.groups import group_ranks

GROUPS = ("tp", "ep", "world")
"""Logical group names of neutral graphs."""

_TIMEOUT = 600.0  # seconds that a thread waits for the others; a mismatch of collectives shows as this
_Result = TypeVar("_Result")


class Communicator(Protocol):
    """One rank's access to its groups."""

    def size(self, group: str) -> int:
        """Ranks in this rank's group of that name."""
        ...

    def rank(self, group: str) -> int:
        """This rank's index in it."""
        ...

    def gather(self, x: Tensor, group: str) -> list[Tensor]:
        """Every rank's x, in rank order. All must have the same shape and dtype."""
        ...

    def exchange(self, parts: Sequence[Tensor], group: str) -> list[Tensor]:
        """part i goes to rank i; what each rank sent to this one, in rank order. Sizes may differ in dimension 0."""
        ...


def members(world: World, rank: int, group: str) -> list[int]:
    """The ranks of the group of that name that `rank` belongs to. ArtifactError for an unknown name."""
    if group not in GROUPS:
        raise ArtifactError(f"the graph communicates over group {group!r}, not one of {', '.join(GROUPS)}")
    return next(ranks for ranks in group_ranks(world, group) if rank in ranks)


class Alone:
    """The only rank of its world."""

    def size(self, group: str) -> int:
        return len(members(World(), 0, group))

    def rank(self, group: str) -> int:
        return 0

    def gather(self, x: Tensor, group: str) -> list[Tensor]:
        return [x]

    def exchange(self, parts: Sequence[Tensor], group: str) -> list[Tensor]:
        return list(parts)


class _Meeting:
    """Where the threads of one group meet: each puts something on the table, then takes what is meant for it."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._table: list[list[Tensor]] = [[] for _ in range(size)]

    def meet(
        self, index: int, brought: list[Tensor], take: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> list[Tensor]:
        self._table[index] = brought
        self._barrier.wait(_TIMEOUT)
        # Copies, before anyone leaves: the owner may write into its tensor as soon as it goes on.
        taken = [tensor.clone() for tensor in take(self._table)]
        self._barrier.wait(_TIMEOUT)
        return taken

    def abort(self) -> None:
        self._barrier.abort()


class ThreadWorld:
    """All ranks of a world as threads of this process; `rank(r)` is what rank r's thread uses."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._meetings = {
            (name, ranks[0]): _Meeting(len(ranks)) for name in GROUPS for ranks in group_ranks(world, name)
        }

    def rank(self, rank: int) -> Communicator:
        """Rank r's communicator."""
        return _ThreadRank(self.world, rank, self._meetings)

    def run(self, work: Callable[[int], _Result]) -> list[_Result]:
        """work(rank) on every rank at once; results in rank order. Raises the first rank's error that is its own."""
        results: dict[int, _Result] = {}
        errors: dict[int, BaseException] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error
                for meeting in self._meetings.values():
                    meeting.abort()

        threads = [threading.Thread(target=body, args=(r,), name=f"rank{r}") for r in range(self.world.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        own = [error for _, error in sorted(errors.items()) if not isinstance(error, threading.BrokenBarrierError)]
        if own:
            raise own[0]
        if errors:
            raise ArtifactError("the ranks do not take part in the same collectives")
        return [results[rank] for rank in range(self.world.size)]


class _ThreadRank:
    def __init__(self, world: World, rank: int, meetings: dict[tuple[str, int], _Meeting]) -> None:
        self._groups = {name: members(world, rank, name) for name in GROUPS}
        self._rank = rank
        self._meetings = meetings

    def size(self, group: str) -> int:
        return len(self._members(group))

    def rank(self, group: str) -> int:
        return self._members(group).index(self._rank)

    def gather(self, x: Tensor, group: str) -> list[Tensor]:
        return self._check(self._meeting(group).meet(self.rank(group), [x], lambda table: [row[0] for row in table]))

    def exchange(self, parts: Sequence[Tensor], group: str) -> list[Tensor]:
        mine = self.rank(group)
        return self._meeting(group).meet(mine, list(parts), lambda table: [row[mine] for row in table])

    def _members(self, group: str) -> list[int]:
        if group not in self._groups:
            raise ArtifactError(f"the graph communicates over group {group!r}, not one of {', '.join(GROUPS)}")
        return self._groups[group]

    def _meeting(self, group: str) -> _Meeting:
        return self._meetings[group, self._members(group)[0]]

    def _check(self, tensors: list[Tensor]) -> list[Tensor]:
        if len({(t.shape, t.dtype) for t in tensors}) != 1:
            raise ArtifactError(f"ranks bring different tensors to one collective: {[list(t.shape) for t in tensors]}")
        return tensors


class GlooRank:
    """This process's rank; torch.distributed must have been initialized over gloo. All ranks make it together."""

    def __init__(self, world: World) -> None:
        if not dist.is_initialized():
            raise ArtifactError(f"the artifact has {world.size} ranks, which are not connected")
        self._rank = dist.get_rank()
        self._groups: dict[str, tuple[list[int], dist.ProcessGroup | None]] = {}
        for name in GROUPS:
            for ranks in group_ranks(world, name):
                group = dist.group.WORLD if len(ranks) == world.size else dist.new_group(ranks, backend="gloo")
                if self._rank in ranks:
                    self._groups[name] = (ranks, group)

    def size(self, group: str) -> int:
        return len(self._group(group)[0])

    def rank(self, group: str) -> int:
        return self._group(group)[0].index(self._rank)

    def gather(self, x: Tensor, group: str) -> list[Tensor]:
        ranks, process_group = self._group(group)
        data = _bytes(x)
        gathered = [torch.empty_like(data) for _ in ranks]
        dist.all_gather(gathered, data, group=process_group)
        return [piece.view(x.dtype).view(x.shape) for piece in gathered]

    def exchange(self, parts: Sequence[Tensor], group: str) -> list[Tensor]:
        _, process_group = self._group(group)
        mine = self.rank(group)
        sizes = self.gather(torch.tensor([part.shape[0] for part in parts]), group)
        incoming = [int(row[mine]) for row in sizes]
        tail, dtype = parts[0].shape[1:], parts[0].dtype
        width = tail.numel() * dtype.itemsize
        received = torch.empty(sum(incoming) * width, dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            torch.cat([_bytes(part) for part in parts]),
            [size * width for size in incoming],
            [part.shape[0] * width for part in parts],
            group=process_group,
        )
        pieces = torch.split(received, [size * width for size in incoming])
        return [piece.clone().view(dtype).view(size, *tail) for piece, size in zip(pieces, incoming)]

    def _group(self, group: str) -> tuple[list[int], dist.ProcessGroup | None]:
        if group not in self._groups:
            raise ArtifactError(f"the graph communicates over group {group!r}, not one of {', '.join(GROUPS)}")
        return self._groups[group]


def _bytes(x: Tensor) -> Tensor:
    """x as bytes: gloo takes those of any dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8)
