// The plain definitions of the CPU ops, in ATen operations only.
#include "plain.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

namespace cann {

namespace {

at::Tensor rotate(const at::Tensor& x_THD, const at::Tensor& cos_TD, const at::Tensor& sin_TD) {
  const int64_t half = x_THD.size(-1) / 2;
  at::Tensor turned = at::cat({x_THD.narrow(-1, half, half).neg(), x_THD.narrow(-1, 0, half)}, -1);
  return x_THD * cos_TD.unsqueeze(1) + turned * sin_TD.unsqueeze(1);
}

// cache [B, K, P, D] -> the first n keys of a sequence as [K, n, D].
at::Tensor gather(const at::Tensor& cache, const at::Tensor& blocks, int64_t n) {
  at::Tensor pages = cache.index_select(0, blocks).transpose(0, 1);  // [K, blocks, P, D]
  return pages.reshape({cache.size(1), -1, cache.size(3)}).narrow(1, 0, n);
}

}  // namespace

at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  return at::linear(x, w, bias);
}

at::Tensor plain_rope_paged_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, at::Tensor k_cache,
                                      at::Tensor v_cache, const at::Tensor& slots, const at::Tensor& block_table,
                                      const at::Tensor& query_ends, const at::Tensor& kv_lens, double scale) {
  const int64_t kv_heads = k_cache.size(1), block_size = k_cache.size(2), dim = k_cache.size(3), tokens = qkv.size(0);
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads, group = heads / kv_heads;
  at::Tensor x = qkv.view({tokens, heads + 2 * kv_heads, dim});
  at::Tensor q = rotate(x.narrow(1, 0, heads), cos, sin), k = rotate(x.narrow(1, heads, kv_heads), cos, sin);
  at::Tensor block = slots.floor_divide(block_size), offset = slots.remainder(block_size);
  // Index [T] x [K] x [T] picks [T, K, D].
  at::Tensor head = at::arange(kv_heads, slots.options()).unsqueeze(0);
  k_cache.index_put_({block.unsqueeze(1), head, offset.unsqueeze(1)}, k);
  v_cache.index_put_({block.unsqueeze(1), head, offset.unsqueeze(1)}, x.narrow(1, heads + kv_heads, kv_heads));

  const auto wide = qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor out = at::zeros({tokens, heads * dim}, qkv.options());
  int64_t start = 0;
  for (int64_t s = 0; s < block_table.size(0); s++) {
    const int64_t end = query_ends.data_ptr<int64_t>()[s], n = kv_lens.data_ptr<int64_t>()[s], rows = end - start;
    if (rows > 0) {
      at::Tensor blocks = block_table.select(0, s).narrow(0, 0, (n + block_size - 1) / block_size).to(at::kLong);
      at::Tensor keys = gather(k_cache, blocks, n).to(wide), values = gather(v_cache, blocks, n).to(wide);
      at::Tensor query = q.narrow(0, start, rows).to(wide).view({rows, kv_heads, group, dim}).permute({1, 2, 0, 3});
      at::Tensor scores = at::matmul(query, keys.unsqueeze(1).transpose(-1, -2)) * scale;  // [K, G, rows, n]
      at::Tensor hidden = at::ones({rows, n}, at::kBool).triu(n - rows + 1);
      scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
      at::Tensor y = at::matmul(scores.softmax(-1), values.unsqueeze(1));  // [K, G, rows, D]
      out.narrow(0, start, rows).copy_(y.permute({2, 0, 1, 3}).reshape({rows, heads * dim}));
    }
    start = end;
  }
  return out;
}

}  // namespace cann
