// The SIMD layer of the CPU kernels: one float vector type, its conversions from and to bfloat16, and the
// multiply-accumulate step of each element type. It is chosen by the compiler's ISA flags (AVX2 with FMA, AVX-512, AVX-512
// with BF16) and leaves blocking and threads to tile.h and the kernels.
//
// Everything sits in an anonymous namespace: translation units are compiled for different ISAs, and the linker must
// never merge their inline functions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace {

using cann::bf16;

#define CANN_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)

using Vec = __m512;
using VecInt = __m512i;
constexpr int W = 16;  // floats in a vector

CANN_INLINE Vec vzero() { return _mm512_setzero_ps(); }
CANN_INLINE Vec vset(float x) { return _mm512_set1_ps(x); }
CANN_INLINE Vec vload(const float* p) { return _mm512_loadu_ps(p); }
CANN_INLINE void vstore(float* p, Vec x) { _mm512_storeu_ps(p, x); }
CANN_INLINE Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
CANN_INLINE Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
CANN_INLINE Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
CANN_INLINE Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
CANN_INLINE Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
CANN_INLINE Vec vfnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
CANN_INLINE float vreduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
CANN_INLINE float vreduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
CANN_INLINE VecInt iload(const void* p) { return _mm512_loadu_si512(p); }
CANN_INLINE VecInt iset(int32_t x) { return _mm512_set1_epi32(x); }
// The even and odd bfloat16 elements of a register of pairs, as floats.
CANN_INLINE Vec pair_low(VecInt x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
CANN_INLINE Vec pair_high(VecInt x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
CANN_INLINE Vec vload(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
// Keeps the first n lanes (0 .. W), puts -infinity in the others.
CANN_INLINE Vec vkeep(Vec x, int n) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), _mm512_set1_ps(-__builtin_inff()), x);
}

CANN_INLINE void vstore(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#else
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), r, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
#endif
}

// 2^n * y for integral n, and 0 where x < -87 (so that exp(-infinity) is exactly 0).
CANN_INLINE Vec exp_scale(Vec y, Vec n, Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_GE_OQ), y, n);
}
CANN_INLINE Vec vround(Vec x) { return _mm512_roundscale_ps(x, 0); }

// The horizontal sums of W vectors, as one vector.
CANN_INLINE Vec hsum(Vec* v) {
  Vec t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  Vec x = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  Vec y = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

#else  // AVX2 with FMA

using Vec = __m256;
using VecInt = __m256i;
constexpr int W = 8;

CANN_INLINE Vec vzero() { return _mm256_setzero_ps(); }
CANN_INLINE Vec vset(float x) { return _mm256_set1_ps(x); }
CANN_INLINE Vec vload(const float* p) { return _mm256_loadu_ps(p); }
CANN_INLINE void vstore(float* p, Vec x) { _mm256_storeu_ps(p, x); }
CANN_INLINE Vec vadd(Vec a, Vec b) { return _mm256_add_ps(a, b); }
CANN_INLINE Vec vsub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
CANN_INLINE Vec vmul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
CANN_INLINE Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
CANN_INLINE Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
CANN_INLINE Vec vfnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
CANN_INLINE float vreduce_max(Vec x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
CANN_INLINE float vreduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
CANN_INLINE VecInt iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
CANN_INLINE VecInt iset(int32_t x) { return _mm256_set1_epi32(x); }
CANN_INLINE Vec pair_low(VecInt x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
CANN_INLINE Vec pair_high(VecInt x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
CANN_INLINE Vec vload(const bf16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
CANN_INLINE Vec vkeep(Vec x, int n) {
  __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(keep));
}
CANN_INLINE void vstore(bf16* p, Vec x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(r));
}
CANN_INLINE Vec exp_scale(Vec y, Vec n, Vec x) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.f), _CMP_GE_OQ), _mm256_mul_ps(y, _mm256_castsi256_ps(bits)));
}
CANN_INLINE Vec vround(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

CANN_INLINE Vec hsum(Vec* v) {
  Vec a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  Vec b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

#endif

// exp(x) for x <= 0 to about 2 units in the last place; exactly 0 below -87. Cody-Waite reduction and a degree-5
// polynomial (Cephes expf).
CANN_INLINE Vec vexp(Vec x) {
  Vec xc = vmax(x, vset(-88.f));
  Vec n = vround(vmul(xc, vset(1.44269504f)));
  Vec r = vfnma(n, vset(-2.12194440e-4f), vfnma(n, vset(0.693359375f), xc));
  Vec y = vset(1.9875691500e-4f);
  y = vfma(y, r, vset(1.3981999507e-3f));
  y = vfma(y, r, vset(8.3334519073e-3f));
  y = vfma(y, r, vset(4.1665795894e-2f));
  y = vfma(y, r, vset(1.6666665459e-1f));
  y = vfma(y, r, vset(5.0000001201e-1f));
  y = vfma(vmul(y, r), r, vadd(r, vset(1.f)));
  return exp_scale(y, n, x);
}

CANN_INLINE float to_float(float x) { return x; }
CANN_INLINE float to_float(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
CANN_INLINE void from_float(float* p, float x) { *p = x; }
CANN_INLINE void from_float(bf16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// One multiply-accumulate step on W columns: PAIR consecutive k-elements of one row against W packed columns.
template <class T>
struct Mac;

template <>
struct Mac<float> {
  static constexpr int PAIR = 1;
  using Weight = Vec;
  using Row = Vec;
  static CANN_INLINE Weight weight(const float* w) { return vload(w); }
  static CANN_INLINE Row row(const float* x) { return vset(*x); }
  static CANN_INLINE Row last(const float* x) { return vset(*x); }
  static CANN_INLINE Vec mac(Vec acc, Weight w, Row x) { return vfma(w, x, acc); }
};

template <>
struct Mac<bf16> {
  static constexpr int PAIR = 2;
#if defined(__AVX512BF16__)
  using Weight = __m512bh;
  using Row = __m512bh;
  static CANN_INLINE Weight weight(const bf16* w) { return reinterpret_cast<__m512bh>(iload(w)); }
  static CANN_INLINE Row pair(int32_t bits) { return reinterpret_cast<__m512bh>(iset(bits)); }
  static CANN_INLINE Vec mac(Vec acc, Weight w, Row x) { return _mm512_dpbf16_ps(acc, w, x); }
#else
  struct Two {
    Vec low, high;
  };
  using Weight = Two;
  using Row = Two;
  static CANN_INLINE Two split(VecInt x) { return {pair_low(x), pair_high(x)}; }
  static CANN_INLINE Weight weight(const bf16* w) { return split(iload(w)); }
  static CANN_INLINE Row pair(int32_t bits) { return split(iset(bits)); }
  static CANN_INLINE Vec mac(Vec acc, Weight w, Row x) { return vfma(w.high, x.high, vfma(w.low, x.low, acc)); }
#endif
  static CANN_INLINE Row row(const bf16* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return pair(bits);
  }
  // The last element of a row of odd length, with a zero beside it.
  static CANN_INLINE Row last(const bf16* x) { return pair(x->bits); }
};

}  // namespace
