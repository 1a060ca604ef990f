// Attention of one query row over a range of cached keys, for all query heads of one kv head: memory-bound, so each key
// and value is read from memory once for the whole group. Produces an unnormalized partial result that merges with those
// of the other ranges (flash decoding). What leads to a row's result depends on its own keys only.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int CHUNK = 128;  // keys of one range; fixed, so that the order of operations never depends on the batch
constexpr int SLICE = W == 16 ? 4 : 2;  // vectors of head_dim accumulated at a time

// Where the keys (or values) of one sequence and one kv head lie.
template <class T>
struct Pages {
  const T* base;         // kv head's part of block 0
  const int32_t* table;  // this sequence's blocks
  int64_t block_stride;  // elements from block to block
  int64_t block_size, head_dim;

  CANN_INLINE const T* at(int64_t key) const {
    return base + table[key / block_size] * block_stride + key % block_size * head_dim;
  }
};

// Partial sums of q . k over head_dim, one vector.
CANN_INLINE Vec dot(const float* q, const float* k, int64_t d) {
  Vec s = vmul(vload(q), vload(k));
  for (int64_t i = W; i < d; i += W) s = vfma(vload(q + i), vload(k + i), s);
  return s;
}
CANN_INLINE Vec dot(const bf16* q, const bf16* k, int64_t d) {
#if defined(__AVX512BF16__)
  Vec s = vzero();
  int64_t i = 0;
  for (; i + 32 <= d; i += 32)
    s = _mm512_dpbf16_ps(s, reinterpret_cast<__m512bh>(iload(q + i)), reinterpret_cast<__m512bh>(iload(k + i)));
  if (i < d)
    s = _mm512_dpbf16_ps(s, reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(0xffff, q + i)),
                         reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(0xffff, k + i)));
  return s;
#else
  Vec s = vmul(vload(q), vload(k));
  for (int64_t i = W; i < d; i += W) s = vfma(vload(q + i), vload(k + i), s);
  return s;
#endif
}

template <class T>
CANN_INLINE void prefetch_rows(const T* p, int64_t elements) {
  for (int64_t i = 0; i < elements; i += 64 / static_cast<int64_t>(sizeof(T)))
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// acc [G][D] += probabilities [G][CHUNK] times values, over one run of keys in one block, for NV vectors from column d.
template <class T, int G, int NVEC>
CANN_INLINE void add_values(const float* probs, const T* values, int64_t keys, int64_t head_dim, float* acc, int64_t d) {
  Vec sum[G][NVEC];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < NVEC; v++) sum[g][v] = vload(acc + g * head_dim + d + v * W);
  for (int64_t j = 0; j < keys; j++) {
    Vec value[NVEC];
    for (int v = 0; v < NVEC; v++) value[v] = vload(values + j * head_dim + d + v * W);
    for (int g = 0; g < G; g++) {
      Vec p = vset(probs[g * CHUNK + j]);
      for (int v = 0; v < NVEC; v++) sum[g][v] = vfma(p, value[v], sum[g][v]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < NVEC; v++) vstore(acc + g * head_dim + d + v * W, sum[g][v]);
}

// Keys [first, last) (at most CHUNK) for G query heads q [G][D]: acc [G][D] = sum of exp(score - high) * value,
// high [G] = the largest score, total [G] = the sum of exp(score - high). DIM: head_dim where known at compile time.
template <class T, int G, int DIM>
void decode_range(const T* q, const Pages<T>& k, const Pages<T>& v, int64_t first, int64_t last, float scale, float* acc,
                  float* high, float* total) {
  const int64_t head_dim = DIM ? DIM : k.head_dim;
  alignas(64) float probs[G * CHUNK];
  Vec top[G];
  for (int g = 0; g < G; g++) top[g] = vset(-__builtin_inff());
  for (int64_t key = first; key < last; key += W) {
    // Block sizes are multiples of 16, so these W keys lie in one block; those past `last` are read and dropped.
    const T* rows = k.at(key);
    if (key + 2 * W < last) prefetch_rows(k.at(key + 2 * W), W * head_dim);
    prefetch_rows(v.at(key), W * head_dim);
    const int64_t left = last - key;
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      Vec partial[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) partial[i] = dot(q + g * head_dim, rows + i * head_dim, head_dim);
      Vec score = vmul(hsum(partial), vset(scale));
      if (left < W) score = vkeep(score, static_cast<int>(left));
      vstore(probs + g * CHUNK + (key - first), score);
      top[g] = vmax(top[g], score);
    }
  }
  const int64_t padded = (last - first + W - 1) / W * W;
  for (int g = 0; g < G; g++) {
    high[g] = vreduce_max(top[g]);
    Vec sum = vzero();
    for (int64_t j = 0; j < padded; j += W) {
      Vec p = vexp(vsub(vload(probs + g * CHUNK + j), vset(high[g])));
      vstore(probs + g * CHUNK + j, p);
      sum = vadd(sum, p);
    }
    total[g] = vreduce_add(sum);
    for (int64_t d = 0; d < head_dim; d += W) vstore(acc + g * head_dim + d, vzero());
  }
  for (int64_t key = first; key < last;) {
    const int64_t run = std::min(v.block_size - key % v.block_size, last - key);
    const T* values = v.at(key);
    const float* p = probs + (key - first);
    int64_t d = 0;
    for (; d + SLICE * W <= head_dim; d += SLICE * W) add_values<T, G, SLICE>(p, values, run, head_dim, acc, d);
    for (; d < head_dim; d += W) add_values<T, G, 1>(p, values, run, head_dim, acc, d);
    key += run;
  }
}

// As decode_range, for any group size: in parts of at most four heads.
template <class T, int DIM>
void decode_group(int64_t group, const T* q, const Pages<T>& k, const Pages<T>& v, int64_t first, int64_t last, float scale,
                  float* acc, float* high, float* total) {
  const int64_t head_dim = DIM ? DIM : k.head_dim;
  for (int64_t g = 0; g < group;) {
    const int64_t part = std::min<int64_t>(4, group - g);
    const T* qg = q + g * head_dim;
    float* out = acc + g * head_dim;
    if (part == 4) decode_range<T, 4, DIM>(qg, k, v, first, last, scale, out, high + g, total + g);
    else if (part == 3) decode_range<T, 3, DIM>(qg, k, v, first, last, scale, out, high + g, total + g);
    else if (part == 2) decode_range<T, 2, DIM>(qg, k, v, first, last, scale, out, high + g, total + g);
    else decode_range<T, 1, DIM>(qg, k, v, first, last, scale, out, high + g, total + g);
    g += part;
  }
}

}  // namespace
