// Vectors of W floats in the compiler's vector extensions: one source for every level, whose width follows from the file's
// flags. Included inside an anonymous namespace of each level's file, so that no two levels share a function.

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef float FUnaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t HUnaligned __attribute__((vector_size(2 * W), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504f;

inline F load(const float* p) { return *reinterpret_cast<const FUnaligned*>(p); }
inline void store(float* p, F x) { *reinterpret_cast<FUnaligned*>(p) = x; }
inline F set1(float x) { return x - F{}; }
inline F vmax(F a, F b) { return a > b ? a : b; }

inline F load_bf16(const uint16_t* p) {
  I wide = __builtin_convertvector(*reinterpret_cast<const HUnaligned*>(p), I);
  return (F)(wide << 16);
}

inline float sum(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
#endif
}

inline float largest(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float best = x[0];
  for (int i = 1; i < W; i++) best = best > x[i] ? best : x[i];
  return best;
#endif
}

/// Write the sum of each of four vectors to out[0], out[stride], ... Since the four share their shuffles, this takes a third of
/// the time of four reductions.
inline void sum4(F a, F b, F c, F d, float* out, int stride) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
  __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
  __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
  float four[4] = {sum(a), sum(b), sum(c), sum(d)};
#endif
  for (int i = 0; i < 4; i++) out[i * stride] = four[i];
}

/// 2^x to about 2 units in the last place; 0 below -126, NaN for NaN.
inline F exp2v(F x) {
  const F magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  F shifted = x + magic;
  F r = x - (shifted - magic);
  // Taylor series of 2^r on [-0.5, 0.5]; the first omitted term is below 1e-7.
  F y = set1(1.5403530e-4f);
  y = y * r + set1(1.3333558e-3f);
  y = y * r + set1(9.6181291e-3f);
  y = y * r + set1(5.5504109e-2f);
  y = y * r + set1(2.4022651e-1f);
  y = y * r + set1(6.9314718e-1f);
  y = y * r + set1(1.0f);
  I bits = (I)y + (((I)shifted - (I)magic) << 23);
  // The integer arithmetic above would turn NaN into a number.
  return x < set1(-126.0f) ? F{} : (x == x ? (F)bits : x);
}

/// tanh from exp2. Absolute error about 1e-7; a logit cap multiplies it.
inline F tanhv(F x) {
  F bounded = x > set1(15.0f) ? set1(15.0f) : (x < set1(-15.0f) ? set1(-15.0f) : x);
  return set1(1.0f) - set1(2.0f) / (exp2v(bounded * set1(2 * kLog2e)) + set1(1.0f));
}

inline float bf16_to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

inline float half_to_float(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023, bits;
  if (exponent == 0) {
    float y = mantissa * 5.9604644775390625e-8f;  // 2^-24, the unit of a denormal half
    __builtin_memcpy(&bits, &y, 4);
  } else {
    bits = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
  }
  bits |= sign;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
#endif
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t x;
  __builtin_memcpy(&x, p, 2);
  return x;
}

inline uint32_t load_u32(const uint8_t* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

inline void convert_to_float(const void* x, int dtype, int n, float* y) {
  if (dtype == kFloat32) {
    __builtin_memcpy(y, x, size_t(n) * 4);
  } else if (dtype == kBFloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(x);
    int i = 0;
    for (; i + W <= n; i += W) store(y + i, load_bf16(p + i));
    for (; i < n; i++) y[i] = bf16_to_float(p[i]);
  } else {
    for (int i = 0; i < n; i++) y[i] = half_to_float(static_cast<const uint16_t*>(x)[i]);
  }
}
