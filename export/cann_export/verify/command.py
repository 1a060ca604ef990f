"""`cann-export verify`: arguments in, a table (or JSON) out; exit code 1 where anything does not pass."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cann_runtime.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Run the ladder on an artifact and print what it gives."""
    parser = Parser(
        prog="cann-export verify",
        description="Prove an artifact on this CPU: linter, proof over ranks, and every rung against transformers in "
        "float64. Exit code 1 where something does not pass.",
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--checkpoint", help="weights to verify with (default: seeded ones)")
    parser.add_argument("--layers", help="only that many decoder layers, with seeded weights, for big models")
    parser.add_argument("--json", action="store_true", help="plain JSON on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    from cann_export.verify.ladder import verify
    from cann_runtime.artifact.store import Artifact
    from cann_runtime.errors import RecipeError

    if args.layers is not None and not args.layers.isdecimal():
        raise RecipeError(f"--layers: {args.layers!r} is not allowed; a whole number from 2")
    log = (lambda text: None) if args.quiet or args.json else (lambda text: print(text, file=sys.stderr))
    artifact = Artifact.open(args.artifact)
    checkpoint = None
    if args.checkpoint is not None:
        from cann_export.checkpoint import resolve_checkpoint

        checkpoint = resolve_checkpoint(args.checkpoint, log)
    report = verify(artifact, checkpoint, None if args.layers is None else int(args.layers), log)
    if args.json:
        print(json.dumps(as_dict(report), indent=1))
    else:
        show(report)
    return 0 if report.ok else 1


def verify_exported(path: Path, checkpoint: Path | None, progress: Any) -> int:
    """Verify what was just exported: on its checkpoint where the model fits in memory, else on two seeded layers."""
    from cann_export.verify.ladder import fits, verify
    from cann_runtime.artifact.store import Artifact

    artifact = Artifact.open(path)
    whole = fits(artifact)
    report = verify(artifact, checkpoint if whole else None, None if whole else 2, progress.log)
    show(report, progress.console)
    return 0 if report.ok else 1


def as_dict(report: Any) -> dict[str, Any]:
    """The report as plain JSON data."""
    return {
        "artifact": report.artifact,
        "ok": report.ok,
        "peak": report.peak,
        "notes": report.notes,
        "findings": [dataclasses.asdict(f) for f in report.findings],
        "proof": {"ok": report.proof.ok, "sources": report.proof.summary(), "problems": report.proof.problems},
        "rungs": [dataclasses.asdict(r) for r in report.rungs],
    }


def show(report: Any, console: Any = None) -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    errors = [f for f in report.findings if f.severity == "error"]
    console.print(f"linter: {'passes' if not errors else f'{len(errors)} errors'}", highlight=False)
    for finding in report.findings[:20]:
        console.print(f"  {finding}", highlight=False, markup=False)
    console.print(f"proof over ranks: {'passes' if report.proof.ok else 'FAILS'}", highlight=False)
    for how, count in report.proof.summary().items():
        console.print(f"  {count} tensors {how}", highlight=False)
    for problem in report.proof.problems[:20]:
        console.print(f"  {problem}", highlight=False, markup=False)
    table = Table("rung", "max error", "rms", "limit", "", "s")
    for rung in report.rungs:
        verdict = "" if rung.limit is None else "pass" if rung.ok else "FAIL"
        numbers = ["-" if x is None else f"{x:.2e}" for x in (rung.error, rung.rms, rung.limit)]
        table.add_row(rung.name, *numbers, verdict, f"{rung.seconds:.1f}")
    console.print(table)
    console.print(f"largest |logit| {report.peak:.3g}", highlight=False)
    for rung in report.rungs:
        if not rung.ok:
            console.print(f"{rung.name}: {rung.note}\n  first: {rung.where}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
