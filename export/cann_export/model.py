"""The Hugging Face model on the meta device, hooked through the library's own extension points.

No weights and no copies of modeling code: the attention function and the cache are ours (registered by name and passed
in), and the rotary module is replaced by a lookup in a table that the runtime computes from the same frequencies.
Cutting the model over ranks is in `shard.py`; tracing it is in `trace.py`.

Shape letters: T tokens, N query heads, K kv heads, D head_dim, B blocks, P block_size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import cann_runtime.ops.atb  # noqa: F401  (registers the ops that the hooks call)
from cann_runtime.errors import RecipeError, UnsupportedModelError

ATTENTION_NAME = "cann_paged"
TRACED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class StepContext:
    """Step inputs and caches that the hooks need while the model's forward runs (see program.STEP_INPUTS)."""

    slot_mapping_T: Tensor
    block_table_SM: Tensor
    query_lens_S: Tensor
    kv_lens_S: Tensor
    kv: list[Tensor]  # k_cache_0, v_cache_0, k_cache_1 ...


@dataclass
class RopeTable:
    """What the runtime needs to make cos and sin: inverse frequencies float32 [D / 2] and their scaling."""

    inv_freq: Tensor
    scaling: float


@dataclass
class BuiltModel:
    """A model on the meta device with its hooks in place.

    config_dict: the config with which it was built. ropes: rope table by the name of its parameters' prefix.
    layer_prefix: module path of the list of decoder layers.
    """

    model: nn.Module
    config: Any
    config_dict: dict[str, Any]
    dtype: torch.dtype
    layer_prefix: str
    ropes: dict[str, RopeTable] = field(default_factory=dict)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.model.get_submodule(self.layer_prefix)
        assert isinstance(layers, nn.ModuleList)
        return layers


def make_config(config_dict: dict[str, Any], num_layers: int | None = None) -> Any:
    """The transformers config object of a config.json, optionally cut to its first `num_layers` layers.

    Raises UnsupportedModelError for a model type that this transformers does not know.
    """
    from transformers import CONFIG_MAPPING

    values = copy.deepcopy(config_dict)
    for key in ("dtype", "torch_dtype", "transformers_version", "auto_map", "_name_or_path"):
        values.pop(key, None)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        known = "llama, mistral, qwen2, qwen3"
        raise UnsupportedModelError(f"model_type {model_type!r} is not known to transformers; try one such as {known}")
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
        for key in ("layer_types", "mlp_layer_types"):
            if isinstance(values.get(key), list):
                values[key] = values[key][:num_layers]
        if "max_window_layers" in values:
            values["max_window_layers"] = min(values["max_window_layers"], num_layers)
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:
        raise RecipeError(f"model: config of type {model_type!r} is refused: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def causal_lm_class(config: Any) -> type[nn.Module]:
    """The causal language model class of a config. Raises UnsupportedModelError where there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"model_type {config.model_type!r} has no causal language model in transformers")
    cls: type[nn.Module] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return cls


def build_model(config_dict: dict[str, Any], dtype: str, max_seq_len: int, num_layers: int | None = None) -> BuiltModel:
    """Make the model on the meta device in `dtype`, with paged attention, paged cache and rope tables hooked in.

    Raises UnsupportedModelError that lists every piece we cannot export (sliding windows shorter than max_seq_len,
    logit soft-caps in attention, rope types that depend on the sequence's length, experts).
    """
    register_attention()
    config = make_config(config_dict, num_layers)
    cls = causal_lm_class(config)
    config._attn_implementation = ATTENTION_NAME
    # What the step graph gives is ours to say, whatever the checkpoint's config was saved with.
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    try:
        with torch.device("meta"):
            model = cls(config)
    except Exception as error:  # a class may fail in its own way on a config that lacks what it needs
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise UnsupportedModelError(f"{cls.__name__} cannot be made from this config ({what})") from error
    model = model.to(DTYPES[dtype]).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # only training looks at it, but a trace would record it
    prefix = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.endswith("layers")), None)
    if prefix is None:
        raise UnsupportedModelError(f"{cls.__name__}: no list of decoder layers named 'layers'")
    built = BuiltModel(model, config, config_dict, DTYPES[dtype], prefix)
    problems = _problems(built, max_seq_len)
    if problems:
        raise UnsupportedModelError(f"{cls.__name__}: {'; '.join(problems)}")
    _swap_rotary(built, max_seq_len)
    return built


def _problems(built: BuiltModel, max_seq_len: int) -> list[str]:
    problems = []
    config = built.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if window is not None and window < max_seq_len and ("sliding_attention" in kinds or not kinds):
        problems.append(
            f"sliding_window {window} is shorter than max_seq_len {max_seq_len}, and sliding attention cannot be "
            f"exported: set max_seq_len to at most {window}"
        )
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        problems.append(f"layer types {', '.join(other)} cannot be exported")
    for key in ("attn_logit_softcapping", "attention_sink_bias"):
        if getattr(config, key, None):
            problems.append(f"config key {key} cannot be exported")
    for i, layer in enumerate(built.layers):
        if not any(hasattr(m, "num_key_value_groups") for m in layer.modules()):
            problems.append(f"layer {i} has no attention of a known form ({type(layer).__name__})")
            break
        if any(p.dim() == 3 for p in layer.parameters()):
            problems.append(f"layer {i} has stacked expert weights (mixture of experts), which cannot be exported")
            break
    return problems


class PagedCache:
    """Stands where transformers expects a Cache: `update` writes the step's keys and values into the paged caches."""

    layers: tuple[()] = ()
    is_compileable = False
    is_sliding = (False,)

    def __init__(self, step: StepContext) -> None:
        self.step = step

    def update(self, key_1KTD: Tensor, value_1KTD: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] of one layer; they are given back untouched."""
        torch.ops.atb.reshape_and_cache(
            key_1KTD.transpose(1, 2)[0],
            value_1KTD.transpose(1, 2)[0],
            self.step.kv[2 * layer_idx],
            self.step.kv[2 * layer_idx + 1],
            self.step.slot_mapping_T,
        )
        return key_1KTD, value_1KTD

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions come from the step's own position_ids."""
        return 0


def paged_attention(
    module: nn.Module,
    query_1NTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: attention of the step over the layer's paged cache, [1, T, N, D]."""
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand its keyword arguments to the attention function"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query_1NTD.shape[-1] ** -0.5
    out_TND = torch.ops.atb.paged_attention(
        query_1NTD.transpose(1, 2)[0],
        step.kv[2 * layer],
        step.kv[2 * layer + 1],
        step.block_table_SM,
        step.query_lens_S,
        step.kv_lens_S,
        scale,
    )
    return out_TND.unsqueeze(0), None


def register_attention() -> None:
    """Make the paged attention known to transformers under ATTENTION_NAME (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


class TableRotary(nn.Module):
    """Rows of the cos and sin tables [positions, D], in place of computing them in the graph."""

    def __init__(self, positions: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cos = nn.Parameter(torch.empty(positions, dim, dtype=dtype, device="meta"), requires_grad=False)
        self.sin = nn.Parameter(torch.empty(positions, dim, dtype=dtype, device="meta"), requires_grad=False)

    def forward(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [1, T, D]."""
        return nn.functional.embedding(position_ids, self.cos), nn.functional.embedding(position_ids, self.sin)


def _swap_rotary(built: BuiltModel, max_seq_len: int) -> None:
    """Replace each rotary module by a table, after checking that the table gives transformers' own numbers."""
    found = [(n, m) for n, m in built.model.named_modules() if hasattr(m, "inv_freq") and hasattr(m, "rope_type")]
    if not found:
        raise UnsupportedModelError(f"{type(built.model).__name__}: no rotary embedding of a known form")
    for name, module in found:
        rope_type = module.rope_type
        if rope_type not in TRACED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} depends on the sequence's length and cannot be exported; known: "
                f"{', '.join(TRACED_ROPE_TYPES)}"
            )
        try:
            with torch.device("cpu"):
                real = type(module)(built.config)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise UnsupportedModelError(f"{type(module).__name__}: it cannot be made from this config alone") from error
        inv_freq = real.inv_freq.detach().float().clone()
        scaling = float(real.attention_scaling)
        positions = torch.tensor([[0, 1, max_seq_len // 2, max_seq_len - 1]])
        angles = positions[..., None].float() * inv_freq
        table = torch.cat((angles, angles), dim=-1)
        cos, sin = real(torch.zeros(1, dtype=torch.float32), positions)
        if cos.shape != table.shape or not (
            torch.equal(cos, table.cos() * scaling) and torch.equal(sin, table.sin() * scaling)
        ):
            raise UnsupportedModelError(f"{type(module).__name__}: its cos and sin are not those of a plain table")
        prefix, _, leaf = name.rpartition(".")
        parent = built.model.get_submodule(prefix)
        setattr(parent, leaf, TableRotary(max_seq_len, 2 * inv_freq.shape[0], built.dtype))
        built.ropes[name] = RopeTable(inv_freq, scaling)


class Step(nn.Module):
    """The step graph: the model's own forward on the flat tokens of one step; gives logits [R, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_lens: Tensor,
        kv_lens: Tensor,
        logits_rows: Tensor,
        kv: list[Tensor],
    ) -> Tensor:
        """Inputs as in program.STEP_INPUTS, then the caches [B, P, K, D] of every layer."""
        step = StepContext(slot_mapping, block_table, query_lens, kv_lens, kv)
        out = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention_mask=None,
            cache=PagedCache(step),
            use_cache=True,
            logits_to_keep=logits_rows,
            step=step,
        )
        logits: Tensor = out.logits
        return logits[0]
