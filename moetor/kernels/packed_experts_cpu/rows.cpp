// Rows times quantised matrices, read as they are packed: out[r, n] = sum over k of x[r, k] · q[n, k] · scale.
//
// Each out is one sum in one order, whatever the number of threads: over the columns of one scale in vectors, times
// that scale, added up in float32. Letters: R rows, N and K output and input size of a matrix.
#include <algorithm>
#include <cstdint>

#include "tables.h"
#include "vectors.h"

namespace {

// Rows of a matrix that one thread takes at a time: 32 KB of 2048 bytes each stay in its first cache while
// further rows of x meet them.
constexpr int64_t CHUNK = 16;
// Below this many numbers, waking the other threads takes longer than the product.
constexpr int64_t ONE_THREAD = 1 << 17;

float number(float scale) { return scale; }
float number(uint8_t exponent) { return tables.e8m0[exponent]; }

struct Matrix {
  const uint8_t* data;
  const char* scale;
  int64_t row_bytes, scale_row_bytes, high, wide, N, K;

  const uint8_t* row(int64_t n) const { return data + n * row_bytes; }
  const char* scales(int64_t n) const { return scale + n / high * scale_row_bytes; }
};

// B rows of a matrix by R rows of x. With 4 bits, x has the columns of the low nibbles first: even, then odd.
template <int bits, typename Scale, int R, int B>
void product(const Matrix& m, const float* x, int64_t n, float* out) {
  Vec sums[B][R];
  float rest[B][R] = {};
  for (auto& row : sums)
    for (Vec& sum : row) sum = Vec::all(0);
  const uint8_t* q[B];
  const Scale* scales[B];
  for (int b = 0; b < B; ++b) q[b] = m.row(n + b), scales[b] = reinterpret_cast<const Scale*>(m.scales(n + b));
  const int64_t per_byte = 8 / bits, odd = m.K / 2;
  for (int64_t start = 0, group = 0; start < m.K; start += m.wide, ++group) {
    int64_t at = start / per_byte, end = std::min(start + m.wide, m.K) / per_byte;
    Vec parts[B][R];
    float tail[B][R] = {};
    for (auto& row : parts)
      for (Vec& part : row) part = Vec::all(0);
    for (; at + Vec::width <= end; at += Vec::width)
      for (int b = 0; b < B; ++b) {
        // these bytes of the rows that come next: a row is too short for the processor to see a stream in it
        if (at % 64 == 0) __builtin_prefetch(q[b] + at + B * m.row_bytes);
        Vec low, high;
        if constexpr (bits == 8) low = Vec::e4m3(q[b] + at);
        else Vec::e2m1(q[b] + at, low, high);
        for (int r = 0; r < R; ++r) {
          parts[b][r] = Vec::fma(low, Vec::load(x + r * m.K + at), parts[b][r]);
          if constexpr (bits == 4) parts[b][r] = Vec::fma(high, Vec::load(x + r * m.K + odd + at), parts[b][r]);
        }
      }
    for (; at < end; ++at)
      for (int b = 0; b < B; ++b) {
        uint8_t byte = q[b][at];
        for (int r = 0; r < R; ++r) {
          const float* from = x + r * m.K + at;
          tail[b][r] += bits == 8 ? tables.e4m3[byte] * from[0]
                                  : tables.e2m1[byte & 15] * from[0] + tables.e2m1[byte >> 4] * from[odd];
        }
      }
    for (int b = 0; b < B; ++b) {
      float scale = number(scales[b][group]);
      for (int r = 0; r < R; ++r) {
        sums[b][r] = Vec::fma(parts[b][r], Vec::all(scale), sums[b][r]);
        rest[b][r] += tail[b][r] * scale;
      }
    }
  }
  for (int b = 0; b < B; ++b) {
    uint8_t largest = 0;  // its highest bit is set where a byte is NaN: 127 and the sign
    if constexpr (bits == 8)
      for (const uint8_t *at = q[b], *end = at + m.K; at < end; ++at) largest |= (*at & 127) + 1;
    for (int r = 0; r < R; ++r) {
      float sum = (sums[b][r].sum() + rest[b][r]) * (bits == 8 ? 256 : 1);
      out[r * m.N + n + b] = largest & 128 ? NAN : sum;
    }
  }
}

template <int bits, typename Scale, int R>
void chunk(const Matrix& m, const float* x, int64_t n, int64_t end, float* out) {
  for (; n + 4 <= end; n += 4) product<bits, Scale, R, 4>(m, x, n, out);
  for (; n < end; ++n) product<bits, Scale, R, 1>(m, x, n, out);
}

template <int bits, typename Scale>
void rows(const Matrix& m, const float* x, int64_t num_rows, int64_t n, int64_t end, float* out) {
  for (; num_rows >= 4; num_rows -= 4, x += 4 * m.K, out += 4 * m.N) chunk<bits, Scale, 4>(m, x, n, end, out);
  for (; num_rows >= 2; num_rows -= 2, x += 2 * m.K, out += 2 * m.N) chunk<bits, Scale, 2>(m, x, n, end, out);
  if (num_rows) chunk<bits, Scale, 1>(m, x, n, end, out);
}

}  // namespace

// items (num_items, 3): expert, its first row of x, and one past its last. high, wide: of the blocks of a scale.
extern "C" void moetor_packed_rows(
    int64_t bits, const float* x, float* out, const int64_t* items, int64_t num_items, const uint8_t* data,
    int64_t matrix_bytes, int64_t row_bytes, const char* scale, int64_t scale_matrix_bytes, int64_t scale_row_bytes,
    int64_t scale_bytes, int64_t high, int64_t wide, int64_t N, int64_t K, int64_t num_threads) {
  const int64_t chunks = (N + CHUNK - 1) / CHUNK;
  if (num_items * N * K < ONE_THREAD) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t job = 0; job < num_items * chunks; ++job) {
    const int64_t *item = items + 3 * (job / chunks), start = job % chunks * CHUNK, end = std::min(start + CHUNK, N);
    const Matrix m{data + item[0] * matrix_bytes, scale + item[0] * scale_matrix_bytes, row_bytes, scale_row_bytes,
                   high, wide, N, K};
    auto run = bits == 8 ? (scale_bytes == 1 ? rows<8, uint8_t> : rows<8, float>)
                         : (scale_bytes == 1 ? rows<4, uint8_t> : rows<4, float>);
    run(m, x + item[1] * K, item[2] - item[1], start, end, out + item[1] * N);
  }
}
