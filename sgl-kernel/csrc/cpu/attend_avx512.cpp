// AVX-512 with VNNI: 2-bit rows are consumed as integers.
//
// Keys. 16 keys' codes are transposed so that each 32-bit lane holds four channels of one key. VPDPBUSD then adds four
// products a lane with no sum across lanes, and the query limb is a broadcast from memory:
//
//     row t:  | b0 b1 b2 b3 | b4 ...        vector j, lane t:  bytes 4j .. 4j+3 of row t
//     (vector j >> 2f) & 3, lane t          codes of channels f*q + 4j .. f*q + 4j+3 of key t
//
// The query is 256 * high + low, two signed bytes, 16 bits in all.
//
// Values. Sums run over keys, so four keys' codes of a channel share a lane, and 16 channels a vector. The weight is p * step
// as a 14-bit integer, 128 * high + low, with the tile's own scale.

#include <immintrin.h>

#include "kernels.h"

namespace {

#define OSCAR_INTEGER_DOTS 1
#include "vec.h"
#include "attend_impl.h"

constexpr int kMaxWords = kMaxDim / 16;  // 32-bit words of codes in a row

inline __m512i field_mask() { return _mm512_set1_epi8(3); }

inline __m512 meta_float(__m512i low16, int dtype) {
  if (dtype == kBFloat16) return _mm512_castsi512_ps(_mm512_slli_epi32(low16, 16));
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low16));
}

/// The uniform grid, and groups that a lane never straddles.
bool side_fits(const OscarSide& side) {
  const int quarter = side.head_dim / kCodesPerByte, groups = side.head_dim / side.group_size;
  return side.levels == nullptr && side.head_dim % 16 == 0 && groups <= kMaxGroups &&
         (groups == 1 || (quarter % 16 == 0 && side.group_size % 16 == 0));
}

bool integer_dots_fit(const OscarLayer& layer) { return side_fits(layer.k) && side_fits(layer.v); }

/// 32 bytes of a row, or as many as it has.
inline __m256i load_codes(const uint8_t* p, int bytes) {
  if (bytes >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_maskz_loadu_epi32(__mmask8((1u << (bytes / 4)) - 1), p);
}

inline __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

struct Meta {
  alignas(64) float centre[kMaxGroups][kTile];
  alignas(64) float step[kMaxGroups][kTile];
};

/// Centres and steps of a tile's rows, by group.
inline void read_meta(const OscarSide& side, const TileRows& rows, Meta* meta) {
  const int quarter = side.head_dim / kCodesPerByte, groups = side.head_dim / side.group_size;
  for (int g = 0; g < groups; g++) {
    const uint8_t* at = rows.base + quarter + g * kMetaBytes;
    for (int t = 0; t < kTile; t += 16) {
      __m128i four[4];
#pragma GCC unroll 8
      for (int i = 0; i < 4; i++) {
        const int64_t* o = rows.offset + t + 4 * i;
        __m128i x = _mm_cvtsi32_si128(int(load_u32(at + o[0])));
        x = _mm_insert_epi32(x, int(load_u32(at + o[1])), 1);
        x = _mm_insert_epi32(x, int(load_u32(at + o[2])), 2);
        four[i] = _mm_insert_epi32(x, int(load_u32(at + o[3])), 3);
      }
      const __m256i low_half = _mm256_inserti128_si256(_mm256_castsi128_si256(four[0]), four[1], 1);
      const __m256i high_half = _mm256_inserti128_si256(_mm256_castsi128_si256(four[2]), four[3], 1);
      const __m512i pair = join(low_half, high_half);
      __m512i low = _mm512_and_si512(pair, _mm512_set1_epi32(0xffff));
      const __m512 step = meta_float(_mm512_srli_epi32(pair, 16), side.meta_dtype);
      _mm512_store_ps(&meta->centre[g][t], meta_float(low, side.meta_dtype));
      _mm512_store_ps(&meta->step[g][t], step);
    }
  }
}

/// words[j][t]: 32-bit word j of the codes of key t.
inline void transpose_keys(const Tile& tile, int quarter, uint32_t (*words)[kTile]) {
  for (int t = 0; t < kTile; t += 16) {
    for (int first = 0; first < quarter; first += 32) {
      __m512i a[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        // Rows i and i + 4 of each run of eight share a vector; then the 128-bit lanes below come out in key order.
        const int low = t + (i & 3) + (i & 4) * 2;
        const uint8_t *x = tile.k.base + tile.k.offset[low], *y = tile.k.base + tile.k.offset[low + 4];
        a[i] = join(load_codes(x + first, quarter - first), load_codes(y + first, quarter - first));
      }
      __m512i word[2][4];
#pragma GCC unroll 8
      for (int i = 0; i < 2; i++) {
        __m512i p = _mm512_unpacklo_epi32(a[4 * i], a[4 * i + 1]), q = _mm512_unpacklo_epi32(a[4 * i + 2], a[4 * i + 3]);
        __m512i r = _mm512_unpackhi_epi32(a[4 * i], a[4 * i + 1]), s = _mm512_unpackhi_epi32(a[4 * i + 2], a[4 * i + 3]);
        word[i][0] = _mm512_unpacklo_epi64(p, q);
        word[i][1] = _mm512_unpackhi_epi64(p, q);
        word[i][2] = _mm512_unpacklo_epi64(r, s);
        word[i][3] = _mm512_unpackhi_epi64(r, s);
      }
#pragma GCC unroll 8
      for (int j = 0; j < 4; j++) {
        if (first / 4 + j < quarter / 4) {
          _mm512_store_si512(&words[first / 4 + j][t], _mm512_shuffle_i64x2(word[0][j], word[1][j], 0x88));
        }
        if (first / 4 + j + 4 < quarter / 4) {
          _mm512_store_si512(&words[first / 4 + j + 4][t], _mm512_shuffle_i64x2(word[0][j], word[1][j], 0xdd));
        }
      }
    }
  }
}

/// quads[i][z]: for keys 4i .. 4i+3 and code bytes 16z .. 16z+15, one byte of each key in every 32-bit lane.
inline void interleave_values(const Tile& tile, int quarter, uint8_t (*quads)[kMaxWords / 4][64]) {
  const __m512i low_words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m512i high_words = _mm512_add_epi32(low_words, _mm512_set1_epi32(4));
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int i = 0; i < kTile / 4; i++) {
    const uint8_t* row[4];
#pragma GCC unroll 8
    for (int t = 0; t < 4; t++) row[t] = tile.v.base + tile.v.offset[4 * i + t];
    for (int first = 0; first < quarter; first += 32) {
      const int left = quarter - first;
      __m512i a = join(load_codes(row[0] + first, left), load_codes(row[1] + first, left));
      __m512i b = join(load_codes(row[2] + first, left), load_codes(row[3] + first, left));
      __m512i low = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, low_words, b), bytes);
      _mm512_store_si512(quads[i][first / 16], low);
      if (left > 16) {
        __m512i high = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, high_words, b), bytes);
        _mm512_store_si512(quads[i][first / 16 + 1], high);
      }
    }
  }
}

/// sum += four products a lane, codes unsigned times limbs signed. In assembly because gcc 12 copies the accumulator first.
inline void add_products(__m512i& sum, __m512i codes, __m512i limbs) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(limbs));
}

inline __m512i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

/// logits[h][t] of NH rows over the tile. kQuarter: code bytes of rows with one group, 0 for any other row.
template <int NH, int kQuarter>
inline void key_dots(const OscarSide& side, const uint32_t (*words)[kTile], const Meta& meta, const QueryRows& rows, int first,
                     Ahead* ahead, float (*logits)[kTile]) {
  const int quarter = kQuarter ? kQuarter : side.head_dim / kCodesPerByte, dim = quarter * kCodesPerByte;
  const int group_size = kQuarter ? dim : side.group_size;
  const int8_t* limbs = rows.limbs + size_t(first) * dim * 2;
  Prefetcher prefetcher(ahead);
  for (int t = 0; t < kTile; t += 32) {
    for (int g = 0, channel = 0; channel < dim; g++) {
      const int end = channel + group_size;
      __m512i upper[NH][2], lower[NH][2];
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
        for (int i = 0; i < 2; i++) upper[h][i] = lower[h][i] = _mm512_setzero_si512();
      }
      while (channel < end) {
        const int f = channel / quarter, stop = end < (f + 1) * quarter ? end : (f + 1) * quarter;
        const __m512i shift = _mm512_set1_epi32(2 * f);
        const uint32_t* word = words[(channel - f * quarter) / 4] + t;
        for (; channel < stop; channel += 4, word += kTile) {
          prefetcher.line();
          const __m512i a = _mm512_and_si512(_mm512_srlv_epi32(_mm512_load_si512(word), shift), field_mask());
          const __m512i b = _mm512_and_si512(_mm512_srlv_epi32(_mm512_load_si512(word + 16), shift), field_mask());
          const int8_t* limb = limbs + channel * (kRowBlock * 2);
#pragma GCC unroll 8
          for (int h = 0; h < NH; h++) {
            const __m512i x = broadcast_word(limb + 8 * h), y = broadcast_word(limb + 8 * h + 4);
            add_products(upper[h][0], a, x);
            add_products(upper[h][1], b, x);
            add_products(lower[h][0], a, y);
            add_products(lower[h][1], b, y);
          }
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        // q . x = scale * (step * (limbs . codes - 1.5 * sum(limbs)) + centre * sum(limbs)). All from the limbs: else their
        // rounding would meet codes 0..3 instead of levels around zero.
        const __m512 scale = _mm512_set1_ps(rows.scale[first + h]);
        const __m512 total = _mm512_set1_ps(rows.sums[(first + h) * kMaxGroups + g]);
        const __m512 middle = _mm512_mul_ps(total, _mm512_set1_ps(-1.5f));
#pragma GCC unroll 8
        for (int i = 0; i < 2; i++) {
          const int at = t + 16 * i;
          __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper[h][i], 8), lower[h][i]));
          dot = _mm512_mul_ps(_mm512_add_ps(dot, middle), _mm512_load_ps(&meta.step[g][at]));
          dot = _mm512_mul_ps(_mm512_fmadd_ps(_mm512_load_ps(&meta.centre[g][at]), total, dot), scale);
          if (g) dot = _mm512_add_ps(dot, _mm512_load_ps(&logits[h][at]));
          _mm512_store_ps(&logits[h][at], dot);
        }
      }
    }
  }
}

/// Weights of one row and one group as limbs: p * step ~ scale * (128 * high + low).
struct Weights {
  alignas(64) int8_t high[kTile], low[kTile];
  float scale;
};

/// Largest lanes of up to four vectors, one a lane; shuffles shared by four are a third of four reductions.
template <int NH>
inline __m128 largest_of(const __m512* x) {
  const __m512 a = x[0], b = x[NH > 1 ? 1 : 0], c = x[NH > 2 ? 2 : 0], d = x[NH > 3 ? 3 : 0];
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// 2^x for x <= 0 with 15 bits, more than a weight keeps; 2^-126 and below become about that.
inline __m512 exp2_short(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order a NaN stays
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  const __m512 shifted = _mm512_add_ps(x, magic), r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  // Minimax fit on [-0.5, 0.5] with 2^0 = 1: largest relative error 3e-6.
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.58285e-3f), r, _mm512_set1_ps(5.590643e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4024099e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9312419e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

/// Bytes of 64 dwords 0..255, in order.
inline __m512i bytes_of_words(__m512i a, __m512i b) {
  // Packing works within 128-bit lanes; this puts the four dwords of each lane back in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
}

/// Raise the running maxima of NH rows to `top`, one a lane. alpha: factors for what the rows hold; beta: for sums relative to
/// `top`.
template <int NH>
inline void raise_maxima(float* const* row, int v_dim, __m128 top, float* alpha, float* beta) {
  const __m128 lowest = _mm_set1_ps(-kInfinity);
  alignas(16) float lanes[4];
#pragma GCC unroll 8
  for (int h = 0; h < 4; h++) lanes[h] = row[h < NH ? h : 0][v_dim];
  const __m128 before = _mm_load_ps(lanes);
  const __m128 now = _mm_max_ps(top, before);  // in this order a NaN stays out of the maximum; it is in the sums
  const __m128 origin = _mm_maskz_mov_ps(_mm_cmp_ps_mask(now, lowest, _CMP_NEQ_UQ), now);
  _mm_store_ps(lanes, now);
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) row[h][v_dim] = lanes[h];
  const __m256 x = _mm256_set_m128(_mm_sub_ps(top, origin), _mm_sub_ps(before, origin));
  const F factor = exp2v((F)_mm512_castps256_ps512(x));
  _mm_storeu_ps(alpha, _mm512_castps512_ps128((__m512)factor));
  _mm_storeu_ps(beta, _mm512_extractf32x4_ps((__m512)factor, 1));
}

/// Logits of NH rows to weights relative to the tile's maximum, in place; running maxima and sums; limbs of p * step, a V group
/// each.
template <int NH>
inline void weigh(const Meta& meta, int groups, int v_dim, float (*logits)[kTile], float* const* row, float* alpha,
                  Weights (*weights)[kMaxGroups]) {
  constexpr float kTop = 127 * 128 + 127;
  constexpr int kVectors = kTile / 16;
  static_assert(kVectors == 4, "limbs are packed four vectors at a time");
  __m512 high[NH];
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    const __m512 a = _mm512_max_ps(_mm512_load_ps(logits[h]), _mm512_load_ps(logits[h] + 16));
    high[h] = _mm512_max_ps(a, _mm512_max_ps(_mm512_load_ps(logits[h] + 32), _mm512_load_ps(logits[h] + 48)));
  }
  const __m128 top = largest_of<NH>(high);
  const __mmask8 finite = _mm_cmp_ps_mask(top, _mm_set1_ps(-kInfinity), _CMP_NEQ_UQ);
  const __m512 shifts = _mm512_broadcast_f32x4(_mm_maskz_mov_ps(finite, top));
  float beta[4];
  raise_maxima<NH>(row, v_dim, top, alpha, beta);
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    const __m512 shift = _mm512_permutexvar_ps(_mm512_set1_epi32(h), shifts);
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
      const __m512 p = exp2_short(_mm512_sub_ps(_mm512_load_ps(logits[h] + 16 * i), shift));
      total = _mm512_add_ps(total, p);
      _mm512_store_ps(logits[h] + 16 * i, p);
    }
    float* lanes = row[h] + v_dim + kLanes;
    const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(lanes), _mm512_set1_ps(alpha[h]));
    _mm512_storeu_ps(lanes, _mm512_fmadd_ps(total, _mm512_set1_ps(beta[h]), old));
  }
  for (int g = 0; g < groups; g++) {
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      high[h] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) {
        const __m512 weight = _mm512_mul_ps(_mm512_load_ps(logits[h] + 16 * i), _mm512_load_ps(&meta.step[g][16 * i]));
        high[h] = _mm512_max_ps(high[h], weight);
      }
    }
    const __m128 largest_weight = largest_of<NH>(high);
    const __mmask8 usable = _mm_cmp_ps_mask(largest_weight, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverses = _mm512_broadcast_f32x4(_mm_maskz_div_ps(usable, _mm_set1_ps(kTop), largest_weight));
    alignas(16) float scale[4];
    _mm_store_ps(scale, _mm_maskz_mul_ps(usable, largest_weight, _mm_set1_ps(1 / kTop)));
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(h), inverses);
      Weights& out = weights[h][g];
      __m512i word[kVectors];
      __m512 offset = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) {
        const __m512 p = _mm512_load_ps(logits[h] + 16 * i);
        offset = _mm512_fmadd_ps(p, _mm512_load_ps(&meta.centre[g][16 * i]), offset);
        word[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(p, _mm512_load_ps(&meta.step[g][16 * i])), inverse));
      }
      const __m512i a = _mm512_packus_epi32(word[0], word[1]), b = _mm512_packus_epi32(word[2], word[3]);
      const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(word[0], word[1]), _mm512_add_epi32(word[2], word[3]));
      const __m512i low = _mm512_set1_epi16(127);
      _mm512_store_si512(out.high, bytes_of_words(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7)));
      _mm512_store_si512(out.low, bytes_of_words(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
      // The -1.5 * step of each level, from the rounded weights for the reason given in key_dots.
      offset = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(1.5f * scale[h]), offset);
      out.scale = scale[h] * beta[h];
      float* lanes = row[h] + v_dim + kLanes * (2 + g);
      const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(lanes), _mm512_set1_ps(alpha[h]));
      _mm512_storeu_ps(lanes, _mm512_fmadd_ps(offset, _mm512_set1_ps(beta[h]), old));
    }
  }
}

/// acc[h] = acc[h] * alpha[h] + sum_t p[h][t] step_t code_t. Codes are left where they lie in their byte: a field's products
/// are 4^f times too large, each in accumulators of its own, and the scale takes that back.
template <int NH, bool kOneGroup, int kQuarter>
inline void value_dots(const OscarSide& side, const uint8_t (*quads)[kMaxWords / 4][64], const Weights (*weights)[kMaxGroups],
                       const float* alpha, float* const* acc_row, int num_quads, Ahead* ahead) {
  const int quarter = kQuarter ? kQuarter : side.head_dim / kCodesPerByte;
  Prefetcher prefetcher(ahead);
  for (int z = 0; z * 16 < quarter; z++) {
    const int lanes = quarter - 16 * z < 16 ? quarter - 16 * z : 16;
    const __mmask16 mask = __mmask16((1u << lanes) - 1);
    // Two fields at a time: 2 fields x 4 rows x 2 limbs are 16 accumulators.
#pragma GCC unroll 8
    for (int first_field = 0; first_field < 4; first_field += 2) {
      __m512i upper[2][NH], lower[2][NH], field[2];
      int group[2];
#pragma GCC unroll 8
      for (int f = 0; f < 2; f++) {
        field[f] = _mm512_set1_epi8(char(3 << 2 * (first_field + f)));
        group[f] = kOneGroup ? 0 : ((first_field + f) * quarter + 16 * z) / side.group_size;
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) upper[f][h] = lower[f][h] = _mm512_setzero_si512();
      }
      for (int i = 0; i < num_quads; i++) {
        prefetcher.line();
        const __m512i packed = _mm512_load_si512(quads[i][z]);
        const __m512i code[2] = {_mm512_and_si512(packed, field[0]), _mm512_and_si512(packed, field[1])};
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          if (kOneGroup) {
            const __m512i x = broadcast_word(weights[h][0].high + 4 * i), y = broadcast_word(weights[h][0].low + 4 * i);
#pragma GCC unroll 8
            for (int f = 0; f < 2; f++) {
              add_products(upper[f][h], code[f], x);
              add_products(lower[f][h], code[f], y);
            }
          } else {
#pragma GCC unroll 8
            for (int f = 0; f < 2; f++) {
              const Weights& w = weights[h][group[f]];
              add_products(upper[f][h], code[f], broadcast_word(w.high + 4 * i));
              add_products(lower[f][h], code[f], broadcast_word(w.low + 4 * i));
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int f = 0; f < 2; f++) {
        const float unit = 1.0f / (1 << 2 * (first_field + f));
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          float* out = acc_row[h] + (first_field + f) * quarter + 16 * z;
          const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(upper[f][h], 7), lower[f][h]);
          const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, out), _mm512_set1_ps(alpha[h]));
          const __m512 scale = _mm512_set1_ps(weights[h][group[f]].scale * unit);
          _mm512_mask_storeu_ps(out, mask, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, old));
        }
      }
    }
  }
}

template <int NH, int kQuarter>
inline void packed_rows(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, int first, const State& state,
                        const uint32_t (*words)[kTile], const uint8_t (*quads)[kMaxWords / 4][64], const Meta& k_meta,
                        const Meta& v_meta) {
  alignas(64) float logits[NH][kTile];
  Weights weights[NH][kMaxGroups];
  key_dots<NH, kQuarter>(layer.k, words, k_meta, rows, first, tile.ahead, logits);
  const int v_dim = layer.v.head_dim, groups = v_dim / layer.v.group_size;
  float alpha[4];
  float* acc_row[NH];
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    acc_row[h] = state.data + size_t(first + h) * state.stride;
    if (tile.count < kTile || rows.cap_log2e > 0) finish_logits(logits[h], tile.count, rows.cap_log2e);
  }
  weigh<NH>(v_meta, groups, v_dim, logits, acc_row, alpha, weights);
  const int num_quads = (tile.count + 3) / 4;
  if (kQuarter || groups == 1) {
    value_dots<NH, true, kQuarter>(layer.v, quads, weights, alpha, acc_row, num_quads, tile.ahead);
  } else {
    value_dots<NH, false, 0>(layer.v, quads, weights, alpha, acc_row, num_quads, tile.ahead);
  }
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

void packed_tile(const OscarLayer& layer, int head, const Tile& tile, const QueryRows& rows, const State& state) {
  alignas(64) uint32_t words[kMaxWords][kTile];
  alignas(64) uint8_t quads[kTile / 4][kMaxWords / 4][64];
  Meta k_meta, v_meta;
  read_meta(layer.k, tile.k, &k_meta);
  read_meta(layer.v, tile.v, &v_meta);
  transpose_keys(tile, layer.k.head_dim / kCodesPerByte, words);
  interleave_values(tile, layer.v.head_dim / kCodesPerByte, quads);
  const auto block = [&](auto quarter) {
    constexpr int kQuarter = decltype(quarter)::value;
    for (int first = 0; first < rows.num_rows; first += kRowBlock) {
      switch (rows.num_rows - first) {
        case 1:
          packed_rows<1, kQuarter>(layer, tile, rows, first, state, words, quads, k_meta, v_meta);
          break;
        case 2:
          packed_rows<2, kQuarter>(layer, tile, rows, first, state, words, quads, k_meta, v_meta);
          break;
        case 3:
          packed_rows<3, kQuarter>(layer, tile, rows, first, state, words, quads, k_meta, v_meta);
          break;
        default:
          packed_rows<4, kQuarter>(layer, tile, rows, first, state, words, quads, k_meta, v_meta);
      }
    }
  };
  const bool plain = layer.k.head_dim == layer.v.head_dim && layer.k.group_size == layer.k.head_dim &&
                     layer.v.group_size == layer.v.head_dim;
  if (plain && layer.k.head_dim == 128) {
    block(Constant<32>{});
  } else if (plain && layer.k.head_dim == 64) {
    block(Constant<16>{});
  } else {
    block(Constant<0>{});
  }
}

}  // namespace

extern const AttendTable kAttendAvx512 = {attend_packed, attend_wide, matmul, quantise_queries, merge, convert_to_float,
                                          read_bytes};
