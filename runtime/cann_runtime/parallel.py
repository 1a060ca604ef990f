"""Ranks as processes: how they are started, find each other, and run the same steps.

Rank 0 schedules and samples; before each step it sends the graph's index and inputs as one compact integer tensor, and
the other ranks run the same graph on them (collectives inside the graph meet over the groups registered here). Which
devices ranks use is the executor's concern. One rank alone needs none of this.

Step messages, int32: [graph index or -1 to stop, T, S, R, M], then input ids, positions, slots, query lengths, KV
lengths, logits rows and the first M columns of the block table (the rest is zero). The first _INLINE numbers travel in
one broadcast of fixed size; only a longer message takes a second one.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from cann_runtime.artifact.manifest import Graph, Manifest, World
from cann_runtime.errors import ArtifactError, CannError
from cann_runtime.executor.base import Executor, StepInputs

LOOPBACK = "127.0.0.1"
# Waiting for the next step is waiting for a user, so only a broken connection ends it: gloo notices that at once.
_TIMEOUT = datetime.timedelta(days=7)
_START_TIMEOUT = datetime.timedelta(minutes=10)
_INLINE = 2048
_HEADER = 5
_STOP = -1
_GROUPS = ("world", "tp")  # as compiled graphs name them


@dataclass(frozen=True)
class Launch:
    """This process's place in the world, and whether it starts the other ranks of its host.

    address and port: where rank 0's store listens; port 0 lets rank 0 choose a free one. managed: torchrun (or a parent
    process of ours) set the environment.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    managed: bool

    @property
    def starts_ranks(self) -> bool:
        """This process starts the other ranks of its host."""
        return not self.managed and self.local_size > 1


def plan_launch(
    world: World,
    environ: Mapping[str, str],
    *,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Launch:
    """Where this process stands. ArtifactError where the launch has another number of ranks than the artifact."""
    if world.dp != 1:
        raise ArtifactError(
            f"the artifact has {world.size} ranks in {world.dp} groups of tp {world.tp}: "
            "cann-run serves one tensor-parallel group (size = tp) for now"
        )
    local_size = world.size // world.nnodes
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE", world.size)
        if size != world.size:
            raise ArtifactError(f"WORLD_SIZE is {size}, but the artifact was exported for {world.size} ranks")
        rank = _number(environ, "RANK", 0)
        if rank >= size:
            raise ArtifactError(f"RANK is {rank}, but the artifact was exported for ranks 0 to {size - 1}")
        local = _number(environ, "LOCAL_RANK", rank % local_size)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", local_size)
        address = environ.get("MASTER_ADDR", LOOPBACK)
        return Launch(rank, size, local, local_size, address, _number(environ, "MASTER_PORT", 29500), managed=True)
    if world.nnodes == 1:
        return Launch(0, world.size, 0, local_size, LOOPBACK, 0, managed=False)
    if node_rank is None or master_addr is None or master_port is None:
        raise ArtifactError(
            f"the artifact spans {world.nnodes} hosts: pass --node-rank, --master-addr and --master-port on each"
        )
    if not 0 <= node_rank < world.nnodes:
        raise ArtifactError(f"--node-rank is {node_rank}: the artifact has nodes 0 to {world.nnodes - 1}")
    return Launch(node_rank * local_size, world.size, 0, local_size, master_addr, master_port, managed=False)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise ArtifactError(f"the environment variable {name} is {text!r}, which is not a whole number")
    return int(text)


def threads_per_rank(launch: Launch, asked: int | None) -> int | None:
    """CPU threads of one rank: what was asked, else an equal share of this host's CPUs; None leaves torch's default."""
    if asked is not None:
        return asked
    if launch.local_size == 1:
        return None
    return max(1, len(os.sched_getaffinity(0)) // launch.local_size)


class LocalRanks:
    """The other ranks of this host, started by this process. The death of one ends this process too."""

    def __init__(self, launch: Launch, port: int, command: Sequence[str], threads: int | None) -> None:
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for local in range(1, launch.local_size):
            rank = launch.rank + local
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(launch.size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(launch.local_size),
                "MASTER_ADDR": launch.address,
                "MASTER_PORT": str(port),
            }
            if threads is not None:
                env["OMP_NUM_THREADS"] = str(threads)
            # Only rank 0 talks to the user; a follower must not read its terminal.
            self._processes[rank] = subprocess.Popen([*command], env=env, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._watch, name="cann-ranks", daemon=True).start()

    def dead(self, patience: float = 0.0) -> str | None:
        """Which rank has ended and how, waiting up to that many seconds for it; None if all run."""
        deadline = time.monotonic() + patience
        while True:
            for rank, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    return f"rank {rank} {how}"
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def _watch(self) -> None:
        while not self._closing:
            death = self.dead()
            if death is not None:
                # A follower that ends on an error of the user's lets rank 0 report it first.
                time.sleep(2.0)
                if self._closing:
                    return
                print(f"cann-run: {death}; all ranks end", file=sys.stderr, flush=True)
                self._kill()
                # The main thread may be inside a collective that will never return.
                os._exit(1)
            time.sleep(0.1)

    def close(self, patience: float = 10.0) -> None:
        """Wait for the ranks to end by themselves; those that do not are killed."""
        self._closing = True
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()


class Comm:
    """This rank's process group over gloo, under the names that compiled graphs use."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self._store = store
        self._columns = 0
        if launch.address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=_TIMEOUT)
        except RuntimeError as error:
            raise ArtifactError(f"the ranks cannot connect at {launch.address}: {_first_line(error)}") from error
        group = dist.group.WORLD
        assert group is not None
        for name in _GROUPS:
            _register_process_group(GroupName(name), group)

    def agree(self, error: CannError | None) -> None:
        """All ranks meet here; where one has an error every rank raises, rank 0 with the first error's message."""
        if error is not None:
            self._store.set(f"error/{self.rank}", str(error))
        failed = [torch.zeros(1, dtype=torch.int32) for _ in range(self.size)]
        dist.all_gather(failed, torch.tensor([int(error is not None)], dtype=torch.int32))
        for rank, flag in enumerate(failed):
            if int(flag):
                message = self._store.get(f"error/{rank}").decode()
                raise error or ArtifactError(f"rank {rank}: {message}")

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def send_step(self, graph_index: int, step: StepInputs) -> None:
        """Rank 0: let the other ranks run this step."""
        table_SM = step.block_table_SM.numpy()
        used = np.flatnonzero(table_SM.any(0))
        columns = int(used[-1]) + 1 if len(used) else 0
        sizes = (len(step.input_ids_T), len(table_SM), len(step.logits_rows_R))
        message = np.concatenate(
            [
                np.array([graph_index, *sizes, columns]),
                step.input_ids_T.numpy(),
                step.position_ids_T.numpy(),
                step.slot_mapping_T.numpy(),
                step.query_lens_S.numpy(),
                step.kv_lens_S.numpy(),
                step.logits_rows_R.numpy(),
                table_SM[:, :columns].ravel(),
            ]
        ).astype(np.int32)
        self._send(message)

    def stop(self) -> None:
        """Rank 0: tell the other ranks that no more steps come."""
        self._send(np.array([_STOP, 0, 0, 0, 0], np.int32))

    def _send(self, message: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> None:
        inline = np.zeros(_INLINE, np.int32)
        inline[: min(len(message), _INLINE)] = message[:_INLINE]
        dist.broadcast(torch.from_numpy(inline), 0)
        if len(message) > _INLINE:
            dist.broadcast(torch.from_numpy(message[_INLINE:]), 0)

    def receive_step(self, graphs: Sequence[Graph], slot_dtype: torch.dtype) -> tuple[Graph, StepInputs] | None:
        """Other ranks: the next step, or None at the end."""
        message = torch.empty(_INLINE, dtype=torch.int32)
        dist.broadcast(message, 0)
        index, T, S, R, M = message[:_HEADER].tolist()
        if index == _STOP:
            return None
        total = _HEADER + 3 * T + 2 * S + R + S * M
        if total > _INLINE:
            rest = torch.empty(total - _INLINE, dtype=torch.int32)
            dist.broadcast(rest, 0)
            message = torch.cat((message, rest))
        parts = torch.split(message[_HEADER:total], [T, T, T, S, S, R, S * M])
        ids, positions, slots, query_lens, kv_lens, rows = (part.long() for part in parts[:6])
        graph = graphs[index]
        table_SM = torch.zeros(S, graph.bucket.max_blocks, dtype=torch.int32)
        table_SM[:, :M] = parts[6].view(S, M)
        return graph, StepInputs(ids, positions, slots.to(slot_dtype), table_SM, query_lens, kv_lens, rows)

    def close(self) -> None:
        """Leave the groups."""
        for name in _GROUPS:
            _unregister_process_group(GroupName(name))
        dist.destroy_process_group()


def connect(launch: Launch, command: Sequence[str], threads: int | None) -> tuple[Comm, LocalRanks | None]:
    """Start the other local ranks (by `command`) where it is ours to do, and connect to all of them."""
    is_master = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port, listener = launch.port, None
    if is_master and not launch.managed:
        # Bound by us, so that it listens on that address alone and no other process can take the port.
        listener = socket.create_server((launch.address, launch.port), backlog=launch.size)
        port = listener.getsockname()[1]
    ranks = LocalRanks(launch, port, command, threads) if launch.starts_ranks else None
    try:
        store = TCPStore(
            launch.address,
            port,
            world_size=launch.size,
            is_master=is_master,
            timeout=_START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError as error:
        raise ArtifactError(f"rank {launch.rank} cannot reach rank 0 at {launch.address}:{port}") from error
    return Comm(launch, PrefixStore("cann-run", store)), ranks


def follow(manifest: Manifest, graphs: Sequence[Graph], executor: Executor, comm: Comm) -> None:
    """Ranks other than 0: run the steps that rank 0 sends, until it stops."""
    slot_dtype = getattr(torch, manifest.slot_dtype)
    while (received := comm.receive_step(graphs, slot_dtype)) is not None:
        executor.execute(*received)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
