"""What an export shows while it runs: a line per stage, a bar per set of graphs, and the report at the end (rich).

On a pipe there is no bar, only lines; everything goes to stderr, so that stdout stays for results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

if TYPE_CHECKING:
    from cann_export.pipeline import Report


class Progress:
    """Stage and graph progress on stderr; `quiet` shows nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def log(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A spinner with the stage's name while it lasts."""
        if self.console.is_terminal:
            with self.console.status(name):
                yield
        else:
            self.log(f"{name} ...")
            yield

    @contextlib.contextmanager
    def graphs(self, name: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over `total` things; the yielded function marks one done, with its name."""
        if not self.console.is_terminal:
            count = 0

            def line(what: str) -> None:
                nonlocal count
                count += 1
                self.log(f"{name} {count}/{total}: {what}")

            yield line
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with RichProgress(*columns, console=self.console) as bar:
            task = bar.add_task(name, total=total)

            def advance(what: str) -> None:
                bar.update(task, advance=1, description=f"{name}: {what}")

            yield advance


def print_report(report: Report, console: Console) -> None:
    """The table at the end of an export: graphs, ops per layer, fusions, time, memory, files."""
    m = report.manifest
    table = Table(title=f"{m.name} -> {report.path}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    target = m.target.isa if m.target.kind == "cpu" else f"{m.target.soc}, CANN {m.target.cann}"
    table.add_row("target", f"{m.target.kind} ({target}), {m.dtype}, kv {m.kv_cache.dtype}")
    table.add_row("world", f"{_count(m.world.size, 'rank')}: tp {m.world.tp}, ep {m.world.ep}, dp {m.world.dp}")
    for phase in dict.fromkeys(g.phase for g in m.graphs):
        sizes = [g.bucket.tokens for g in m.graphs if g.phase == phase]
        kind = "any size up to" if m.graphs[0].dynamic else f"{_count(len(sizes), 'bucket')}:"
        table.add_row(f"{phase} graphs", f"{kind} {', '.join(map(str, sizes))} tokens")
    unique = {g.object for g in m.graphs}
    table.add_row(
        "stored",
        f"{_count(len(unique), 'graph')} for {_count(m.world.size, 'rank')}, {sum(m.objects.values()) / 1e6:.1f} MB",
    )
    layers = m.graphs[0].report.get("layers") or {}
    for kind, layer in layers.items():
        ops = ", ".join(f"{name} {n}" for name, n in layer.get("histogram", {}).items())
        kernels = f" ({layer['kernels']} kernels)" if "kernels" in layer else ""
        label = "ops per layer" if len(layers) == 1 else f"ops per layer ({kind})"
        table.add_row(label, f"{layer.get('nodes')}{kernels}: {ops}")
    table.add_row(
        f"fusions in {m.report.get('traced_layers')} traced layers",
        ", ".join(f"{k} {n}" for k, n in m.report.get("fusions", {}).items()),
    )
    table.add_row("kv cache", f"{m.kv_cache.bytes_per_block() / m.kv_cache.block_size:.0f} bytes per token and rank")
    if m.weights:
        table.add_row("weights", f"{sum(w.size for w in m.weights.values()) / 1e6:.0f} MB packed")
    seconds = ", ".join(f"{stage} {s:.1f}" for stage, s in report.seconds.items())
    table.add_row("time", f"{sum(report.seconds.values()):.1f} s ({seconds})")
    table.add_row("peak memory", f"{report.peak_bytes / 1e9:.2f} GB")
    table.add_row("fingerprint", m.fingerprint[:16])
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
