// What single bytes mean, for where there are fewer than a vector of them.
#pragma once
#include <cmath>
#include <cstdint>

struct Tables {
  float e4m3[256];  // 2^8 too small, as in vectors.h
  float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  float e8m0[256];

  Tables() {
    for (int code = 0; code < 256; ++code) {
      int exponent = code >> 3 & 15, mantissa = code & 7;
      float size = exponent ? std::ldexp(1 + mantissa / 8.f, exponent - 15) : std::ldexp(float(mantissa), -17);
      e4m3[code] = code & 128 ? -size : size;
      e8m0[code] = code == 255 ? NAN : std::ldexp(1.f, code - 127);
    }
  }
};

static const Tables tables;
