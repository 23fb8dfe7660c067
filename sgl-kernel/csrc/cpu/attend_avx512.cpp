// AVX-512 with VNNI: packed rows are multiplied as integers. avx512_rows.h brings them into order, avx512_keys.h makes logits;
// here are softmax and values.
//
// Values. The output is a sum over keys, and VPDPBUSD adds four products in a lane. So the code bytes of four keys, a quad, are
// interleaved: a lane holds one byte of each, and a vector 16 bytes of each. What multiplies the codes is weight * step as a
// 14-bit integer, 128 * high + low, with a scale of its own for each tile, query row and V group.

#include <immintrin.h>

#include "kernels.h"

namespace {

#define OSCAR_INTEGER_DOTS 1
#include "vec.h"
#include "attend_impl.h"
#include "avx512_rows.h"
#include "avx512_keys.h"

/// p * step of a tile's keys for one query row and one V group, as limbs: scale * (128 * high + low). p: weight.
struct Weights {
  alignas(64) int8_t high[kLookUpTile], low[kLookUpTile];
  float scale;
};

/// The largest number of each of up to four vectors, one a lane. Since four vectors share their shuffles, this takes a third of
/// the time of four reductions.
template <int NH>
inline __m128 largest_of(const __m512* x) {
  const __m512 a = x[0], b = x[NH > 1 ? 1 : 0], c = x[NH > 2 ? 2 : 0], d = x[NH > 3 ? 3 : 0];
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// 2^x for x <= 0, correct to 18 bits where a weight keeps 14. -inf gives 0, and NaN stays NaN.
inline __m512 exp2_short(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0);  // x minus the nearest integer
  // Minimax fit of 2^r on [-0.5, 0.5] with 2^0 = 1: largest relative error 3e-6.
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.58285e-3f), r, _mm512_set1_ps(5.590643e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4024099e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9312419e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, _mm512_sub_ps(x, r));
}

/// 64 numbers 0..255 as bytes, in order. a and b hold them as 16-bit words, as two _mm512_packus_epi32 of four vectors in order
/// give them.
inline __m512i bytes_of_words(__m512i a, __m512i b) {
  // Packing works within 128-bit lanes, so the 32-bit words of the result are out of order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
}

/// Raise the maxima in the states of NH query rows to `top`, the largest logits of this tile, one a lane. alpha[h] becomes the
/// factor that brings the state's sums to the new maximum, beta[h] the factor for sums of this tile, which are relative to
/// `top`.
template <int NH>
inline void raise_maxima(float* const* row, int v_dim, __m128 top, float* alpha, float* beta) {
  const __m128 lowest = _mm_set1_ps(-kInfinity);
  alignas(16) float lanes[4];
#pragma GCC unroll 8
  for (int h = 0; h < 4; h++) lanes[h] = row[h < NH ? h : 0][v_dim];
  const __m128 before = _mm_load_ps(lanes);
  const __m128 now = _mm_max_ps(top, before);  // `before` where `top` is NaN: a NaN is in the sums, never in the maximum
  const __m128 origin = _mm_maskz_mov_ps(_mm_cmp_ps_mask(now, lowest, _CMP_NEQ_UQ), now);
  _mm_store_ps(lanes, now);
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) row[h][v_dim] = lanes[h];
  const __m256 x = _mm256_set_m128(_mm_sub_ps(top, origin), _mm_sub_ps(before, origin));
  const F factor = exp2v((F)_mm512_castps256_ps512(x));
  _mm_storeu_ps(alpha, _mm512_castps512_ps128((__m512)factor));
  _mm_storeu_ps(beta, _mm512_extractf32x4_ps((__m512)factor, 1));
}

enum { kL2 = 2, kL1 = 3 };  // the third argument of __builtin_prefetch

/// Prefetches the rows of a tile in order, some at each call.
template <int kLocality>
struct RowPrefetcher {
  const uint8_t* base;
  const int64_t* offset;

  explicit RowPrefetcher(const TileRows& rows) : base(rows.base), offset(rows.offset) {}
  template <int kCount>
  inline __attribute__((always_inline)) void rows() {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; i++) __builtin_prefetch(base + offset[i], 0, kLocality);
    offset += kCount;
  }
};

/// Softmax of NH query rows over a tile. Turns logits into weights relative to the tile's own maximum, so that nothing waits
/// for the maximum of the state; adds to m, l and r of the states `row`; writes the limbs of p * step for each V group.
/// alpha[h] is then the factor that value_dots must apply to acc. `logits` is overwritten. kPrefetch: prefetch V rows of a
/// later tile meanwhile.
template <int NH, int kKeys, bool kOneGroup, bool kPrefetch>
__attribute__((noinline)) void weigh(const Meta& meta, int groups, int v_dim, float (*logits)[kLookUpTile], float* const* row,
                                     float* alpha, Weights (*weights)[kMaxGroups], const Tile& tile) {
  constexpr float kTop = 127 * 128 + 127;
  constexpr int kVectors = kKeys / 16;
  static_assert(kVectors % 4 == 0, "limbs are packed four vectors at a time");
  __m512 high[NH];
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    high[h] = _mm512_load_ps(logits[h]);
#pragma GCC unroll 8
    for (int i = 1; i < kVectors; i++) high[h] = _mm512_max_ps(high[h], _mm512_load_ps(logits[h] + 16 * i));
  }
  const __m128 top = largest_of<NH>(high);
  const __mmask8 finite = _mm_cmp_ps_mask(top, _mm_set1_ps(-kInfinity), _CMP_NEQ_UQ);
  const __m512 shifts = _mm512_broadcast_f32x4(_mm_maskz_mov_ps(finite, top));
  float beta[4];
  raise_maxima<NH>(row, v_dim, top, alpha, beta);
  // p * step of one group at a time. With one group the products overwrite p, which is not needed again.
  alignas(64) float more[kOneGroup ? 1 : NH][kLookUpTile];
  float (*const products)[kLookUpTile] = kOneGroup ? logits : more;
  alignas(64) float offsets[NH][16];  // sums of p * centre
  const auto multiply = [&](int g, int h, int i, __m512 p, __m512* offset, __m512* largest) {
    const __m512 product = _mm512_mul_ps(p, _mm512_load_ps(&meta.step[g][16 * i]));
    _mm512_store_ps(products[h] + 16 * i, product);
    *offset = _mm512_fmadd_ps(p, _mm512_load_ps(&meta.centre[g][16 * i]), *offset);
    *largest = _mm512_max_ps(*largest, product);
  };
  alignas(64) float largest[NH][16];
  constexpr int kRowsAStep = kPrefetch ? kKeys / (NH * kVectors) : 0;
  RowPrefetcher<kL2> later_v(tile.to_l2->v);
  // Not unrolled: the code for a tile would begin to outgrow the processor's cache of decoded instructions.
#pragma GCC unroll 1
  for (int h = 0; h < NH; h++) {
    const __m512 shift = _mm512_permutexvar_ps(_mm512_set1_epi32(h), shifts);
    __m512 total = _mm512_setzero_ps(), offset = _mm512_setzero_ps(), most = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
      const __m512 p = exp2_short(_mm512_sub_ps(_mm512_load_ps(logits[h] + 16 * i), shift));
      total = _mm512_add_ps(total, p);
      if (!kOneGroup) _mm512_store_ps(logits[h] + 16 * i, p);
      multiply(0, h, i, p, &offset, &most);
      later_v.rows<kRowsAStep>();
    }
    _mm512_store_ps(offsets[h], offset);
    _mm512_store_ps(largest[h], most);
    float* lanes = row[h] + v_dim + kLanes;
    const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(lanes), _mm512_set1_ps(alpha[h]));
    _mm512_storeu_ps(lanes, _mm512_fmadd_ps(total, _mm512_set1_ps(beta[h]), old));
  }
  later_v.rows<kPrefetch ? kKeys - kRowsAStep * NH * kVectors : 0>();
  for (int g = 0; g < groups; g++) {
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      high[h] = _mm512_load_ps(largest[h]);
      if (kOneGroup || g == 0) continue;
      __m512 offset = _mm512_setzero_ps();
      high[h] = _mm512_setzero_ps();
#pragma GCC unroll 1
      for (int i = 0; i < kVectors; i++) multiply(g, h, i, _mm512_load_ps(logits[h] + 16 * i), &offset, &high[h]);
      _mm512_store_ps(offsets[h], offset);
    }
    const __m128 largest_weight = largest_of<NH>(high);
    const __mmask8 usable = _mm_cmp_ps_mask(largest_weight, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverses = _mm512_broadcast_f32x4(_mm_maskz_div_ps(usable, _mm_set1_ps(kTop), largest_weight));
    alignas(16) float scale[4];
    _mm_store_ps(scale, _mm_maskz_mul_ps(usable, largest_weight, _mm_set1_ps(1 / kTop)));
#pragma GCC unroll 1
    for (int h = 0; h < NH; h++) {
      const __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(h), inverses);
      Weights& out = weights[h][g];
      __m512i word[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) {
        word[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(products[h] + 16 * i), inverse));
      }
      const __m512i low = _mm512_set1_epi16(127);
      __m512i sum = word[0];
#pragma GCC unroll 8
      for (int i = 1; i < kVectors; i++) sum = _mm512_add_epi32(sum, word[i]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i += 4) {
        const __m512i a = _mm512_packus_epi32(word[i], word[i + 1]), b = _mm512_packus_epi32(word[i + 2], word[i + 3]);
        _mm512_store_si512(out.high + 16 * i, bytes_of_words(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7)));
        _mm512_store_si512(out.low + 16 * i, bytes_of_words(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
      }
      // r has -1.5 * step of each key times its weight: of the rounded weights, for the reason given in key_dots.
      const __m512 middle = _mm512_set1_ps(kMidCode * scale[h]);
      const __m512 offset = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), middle, _mm512_load_ps(offsets[h]));
      out.scale = scale[h] * beta[h];
      float* lanes = row[h] + v_dim + kLanes * (2 + g);
      const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(lanes), _mm512_set1_ps(alpha[h]));
      _mm512_storeu_ps(lanes, _mm512_fmadd_ps(offset, _mm512_set1_ps(beta[h]), old));
    }
  }
}

/// acc[h] = acc[h] * alpha[h] + sum over t of p[h][t] * step_t * code_t. Codes stay where they lie in their byte, so that
/// products of field f are 4^f times too large. Each field has sums of its own, whose scale takes the factor back. kPrefetch:
/// prefetch rows of the next call and K rows of a later tile meanwhile.
template <int NH, bool kOneGroup, int kQuarter, bool kPrefetch>
__attribute__((noinline)) void value_dots(const OscarSide& side, const uint8_t (*quads)[kMaxWords / 4][64],
                                          const Weights (*weights)[kMaxGroups], const float* alpha, float* const* acc_row,
                                          int num_quads, const Tile& tile) {
  constexpr int kRowsAStep = kPrefetch ? 32 / kQuarter : 0;  // in a full tile, all steps together prefetch kLookUpTile rows
  const int quarter = kQuarter ? kQuarter : side.head_dim / kCodesPerByte;
  Prefetcher prefetcher(tile.next_lines);
  RowPrefetcher<kL1> next_k(tile.to_l1->k), next_v(tile.to_l1->v);
  RowPrefetcher<kL2> later_k(tile.to_l2->k);
  for (int z = 0; z * 16 < quarter; z++) {
    const int lanes = quarter - 16 * z < 16 ? quarter - 16 * z : 16;
    const __mmask16 mask = __mmask16((1u << lanes) - 1);
    // Two fields at a time: 2 fields x 4 query rows x 2 limbs are 16 registers of sums.
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
        if (kQuarter == 0) prefetcher.line();
        // A few rows a step, and in softmax too: where more is requested than memory delivers, all loads wait.
        if constexpr (kQuarter > 16) {  // rows of 20 bytes share their lines with two other heads' rows, read before
          next_k.rows<kRowsAStep>();
          next_v.rows<kRowsAStep>();
        }
        later_k.rows<kRowsAStep>();
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

/// A tile's rows, in the order in which the kernels take them.
struct Operands {
  alignas(64) uint16_t words16[kMaxDim / 8][kLookUpTile];         // codes of K for look-ups
  alignas(64) uint32_t words32[kMaxWords][kTile];                 // codes of K for products
  alignas(64) uint8_t quads[kLookUpTile / 4][kMaxWords / 4][64];  // codes of V
  Meta k_meta, v_meta;
};

/// Add a tile to the states of NH query rows from `first` on. kKeys: kLookUpTile where logits come from look-ups, else kTile.
/// kQuarter: the quarter, where K and V have the same one and one group each; 0 for other formats, whose sizes `layer` has.
template <int NH, int kKeys, int kQuarter>
inline void packed_rows(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, int first, const State& state,
                        const Operands& x) {
  alignas(64) float logits[NH][kLookUpTile];
  Weights weights[NH][kMaxGroups];
  if constexpr (kKeys == kLookUpTile) {
    key_lookups<NH, kQuarter / 2>(layer.k.head_dim, x.words16, x.k_meta, rows, first, logits);
  } else {
    key_dots<NH>(layer.k, x.words32, x.k_meta, rows, first, tile.next_lines, logits);
  }
  const int v_dim = layer.v.head_dim, groups = v_dim / layer.v.group_size;
  float alpha[4];
  float* acc_row[NH];
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    acc_row[h] = state.data + size_t(first + h) * state.stride;
    if (tile.count < kKeys || rows.cap_log2e > 0) finish_logits(logits[h], tile.count, kKeys, rows.cap_log2e);
  }
  const int num_quads = (tile.count + 3) / 4;
  if (kQuarter && first + NH >= rows.num_rows) {  // the last block prefetches: once a tile is enough
    weigh<NH, kKeys, true, kQuarter != 0>(x.v_meta, 1, v_dim, logits, acc_row, alpha, weights, tile);
    value_dots<NH, true, kQuarter, kQuarter != 0>(layer.v, x.quads, weights, alpha, acc_row, num_quads, tile);
  } else if (kQuarter || groups == 1) {
    weigh<NH, kKeys, true, false>(x.v_meta, 1, v_dim, logits, acc_row, alpha, weights, tile);
    value_dots<NH, true, kQuarter, false>(layer.v, x.quads, weights, alpha, acc_row, num_quads, tile);
  } else {
    weigh<NH, kKeys, false, false>(x.v_meta, groups, v_dim, logits, acc_row, alpha, weights, tile);
    value_dots<NH, false, 0, false>(layer.v, x.quads, weights, alpha, acc_row, num_quads, tile);
  }
}

/// Add a tile to the states of all query rows. kKeys, kQuarter: as in packed_rows.
template <int kKeys, int kQuarter>
inline void packed_keys(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  Operands x;
  read_meta<kQuarter>(layer.k, tile.k, kKeys, &x.k_meta);
  read_meta<kQuarter>(layer.v, tile.v, kKeys, &x.v_meta);
  if constexpr (kKeys == kLookUpTile) {
    transpose_keys<kQuarter>(tile, layer.k.head_dim, x.words16);
  } else {
    transpose_keys(tile, layer.k.head_dim, x.words32);
  }
  interleave_values<kQuarter>(tile, layer.v.head_dim, kKeys, x.quads);
  for (int first = 0; first < rows.num_rows; first += kRowBlock) {
    switch (rows.num_rows - first) {
      case 1: packed_rows<1, kKeys, kQuarter>(layer, tile, rows, first, state, x); break;
      case 2: packed_rows<2, kKeys, kQuarter>(layer, tile, rows, first, state, x); break;
      case 3: packed_rows<3, kKeys, kQuarter>(layer, tile, rows, first, state, x); break;
      default: packed_rows<4, kKeys, kQuarter>(layer, tile, rows, first, state, x);
    }
  }
}

void packed_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  const bool plain = layer.v.head_dim == layer.k.head_dim && layer.v.group_size == layer.v.head_dim;
  if (rows.tables && plain && layer.k.head_dim == 128) {
    packed_keys<kLookUpTile, 32>(layer, tile, rows, state);
  } else if (rows.tables && plain && layer.k.head_dim == 64) {
    packed_keys<kLookUpTile, 16>(layer, tile, rows, state);
  } else {
    if (rows.tables) {
      packed_keys<kLookUpTile, 0>(layer, tile, rows, state);
    } else {
      packed_keys<kTile, 0>(layer, tile, rows, state);
    }
    prefetch_rest(tile.next_lines);
  }
}

bool looks_up(const OscarLayer* layer, int) { return integer_dots_fit(*layer) && layer->k.group_size == layer->k.head_dim; }

}  // namespace

extern const AttendTable kAttendAvx512 = {attend_packed,    attend_wide, matmul,   quantise_queries, merge,
                                          convert_to_float, read_bytes,  looks_up, tabulate_queries};
