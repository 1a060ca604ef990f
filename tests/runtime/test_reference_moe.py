"""Mixture-of-experts and quantisation ops of the reference executor, against transformers' modules and plain torch.

Graphs come from TorchAir's converters of the torch_npu ops where there is one; `run_op` runs an op by itself.
Letters: N tokens, H hidden, E experts, K experts of a token, I intermediate, M rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ge_convert import convert
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_op import run_op
from torch import Tensor
from torch.nn import functional as F

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.manifest import World
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.comm import ThreadWorld

BF16, I8 = torch.bfloat16, torch.int8
N, H, E, K, I = 7, 64, 16, 4, 32


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def int8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(I8)


def experts_of(tokens: int, seed: int = 0) -> Tensor:
    """K distinct experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)]).int()


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def deepseek(**changes: Any) -> Any:
    """transformers' own DeepSeek-V3 mixture of experts, random weights and bias, in float64."""
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=I,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        **changes,
    )
    config._experts_implementation = "eager"
    module = DeepseekV3MoE(config).double().requires_grad_(False)
    for i, (name, value) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        value.copy_(randn(*value.shape, seed=i).double() * (0.2 if "bias" in name else value.shape[-1] ** -0.5))
    return module


def test_a_whole_mixture_of_experts_equals_transformers() -> None:
    module = deepseek()
    x = randn(N, H)
    arguments = [
        x,
        module.gate.weight.float(),
        module.gate.e_score_correction_bias.float(),
        module.experts.gate_up_proj.to(BF16).transpose(1, 2).contiguous(),
        module.experts.down_proj.to(BF16).transpose(1, 2).contiguous(),
    ]

    def function(x: Tensor, gate: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        npu = torch.ops.npu
        scores = x.float() @ gate.t()
        weights, experts, _ = npu.npu_moe_gating_top_k(
            scores, K, bias=bias, k_group=2, group_count=4, group_select_mode=1, norm_type=1, routed_scaling_factor=2.5
        )
        rows, places, counts, _ = npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=N * K,
            expert_num=E,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, E],
        )
        how = {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": 1}
        hidden = npu.npu_swiglu(npu.npu_grouped_matmul([rows], [up], **how)[0])
        out = npu.npu_grouped_matmul([hidden], [down], **how)[0]
        return (npu.npu_moe_finalize_routing(out, None, None, None, weights, places, experts, drop_pad_mode=2),)

    graph = convert(function, arguments)
    assert graph.types() >= {"MoeGatingTopK", "MoeInitRoutingV3", "GroupedMatmul", "MoeFinalizeRoutingV2"}
    (got,) = graph.run(arguments, "exact64")
    for parameter in (module.gate.weight, module.experts.gate_up_proj, module.experts.down_proj):
        parameter.copy_(parameter.float() if parameter is module.gate.weight else parameter.to(BF16))
    flat = module.gate(x.double()[None])
    want = module.experts(x.double(), *_routed(module, flat))
    close(got, want, 1e-6)  # the bias and the routing factor pass through float32


def _routed(module: Any, logits: Any) -> tuple[Tensor, Tensor]:
    """(experts, weights) as the transformers module routes."""
    if isinstance(logits, tuple):
        _, weights, experts = logits
        return experts, weights
    return module.route_tokens_to_experts(logits)  # type: ignore[no-any-return]


def test_gating_by_softmax_keeps_scores_and_breaks_ties_by_the_lowest_expert() -> None:
    x = randn(5, E, dtype=torch.float32)
    x[0] = 1.0
    weights, experts, rows = run_op("MoeGatingTopKSoftmax", {"x": x}, {"k": 3})
    scores = x.double().softmax(-1)
    close(weights, scores.sort(-1, descending=True)[0][:, :3])
    assert experts[0].tolist() == [0, 1, 2]
    assert torch.equal(scores.gather(1, experts.long()), weights)
    assert rows.t().reshape(-1).tolist() == list(range(15)), "row numbers count all first choices, then all second ones"
    renormed, same, _ = run_op("MoeGatingTopK", {"x": x}, {"k": 3, "renorm": 1})
    assert torch.equal(same, experts)
    close(renormed, weights / weights.sum(-1, keepdim=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 9), first=st.integers(0, E - 1), count=st.integers(1, E), seed=st.integers(0, 99))
def test_rows_go_to_their_experts_and_back(tokens: int, first: int, count: int, seed: int) -> None:
    x, experts = randn(tokens, H, seed=seed), experts_of(tokens, seed)
    last = min(E, first + count)
    attrs = {"active_expert_range": (first, last), "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    rows, places, counts, _ = run_op("MoeInitRoutingV3", {"x": x, "expert_idx": experts}, attrs)
    mine = (experts >= first) & (experts < last)
    assert counts.tolist() == [int((experts == e).sum()) for e in range(first, last)]
    flat = torch.arange(tokens * K)
    expected = sorted((int(experts.view(-1)[i]), int(i)) for i in flat[mine.view(-1)])
    for place, (_, i) in enumerate(expected):
        assert torch.equal(rows[place], x.double()[i // K])
        assert int(places[i]) == place
    assert rows[len(expected) :].isnan().all(), "rows that no expert has are undefined"
    assert (places.view_as(experts)[~mine] == -1).all()
    (_, scattered, _, _) = run_op("MoeInitRoutingV3", {"x": x, "expert_idx": experts}, {**attrs, "row_idx_type": 1})
    assert scattered[: len(expected)].tolist() == [i for _, i in expected]
    scales = randn(tokens, K, dtype=torch.float32, seed=seed).double()
    given_ = {"expanded_x": rows, "expanded_row_idx": places, "scales": scales, "expert_idx": experts}
    (back,) = run_op("MoeFinalizeRoutingV2", given_, {"drop_pad_mode": 2})
    close(back, x.double() * torch.where(mine, scales, 0).sum(-1, keepdim=True))


def test_the_first_routing_ops_use_first_choices_first() -> None:
    x, experts = randn(N, H), experts_of(N)
    row_idx = (torch.arange(K)[None] * N + torch.arange(N)[:, None]).int()
    attrs = {"active_num": N}
    rows, places, order = run_op("MoeInitRouting", {"x": x, "row_idx": row_idx, "expert_idx": experts}, attrs)
    (ends,) = run_op("MoeComputeExpertTokens", {"sorted_experts": order}, {"num_experts": E})
    assert ends.tolist() == [int((experts <= e).sum()) for e in range(E)]
    bias, skip = randn(E, H, seed=1), randn(N, H, seed=2)
    scales = randn(N, K, dtype=torch.float32).double()
    given_ = {"expanded_x": rows * 2, "x1": skip, "bias": bias, "scales": scales, "expanded_row_idx": places}
    (out,) = run_op("MoeFinalizeRouting", {**given_, "expanded_expert_idx": experts})
    want = skip.double() + sum(
        scales[:, j : j + 1] * (2 * x.double() + bias.double()[experts[:, j].long()]) for j in range(K)
    )
    close(out, want)


def test_tokens_of_many_ranks_are_put_in_order_of_experts() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])  # [rank, expert]
    tokens = torch.arange(9.0)[:, None].expand(9, 4).contiguous()  # rows 7 and 8 are beyond the counts
    out, _, index, per_expert = run_op("MoeReRouting", {"tokens": tokens, "expert_token_num_per_rank": counts})
    assert out[:7, 0].tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert out[7:].isnan().all()
    assert index[:7].tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert per_expert.tolist() == [3, 3, 1]


# Products of groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_grouped_product_of_floats(kind: int) -> None:
    x, weights, bias = randn(9, H), randn(3, H, I, seed=1), randn(3, I, dtype=torch.float32, seed=2)
    lists = {0: torch.tensor([4, 4, 7]), 1: torch.tensor([4, 0, 3]), 2: torch.tensor([[0, 4], [2, 3], [1, 0]])}
    attrs = {"split_item": 3, "group_type": 0, "group_list_type": kind, "dtype": -1}
    (got,) = run_op("GroupedMatmul", {"x0": x, "weight0": weights, "bias0": bias, "group_list": lists[kind]}, attrs)
    owner = [0] * 4 + [2] * 3
    for row, e in enumerate(owner):
        close(got[row], x[row].double() @ weights[e].double() + bias[e].double())
    assert got[7:].isnan().all()


def test_a_group_list_that_does_not_fit_is_refused() -> None:
    inputs = {"x0": randn(9, H), "weight0": randn(2, H, I), "group_list": torch.tensor([5, 5])}
    with pytest.raises(ArtifactError, match=r"group_list \[5, 5\] does not fit 9 rows"):
        run_op("GroupedMatmul", inputs, {"split_item": 3, "group_type": 0, "group_list_type": 1, "dtype": -1})


def test_grouped_product_of_int8_is_exact() -> None:
    x, weights = int8(6, H), int8(2, H, I, seed=1)
    groups = torch.tensor([2, 6])
    attrs = {"split_item": 3, "group_type": 0}
    inputs = {"x0": x, "weight0": weights, "group_list": groups}
    (raw,) = run_op("GroupedMatmul", inputs, {**attrs, "dtype": 2})
    want = torch.cat((x[:2].long() @ weights[0].long(), x[2:].long() @ weights[1].long()))
    assert raw.dtype == torch.int32
    assert torch.equal(raw.long(), want)
    scale, token = randn(2, I, seed=3), randn(6, dtype=torch.float32, seed=4)
    (scaled,) = run_op("GroupedMatmul", {**inputs, "scale0": scale, "per_token_scale": token}, {**attrs, "dtype": 1})
    per_row = scale.double()[torch.tensor([0, 0, 1, 1, 1, 1])]
    close(scaled, want.double() * per_row * token.double()[:, None])


def test_grouped_product_that_adds_up_the_rows_of_a_token() -> None:
    x, weights, scale = int8(6, H), int8(2, H, I, seed=1), randn(2, I, dtype=torch.float32, seed=2)
    token, logit = randn(6, dtype=torch.float32, seed=3), randn(6, dtype=torch.float32, seed=4)
    shared, target = randn(2, I, seed=5), torch.tensor([0, 3, 3, 1, 0, 2])
    inputs = {"x": x, "w": weights, "scale": scale, "pertoken_scale": token, "logit": logit, "row_index": target}
    attrs = {"output_bs": 4, "shared_input_weight": 0.5, "shared_input_offset": 1}
    (got,) = run_op(
        "GroupedMatmulFinalizeRouting", {**inputs, "group_list": torch.tensor([2, 4]), "shared_input": shared}, attrs
    )
    want = torch.zeros(4, I, dtype=torch.float64)
    want[1:3] += 0.5 * shared.double()
    for row in range(6):
        e = 0 if row < 2 else 1
        product = x[row].double() @ weights[e].double() * scale[e].double()
        want[target[row]] += product * token[row].double() * logit[row].double()
    close(got, want)


# Quantisation -------------------------------------------------------------------------------------------------------


def test_dynamic_quantisation_per_row() -> None:
    x = randn(5, H)
    x[3] = 0
    y, scale = run_op("DynamicQuant", {"x": x})
    close(scale, x.double().abs().amax(-1) / 127)
    assert float((y.double() * scale[:, None] - x.double()).abs().max()) <= float(scale.max()) / 2
    assert y[3].eq(0).all()
    device, _ = run_op("DynamicQuant", {"x": x}, mode="npu")
    assert int((device.int() - y.int()).abs().max()) <= 1
    smooth = randn(H, dtype=torch.float32, seed=1).abs() + 0.5
    (smoothed, _) = convert(
        lambda x, s: torch.ops.npu.npu_dynamic_quant(x, smooth_scales=s), [x.clone(), smooth.to(BF16)]
    ).run([x, smooth.to(BF16)], "exact64")
    assert torch.equal(smoothed, run_op("DynamicQuant", {"x": x.double() * smooth.to(BF16).double()})[0])


def test_asymmetric_quantisation_covers_the_whole_range() -> None:
    x = randn(5, H) + 1
    y, scale, offset = run_op("DynamicQuantV2", {"x": x})
    assert y.amax(-1).tolist() == [127] * 5
    assert y.amin(-1).tolist() == [-128] * 5
    restored = (y.double() - offset[:, None]) * scale[:, None]
    assert float((restored - x.double()).abs().max()) <= float(scale.max())


def test_static_quantisation_multiplies_or_divides() -> None:
    x = randn(4, 8)
    scale, zero = torch.rand(8, generator=torch.Generator().manual_seed(0)) / 20 + 0.02, torch.arange(8.0)
    (got,) = run_op("Quantize", {"x": x, "scales": scale, "zero_points": zero}, {"dtype": "torch.qint8"})
    want = torch.quantize_per_channel(x.float(), scale, zero.long(), 1, torch.qint8).int_repr()
    assert torch.equal(got, want)
    (multiplied,) = run_op("AscendQuantV2", {"x": x, "scale": 1 / scale, "offset": zero})
    assert int((multiplied.int() - want.int()).abs().max()) <= 1, "1 / scale is not exact"
    (back,) = run_op("AscendAntiQuantV2", {"x": want, "scale": scale, "offset": -zero}, {"dst_type": 0})
    close(back, torch.quantize_per_channel(x.float(), scale, zero.long(), 1, torch.qint8).dequantize(), 1e-6)


def test_packed_scales_keep_nineteen_bits() -> None:
    scale = randn(50, dtype=torch.float32).abs()
    (packed,) = convert(lambda s: (torch.ops.npu.npu_trans_quant_param(s),), [scale]).run([scale])
    x1, x2 = int8(4, H), int8(H, 50, seed=1)
    attrs = {"dtype": 27}
    (got,) = run_op("QuantBatchMatmulV3", {"x1": x1, "x2": x2, "scale": packed.view(torch.int64)}, attrs)
    (want,) = run_op("QuantBatchMatmulV3", {"x1": x1, "x2": x2, "scale": scale}, attrs)
    assert float(((got - want) / want.abs().clamp(min=1e-9)).abs().max()) <= 2.0**-10
    assert not torch.equal(got, want)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.int8, torch.int32])
def test_quantised_product(out: torch.dtype) -> None:
    x1, x2 = int8(3, H), int8(20, H, seed=1)
    scale, token = randn(20, dtype=torch.float32, seed=2) / 500, randn(3, dtype=torch.float32, seed=3)
    bias = torch.randint(-99, 99, (20,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    inputs = {"x1": x1, "x2": x2, "scale": scale, "bias": bias}
    total = torch.nn.functional.linear(x1.double(), x2.double(), bias.double())
    code = {torch.bfloat16: 27, torch.int8: 2, torch.int32: 3}[out]
    if out == torch.bfloat16:
        inputs["pertoken_scale"] = token
    (got,) = (
        run_op("QuantBatchMatmulV3", inputs, {"dtype": code, "transpose_x2": True})
        if out != torch.int32
        else (run_op("QuantBatchMatmulV3", inputs, {"dtype": code, "transpose_x2": True}, mode="npu"))
    )
    if out == torch.int32:
        assert torch.equal(got.double(), total)
    elif out == torch.int8:
        assert torch.equal(got.double(), (total * scale.double()).round().clamp(-128, 127))
    else:
        close(got, total * scale.double() * token.double()[:, None])


@pytest.mark.parametrize("groups", [None, 4])
def test_product_with_int8_weights(groups: int | None) -> None:
    x, weight = randn(3, H), int8(H, 20)
    shape = (1, 20) if groups is None else (groups, 20)
    scale, offset = randn(*shape, seed=1) / 50, randn(*shape, seed=2)
    group_size = 0 if groups is None else H // groups

    def function(x: Tensor, w: Tensor, s: Tensor, o: Tensor) -> tuple[Tensor]:
        return (torch.ops.npu.npu_weight_quant_batchmatmul(x, w, s, o, antiquant_group_size=group_size),)

    (got,) = convert(function, [x, weight, scale, offset]).run([x, weight, scale, offset], "exact64")
    full = [t.double().repeat_interleave(H // shape[0], 0) for t in (scale, offset)]
    close(got, x.double() @ ((weight.double() + full[1]) * full[0]))


@pytest.mark.parametrize("left", [True, False])
def test_dequantised_gate_is_quantised_again(left: bool) -> None:
    x = torch.randint(-9999, 9999, (6, 2 * I), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    weight, token = randn(2, 2 * I, dtype=torch.float32, seed=1) / 999, randn(6, dtype=torch.float32, seed=2).abs()
    counts = torch.tensor([2, 3])
    inputs = {"x": x, "weight_scale": weight, "activation_scale": token, "group_index": counts}
    y, scale = run_op("DequantSwigluQuant", inputs, {"quant_mode": "dynamic", "activate_left": left})
    rows = torch.tensor([0, 0, 1, 1, 1])
    first, second = (x[:5].double() * weight[rows].double() * token[:5, None].double()).chunk(2, -1)
    want = F.silu(first) * second if left else F.silu(second) * first
    close(scale[:5], want.abs().amax(-1) / 127)
    assert float((y[:5].double() * scale[:5, None] - want).abs().max()) <= float(scale[:5].max()) * 0.5001
    assert scale[5].isnan()


def test_sum_and_norm_are_quantised() -> None:
    x1, x2, gamma = randn(5, H), randn(5, H, seed=1), randn(H, seed=2)
    smooth = randn(H, seed=3).abs() + 0.5
    inputs = {"x1": x1, "x2": x2, "gamma": gamma, "smooth_scale1": smooth}
    y1, _, x, scale1, _ = run_op("AddRmsNormDynamicQuant", inputs)
    close(x, x1.double() + x2.double())
    want = F.rms_norm(x, (H,), gamma.double(), 1e-6) * smooth.double()
    close(scale1, want.abs().amax(-1) / 127)
    assert float((y1.double() * scale1[:, None] - want).abs().max()) <= float(scale1.max()) * 0.5001


# Tokens to other ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("quant", [0, 2])
def test_dispatch_and_combine_over_ranks(ranks: int, quant: int) -> None:
    world = ThreadWorld(World(size=ranks, ep=ranks))
    per_rank = E // ranks
    tokens = [randn(N, H, seed=10 * r) for r in range(ranks)]
    experts = [experts_of(N, seed=r) for r in range(ranks)]
    scales = [torch.rand(N, K, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    factor = torch.arange(1.0, E + 1)  # what an expert does here: times its number

    def work(rank: int) -> tuple[Tensor, list[int]]:
        comm = world.rank(rank)
        attrs = {"group_ep": "ep", "ep_world_size": ranks, "ep_rank_id": rank, "moe_expert_num": E}
        sent = {"x": tokens[rank], "expert_ids": experts[rank]}
        rows, row_scale, assist, counts, received, *_ = run_op(
            "MoeDistributeDispatchV2", sent, {**attrs, "quant_mode": quant}, comm=comm
        )
        total = int(counts.sum())
        assert int(received[-1]) == total
        if quant == 0:
            assert rows[total:].isnan().all()
        else:
            rows = rows.double() * row_scale[:, None]
        own = torch.arange(rank * per_rank, (rank + 1) * per_rank).repeat_interleave(counts)
        rows[:total] *= factor[own, None].double()
        back = {"expand_x": rows, "expert_ids": experts[rank], "assist_info_for_combine": assist}
        back |= {"ep_send_counts": received, "expert_scales": scales[rank], "shared_expert_x": tokens[rank]}
        (out,) = run_op("MoeDistributeCombineV2", back, attrs, comm=comm)
        return out, counts.tolist()

    results = world.run(work)
    everything = torch.cat(experts)
    for rank, (out, counts) in enumerate(results):
        assert counts == [int((everything == rank * per_rank + e).sum()) for e in range(per_rank)]
        weight = (scales[rank].double() * factor[experts[rank].long()].double()).sum(-1, keepdim=True)
        x = tokens[rank].double()
        error = (out - (x * weight + x)).abs()
        step = x.abs().amax(-1, keepdim=True) / 127 if quant else 1e-9
        assert (error <= step * weight * 0.5001).all()
