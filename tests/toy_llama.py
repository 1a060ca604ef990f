"""A tiny Llama for the engine's tests: transformers' own model, and an executor of its weights over a paged cache.

The executor is written by hand on the plain `atb` ops, with real block tables and slots, so that everything the engine
does to a batch (chunks, padding, block order, ranks) shows in the tokens; transformers' `generate` is what they are
compared with. Manifests of all layouts are made here too.

Shape letters: T tokens, S sequences, N heads, K kv heads, D head_dim, R logits rows, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import cann_runtime.ops.atb  # noqa: F401  (registers the ops)
from cann_export.package import ArtifactWriter
from cann_runtime.artifact.manifest import Bucket, Graph, KVCacheSpec, Manifest, StoredFile, Target, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.executor.base import StepInputs

VOCAB, PADDED_VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS, MAX_SEQ_LEN = 299, 304, 4, 2, 16, 2, 128
MAX_BATCH, BLOCK = 8, 4

atb = torch.ops.atb


def hf_model() -> Any:
    """transformers' LlamaForCausalLM with seeded weights, float32; sharp enough that greedy choices have no ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_SEQ_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def hf_greedy(model: Any, prompt: list[int], max_tokens: int, eos: list[int]) -> list[int]:
    """transformers' greedy continuation, the end token included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class ToyExecutor:
    """Runs the weights of `hf_model` on one of `tp` ranks; the names of collectives are those of compiled graphs."""

    def __init__(self, manifest: Manifest, state: dict[str, Tensor], *, rank: int = 0) -> None:
        self.manifest = manifest
        self.kv_spec = manifest.kv_cache
        self.tp = manifest.world.tp
        self.rank = rank
        self.state = state
        self.steps: list[tuple[Graph, StepInputs]] = []
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        freqs = torch.outer(torch.arange(MAX_SEQ_LEN).float(), inv_freq)
        self.cos, self.sin = (torch.cat((f, f), -1) for f in (freqs.cos(), freqs.sin()))

    def allocate_kv(self, num_blocks: int) -> None:
        spec = self.kv_spec
        # Not zeros: a key that nobody wrote must never be read.
        self.kv = torch.full((spec.layers, 2, num_blocks, spec.block_size, spec.kv_heads, spec.head_dim), 1e4)
        self.kv[:, :, : spec.scratch_blocks] = 0

    def _cut(self, name: str, dim: int) -> Tensor:
        return self.state[name].chunk(self.tp, dim)[self.rank]

    def _sum(self, x: Tensor) -> Tensor:
        if self.tp == 1:
            return x
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", "tp"))

    def _attention(self, q_TND: Tensor, step: StepInputs, layer: int) -> Tensor:
        k_cache, v_cache = self.kv[layer]
        query_lens, table = step.query_lens_S, step.block_table_SM
        if self.manifest.query_lens == "cumulative":
            return atb.paged_attention(q_TND, k_cache, v_cache, table, query_lens, step.kv_lens_S, HEAD_DIM**-0.5)
        # Rectangular: the rows of a sequence past its length are padding, and their output is poison.
        chunk = len(q_TND) // len(query_lens)
        rows = torch.cat([torch.arange(s * chunk, s * chunk + n) for s, n in enumerate(query_lens.tolist())])
        out = torch.full_like(q_TND, float("nan"))
        args = (k_cache, v_cache, table, query_lens.cumsum(0), step.kv_lens_S, HEAD_DIM**-0.5)
        out[rows] = atb.paged_attention(q_TND[rows], *args)
        return out

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        check_shapes(self.manifest, graph, step)
        self.steps.append((graph, step))
        x = self.state["model.embed_tokens.weight"][step.input_ids_T]
        cos_TD, sin_TD = self.cos[step.position_ids_T], self.sin[step.position_ids_T]
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            h = atb.rms_norm(x, self.state[p + "input_layernorm.weight"], 1e-6)
            q, k, v = (
                atb.linear(h, self._cut(f"{p}self_attn.{n}_proj.weight", 0)).unflatten(-1, (-1, HEAD_DIM))
                for n in "qkv"
            )
            q, k = atb.rotary(q, k, cos_TD, sin_TD)
            atb.reshape_and_cache(k, v, self.kv[i, 0], self.kv[i, 1], step.slot_mapping_T)
            out = self._attention(q, step, i).flatten(1)
            x = x + self._sum(atb.linear(out, self._cut(p + "self_attn.o_proj.weight", 1)))
            h = atb.rms_norm(x, self.state[p + "post_attention_layernorm.weight"], 1e-6)
            gate_up = [atb.linear(h, self._cut(f"{p}mlp.{n}_proj.weight", 0)) for n in ("gate", "up")]
            h = atb.swiglu(torch.cat(gate_up, -1))
            x = x + self._sum(atb.linear(h, self._cut(p + "mlp.down_proj.weight", 1)))
        x = atb.rms_norm(x[step.logits_rows_R], self.state["model.norm.weight"], 1e-6)
        logits_RV = atb.linear(x, self.state["lm_head.weight"])
        # Padding columns larger than any logit: choosing one would show.
        return torch.nn.functional.pad(logits_RV, (0, PADDED_VOCAB - VOCAB), value=1e9)


def check_shapes(manifest: Manifest, graph: Graph, step: StepInputs) -> None:
    """What every graph demands of its inputs."""
    T, S, R = len(step.input_ids_T), len(step.block_table_SM), len(step.logits_rows_R)
    b = graph.bucket
    sizes, limits = [T, S, R], [b.tokens, b.seqs, b.rows]
    if graph.dynamic:
        assert all(0 < size <= limit for size, limit in zip(sizes, limits))
    else:
        assert sizes == limits
    assert step.block_table_SM.shape == (S, b.max_blocks)
    assert step.block_table_SM.dtype == torch.int32
    assert step.slot_mapping_T.dtype == getattr(torch, manifest.slot_dtype)
    assert [len(t) for t in step.tensors()] == [T, T, T, S, S, S, R]
    assert all(t.dtype == torch.int64 for i, t in enumerate(step.tensors()) if i not in (2, 3))
    assert len(step.slot_mapping_T.unique()) == T, "the cache write forbids duplicate slots"
    if manifest.query_lens == "cumulative":
        assert int(step.query_lens_S[-1]) == T
        assert bool((step.query_lens_S.diff() >= 0).all())


def manifest(kind: str, *, tp: int = 1, max_batch_size: int = MAX_BATCH, eos: tuple[int, ...] = (2,)) -> Manifest:
    """A manifest of the toy: kind: dynamic (CPU), flat (static, mixed phases) or rectangular (static, phases apart)."""
    columns = MAX_SEQ_LEN // BLOCK
    wide = columns + 3  # prefill tables may have room for more padding than a sequence is long
    decode_sizes = [n for n in (1, 2, 4, 8) if n <= max_batch_size]

    def graph(phase: str, tokens: int, seqs: int, rows: int, query_len: int | None, dynamic: bool = False) -> Graph:
        max_blocks = wide if phase == "prefill" else columns
        bucket = Bucket(tokens=tokens, seqs=seqs, rows=rows, max_blocks=max_blocks, query_len=query_len)
        return Graph.model_validate(
            {
                "phase": phase,
                "bucket": bucket,
                "dynamic": dynamic,
                "ranks": list(range(tp)),
                "format": "aoti-so",
                "object": "0" * 64,
                "signature": "1" * 64,
            }
        )

    if kind == "dynamic":
        graphs = [graph("mixed", 32, max_batch_size, max_batch_size, None, dynamic=True)]
    elif kind == "flat":
        graphs = [graph("decode", n, n, n, None) for n in decode_sizes]
        graphs += [graph("prefill", t, max_batch_size + 1, max_batch_size, None) for t in (16, 32)]
    else:
        graphs = [graph("decode", n, n, n, 1) for n in decode_sizes]
        graphs += [graph("prefill", s * q, s, s, q) for s, q in ((1, 8), (2, 8), (1, 24))]
    return Manifest(
        name="toy",
        fingerprint="f" * 64,
        fingerprint_fields={},
        recipe={},
        architecture={},
        dtype="float32",
        toolchain={},
        target=Target(kind="cpu", isa="avx2"),
        world=World(size=tp, tp=tp),
        layout="rectangular" if kind == "rectangular" else "flat",
        mixed_phases=kind != "rectangular",
        query_lens="per_sequence" if kind == "rectangular" else "cumulative",
        slot_dtype="int64" if kind == "dynamic" else "int32",
        vocab_size=VOCAB,
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=max_batch_size,
        eos_token_ids=list(eos),
        graphs=graphs,
        kv_cache=KVCacheSpec(
            layout="per_layer",
            layers=LAYERS,
            kv_heads=KV_HEADS // tp,
            head_dim=HEAD_DIM,
            block_size=BLOCK,
            dtype="float32",
            scratch_blocks=8,
        ),
        weight_plan=StoredFile(sha256="2" * 64, size=0),
    )


def write_toy(folder: Path, kind: str = "dynamic", *, tp: int = 1, tokenizer: bool = True, **changes: Any) -> Path:
    """An artifact of the toy that the loader accepts; its graphs are empty files, and it holds no weights."""
    made = manifest(kind, tp=tp)
    with ArtifactWriter(folder, log=lambda line: None) as writer:
        sha, signature = writer.add_object(b"toy", "graph"), writer.add_json({"inputs": [], "outputs": []}, "signature")
        for graph in made.graphs:
            graph.object, graph.signature = sha, signature
        made.weight_plan = writer.add_weight_plan(WeightPlan(tp=tp, params={}))
        if tokenizer:
            made.tokenizer = writer.add_tokenizer(write_tokenizer(folder.with_name(f"{folder.name}-tokenizer")))
        writer.finish(made.model_copy(update=changes))
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCAB tokens, as of GPT-2, Qwen2 and SmolLM2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "The capital of France is Paris and the user asks for more. Every assistant answers in whole sentences. "
    backend.train_from_iterator([text * 20], trainer)
    assert backend.get_vocab_size() == VOCAB
    return backend


def write_tokenizer(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a folder, by name; the end token is 2."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return {path.name: path for path in sorted(folder.iterdir())}


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
