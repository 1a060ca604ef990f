// The kernels behind the torch ops, as plain functions on raw pointers: compiled per ISA, free of torch headers.
// ops.cpp checks shapes and dtypes before it calls them.
#pragma once

#include <cstdint>

#include "bf16.h"

namespace cann {

// The ISA that the kernels were compiled for.
const char* isa();

constexpr int64_t LINEAR_BLOCK = 32;  // output features of a packed block

// x [m, k] times packed weights [ceil(n / 32)][ceil(k / PAIR)][32][PAIR] plus bias [n] (or null): out [m, n].
// Accumulates in float32, rounds once to the output's type O (T or float); each row's result is the same for every m and
// number of threads.
template <class T, class O>
void linear(const T* x, const T* packed, const T* bias, O* out, int64_t m, int64_t n, int64_t k, int threads);

// One step of attention of one layer. Letters: T tokens, S sequences, N query heads, K kv heads, D head_dim, B blocks,
// P block_size, M columns of the block table.
template <class T>
struct Attention {
  const T* qkv;  // [T, (N + 2 K) D]
  const T* cos;  // [T, D], as transformers gives them: the second half repeats the first
  const T* sin;
  T* k_cache;  // [B, K, P, D]
  T* v_cache;
  const int64_t* slots;         // [T] block * P + offset
  const int32_t* block_table;   // [S, M]
  const int64_t* query_ends;    // [S] cumulative
  const int64_t* kv_lens;       // [S]
  T* out;                       // [T, N D]
  int64_t tokens, seqs, heads, kv_heads, head_dim, block_size, table_width;
  float scale;
  int threads;
};

// Rotates q and k (half mode), writes k and v to their slots, then causal attention over the paged cache.
// D and P are multiples of 16. Rows that belong to no sequence are left untouched.
template <class T>
void rope_paged_attention(const Attention<T>& a);

}  // namespace cann
