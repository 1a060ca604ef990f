"""What comes before latent attention, in one op: queries into the latent space, keys into the caches.

Letters: T tokens, I hidden, Q query latent, N heads, D head size without position, R rotary size, L key latent.
Source: ops-transformer attention/mla_prolog_v3 (README and its pytest golden); op-plugin npu_mla_prolog_v3.
"""

from __future__ import annotations

from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.cache import write_rows
from cann_runtime.executor.reference.ops.norm import rstd
from cann_runtime.executor.reference.ops.registry import OpFunction, implements
from cann_runtime.executor.reference.ops.rope import deinterleave, rotate_half

OPS: dict[str, OpFunction] = {}


@implements(OPS, "MlaPrologV3")
def mla_prolog_v3(call: Call) -> tuple[Tensor, ...]:
    """(query [T, N, L], query_rope [T, N, R], kv_cache, kr_cache, -, query_norm, -), unquantised.

    c = norm(x W_dq) * gamma_cq * qc_qr_scale; per head c W_uq_qr = (D, R): the first times W_uk [N, D, L], the second
    de-interleaved and rotated. x W_dkv_kr = (L, R): the first normed * gamma_ckv * kc_scale into kv_cache, the second
    de-interleaved and rotated into kr_cache, at cache_index, in place. Every product and the query norm are rounded.
    """
    for name in ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode"):
        call.choice(name, (0,))
    call.ignore("quant_scale_repo_mode", "tile_size")
    x, up_uk = call["token_x"], call["weight_uk"]
    lead, heads, width = x.shape[:-1], up_uk.shape[0], up_uk.shape[1]
    x_TI = x.reshape(-1, x.shape[-1])
    cos_TR, sin_TR = (call.wide(call[name]).reshape(len(x_TI), -1) for name in ("rope_cos", "rope_sin"))

    c_TQ = _product(call, x_TI, call["weight_dq"])
    c_TQ = _normed(call, c_TQ, call["rmsnorm_gamma_cq"], call.number("rmsnorm_epsilon_cq"), call.number("qc_qr_scale"))
    q_TN = _product(call, c_TQ, call["weight_uq_qr"]).view(len(x_TI), heads, -1)
    nope_TND, rope_TNR = q_TN[..., :width], q_TN[..., width:]
    query_TNL = _product(call, nope_TND.transpose(0, 1), up_uk).transpose(0, 1)
    rope_TNR = _rotated(call, rope_TNR, cos_TR[:, None], sin_TR[:, None])

    both = _product(call, x_TI, call["weight_dkv_kr"])
    latent = call["rmsnorm_gamma_ckv"].shape[0]
    keys = _normed(
        call, both[:, :latent], call["rmsnorm_gamma_ckv"], call.number("rmsnorm_epsilon_ckv"), call.number("kc_scale")
    )
    mode = {"PA_BSND": "PA", "PA_NZ": "PA_NZ"}[call.text("cache_mode", ("PA_BSND", "PA_NZ"))]
    index = call["cache_index"].long().reshape(1, -1)
    write_rows(call, call["kv_cache"], keys[None], index, mode)
    write_rows(call, call["kr_cache"], _rotated(call, both[:, latent:], cos_TR, sin_TR)[None], index, mode)
    norm = c_TQ.view(*lead, -1) if call.flag("query_norm_flag") else call.undefined([0], x.dtype)
    return (
        query_TNL.reshape(*lead, heads, -1),
        rope_TNR.reshape(*lead, heads, -1),
        call["kv_cache"],
        call["kr_cache"],
        call.undefined([0], call.precision.compute),
        norm,
        call.undefined([0], call.precision.compute),
    )


def _product(call: Call, x: Tensor, weight: Tensor) -> Tensor:
    return (call.wide(x) @ call.wide(weight)).to(x.dtype)


def _normed(call: Call, x: Tensor, gamma: Tensor, epsilon: float, factor: float) -> Tensor:
    wide = call.wide(x)
    return (wide * rstd(wide, 1, epsilon) * call.wide(gamma) * factor).to(x.dtype)


def _rotated(call: Call, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = deinterleave(call.wide(x))
    return (pairs * cos + rotate_half(pairs) * sin).to(x.dtype)
