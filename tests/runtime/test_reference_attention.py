"""Fused attention, rotary, norm and cache ops of the reference executor against torch's and transformers' own modules.

Graphs come from TorchAir's converters of the torch_npu ops. In mode exact64 nothing but the formula counts: 1e-9.
Letters: T tokens, S sequences, N heads, G key heads, D head size, B blocks, P rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ge_convert import convert
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_op import run_op
from torch import Tensor
from torch.nn import functional as F

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.errors import ArtifactError

BF16 = torch.bfloat16
P = 128


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def exact(function: Callable[..., Any], arguments: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """The graph's results in float64, of arguments that the graph may write (it writes float64 copies)."""
    return convert(function, arguments, **options).run(arguments, "exact64")


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def fused_attention(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    import torchair

    result: tuple[Tensor, Tensor] = torchair.ops.npu_fused_infer_attention_score(*tensors, **options)
    return result


def sdpa(q_QND: Tensor, k_KGD: Tensor, v_KGD: Tensor, scale: float, allowed: Tensor | None = None) -> Tensor:
    """torch's own attention of one sequence, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q_QND, k_KGD, v_KGD))
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale, enable_gqa=True).transpose(0, 1)


def lower_right(queries: int, keys: int) -> Tensor:
    """True where a query of a sequence's last rows may see a key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """A sequence's rows of a paged cache [B, P, ...]."""
    return torch.stack([cache[int(table[i // P]), i % P] for i in range(length)])


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


# Norms and rotary ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 96])
def test_rms_norm(width: int) -> None:
    x, gamma = randn(5, width), randn(width, seed=1)
    (got,) = exact(lambda x, g: (torch.ops.npu.npu_rms_norm(x, g, 1e-5)[0],), [x, gamma])
    close(got, F.rms_norm(x.double(), (width,), gamma.double(), 1e-5))
    (rounded,) = convert(lambda x, g: (torch.ops.npu.npu_rms_norm(x, g, 1e-5)[0],), [x, gamma]).run([x, gamma])
    assert torch.equal(rounded, F.rms_norm(x.float(), (width,), gamma.float(), 1e-5).to(BF16))


def test_add_rms_norm_rounds_as_each_family_does() -> None:
    x1, x2, gamma = randn(64, 96), randn(64, 96, seed=1), randn(96, seed=2)
    function = lambda a, b, g: torch.ops.npu.npu_add_rms_norm(a, b, g, 1e-6)[::2]  # noqa: E731
    y, x = exact(function, [x1, x2, gamma])
    close(x, x1.double() + x2.double())
    close(y, F.rms_norm(x, (96,), gamma.double(), 1e-6))
    total = x1.float() + x2.float()
    older, x_older = convert(function, [x1, x2, gamma]).run([x1, x2, gamma])
    normed = F.rms_norm(total.to(BF16).float(), (96,), None, 1e-6).to(BF16)
    assert torch.equal(older, (normed.float() * gamma.float()).to(BF16))
    assert torch.equal(x_older, total.to(BF16))
    newer, _ = convert(function, [x1, x2, gamma], family="ascend950").run([x1, x2, gamma], "npu", "ascend950")
    assert torch.equal(newer, F.rms_norm(total, (96,), gamma.float(), 1e-6).to(BF16))
    assert not torch.equal(older, newer)


def test_group_norm_silu() -> None:
    x, weight, bias = randn(2, 32, 30), randn(32, seed=1), randn(32, seed=2)
    (got,) = exact(lambda x, w, b: (torch.ops.npu.npu_group_norm_silu(x, w, b, 4, 1e-6)[0],), [x, weight, bias])
    close(got, F.silu(F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-6)))


def test_swiglu_gates_with_the_first_half() -> None:
    x = randn(5, 12)
    (got,) = exact(lambda x: (torch.ops.npu.npu_swiglu(x),), [x])
    close(got, F.silu(x.double()[:, :6]) * x.double()[:, 6:])


def rope_tables(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    table = torch.cat((angles, angles), -1)
    return table.cos().to(BF16), table.sin().to(BF16)


def test_rotary_ops_equal_transformers() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = randn(6, 4, 64), randn(6, 2, 64, seed=1)
    cos, sin = rope_tables(6, 64)
    as_hf = [x.double().transpose(0, 1)[None] for x in (q, k)]
    want = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*as_hf, cos.double()[None], sin.double()[None])]
    both = convert(
        lambda q, k, c, s: torch.ops.npu.npu_apply_rotary_pos_emb(q, k, c[:, None], s[:, None], "TND"), [q, k, cos, sin]
    ).run([q, k, cos, sin], "exact64")
    for got, wanted in zip(both, want, strict=True):
        close(got, wanted)
    (single,) = exact(
        lambda q, c, s: (torch.ops.npu.npu_rotary_mul(q[None], c[None, :, None], s[None, :, None]),), [q, cos, sin]
    )
    close(single[0], want[0])
    (interleaved,) = exact(
        lambda q, c, s: (torch.ops.npu.npu_interleave_rope(q, c, s),),
        [q.transpose(0, 1)[None], cos[None, None], sin[None, None]],
    )
    want_interleaved, _ = apply_rotary_pos_emb_interleave(as_hf[0], as_hf[1], cos.double()[None], sin.double()[None])
    close(interleaved, want_interleaved)


# Caches -------------------------------------------------------------------------------------------------------------


def test_rows_are_written_into_their_slots_in_place() -> None:
    key, value = randn(5, 2, 32), randn(5, 2, 16, seed=1)
    slots = torch.tensor([3, -1, 130, 0, 255], dtype=torch.int32)
    caches = [randn(2, P, 2, 32, seed=2), randn(2, P, 2, 16, seed=3)]

    def step(k: Tensor, v: Tensor, slots: Tensor, kc: Tensor, vc: Tensor) -> tuple[Tensor]:
        kn, vn = torch.ops.npu.npu_scatter_pa_kv_cache_functional(k, v, kc, vc, slots, cache_mode="Norm")
        torch.ops.aten.copy_(kc, kn)
        torch.ops.aten.copy_(vc, vn)
        return (kn.sum() + vn.sum(),)

    graph = convert(step, [key, value, slots, *caches])
    assert not graph.types() & {"TensorMove", "Assign"}
    written = [cache.clone() for cache in caches]
    graph.run([key, value, slots, *written])
    for rows, before, after in zip((key, value), caches, written, strict=True):
        want = before.clone().view(2 * P, *rows.shape[1:])
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if slot >= 0:
                want[slot] = row
        assert torch.equal(after, want.view_as(after))
    with pytest.raises(ArtifactError, match="two rows go to the same slot"):
        graph.run([key, value, torch.zeros_like(slots), *written])
    with pytest.raises(ArtifactError, match="slot 256 is outside a cache of 256 rows"):
        graph.run([key, value, slots + 1, *written])


def test_blocked_layout_keeps_sixteen_columns_together() -> None:
    key, slots = randn(3, 2, 32), torch.tensor([3, 17, 16], dtype=torch.int32)
    cache = randn(2, 4, 16, 16, seed=1)  # [B, N * D / 16, P, 16]
    (got,) = convert(
        lambda k, s, kc, vc: torch.ops.npu.npu_scatter_pa_kv_cache_functional(k, k, kc, vc, s, cache_mode="PA_NZ")[:1],
        [key, slots, cache, cache],
    ).run([key, slots, cache, cache])
    plain = got.permute(0, 2, 1, 3).reshape(32, 64)
    assert torch.equal(plain[slots.long()], key.view(3, 64))


def kv_cache_case(mode: str) -> tuple[list[Tensor], Callable[..., Any]]:
    kv, gamma = randn(3, 1, 1, 576), randn(512, seed=1)
    cos, sin = (table[:, None, None] for table in rope_tables(3, 64))
    slots = torch.tensor([5, P + 2, -1])
    caches = [randn(3, P, 1, 64, seed=2), randn(3, P, 1, 512, seed=3)]

    def function(kv: Tensor, g: Tensor, c: Tensor, s: Tensor, i: Tensor, kr: Tensor, ck: Tensor) -> tuple[Tensor, ...]:
        op = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional
        out: tuple[Tensor, ...] = op(kv, g, c, s, i, kr, ck, epsilon=1e-6, cache_mode=mode, is_output_kv=True)
        return out

    return [kv, gamma, cos, sin, slots, *caches], function


@pytest.mark.parametrize("mode", ["PA", "PA_NZ"])
def test_kv_rms_norm_rope_cache(mode: str) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    arguments, function = kv_cache_case(mode)
    kv, gamma, cos, sin, slots, *before = arguments
    k_rope, c_kv, k_cache, ckv_cache = exact(function, arguments)
    rope = kv.double()[..., 512:]
    _, want_k = apply_rotary_pos_emb_interleave(rope, rope, cos.double()[:, 0], sin.double()[:, 0])
    want_c = F.rms_norm(kv.double()[..., :512], (512,), gamma.double(), 1e-6)
    close(k_rope, want_k)
    close(c_kv, want_c)
    for got, old, rows in ((k_cache, before[0], want_k), (ckv_cache, before[1], want_c)):
        want = old.double().clone()
        if mode == "PA_NZ":
            got, want = (x.view(3, -1, P, 16).permute(0, 2, 1, 3).reshape(3, P, 1, -1) for x in (got, want))
        for row, slot in zip(rows[:, 0, 0], slots.tolist(), strict=True):
            if slot >= 0:
                want[slot // P, slot % P, 0] = row
        close(got, want)


# Fused attention ----------------------------------------------------------------------------------------------------


def flat_case(sizes: list[tuple[int, int]], N: int, G: int) -> dict[str, Tensor]:
    """Inputs of FusedInferAttentionScore for sequences of (new, past) tokens, causal, keys in pages."""
    return {
        "query": randn(sum(new for new, _ in sizes), N, 128),
        "key0": randn(2 * len(sizes), P, G * 128, seed=1),
        "value0": randn(2 * len(sizes), P, G * 128, seed=2),
        "atten_mask": TRIANGLE,
        "block_table": torch.randperm(2 * len(sizes), generator=torch.Generator().manual_seed(3)).view(-1, 2).int(),
        "actual_seq_lengths": torch.tensor([new for new, _ in sizes]).cumsum(0),
        "actual_seq_lengths_kv": torch.tensor([new + past for new, past in sizes]),
    }


def flat_options(N: int, G: int) -> dict[str, Any]:
    options = {"num_heads": N, "num_key_value_heads": G, "scale": 0.125, "input_layout": "TND", "sparse_mode": 3}
    return {**options, "block_size": P}


def check_flat(got: Tensor, case: dict[str, Tensor], sizes: list[tuple[int, int]], G: int) -> None:
    row = 0
    for s, (new, past) in enumerate(sizes):
        if not new:
            continue
        k, v = (pages(case[name], case["block_table"][s], new + past).view(-1, G, 128) for name in ("key0", "value0"))
        q = case["query"][row : row + new]
        close(got[row : row + new], sdpa(q, k, v, 0.125, lower_right(new, new + past)))
        row += new


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 200)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
)
def test_flat_paged_attention_equals_torch(sizes: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    case = flat_case(sizes, *heads)
    check_flat(run_op("FusedInferAttentionScore", case, flat_options(*heads))[0], case, sizes, heads[1])


def test_the_lowered_op_with_lengths_as_tensors() -> None:
    sizes = [(3, 0), (1, 130), (2, 7)]
    case, options = flat_case(sizes, 4, 2), flat_options(4, 2)

    def function(*t: Tensor) -> tuple[Tensor]:
        q, k, v, mask, table, ends, lens = t
        lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lens}
        return (fused_attention(q, k, v, atten_mask=mask, block_table=table, **lengths, **options)[0],)

    check_flat(exact(function, list(case.values()))[0], case, sizes, 2)


def test_a_sequence_of_padding_has_no_rows() -> None:
    sizes = [(2, 0), (0, 0), (1, 5)]
    case = flat_case(sizes, 4, 2)
    check_flat(run_op("FusedInferAttentionScore", case, flat_options(4, 2))[0], case, sizes, 2)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD"])
def test_rectangular_layouts(layout: str) -> None:
    B, S, N, G, D = 2, 3, 4, 2, 64
    q, k, v = randn(B, S, N, D), randn(B, 6, G, D, seed=1), randn(B, 6, G, D, seed=2)
    lens, counts = torch.tensor([6, 4]), torch.tensor([3, 2])
    mask = torch.rand(B, 1, S, 6, generator=torch.Generator().manual_seed(4)) < 0.3
    source = layout.split("_")[0]
    lay = {"BSH": lambda x: x.flatten(2), "BSND": lambda x: x, "BNSD": lambda x: x.transpose(1, 2).contiguous()}[source]
    options = {"num_heads": N, "num_key_value_heads": G, "scale": 0.125, "input_layout": layout}

    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor, counts: Tensor, lens: Tensor) -> tuple[Tensor]:
        lengths = {"actual_seq_lengths": counts, "actual_seq_lengths_kv": lens}
        return (fused_attention(q, k, v, atten_mask=m, **lengths, **options)[0],)

    (got,) = exact(function, [*map(lay, (q, k, v)), mask, counts, lens])
    back = {
        "BSH": lambda x: x.view(B, S, N, D),
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2),
        "NBSD": lambda x: x.permute(1, 2, 0, 3),
    }[layout.split("_")[-1]]
    for b in range(B):
        count, seen = int(counts[b]), int(lens[b])
        allowed = ~mask[b, 0, :count, :seen]
        close(back(got)[b, :count], sdpa(q[b, :count], k[b, :seen], v[b, :seen], 0.125, allowed).nan_to_num())
        assert back(got)[b, count:].isnan().all(), "what lies past a sequence's length must not look like a value"


def test_query_heads_in_the_latent_space_with_rotary_part() -> None:
    """Absorbed latent attention: keys and values are the latent, plus a rotary part of its own."""
    B, N = 3, 4
    q, q_rope = randn(B, N, 1, 512), randn(B, N, 1, 64, seed=1)
    latent, rope = randn(6, P, 512, seed=2), randn(6, P, 64, seed=3)
    table = torch.tensor([[0, 1], [2, 3], [5, 4]], dtype=torch.int32)
    lens = torch.tensor([5, 130, 128])
    options = {"num_heads": N, "num_key_value_heads": 1, "scale": 0.0625, "input_layout": "BNSD", "block_size": P}

    def function(q: Tensor, c: Tensor, qr: Tensor, kr: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor]:
        extra = {"query_rope": qr, "key_rope": kr, "block_table": table, "actual_seq_lengths_kv": lens}
        return (fused_attention(q, c, c, **extra, **options)[0],)

    (got,) = exact(function, [q, latent, q_rope, rope, table, lens])
    for b in range(B):
        c, r = (pages(x, table[b], int(lens[b]))[:, None] for x in (latent, rope))
        both = torch.cat((q[b].transpose(0, 1), q_rope[b].transpose(0, 1)), -1)
        want = sdpa(both, torch.cat((c, r), -1), F.pad(c, (0, 64)), 0.0625)[..., :512]
        close(got[b].transpose(0, 1), want)


def test_int8_keys_and_values_are_dequantised() -> None:
    B, G, D = 2, 2, 64
    q = randn(B, 1, 4 * D)
    k8, v8 = (
        torch.randint(-99, 99, (4, P, G * D), generator=torch.Generator().manual_seed(s)).to(torch.int8) for s in (1, 2)
    )
    k_scale = (randn(G * D, dtype=torch.float32, seed=3).abs() / 50).to(BF16)  # per channel
    v_scale = randn(B, 2 * P, dtype=torch.float32, seed=4).abs() / 50  # per token
    table, lens = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32), torch.tensor([100, 200])
    options = {"num_heads": 4, "num_key_value_heads": G, "scale": 0.125, "input_layout": "BSH", "block_size": P}

    def function(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor]:
        scales = {"key_antiquant_scale": ks, "value_antiquant_scale": vs}
        modes = {"key_antiquant_mode": 0, "value_antiquant_mode": 1}
        paged = {"block_table": table, "actual_seq_lengths_kv": lens}
        return (fused_attention(q, k, v, **scales, **modes, **paged, **options)[0],)

    (got,) = exact(function, [q, k8, v8, k_scale, v_scale, table, lens])
    for b in range(B):
        n = int(lens[b])
        k = pages(k8, table[b], n).double().view(n, G, D) * k_scale.double().view(G, D)
        v = pages(v8, table[b], n).double().view(n, G, D) * v_scale[b, :n].double().view(n, 1, 1)
        close(got[b], sdpa(q[b].view(1, 4, D), k, v, 0.125).flatten(1))


def test_npu_mode_rounds_the_weights_before_they_meet_the_values() -> None:
    q, k, v = randn(1, 2, 3, 64), randn(1, 2, 40, 64, seed=1), randn(1, 2, 40, 64, seed=2)
    options = {"num_heads": 2, "scale": 0.125, "input_layout": "BNSD"}
    (got,) = convert(lambda q, k, v: (fused_attention(q, k, v, **options)[0],), [q, k, v]).run([q, k, v])
    scores = (q.float() @ k.float().mT) * 0.125
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    want = (weights.to(BF16).float() @ v.float() / weights.sum(-1, keepdim=True)).to(BF16)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atten_mask": torch.zeros(2048, 2048, dtype=torch.bool)}, "ones above the diagonal"),
        ({"atten_mask": TRIANGLE.to(BF16)}, "allowed: bool, int8, uint8"),
        ({"actual_seq_lengths_kv": torch.tensor([300])}, "more than 2 blocks"),
        ({"actual_seq_lengths_kv": torch.tensor([200], dtype=torch.int32)}, "key lengths are torch.int32"),
        ({"actual_seq_lengths": torch.tensor([4])}, "the last query length is 4, but there are 5 rows"),
        ({"block_table": torch.tensor([[9, 0]], dtype=torch.int32)}, "outside a cache of 2 blocks"),
        ({"block_table": torch.tensor([[0, 1]])}, "block_table is torch.int64"),
    ],
)
def test_inputs_that_the_op_forbids_are_refused(change: dict[str, Tensor], message: str) -> None:
    case = flat_case([(5, 100)], 2, 1)
    run_op("FusedInferAttentionScore", case, flat_options(2, 1))
    with pytest.raises(ArtifactError, match=message):
        run_op("FusedInferAttentionScore", {**case, **change}, flat_options(2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_mode": 7}, "sparse_mode is 7"),
        ({"input_layout": "SBH"}, "layout 'SBH' is not supported"),
        ({"block_size": 64}, "block_size is 64"),
        ({"query_quant_mode": 1}, "query_quant_mode = 1 is not supported"),
        ({"inner_precise": 2}, "inner_precise is 2"),
    ],
)
def test_attributes_without_a_meaning_here_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        run_op("FusedInferAttentionScore", flat_case([(5, 100)], 2, 1), {**flat_options(2, 1), **change})


def test_an_input_without_a_part_in_the_result_is_refused() -> None:
    case = {**flat_case([(5, 100)], 2, 1), "quant_scale2": torch.ones(1)}
    with pytest.raises(ArtifactError, match="input quant_scale2 is not supported"):
        run_op("FusedInferAttentionScore", case, flat_options(2, 1))


def test_bands_and_sinks() -> None:
    q, k, v = (randn(1, 2, 6, 64, seed=s) for s in range(3))
    inputs = {"query": q, "key0": k, "value0": v, "atten_mask": TRIANGLE}
    options = {
        "num_heads": 2,
        "scale": 0.125,
        "input_layout": "BNSD",
        "sparse_mode": 4,
        "pre_tokens": 2,
        "next_tokens": 1,
    }
    (got, _) = run_op("FusedInferAttentionScore", inputs, options)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    band = (j <= i + 1) & (j >= i - 2)
    close(got, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), band))

    sink = randn(2, seed=9)
    (got, lse) = run_op(
        "FusedInferAttentionScore",
        {"query": q, "key0": k, "value0": v, "learnable_sink": sink},
        {"num_heads": 2, "scale": 0.125, "input_layout": "BNSD", "softmax_lse_flag": True},
    )
    scores = torch.cat((q.double() @ k.double().mT * 0.125, sink.double().view(1, 2, 1, 1).expand(1, 2, 6, 1)), -1)
    close(got, scores.softmax(-1)[..., :-1] @ v.double())
    close(lse.squeeze(-1), scores.logsumexp(-1))


def test_older_attention_ops() -> None:
    q, k, v = randn(1, 3, 10, 64), randn(1, 3, 12, 64, seed=1), randn(1, 3, 12, 64, seed=2)
    inputs = {"query": q, "key": k, "value": v}
    whole = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    options: dict[str, Any] = {"input_layout": "BNSD", "scale_value": 0.125}
    close(run_op("FlashAttentionScore", inputs, {**options, "head_num": 3})[3], whole)
    wide = {"num_heads": 3, "num_key_value_heads": 3, "next_tokens": 2147483647}
    close(run_op("PromptFlashAttention", inputs, {**options, **wide})[0], whole)
    one = {"query": q[:, :, :1], "key0": k, "value0": v, "actual_seq_lengths": torch.tensor([7])}
    (got,) = run_op("IncreFlashAttention", one, {**options, "num_heads": 3, "num_key_value_heads": 3})
    close(got, F.scaled_dot_product_attention(q.double()[:, :, :1], k.double()[:, :, :7], v.double()[:, :, :7]))


def test_mla_prolog_equals_the_layers_of_deepseek() -> None:
    """Against the modules that the op replaces: two projections with a norm between, per-head absorption, rotary."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    T, I, Q, N, D, L, R = 3, 7168, 1536, 2, 128, 512, 64
    scale = 0.02
    x = randn(T, I)
    w_dq, w_uq = randn(I, Q, seed=1) * scale, randn(Q, N * (D + R), seed=2) * scale
    w_uk, w_dkv = randn(N, D, L, seed=3) * scale, randn(I, L + R, seed=4) * scale
    g_cq, g_ckv = randn(Q, seed=5), randn(L, seed=6)
    cos, sin = rope_tables(T, R)
    slots = torch.tensor([7, P + 1, 0])
    caches = [randn(2, P, 1, L, seed=7), randn(2, P, 1, R, seed=8)]

    def function(*t: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = torch.ops.npu.npu_mla_prolog_v3_functional(
            *t[:7], t[7], t[8], t[9], t[10], cache_index=t[11], rmsnorm_epsilon_cq=1e-6, rmsnorm_epsilon_ckv=1e-6
        )
        return (*out[:2], *out[5:])

    arguments = [x, w_dq, w_uq, w_uk, w_dkv, g_cq, g_ckv, sin, cos, *caches, slots]
    query, query_rope, kv_cache, kr_cache = exact(function, arguments)
    d = [a.double() for a in arguments[:9]]
    c = F.rms_norm(d[0] @ d[1], (Q,), d[5], 1e-6)
    heads = (c @ d[2]).view(T, N, D + R)
    close(query, torch.einsum("tnd,ndl->tnl", heads[..., :D], d[3]), 1e-8)
    rope = heads[..., D:].transpose(0, 1)[None]
    want, _ = apply_rotary_pos_emb_interleave(rope, rope, d[8][None], d[7][None])
    close(query_rope, want[0].transpose(0, 1), 1e-8)
    both = d[0] @ d[4]
    keys = F.rms_norm(both[:, :L], (L,), d[6], 1e-6)
    turned, _ = apply_rotary_pos_emb_interleave(
        both[None, None, :, L:], both[None, None, :, L:], d[8][None], d[7][None]
    )
    close(kv_cache.view(-1, L)[slots], keys, 1e-8)
    close(kr_cache.view(-1, R)[slots], turned[0, 0], 1e-8)
