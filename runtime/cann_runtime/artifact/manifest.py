"""Schema of an artifact's `manifest.json`, and of the graph signatures it points to.

This is the one contract between `cann-export` and `cann-run`: plain data, validated on both sides. Reading and writing
files is in `store.py`; weights are in `weights.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

Phase = Literal["decode", "prefill", "mixed"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class World(_Strict):
    """Ranks of the artifact: `size = nnodes x ranks per node`; tp and ep divide it."""

    size: int = 1
    tp: int = 1
    ep: int = 1
    nnodes: int = 1

    @property
    def dp(self) -> int:
        """Number of attention groups that own different requests."""
        return self.size // self.tp


class Target(_Strict):
    """What the graphs were compiled for.

    kind 'cpu': `isa` is one of cann_runtime.executor.isa.ISAS. kind 'ascend': `family` is ascend910b, ascend910_93 or
    ascend950, `soc` the full SoC name that the converter was pinned to, `cann` the CANN version that it was pinned to.
    """

    kind: Literal["cpu", "ascend"]
    isa: str | None = None
    family: str | None = None
    soc: str | None = None
    cann: str | None = None


class Bucket(_Strict):
    """Sizes of one step graph; on a dynamic (CPU) graph they are the largest values allowed.

    tokens T, seqs S, rows R (logits rows), max_blocks (columns of the block table). `query_len` Q is set only for
    rectangular layouts, where T = S * Q.
    """

    tokens: int
    seqs: int
    rows: int
    max_blocks: int
    query_len: int | None = None


class TensorRef(_Strict):
    """One input or output of a graph. A dimension of -1 is bound at load (KV blocks) or dynamic.

    On the CPU, `source` names the plan parameter that a constant is made from, and `packed` says that it is that
    parameter's packed form (cann_runtime.ops.cpu.pack_linear); `name` is unique among the graph's inputs.
    """

    name: str
    kind: Literal["param", "input", "kv", "output"]
    dtype: str  # torch name: "bfloat16", "int64" ...
    shape: list[int]
    source: str | None = None
    packed: bool = False


class Signature(_Strict):
    """Inputs and outputs of a graph in the order in which the executor passes them.

    `aliases` maps an input's index to what it is written by in place (always the KV caches). `options` are compile and
    run options of the executor (GE options on Ascend).
    """

    inputs: list[TensorRef]
    outputs: list[TensorRef]
    in_place: list[int] = []
    options: dict[str, str] = {}


class Graph(_Strict):
    """One compiled graph: `object` is the sha256 of its file in objects/, `signature` of its Signature's JSON.

    `onnx` is that of the same graph as an ONNX model, where asked for at export; the runtime does not read it.
    """

    phase: Phase
    bucket: Bucket
    dynamic: bool = False
    ranks: list[int]
    format: Literal["ge-modeldef", "aoti-so"]
    object: str
    signature: str
    onnx: str | None = None
    report: dict[str, Any] = {}


class KVCacheSpec(_Strict):
    """How the paged KV cache is laid out on one rank.

    per_layer: two tensors a layer (names k_cache_{i}, v_cache_{i}), each [blocks, block_size, kv_heads, head_dim].
    stacked: one tensor for all layers (name kv_cache), [layers, 2, blocks, kv_heads, block_size, head_dim].
    The first `scratch_blocks` blocks are reserved for padding rows and are never given to a request.
    """

    layout: Literal["per_layer", "stacked"]
    layers: int
    kv_heads: int  # on one rank
    head_dim: int
    block_size: int
    dtype: str
    scratch_blocks: int

    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values, on one rank."""
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * itemsize


class StoredFile(_Strict):
    """A file of the artifact by its content."""

    sha256: str
    size: int


class Manifest(_Strict):
    """The whole artifact in one document; every other file is reached from here by its sha256."""

    schema_version: int = SCHEMA_VERSION
    name: str
    fingerprint: str
    fingerprint_fields: dict[str, Any]  # what was hashed, so that `why` can name the field that differs
    recipe: dict[str, Any]
    architecture: dict[str, Any]  # the model's config.json
    dtype: str
    toolchain: dict[str, str]  # package -> version
    target: Target
    world: World
    layout: Literal["flat", "rectangular"]
    mixed_phases: bool  # may one step hold prefill chunks and decodes together
    query_lens: Literal["cumulative", "per_sequence"]
    slot_dtype: Literal["int32", "int64"] = "int32"
    vocab_size: int  # real one: logits columns past it are padding
    max_seq_len: int
    max_batch_size: int
    max_num_blocks: int | None = None  # asked for in the recipe; None: from the memory budget at load
    eos_token_ids: list[int] = []
    graphs: list[Graph]
    kv_cache: KVCacheSpec
    weight_plan: StoredFile
    constants: StoredFile | None = None  # safetensors of small tables that the plan names (inverse frequencies ...)
    libraries: list[StoredFile] = []  # CPU kernel libraries (compiled), loaded before the graphs
    tokenizer: dict[str, StoredFile] = {}  # file name under tokenizer/ -> content
    weights: dict[str, StoredFile] = {}  # tp rank -> packed safetensors under weights/, only with --pack-weights
    objects: dict[str, int] = {}  # sha256 -> size of every file in objects/
    report: dict[str, Any] = {}
