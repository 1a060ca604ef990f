// Attention of a block of query rows of one sequence and one kv head over all keys that they see: compute-bound, so keys
// and values are repacked into register tiles, KEYS at a time, and reused by every row (flash attention, online softmax).
// A "virtual row" is one query head of one token; those of one kv head follow each other. Key blocks start at key 0 of
// the sequence, so a row's result does not depend on how its prompt was cut into chunks.
#pragma once

#include <algorithm>

#include "decode.h"
#include "tile.h"

namespace {

constexpr int KEYS = 64;           // keys of one online-softmax step
constexpr int VIRTUAL_ROWS = 192;  // virtual rows of one task (a multiple of 12 and 3: RMAX)

// k rows [keys][D] of one sequence -> [KEYS / BLOCK] packed blocks of D x 32; keys past `seen` become zero.
template <class T>
CANN_INLINE void pack_keys(const Pages<T>& k, int64_t first, int64_t seen, T* out) {
  constexpr int P = Mac<T>::PAIR;
  const int64_t head_dim = k.head_dim, pairs = head_dim / P;
  for (int b = 0; b < KEYS / BLOCK; b++) {
    T* block = out + b * head_dim * BLOCK;
    for (int i = 0; i < BLOCK; i++) {
      const int64_t key = first + b * BLOCK + i;
      if (key < seen) {
        const T* row = k.at(key);
        for (int64_t d = 0; d < pairs; d++) std::memcpy(block + (d * BLOCK + i) * P, row + d * P, P * sizeof(T));
      } else {
        for (int64_t d = 0; d < pairs; d++) std::memset(block + (d * BLOCK + i) * P, 0, P * sizeof(T));
      }
    }
  }
}

// v rows [KEYS][D] -> column blocks of KEYS x 32: [ceil(D / 32)][KEYS / PAIR][32][PAIR]; keys past `seen` and columns
// past D become zero.
template <class T>
CANN_INLINE void pack_values(const Pages<T>& v, int64_t first, int64_t seen, T* out) {
  constexpr int P = Mac<T>::PAIR;
  const int64_t head_dim = v.head_dim, blocks = (head_dim + BLOCK - 1) / BLOCK;
  for (int64_t key = 0; key < KEYS; key++) {
    const T* row = first + key < seen ? v.at(first + key) : nullptr;
    for (int64_t b = 0; b < blocks; b++) {
      T* line = out + (b * KEYS + key / P * P) * BLOCK + key % P;
      const int64_t columns = row ? std::min<int64_t>(BLOCK, head_dim - b * BLOCK) : 0;
      for (int64_t c = 0; c < columns; c++) line[c * P] = row[b * BLOCK + c];
      for (int64_t c = columns; c < BLOCK; c++) line[c * P] = T{};
    }
  }
}

// State of a task between key blocks: unnormalized output, running maximum and sum (W partial sums) of each virtual row.
template <class T>
struct PrefillScratch {
  T *keys, *values;
  float *out, *total, *high;
  int64_t columns;  // head_dim rounded up to whole blocks

  static int64_t floats(int64_t head_dim) {
    const int64_t columns = (head_dim + BLOCK - 1) / BLOCK * BLOCK;
    return KEYS * (head_dim + columns) + VIRTUAL_ROWS * (columns + W + 1) + 64;
  }
  PrefillScratch(float* memory, int64_t head_dim) : columns((head_dim + BLOCK - 1) / BLOCK * BLOCK) {
    out = memory;
    total = out + VIRTUAL_ROWS * columns;
    keys = reinterpret_cast<T*>(total + VIRTUAL_ROWS * W);
    values = keys + KEYS * head_dim;
    high = reinterpret_cast<float*>(values + KEYS * columns);
  }
};

// One tile of R virtual rows against the packed key block that starts at key `first`. seen[r]: keys that row r sees.
template <class T, int R>
void prefill_tile(const PrefillScratch<T>& s, const T* q, int64_t row, const int64_t* seen, int64_t first, int64_t head_dim,
                  float scale) {
  alignas(64) float scores[R][KEYS];
  alignas(64) T probs[R][KEYS];
  for (int b = 0; b < KEYS / BLOCK; b++) {
    Vec acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = vzero();
    accumulate<T, R, 1, 0>(acc, q, head_dim, s.keys + b * head_dim * BLOCK, 0, head_dim);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) vstore(&scores[r][b * BLOCK + v * W], vmul(acc[r][v], vset(scale)));
  }
  for (int r = 0; r < R; r++) {
    const int64_t visible = seen[r] - first;
    constexpr int N = KEYS / W;
    Vec x[N];
    for (int j = 0; j < N; j++) {
      x[j] = vload(&scores[r][j * W]);
      if (visible < KEYS) x[j] = vkeep(x[j], static_cast<int>(std::clamp<int64_t>(visible - j * W, 0, W)));
    }
    Vec top = x[0];
    for (int j = 1; j < N; j++) top = vmax(top, x[j]);
    float& high = s.high[row + r];
    const float block_high = vreduce_max(top);
    float* total = s.total + (row + r) * W;
    if (block_high > high) {
      // The first block always gets here with high = -infinity, where the factor is exactly 0.
      const Vec factor = vexp(vset(high - block_high));
      float* out = s.out + (row + r) * s.columns;
      for (int64_t d = 0; d < s.columns; d += W) vstore(out + d, vmul(vload(out + d), factor));
      vstore(total, vmul(vload(total), factor));
      high = block_high;
    }
    Vec sum = vload(total);
    for (int j = 0; j < N; j++) {
      Vec p = vexp(vsub(x[j], vset(high)));
      sum = vadd(sum, p);
      vstore(&probs[r][j * W], p);
    }
    vstore(total, sum);
  }
  for (int64_t d = 0; d < s.columns; d += BLOCK) {
    Vec acc[R][NV];
    float* out = s.out + row * s.columns + d;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = vload(out + r * s.columns + v * W);
    accumulate<T, R, 1, 0>(acc, &probs[0][0], KEYS, s.values + d * KEYS, 0, KEYS);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) vstore(out + r * s.columns + v * W, acc[r][v]);
  }
}

// Virtual rows [first_row, first_row + rows) of a sequence: q [rows][D] of one kv head. Virtual row i belongs to token
// i / group of the sequence's rows and sees keys 0 .. offset + i / group.
// write(virtual row, its out [D], factor) receives each finished row; out * factor is the result.
template <class T, class Write>
void prefill_rows(const Pages<T>& k, const Pages<T>& v, const T* q, int64_t first_row, int64_t rows, int64_t group,
                  int64_t offset, float scale, float* memory, const Write& write) {
  const int64_t head_dim = k.head_dim;
  PrefillScratch<T> s(memory, head_dim);
  for (int64_t i = 0; i < rows * s.columns; i++) s.out[i] = 0;
  for (int64_t i = 0; i < rows * W; i++) s.total[i] = 0;
  for (int64_t i = 0; i < rows; i++) s.high[i] = -__builtin_inff();
  int64_t seen[VIRTUAL_ROWS];
  for (int64_t i = 0; i < rows; i++) seen[i] = offset + (first_row + i) / group + 1;
  const int64_t last = seen[rows - 1];
  for (int64_t key = 0; key < last; key += KEYS) {
    pack_keys(k, key, last, s.keys);
    pack_values(v, key, last, s.values);
    for (int64_t row = 0; row < rows;) {
      const int n = next_rows(rows - row);
      if (seen[row + n - 1] > key)
        with_rows(n, [&](auto r) {
          prefill_tile<T, decltype(r)::value>(s, q + row * head_dim, row, seen + row, key, head_dim, scale);
        });
      row += n;
    }
  }
  for (int64_t i = 0; i < rows; i++) write(first_row + i, s.out + i * s.columns, 1.f / vreduce_add(vload(s.total + i * W)));
}

}  // namespace
