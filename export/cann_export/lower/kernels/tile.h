// The register tile that all matrix products of the CPU kernels share: R rows times NB column blocks of 32.
// A column block of K x 32 is packed [K / PAIR][32][PAIR] (PAIR is 2 for bfloat16, 1 for float). Every output element
// is one chain of multiply-accumulates in k order, whatever R and NB are: results do not depend on the blocking.
#pragma once

#include "vec.h"

namespace {

constexpr int BLOCK = 32;            // columns of a packed block
constexpr int NV = BLOCK / W;        // vectors of a packed block
constexpr int RMAX = W == 16 ? 12 : 3;  // rows whose accumulators fit the register file

// acc[r][b * NV + v] += x[r, :k] * w[block b, :k, columns of vector v].
// x: R rows ldx elements apart; w: NB packed blocks, wstride elements apart. AHEAD: bytes of prefetch distance, 0 for none.
template <class T, int R, int NB, int AHEAD>
CANN_INLINE void accumulate(Vec (&acc)[R][NB * NV], const T* x, int64_t ldx, const T* w, int64_t wstride, int64_t k) {
  using M = Mac<T>;
  constexpr int P = M::PAIR;
  for (int64_t i = 0; i + P <= k; i += P) {
    typename M::Row row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) row[r] = M::row(x + r * ldx + i);
#pragma GCC unroll 8
    for (int c = 0; c < NB * NV; c++) {
      const T* p = w + (c / NV) * wstride + i * BLOCK + (c % NV) * W * P;
      if constexpr (AHEAD > 0) {
        constexpr int LINE = 64 / static_cast<int>(sizeof(T) * W * P);  // vectors of one cache line
        if (c % LINE == 0) _mm_prefetch(reinterpret_cast<const char*>(p) + AHEAD, _MM_HINT_T0);
      }
      typename M::Weight weight = M::weight(p);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r][c] = M::mac(acc[r][c], weight, row[r]);
    }
  }
  if constexpr (P == 2) {
    if (k & 1) {
      int64_t i = k - 1;
#pragma GCC unroll 8
      for (int c = 0; c < NB * NV; c++) {
        typename M::Weight weight = M::weight(w + (c / NV) * wstride + i * BLOCK + (c % NV) * W * P);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[r][c] = M::mac(acc[r][c], weight, M::last(x + r * ldx + i));
      }
    }
  }
}

// Calls f(std::integral_constant<int, r>) for 1 <= r <= RMAX.
template <int R>
struct Int {
  static constexpr int value = R;
};
template <int R = RMAX, class F>
CANN_INLINE void with_rows(int r, F&& f) {
  if constexpr (R > 1) {
    if (r < R) {
      with_rows<R - 1>(r, f);
      return;
    }
  }
  f(Int<R>{});
}

// How many of the rows left go into the next tile: as even a split as possible of what two tiles can hold.
CANN_INLINE int next_rows(int64_t left) {
  if (left <= RMAX) return static_cast<int>(left);
  return left < 2 * RMAX ? static_cast<int>((left + 1) / 2) : RMAX;
}

}  // namespace
