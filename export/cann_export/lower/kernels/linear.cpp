// y = x W^T + b on packed weights, for one row (memory-bound: streams the weights once) up to thousands (compute-bound).
// Threads share the (row panel, column block) grid; nothing is reduced across threads, so the result is deterministic.
#include <omp.h>

#include <algorithm>

#include "kernels.h"
#include "tile.h"

namespace {

// Bytes of activations that a panel may hold, so that they stay in the L2 cache while all weight blocks pass by.
constexpr int64_t PANEL_BYTES = 512 * 1024;
constexpr int PAIR_ROWS = W == 16 ? RMAX / 2 : 1;  // rows of a tile of two blocks
constexpr int PREFETCH = 2048;  // bytes ahead in the weight stream

template <class T, class O>
CANN_INLINE void store_block(const Vec* acc, const T* bias, O* out, int64_t columns) {
  if (columns >= BLOCK) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) vstore(out + v * W, bias ? vadd(acc[v], vload(bias + v * W)) : acc[v]);
    return;
  }
  float values[BLOCK];
  for (int v = 0; v < NV; v++) vstore(values + v * W, acc[v]);
  for (int64_t c = 0; c < columns; c++) from_float(out + c, bias ? values[c] + to_float(bias[c]) : values[c]);
}

template <class T, class O, int R, int NB>
void rows_times_blocks(const T* x, const T* w, const T* bias, O* out, int64_t n, int64_t k, int64_t columns) {
  constexpr int P = Mac<T>::PAIR;
  const int64_t wstride = (k + P - 1) / P * P * BLOCK;
  Vec acc[R][NB * NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < NB * NV; c++) acc[r][c] = vzero();
  accumulate<T, R, NB, (R <= 4 ? PREFETCH : 0)>(acc, x, k, w, wstride, k);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int b = 0; b < NB; b++)
      store_block(&acc[r][b * NV], bias ? bias + b * BLOCK : nullptr, out + r * n + b * BLOCK, columns - b * BLOCK);
}

}  // namespace

namespace cann {

const char* isa() {
#if defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#else
  return "avx2";
#endif
}

template <class T, class O>
void linear(const T* x, const T* packed, const T* bias, O* out, int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int P = Mac<T>::PAIR;
  const int64_t blocks = (n + BLOCK - 1) / BLOCK, block_size = (k + P - 1) / P * P * BLOCK;
  int64_t panel = PANEL_BYTES / std::max<int64_t>(1, k * static_cast<int64_t>(sizeof(T)));
  panel = std::clamp<int64_t>(panel / RMAX * RMAX, 2 * RMAX, 192);
  const int64_t panels = (m + panel - 1) / panel, total = panels * blocks;
  if (m * n * k < 32768) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t last = total * (thread + 1) / team;
    for (int64_t item = total * thread / team; item < last;) {
      const int64_t row0 = item / blocks * panel, row1 = std::min(m, row0 + panel), b = item % blocks;
      const T* w = packed + b * block_size;
      const T* bias_b = bias ? bias + b * BLOCK : nullptr;
      // Two blocks at a time where that is faster: one row alone is bound by the latency of its accumulator chains, and
      // many rows need fewer broadcasts for each multiply (where the register file is large enough).
      const bool two = item + 1 < last && b + 1 < blocks && (m == 1 || (PAIR_ROWS > 1 && m > RMAX));
      for (int64_t row = row0; row < row1;) {
        const int rows = two ? static_cast<int>(std::min<int64_t>(PAIR_ROWS, row1 - row)) : next_rows(row1 - row);
        const T* x_row = x + row * k;
        O* y = out + row * n + b * BLOCK;
        if (two)
          with_rows<PAIR_ROWS>(rows, [&](auto r) {
            rows_times_blocks<T, O, decltype(r)::value, 2>(x_row, w, bias_b, y, n, k, n - b * BLOCK);
          });
        else
          with_rows(rows, [&](auto r) {
            rows_times_blocks<T, O, decltype(r)::value, 1>(x_row, w, bias_b, y, n, k, n - b * BLOCK);
          });
        row += rows;
      }
      item += two ? 2 : 1;
    }
  }
}

template void linear(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int);
template void linear(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int);
template void linear(const bf16*, const bf16*, const bf16*, float*, int64_t, int64_t, int64_t, int);

}  // namespace cann
