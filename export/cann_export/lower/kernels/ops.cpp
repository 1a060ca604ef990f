// The torch ops of the namespace `cann_cpu`: schemas, shapes, argument checks, and the choice between a kernel and the
// plain path. The C functions at the end are what compiled graphs call, without going through the dispatcher.
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "kernels.h"
#include "plain.h"

namespace {

using at::Tensor;
using cann::LINEAR_BLOCK;
using OptionalTensor = std::optional<Tensor>;

// Calls since the library was loaded: linear by kernel, linear plain, attention by kernel, attention plain.
std::array<std::atomic<int64_t>, 4> calls{};

bool kernel_dtype(at::ScalarType t) { return t == at::kFloat || t == at::kBFloat16; }
int64_t pair_of(at::ScalarType t) { return t == at::kBFloat16 ? 2 : 1; }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

Tensor pack_linear(const Tensor& w) {
  TORCH_CHECK(w.dim() == 2, "pack_linear: w must be [N, K], got ", w.sizes());
  if (!kernel_dtype(w.scalar_type())) return w.contiguous().clone();
  const int64_t n = w.size(0), k = w.size(1), pair = pair_of(w.scalar_type());
  const int64_t blocks = (n + LINEAR_BLOCK - 1) / LINEAR_BLOCK, pairs = (k + pair - 1) / pair;
  Tensor padded = w;
  if (n % LINEAR_BLOCK || k % pair) padded = at::constant_pad_nd(w, {0, pairs * pair - k, 0, blocks * LINEAR_BLOCK - n}, 0);
  return padded.reshape({blocks, LINEAR_BLOCK, pairs, pair}).permute({0, 2, 1, 3}).contiguous();
}

Tensor pack_linear_meta(const Tensor& w) {
  if (!kernel_dtype(w.scalar_type())) return at::empty_symint(w.sym_sizes(), w.options());
  const c10::SymInt pair = pair_of(w.scalar_type()), block = LINEAR_BLOCK;
  return at::empty_symint({(w.sym_size(0) + block - 1) / block, (w.sym_size(1) + pair - 1) / pair, block, pair}, w.options());
}

Tensor linear_to(const Tensor& x, const Tensor& w, const OptionalTensor& bias, int64_t n, at::ScalarType out_dtype) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "linear: x is ", x.scalar_type(), ", w is ", w.scalar_type());
  if (!kernel_dtype(x.scalar_type())) {
    calls[1]++;
    return cann::plain_linear(x, w, bias).to(out_dtype);
  }
  const int64_t k = x.size(-1), pair = pair_of(x.scalar_type());
  TORCH_CHECK(w.dim() == 4 && w.is_contiguous() && w.size(0) == (n + LINEAR_BLOCK - 1) / LINEAR_BLOCK &&
                  w.size(1) == (k + pair - 1) / pair && w.size(2) == LINEAR_BLOCK && w.size(3) == pair,
              "linear: w of shape ", w.sizes(), " is not the packed form of [", n, ", ", k, "]");
  TORCH_CHECK(!bias || (bias->numel() == n && bias->is_contiguous() && bias->scalar_type() == x.scalar_type()),
              "linear: bias must be [", n, "] of x's dtype");
  Tensor rows = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = n;
  Tensor out = at::empty(shape, x.options().dtype(out_dtype));
  if (out.numel() == 0) return out;
  const int64_t m = out.numel() / n;
  auto call = [&](auto in, auto to) {
    using T = decltype(in);
    using O = decltype(to);
    cann::linear<T, O>(data<T>(rows), data<T>(w), bias ? data<T>(*bias) : nullptr, static_cast<O*>(out.mutable_data_ptr()), m, n,
                       k, at::get_num_threads());
  };
  if (x.scalar_type() == at::kFloat) call(float{}, float{});
  else if (out_dtype == at::kFloat) call(cann::bf16{}, float{});
  else call(cann::bf16{}, cann::bf16{});
  calls[0]++;
  return out;
}

Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias, int64_t n) {
  return linear_to(x, w, bias, n, x.scalar_type());
}

// Logits: as they were accumulated, without the rounding that would make ties of near-equal ones.
Tensor linear_f32(const Tensor& x, const Tensor& w, const OptionalTensor& bias, int64_t n) {
  return linear_to(x, w, bias, n, at::kFloat);
}

Tensor linear_f32_meta(const Tensor& x, const Tensor&, const OptionalTensor&, c10::SymInt n) {
  auto shape = x.sym_sizes().vec();
  shape.back() = n;
  return at::empty_symint(shape, x.options().dtype(at::kFloat));
}

Tensor linear_meta(const Tensor& x, const Tensor&, const OptionalTensor&, c10::SymInt n) {
  auto shape = x.sym_sizes().vec();
  shape.back() = n;
  return at::empty_symint(shape, x.options());
}

Tensor int64(const Tensor& t) { return t.to(at::kLong).contiguous(); }

// Refuses what would make a kernel touch memory that is not the caller's.
void check_step(const Tensor& slots, const Tensor& table, const Tensor& ends, const Tensor& lens, int64_t tokens, int64_t blocks,
                int64_t block_size) {
  const int64_t seqs = table.size(0), width = table.size(1);
  TORCH_CHECK(slots.numel() == tokens, "rope_paged_attention: ", slots.numel(), " slots for ", tokens, " rows");
  TORCH_CHECK(ends.numel() == seqs && lens.numel() == seqs, "rope_paged_attention: query_lens and kv_lens must be [", seqs, "]");
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t slot = data<int64_t>(slots)[t];
    TORCH_CHECK(slot >= 0 && slot < blocks * block_size, "rope_paged_attention: slot ", slot, " is outside the cache");
  }
  int64_t start = 0;
  for (int64_t s = 0; s < seqs; s++) {
    const int64_t end = data<int64_t>(ends)[s], n = data<int64_t>(lens)[s];
    TORCH_CHECK(end >= start && end <= tokens, "rope_paged_attention: query_lens must grow up to ", tokens, ", got ", end);
    if (end > start) {
      TORCH_CHECK(n >= end - start && n <= width * block_size, "rope_paged_attention: kv_lens[", s, "] = ", n, " does not fit");
      for (int64_t b = 0; b < (n + block_size - 1) / block_size; b++) {
        const int32_t id = data<int32_t>(table)[s * width + b];
        TORCH_CHECK(id >= 0 && id < blocks, "rope_paged_attention: block ", id, " is outside the cache of ", blocks, " blocks");
      }
    }
    start = end;
  }
}

Tensor rope_paged_attention(const Tensor& qkv_, const Tensor& cos_, const Tensor& sin_, Tensor cache, int64_t layer,
                            const Tensor& slots_, const Tensor& block_table, const Tensor& query_lens, const Tensor& kv_lens,
                            double scale) {
  TORCH_CHECK(cache.dim() == 6 && cache.is_contiguous(), "rope_paged_attention: cache must be contiguous [L, 2, B, K, P, D]");
  TORCH_CHECK(layer >= 0 && layer < cache.size(0), "rope_paged_attention: no layer ", layer, " in the cache");
  const int64_t blocks = cache.size(2), kv_heads = cache.size(3), block_size = cache.size(4), dim = cache.size(5);
  const int64_t tokens = qkv_.size(0), heads = qkv_.size(1) / dim - 2 * kv_heads;
  TORCH_CHECK(qkv_.size(1) % dim == 0 && heads > 0 && heads % kv_heads == 0 && dim % 2 == 0,
              "rope_paged_attention: qkv ", qkv_.sizes(), " does not fit a cache of ", kv_heads, " heads of ", dim);
  const auto dtype = qkv_.scalar_type();
  TORCH_CHECK(cos_.sizes() == sin_.sizes() && cos_.dim() == 2 && cos_.size(0) == tokens && cos_.size(1) == dim,
              "rope_paged_attention: cos and sin must be [", tokens, ", ", dim, "]");
  TORCH_CHECK(cos_.scalar_type() == dtype && sin_.scalar_type() == dtype && cache.scalar_type() == dtype,
              "rope_paged_attention: qkv, cos, sin and cache must have one dtype");
  TORCH_CHECK(block_table.dim() == 2 && block_table.scalar_type() == at::kInt, "rope_paged_attention: block_table must be int32 [S, M]");
  const Tensor qkv = qkv_.contiguous(), cos = cos_.contiguous(), sin = sin_.contiguous(), table = block_table.contiguous();
  const Tensor slots = int64(slots_), ends = int64(query_lens), lens = int64(kv_lens);
  check_step(slots, table, ends, lens, tokens, blocks, block_size);
  if (!kernel_dtype(dtype) || dim % 16 || block_size % 16) {
    calls[3]++;
    const Tensor kv = cache.select(0, layer);
    return cann::plain_rope_paged_attention(qkv, cos, sin, kv.select(0, 0), kv.select(0, 1), slots, table, ends, lens, scale);
  }
  Tensor out = at::empty({tokens, heads * dim}, qkv.options());
  const int64_t seqs = table.size(0), used = seqs ? data<int64_t>(ends)[seqs - 1] : 0;
  if (used < tokens) out.zero_();
  auto call = [&](auto zero) {
    using T = decltype(zero);
    T* k_cache = static_cast<T*>(cache.mutable_data_ptr()) + layer * cache.stride(0);
    cann::rope_paged_attention<T>({data<T>(qkv), data<T>(cos), data<T>(sin), k_cache, k_cache + cache.stride(1),
                                   data<int64_t>(slots), data<int32_t>(table), data<int64_t>(ends), data<int64_t>(lens),
                                   static_cast<T*>(out.mutable_data_ptr()), tokens, seqs, heads, kv_heads, dim, block_size,
                                   table.size(1), static_cast<float>(scale), at::get_num_threads()});
  };
  if (dtype == at::kFloat) call(float{});
  else call(cann::bf16{});
  calls[2]++;
  return out;
}

Tensor rope_paged_attention_meta(const Tensor& qkv, const Tensor&, const Tensor&, Tensor cache, int64_t, const Tensor&,
                                 const Tensor&, const Tensor&, const Tensor&, double) {
  return at::empty_symint({qkv.sym_size(0), qkv.sym_size(1) - cache.sym_size(3) * cache.sym_size(5) * 2}, qkv.options());
}

std::vector<int64_t> kernel_calls() { return {calls[0], calls[1], calls[2], calls[3]}; }

std::string isa() { return cann::isa(); }

}  // namespace

TORCH_LIBRARY(cann_cpu, m) {
  m.def("pack_linear(Tensor w) -> Tensor");
  m.def("linear(Tensor x, Tensor w_packed, Tensor? bias, SymInt n) -> Tensor");
  m.def("linear_f32(Tensor x, Tensor w_packed, Tensor? bias, SymInt n) -> Tensor");
  m.def(
      "rope_paged_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) cache, int layer, Tensor slots, "
      "Tensor block_table, Tensor query_lens, Tensor kv_lens, float scale) -> Tensor");
  m.def("all_reduce(Tensor x, str group) -> Tensor");
  m.def("all_gather(Tensor x, int size, str group) -> Tensor");
  m.def("kernel_calls() -> int[]", kernel_calls);
  m.def("isa() -> str", isa);
}

TORCH_LIBRARY_IMPL(cann_cpu, CPU, m) {
  m.impl("pack_linear", pack_linear);
  m.impl("linear", linear);
  m.impl("linear_f32", linear_f32);
  m.impl("rope_paged_attention", rope_paged_attention);
}

TORCH_LIBRARY_IMPL(cann_cpu, Meta, m) {
  m.impl("pack_linear", pack_linear_meta);
  m.impl("linear", linear_meta);
  m.impl("linear_f32", linear_f32_meta);
  m.impl("rope_paged_attention", rope_paged_attention_meta);
}

namespace {
const Tensor& tensor(AtenTensorHandle h) { return *torch::aot_inductor::tensor_handle_to_tensor_pointer(h); }
}  // namespace

// Signatures follow AOTInductor's C shim convention: handles in, one owned handle out, an error code back.
extern "C" {

AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, int64_t n,
                                     AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(linear(tensor(x), tensor(w), bias ? OptionalTensor(tensor(*bias)) : std::nullopt, n));
  });
}

AOTITorchError aoti_torch_cpu_linear_f32(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, int64_t n,
                                         AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(
        linear_f32(tensor(x), tensor(w), bias ? OptionalTensor(tensor(*bias)) : std::nullopt, n));
  });
}

AOTITorchError aoti_torch_cpu_rope_paged_attention(AtenTensorHandle qkv, AtenTensorHandle cos, AtenTensorHandle sin,
                                                   AtenTensorHandle cache, int64_t layer, AtenTensorHandle slots,
                                                   AtenTensorHandle block_table, AtenTensorHandle query_lens,
                                                   AtenTensorHandle kv_lens, double scale, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(rope_paged_attention(tensor(qkv), tensor(cos), tensor(sin), tensor(cache), layer,
                                                                       tensor(slots), tensor(block_table), tensor(query_lens),
                                                                       tensor(kv_lens), scale));
  });
}

}  // extern "C"
