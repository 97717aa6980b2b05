// A vector of float32 as wide as this machine has, and how bytes of e4m3 and e2m1 become one.
//
// e4m3 is read as the float16 of the same bits, which is 2^8 too small: exact, and without float32 that are subnormal,
// which some processors are slow at. Its NaN becomes 480 · 2^-8; the caller looks for it.
#pragma once
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

struct Vec {
  static constexpr int width = 16;
  __m512 v;
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  float sum() const { return _mm512_reduce_add_ps(v); }

  static Vec e4m3(const uint8_t* p) {
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBFFF))))};
  }
  // The numbers of the low nibbles, then those of the high ones.
  static void e2m1(const uint8_t* p, Vec& low, Vec& high) {
    const __m512 numbers = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    low.v = _mm512_permutexvar_ps(code, numbers);  // which looks at the lowest four bits only
    high.v = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), numbers);
  }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

struct Vec {
  static constexpr int width = 8;
  __m256 v;
  static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  float sum() const {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static Vec e4m3(const uint8_t* p) {
    __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xBFFF))))};
  }
  static void e2m1(const uint8_t* p, Vec& low, Vec& high) {
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    low = number(code);
    high = number(_mm256_srli_epi32(code, 4));
  }

 private:
  static Vec number(__m256i code) {
    const __m256 sizes = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    return {_mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, code), _mm256_castsi256_ps(sign))};
  }
};

#else
#include "tables.h"

struct Vec {
  static constexpr int width = 1;
  float v;
  static Vec all(float x) { return {x}; }
  static Vec load(const float* p) { return {*p}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  float sum() const { return v; }
  static Vec e4m3(const uint8_t* p) { return {tables.e4m3[*p]}; }
  static void e2m1(const uint8_t* p, Vec& low, Vec& high) { low = {tables.e2m1[*p & 15]}, high = {tables.e2m1[*p >> 4]}; }
};
#endif
