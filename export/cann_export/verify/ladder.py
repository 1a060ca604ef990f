"""Runs the rungs: transformers -> traced -> sharded -> fused -> GE graph (or CPU package), all on the same steps.

In float32 a rung passes within 2e-5 of the largest |logit| of transformers in float64; with the device's roundings it
passes where its error (root mean square over all logits) is at most 1.5 times that of transformers' own eager mode in
the model's dtype. Before the rungs, the linter and the proof over ranks look at every graph.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cann_export.lint import Facts, Finding, lint
from cann_export.lint_types import read_graph
from cann_export.proof import Proof, prove_plan, prove_ranks, prove_sums
from cann_export.verify import blame
from cann_export.verify.cut import Layers, cut_layers, cut_plan, cut_vocab, vocab_rows
from cann_export.verify.ge import GeGraph, GeRanks
from cann_export.verify.graphs import FxRanks, make_program
from cann_export.verify.hf import EagerModel
from cann_export.verify.steps import Script, make_script
from cann_export.verify.weights import RoundedReader, SeededReader
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Manifest
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.store import Artifact
from cann_runtime.artifact.weights import check_plan, resolve_names
from cann_runtime.errors import ArtifactError, CannError
from cann_runtime.loader import free_host_memory

TOLERANCE = 2e-5
EAGER_FACTOR = 1.5
_RESIDENT = 2 << 30  # bytes of float32 weights up to which every rung is run
_CUT_VOCAB = 256  # rows that a rank keeps of a vocabulary that is cut
_STEP_TOKENS = 300
_FEW_LAYERS = 2
_WORKING = 1.5  # memory that the rungs take, in sizes of the float32 weights

Log = Callable[[str], None]


@dataclass
class Rung:
    """One line of the table. error: largest (max) or root mean square (rms) difference from float64, beside the limit;
    limit None: a reference, nothing to pass. where: the first node that differs."""

    name: str
    error: float | None
    rms: float | None
    limit: float | None
    ok: bool
    seconds: float
    note: str = ""
    where: str = ""


@dataclass
class Report:
    """What was verified: findings, the proof, the rungs. peak: largest |logit| of the reference."""

    artifact: str
    findings: list[Finding] = field(default_factory=list)
    proof: Proof = field(default_factory=Proof)
    rungs: list[Rung] = field(default_factory=list)
    peak: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Everything that ran passed."""
        return self.proof.ok and all(f.severity != "error" for f in self.findings) and all(r.ok for r in self.rungs)


@dataclass
class Subject:
    """What the rungs run: an artifact's graphs, plan and sizes, whole or cut. `graphs` by Graph.object."""

    manifest: Manifest
    config: dict[str, Any]
    vocab: int
    plan: WeightPlan
    constants: dict[str, Tensor]
    graphs: dict[str, GeGraph]


def load_subject(artifact: Artifact) -> Subject:
    """The whole of an artifact, its GE graphs read."""
    m = artifact.manifest
    graphs = {}
    for graph in m.graphs:
        if graph.format == "ge-modeldef" and graph.object not in graphs:
            read = read_graph(artifact.object_path(graph.object).read_bytes())
            graphs[graph.object] = GeGraph(read, artifact.signature(graph.signature))
    return Subject(m, m.architecture, m.vocab_size, artifact.plan(), artifact.constants(), graphs)


def check_graphs(subject: Subject) -> tuple[list[Finding], Proof]:
    """The linter on every graph and the proof over ranks: all that needs no numbers."""
    m = subject.manifest
    findings: list[Finding] = []
    heads = subject.config.get("num_key_value_heads") or subject.config.get("num_attention_heads")
    proof = prove_plan(subject.plan, heads)
    by_bucket: dict[tuple[str, int, int], dict[int, GeGraph]] = {}
    for graph in m.graphs:
        made = subject.graphs.get(graph.object)
        if made is None:
            continue
        facts = Facts(str(m.target.family), graph.phase, graph.bucket, m.world, m.kv_cache, m.dtype, subject.config)
        findings.extend(lint(made.graph, made.signature, facts))
        try:
            proof.problems.extend(prove_sums(made.graph, made.signature, subject.plan))
        except CannError as error:
            proof.problems.append(str(error))
        ranks = by_bucket.setdefault((graph.phase, graph.bucket.tokens, graph.bucket.seqs), {})
        ranks.update(dict.fromkeys(graph.ranks, made))
    for (phase, tokens, _), ranks in by_bucket.items():
        missing = sorted(set(range(m.world.size)) - set(ranks))
        if missing:
            proof.problems.append(f"{phase} {tokens}: rank {missing[0]} has no graph")
        problems = prove_ranks({rank: made.graph for rank, made in ranks.items()})
        proof.problems.extend(f"{phase} {tokens}: {problem}" for problem in problems)
    flat = m.layout == "flat"
    if (m.query_lens == "cumulative") != flat:
        proof.problems.append(f"manifest: query_lens is {m.query_lens}, layout {m.layout}: cumulative goes with flat")
    return findings, proof


def cut_subject(subject: Subject, count: int, report: Report) -> Subject:
    """The subject with `count` layers, and a short vocabulary where the whole is large; says so in the report."""
    m = subject.manifest
    total = m.kv_cache.layers
    if not 2 <= count < total:
        if count != total:
            raise ArtifactError(f"--layers {count}: the artifact has {total}; allowed: 2 to {total}")
        return subject
    layers = Layers.of(total, count)
    report.notes.append(f"layers {', '.join(map(str, layers.kept))} of {total}")
    rows = vocab_rows(subject.plan, subject.vocab)
    vocab = _CUT_VOCAB * subject.plan.tp
    if rows is None or rows <= _CUT_VOCAB:
        vocab = subject.vocab
    else:
        report.notes.append(f"vocabulary cut from {subject.vocab} to {vocab}")
    cut = vocab if vocab != subject.vocab else None
    graphs = {}
    for key, made in subject.graphs.items():
        graph, signature = made.graph, made.signature
        if cut is not None:
            graph, signature = cut_vocab(graph, signature, subject.plan, subject.vocab, vocab)
        graphs[key] = GeGraph(*cut_layers(graph, signature, layers))
    config = subject.config | {"num_hidden_layers": count, "vocab_size": vocab}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            config[key] = [config[key][i] for i in layers.kept]
    plan = cut_plan(subject.plan, layers, cut, subject.vocab)
    kv = m.kv_cache.model_copy(update={"layers": count})
    manifest = m.model_copy(update={"kv_cache": kv, "vocab_size": vocab})
    return Subject(manifest, config, vocab, plan, subject.constants, graphs)


@dataclass
class Ladder:
    """The rungs of one subject. reader: its weights."""

    subject: Subject
    reader: CheckpointReader
    report: Report
    log: Log
    script: Script = field(init=False)
    want: list[Tensor] = field(init=False)  # per step, float64 logits [rows, vocab]
    eager_rms: float = 0.0

    def __post_init__(self) -> None:
        m = self.subject.manifest
        self.script = make_script(m, self.subject.vocab, _STEP_TOKENS)
        self.names = resolve_names(self.subject.plan, self.reader)
        if self.script.skipped:
            sizes = ", ".join(f"{g.phase} {g.bucket.tokens}" for g in self.script.skipped)
            self.report.notes.append(f"checked by linter and proof only: {sizes}")

    def reference(self, *, rounded: bool = True) -> None:
        """transformers in float64, and in float32 beside it; where `rounded` also in the model's dtype."""
        dtype = getattr(torch, self.subject.manifest.dtype)
        kinds = [torch.float64, torch.float32] + ([dtype] if rounded and dtype != torch.float32 else [])
        for kind in kinds:
            start = time.perf_counter()
            logits = self._eager(kind)
            if kind == torch.float64:
                self.want = logits
                self.report.peak = max(float(x.abs().max()) for x in logits)
                error, rms = None, None
            else:
                error, rms = self.distance(logits)
                self.eager_rms = rms
            name = f"transformers eager, {str(kind).removeprefix('torch.')}"
            self.report.rungs.append(Rung(name, error, rms, None, True, time.perf_counter() - start))
            self.log(f"{name}: done")

    def _eager(self, dtype: torch.dtype) -> list[Tensor]:
        model = self.eager_model(dtype)
        found: dict[tuple[int, int], Tensor] = {}
        for i, text in enumerate(self.script.texts):
            positions = sorted({p for step in self.script.steps for s, p in step.wanted if s == i})
            for position, row in zip(positions, model.logits(text, positions)):
                found[i, position] = row
        return [torch.stack([found[place] for place in step.wanted]) for step in self.script.steps]

    def eager_model(self, dtype: torch.dtype) -> EagerModel:
        """transformers' model with the subject's weights."""
        return EagerModel(self.subject.config, self.reader, self.names, dtype)

    def distance(self, logits: list[Tensor]) -> tuple[float, float]:
        """(largest, root mean square) difference of logits per step from float64; NaN counts as infinite."""
        differences = [(got[:, : self.subject.vocab].double() - want) for got, want in zip(logits, self.want)]
        flat = torch.cat([torch.where(d.isnan(), torch.inf, d).flatten() for d in differences])
        return float(flat.abs().max()), float(flat.square().mean().sqrt())

    def rung(
        self, name: str, run: Callable[[], list[Tensor]], where: Callable[[], object], *, rounded: bool = False
    ) -> None:
        """Run one rung and add its line; on failure `where` says which node."""
        start = time.perf_counter()
        error = rms = None
        note = ""
        limit = EAGER_FACTOR * self.eager_rms if rounded else TOLERANCE * self.report.peak
        try:
            error, rms = self.distance(run())
            ok = (rms if rounded else error) <= limit
            note = "rms against 1.5 x eager's" if rounded else ""
        except CannError as failure:
            ok, note = False, str(failure)
        place = ""
        if not ok:
            try:
                place = str(where() or "no single node is off by more than the rounding of float32")
            except CannError as failure:
                place = str(failure)
        seconds = time.perf_counter() - start
        self.report.rungs.append(Rung(name, error, rms, limit, ok, seconds, note, place))
        self.log(f"{name}: {'passes' if ok else 'FAILS'}")
        gc.collect()

    def fx(self, tp: int, *, fused: bool) -> FxRanks:
        """The step graph before lowering, on tp ranks."""
        m = self.subject.manifest
        size = m.kv_cache.block_size
        program, plan, constants, (heads, dim) = make_program(self.subject.config, m.max_seq_len, size, tp, fused=fused)
        return FxRanks(program, plan, self.reader, constants, [self.script.blocks, size, heads, dim])

    def traces(self) -> FxRanks | None:
        """The rungs before lowering; gives the fused graph, or None where they were left out."""
        tp = self.subject.manifest.world.tp
        kinds: list[tuple[str, int, bool]] = [("traced", 1, False)] + ([("sharded", tp, False)] if tp > 1 else [])
        ranks: FxRanks | None = None
        for name, size, fused in [*kinds, ("fused", tp, True)]:
            ranks = None  # its weights go before the next one's come
            ranks = made = self.fx(size, fused=fused)
            self.rung(
                f"{name}{f' (tp {size})' if size > 1 else ''}",
                lambda made=made: [made.run(step) for step in self.script.steps],  # type: ignore[misc]
                lambda made=made: blame.in_trace(made, self.script, self.eager_model(torch.float64)),  # type: ignore[misc]
            )
        return ranks

    def ge(self, precision: str, fused: FxRanks | None) -> None:
        """The GE graphs on all ranks; in mode exact also their caches against the fused graph's."""
        m, s = self.subject.manifest, self.subject
        made = GeRanks(
            s.graphs, m.world, m.target.family, s.plan, self.reader, s.constants, self.script.blocks, precision
        )

        def run() -> list[Tensor]:
            logits = [made.run(step) for step in self.script.steps]
            if fused is not None and precision == "exact":
                self._compare_caches(made, fused)
            return logits

        def where() -> object:
            if precision != "exact":
                return "the same graphs pass in exact mode: rounding"
            return blame.in_graph(made, fused or self.fx(m.world.tp, fused=True), self.script)

        mode = "exact" if precision == "exact" else f"{m.target.family}'s roundings"
        self.rung(f"GE graphs, {m.world.size} ranks, {mode}", run, where, rounded=precision != "exact")

    def _compare_caches(self, ge: GeRanks, fused: FxRanks) -> None:
        slots = self.script.slots()
        for rank, caches in enumerate(ge.kv):
            for name in caches:
                got, want = (c[name].flatten(0, 1)[slots] for c in (ge.kv[rank], fused.kv[rank % fused.tp]))
                error, peak = float((got - want).abs().max()), float(want.abs().max())
                if not error <= TOLERANCE * max(peak, 1.0):
                    raise ArtifactError(
                        f"rank {rank}: {name} differs from the fused graph's by {error:.3g} of {peak:.3g}"
                    )


def weight_bytes(plan: WeightPlan) -> int:
    """Bytes of all ranks' parameters in float32."""
    return 4 * plan.tp * sum(torch.Size(param.shape).numel() for param in plan.params.values())


def fits(artifact: Artifact) -> bool:
    """Can every rung of the whole model be run here?"""
    return weight_bytes(artifact.plan()) <= _RESIDENT


def verify(artifact: Artifact, checkpoint_path: Any, layers: int | None, log: Log) -> Report:
    """Prove an artifact: see the module's text. Raises CannError where it cannot be tried at all.

    checkpoint_path: a checkpoint folder, or None for seeded weights. layers: that many of the model's; None: all.
    """
    report = Report(str(artifact.path))
    subject = load_subject(artifact)
    if artifact.manifest.target.kind == "cpu" and layers is not None:
        raise ArtifactError("--layers: a compiled CPU package cannot be cut; verify it without --layers")
    if layers is None and weight_bytes(subject.plan) * _WORKING > free_host_memory(1):
        if artifact.manifest.target.kind == "cpu":
            raise ArtifactError(f"{artifact.path} is too big to be verified in this host's memory")
        layers = _FEW_LAYERS
        report.notes.append(f"the whole model is too big for this host's memory: as with --layers {layers}")
    report.findings, report.proof = check_graphs(subject)
    log("linter and proof: done")
    if layers is not None:
        subject = cut_subject(subject, layers, report)
    dtype = getattr(torch, subject.manifest.dtype)
    reader: CheckpointReader
    if checkpoint_path is not None and layers is None:
        reader = RoundedReader(checkpoint_path, dtype)
        check_plan(subject.plan, reader)
    else:
        reader = SeededReader(subject.plan, dtype)
        report.notes.append("seeded weights")
    ladder = Ladder(subject, reader, report, log)
    whole = weight_bytes(subject.plan) <= _RESIDENT
    ladder.reference(rounded=whole)
    fused = None
    if whole:
        fused = ladder.traces()
    else:
        report.notes.append("too big for every rung: transformers -> GE graphs only")
    if subject.manifest.target.kind == "ascend":
        ladder.ge("exact", fused)
        if whole:
            ladder.ge("npu", None)
    else:
        from cann_export.verify.cpu import cpu_rung

        cpu_rung(ladder, artifact, checkpoint_path)
    return report
