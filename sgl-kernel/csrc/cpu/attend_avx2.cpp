// AVX2 with FMA: packed rows become code - 1.5 in registers, and products are float32.
//
// VPERMILPS reads a table of four floats by the lowest two bits of each lane: a shift and a look-up give code - 1.5 of eight
// codes, which serve all query rows of a block. Integer products of this precision would take three limbs of a query or a
// weight: six instructions for what four FMAs do here.
//
// Keys. The codes of eight keys are transposed so that a 32-bit lane holds 16 channels of one key. So no sum crosses lanes, and
// a query number is broadcast from memory. q is the quarter:
//
//     row t:  | b0 b1 b2 b3 | b4 ...          vector j, lane t:  bytes 4j .. 4j+3 of row t
//     (vector j >> 2f) >> 8i, lane t          lowest bits: code of channel f*q + 4j + i of key t
//
// Values. Eight code bytes of one key go to eight lanes, and weight * step of the key is broadcast.

#include <immintrin.h>

#include "kernels.h"

namespace {

#include "vec.h"
#include "attend_impl.h"

constexpr int kMaxWords = kMaxDim / 16;  // 32-bit words of codes in a row

/// Whether the kernels for codes take a side's format: not too many groups, and each vector of channels within one group.
bool side_fits(const OscarSide& side) {
  const int quarter = side.head_dim / kCodesPerByte, groups = side.head_dim / side.group_size;
  return groups <= kMaxGroups && (groups == 1 || (quarter % W == 0 && side.group_size % W == 0));
}

/// code - 1.5 of the code in the lowest two bits of each lane; the other bits are ignored.
inline F centred_codes(__m256i codes) {
  const __m256 table = _mm256_setr_ps(-kMidCode, 1 - kMidCode, 2 - kMidCode, 3 - kMidCode,  //
                                      -kMidCode, 1 - kMidCode, 2 - kMidCode, 3 - kMidCode);
  return (F)_mm256_permutevar_ps(table, codes);
}

/// 32 code bytes of a row. Where only `bytes` are left in it, the others are zero and not read.
inline __m256i load_codes(const uint8_t* p, int bytes) {
  if (bytes >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), _mm256_cmpgt_epi32(_mm256_set1_epi32(bytes / 4), lane));
}

/// Centres and steps of a tile's rows, by group.
struct Meta {
  alignas(32) float centre[kMaxGroups][kTile], step[kMaxGroups][kTile];
};

/// float16 numbers in the low halves of eight 32-bit lanes, the high halves zero, to float32.
inline __m256 meta_floats(__m256i low16) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low16, low16), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

void read_meta(const OscarSide& side, const TileRows& rows, Meta* meta) {
  const int groups = side.head_dim / side.group_size;
  for (int g = 0; g < groups; g++) {
    const uint8_t* at = rows.base + side.head_dim / kCodesPerByte + g * kMetaBytes;
    for (int t = 0; t < kTile; t += W) {
      alignas(32) uint32_t pair[W];
      for (int i = 0; i < W; i++) pair[i] = load_u32(at + rows.offset[t + i]);
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(pair));
      const __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
      _mm256_store_ps(&meta->centre[g][t], meta_floats(low));
      _mm256_store_ps(&meta->step[g][t], meta_floats(_mm256_srli_epi32(both, 16)));
    }
  }
}

/// words[j][t] = 32-bit word j of the codes of key t.
void transpose_keys(const Tile& tile, int quarter, uint32_t (*words)[kTile]) {
  const auto store_word = [](uint32_t* at, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i*>(at), x); };
  for (int t = 0; t < kTile; t += 8) {
    for (int first = 0; first < quarter; first += 32) {
      __m256i x[8], y[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) x[i] = load_codes(tile.k.base + tile.k.offset[t + i] + first, quarter - first);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i += 4) {
        const __m256i p = _mm256_unpacklo_epi32(x[i], x[i + 1]), q = _mm256_unpacklo_epi32(x[i + 2], x[i + 3]);
        const __m256i r = _mm256_unpackhi_epi32(x[i], x[i + 1]), s = _mm256_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm256_unpacklo_epi64(p, q);
        y[i + 1] = _mm256_unpackhi_epi64(p, q);
        y[i + 2] = _mm256_unpacklo_epi64(r, s);
        y[i + 3] = _mm256_unpackhi_epi64(r, s);
      }
#pragma GCC unroll 8
      for (int j = 0; j < 4; j++) {
        store_word(&words[first / 4 + j][t], _mm256_permute2x128_si256(y[j], y[j + 4], 0x20));
        store_word(&words[first / 4 + j + 4][t], _mm256_permute2x128_si256(y[j], y[j + 4], 0x31));
      }
    }
  }
}

/// `sums` of QueryRows: for each K group the sum of q, which a key's centre multiplies.
void sum_queries(const OscarSide* k, int num_rows, const float* q, int8_t*, float*, float* sums) {
  const int groups = k->head_dim / k->group_size;
  if (groups > kMaxGroups) return;
  for (int r = 0; r < num_rows; r++, sums += kMaxGroups) {
    for (int g = 0; g < groups; g++) {
      double total = 0;
      for (int c = 0; c < k->group_size; c++) total += *q++;
      sums[g] = float(total);
    }
  }
}

/// logits[h][t] of NH query rows from `first` on, NV vectors of keys at a time. Vectors are taken whole: softmax_tile masks
/// what lies behind the last key.
template <int NH, int NV>
inline void key_dots(const OscarSide& side, const uint32_t (*words)[kTile], const Meta& meta, const QueryRows& rows, int first,
                     const Tile& tile, float (*logits)[kTile]) {
  const int dim = side.head_dim, quarter = dim / kCodesPerByte;
  const float* q = rows.q + size_t(first) * dim;
  Prefetcher prefetcher(tile.next_lines);
  for (int t = 0; t < tile.count; t += NV * W) {
    for (int g = 0, channel = 0; channel < dim; g++) {
      const int end = channel + side.group_size;
      F dot[NH][NV] = {};
      while (channel < end) {
        const int f = channel / quarter, stop = end < (f + 1) * quarter ? end : (f + 1) * quarter;
        const __m128i shift = _mm_cvtsi32_si128(2 * f);
        const uint32_t* word = words[(channel - f * quarter) / 4] + t;
        for (; channel < stop; channel += 4, word += kTile) {
          prefetcher.lines(NV / 2);  // 128 in all at head_dim 128, where a head's share of the next tile is about 75 lines
          __m256i codes[NV];
#pragma GCC unroll 8
          for (int i = 0; i < NV; i++) {
            codes[i] = _mm256_srl_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(word + i * W)), shift);
          }
#pragma GCC unroll 8
          for (int b = 0; b < 4; b++) {
            F key[NV];
#pragma GCC unroll 8
            for (int i = 0; i < NV; i++) key[i] = centred_codes(_mm256_srli_epi32(codes[i], 8 * b));
#pragma GCC unroll 8
            for (int h = 0; h < NH; h++) {
              const F query = set1(q[h * dim + channel + b]);
#pragma GCC unroll 8
              for (int i = 0; i < NV; i++) dot[h][i] += query * key[i];
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const F total = set1(rows.sums[(first + h) * kMaxGroups + g]);
#pragma GCC unroll 8
        for (int i = 0; i < NV; i++) {
          const int at = t + i * W;
          const F logit = dot[h][i] * load(&meta.step[g][at]) + total * load(&meta.centre[g][at]);
          store(logits[h] + at, g ? load(logits[h] + at) + logit : logit);
        }
      }
    }
  }
}

/// acc[h] = acc[h] * alpha[h] + sum over t of weights[g][h][t] * (code_t - 1.5), for fields [kFirst, kFirst + NF) of W code
/// bytes from `byte` on. weights: weight * step, for each V group g.
template <int NH, int kFirst, int NF, bool kOneGroup>
inline void value_dots(const OscarSide& side, const Tile& tile, const float (*weights)[NH][kTile], const float* alpha,
                       float* const* acc_row, int byte) {
  const int quarter = side.head_dim / kCodesPerByte;
  const float (*weight[NF])[kTile];
  for (int f = 0; f < NF; f++) weight[f] = weights[kOneGroup ? 0 : ((kFirst + f) * quarter + byte) / side.group_size];
  F dot[NH][NF] = {};
  const uint8_t* codes = tile.v.base + byte;
#pragma GCC unroll 2
  for (int t = 0; t < tile.count; t++) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + tile.v.offset[t])));
    F value[NF];
#pragma GCC unroll 8
    for (int f = 0; f < NF; f++) value[f] = centred_codes(_mm256_srli_epi32(bytes, 2 * (kFirst + f)));
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
      for (int f = 0; f < NF; f++) dot[h][f] += set1(weight[kOneGroup ? 0 : f][h][t]) * value[f];
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
    for (int f = 0; f < NF; f++) {
      float* out = acc_row[h] + (kFirst + f) * quarter + byte;
      const __m256 factor = _mm256_set1_ps(alpha[h]);
      if (byte + W <= quarter) {
        store(out, load(out) * (F)factor + dot[h][f]);
      } else {  // only four of the bytes were codes, the others were of (centre, step) pairs
        const __m128 old = _mm_mul_ps(_mm_loadu_ps(out), _mm256_castps256_ps128(factor));
        _mm_storeu_ps(out, _mm_add_ps(old, _mm256_castps256_ps128((__m256)dot[h][f])));
      }
    }
  }
}

template <int NH, bool kOneGroup>
inline void value_rows(const OscarSide& side, const Tile& tile, const float (*weights)[NH][kTile], const float* alpha,
                       float* const* acc_row) {
  for (int byte = 0; byte < side.head_dim / kCodesPerByte; byte += W) {
    if constexpr (NH <= 2) {  // at most eight registers of sums, so that the factors have registers too
      value_dots<NH, 0, 4, kOneGroup>(side, tile, weights, alpha, acc_row, byte);
    } else {
      value_dots<NH, 0, 2, kOneGroup>(side, tile, weights, alpha, acc_row, byte);
      value_dots<NH, 2, 2, kOneGroup>(side, tile, weights, alpha, acc_row, byte);
    }
  }
}

/// What all query rows share of a tile.
struct Operands {
  alignas(32) uint32_t words[kMaxWords][kTile];
  Meta k_meta, v_meta;
};

/// Add a tile to the states of NH query rows from `first` on.
template <int NH>
inline void code_rows(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, int first, const State& state,
                      const Operands& x) {
  constexpr int kVectors = NH == 1 ? 8 : NH == 2 ? 4 : 2;  // 6 or 8 sums in all, enough to cover the latency of an FMA
  alignas(32) float logits[NH][kTile], weights[kMaxGroups][NH][kTile];
  key_dots<NH, kVectors>(layer.k, x.words, x.k_meta, rows, first, tile, logits);
  const int v_dim = layer.v.head_dim, groups = v_dim / layer.v.group_size;
  float alpha[NH];
  float* acc_row[NH];
  for (int h = 0; h < NH; h++) {
    acc_row[h] = state.data + size_t(first + h) * state.stride;
    alpha[h] = softmax_tile(logits[h], tile.count, rows.cap_log2e, acc_row[h], v_dim, groups);
    for (int g = 0; g < groups; g++) {
      float* lanes = acc_row[h] + v_dim + kLanes * (2 + g);
      F offset = load(lanes);
      for (int t = 0; t < kTile; t += W) {
        const F p = load(logits[h] + t);
        offset += p * load(&x.v_meta.centre[g][t]);
        store(weights[g][h] + t, p * load(&x.v_meta.step[g][t]));
      }
      store(lanes, offset);
    }
  }
  if (groups == 1) {
    value_rows<NH, true>(layer.v, tile, weights, alpha, acc_row);
  } else {
    value_rows<NH, false>(layer.v, tile, weights, alpha, acc_row);
  }
}

void attend_codes(const OscarLayer* layer, const Tile* tile, const QueryRows* rows, const State* state) {
  if (!side_fits(layer->k) || !side_fits(layer->v)) {
    attend_packed(layer, tile, rows, state);
    return;
  }
  Operands x;
  read_meta(layer->k, tile->k, &x.k_meta);
  read_meta(layer->v, tile->v, &x.v_meta);
  transpose_keys(*tile, layer->k.head_dim / kCodesPerByte, x.words);
  for (int first = 0; first < rows->num_rows; first += kRowBlock) {
    switch (rows->num_rows - first) {
      case 1: code_rows<1>(*layer, *tile, *rows, first, *state, x); break;
      case 2: code_rows<2>(*layer, *tile, *rows, first, *state, x); break;
      case 3: code_rows<3>(*layer, *tile, *rows, first, *state, x); break;
      default: code_rows<4>(*layer, *tile, *rows, first, *state, x);
    }
  }
  prefetch_rest(tile->next_lines);
}

}  // namespace

extern const AttendTable kAttendAvx2 = {attend_codes, attend_wide, matmul, sum_queries, merge, convert_to_float, read_bytes};
