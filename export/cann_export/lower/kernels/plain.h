// The plain definitions of the CPU ops in ATen: what the kernels are tested against, and the path for the dtypes and
// sizes that they do not cover.
#pragma once

#include <ATen/core/Tensor.h>

namespace cann {

// x [.., K] times w [N, K] transposed plus bias [N].
at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias);

// As rope_paged_attention of kernels.h, for one layer's caches [B, K, P, D] and int64 slots, query_ends and kv_lens.
at::Tensor plain_rope_paged_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, at::Tensor k_cache,
                                      at::Tensor v_cache, const at::Tensor& slots, const at::Tensor& block_table,
                                      const at::Tensor& query_ends, const at::Tensor& kv_lens, double scale);

}  // namespace cann
