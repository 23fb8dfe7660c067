// Logits of packed K rows: by look-up for rows with one group, by products for rows with more. Included by attend_avx512.cpp.
//
// Look-ups. The codes of 32 keys are transposed so that a 16-bit lane holds 8 channels of one key. What five bits of the lane
// add to the logit, except for the step, is an entry of a table, and VPERMW reads one table for 32 keys at once. A query row
// has 52 such tables at head_dim 128. QueryRows (kernels.h) describes them.
//
// Products. The codes of 16 keys are transposed so that a 32-bit lane holds 16 channels of one key, four for each field.
// VPDPBUSD adds the products of four channels in each lane, so no sum crosses lanes, and the query limbs are broadcast from
// memory. q is the quarter:
//
//     row t:  | b0 b1 b2 b3 | b4 ...        vector j, lane t:  bytes 4j .. 4j+3 of row t
//     (vector j >> 2f) & 3, lane t          codes of channels f*q + 4j .. f*q + 4j+3 of key t
//
// A query number is 256 * high + low, two signed bytes.

/// sum += four products in each lane, of unsigned codes and signed limbs. In assembly because gcc 12 copies `sum` first for the
/// intrinsic.
inline void add_products(__m512i& sum, __m512i codes, __m512i limbs) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(limbs));
}

inline __m512i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

/// logits[h][t] of NH query rows from `first` on and kTile keys, by products.
template <int NH>
inline void key_dots(const OscarSide& side, const uint32_t (*words)[kTile], const Meta& meta, const QueryRows& rows, int first,
                     NextTileLines* lines, float (*logits)[kLookUpTile]) {
  const int dim = side.head_dim, quarter = dim / kCodesPerByte, group_size = side.group_size;
  const int8_t* limbs = rows.limbs + size_t(first) * dim * 2;
  Prefetcher prefetcher(lines);
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
        // q . x = scale * (step * (limbs . codes - 1.5 * sum(limbs)) + centre * sum(limbs)). `total`, the sum, is of the
        // rounded limbs and not of q. So a limb's rounding error is multiplied by code - 1.5, which lies around zero, and not
        // by a code 0..3; that makes errors 1.7 times smaller.
        const __m512 scale = _mm512_set1_ps(rows.scale[first + h]);
        const __m512 total = _mm512_set1_ps(rows.sums[(first + h) * kMaxGroups + g]);
        const __m512 middle = _mm512_mul_ps(total, _mm512_set1_ps(-kMidCode));
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

/// Fill a table of kEntries: entry i is the sum of w[b] for each bit b that is set in i and of -w[b] for each that is not.
/// `bits`: how many numbers w has, at most five.
inline void fill_table(const float* w, int bits, int16_t* out) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 low = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < 4; b++) {
    const __mmask16 up = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(1 << b));
    const __m512 x = _mm512_set1_ps(b < bits ? w[b] : 0.0f);
    low = _mm512_mask_add_ps(_mm512_sub_ps(low, x), up, low, x);
  }
  const __m512 last = _mm512_set1_ps(bits > 4 ? w[4] : 0.0f);
  const __m512i a = _mm512_cvtps_epi32(_mm512_sub_ps(low, last)), b = _mm512_cvtps_epi32(_mm512_add_ps(low, last));
  _mm512_store_si512(out, join(_mm512_cvtepi32_epi16(a), _mm512_cvtepi32_epi16(b)));
}

/// Tables, scales and sums of query rows, as QueryRows describes them.
void tabulate_queries(const OscarSide* k, int num_rows, const float* q, int16_t* tables, float* scale, float* sums) {
  constexpr float kTop = 32000;    // bound of a part: below 32767, for the rounding of its entries
  constexpr float kFactor = 1024;  // factor of the part that spans most; the sum of 34 parts, the most, stays below 2^31
  const int dim = k->head_dim, quarter = dim / kCodesPerByte, words = quarter / 2, lookups = oscar_lookups(dim);
  // The bits 15 of the first `half` words are one part, those of the other words the next.
  const int parts = words + 2, half = (lookups - 3 * words + 1) / 2 * 5;
  for (int r = 0; r < num_rows; r++, q += dim) {
    // code - 1.5 is (+1 or -1) for the code's upper bit plus (+0.5 or -0.5) for the lower one. So a bit that is set adds w and
    // one that is not subtracts w. size[i]: what part i can be at most.
    float w[kMaxDim / 8][16], size[kMaxDim / 8 + 2] = {}, total = 0;
    for (int j = 0; j < words; j++) {
      for (int b = 0; b < 16; b++) {
        const float x = q[b % 8 / 2 * quarter + 2 * j + b / 8];
        w[j][b] = b % 2 ? x : 0.5f * x;
        if (b < 15) size[j] += __builtin_fabsf(w[j][b]);
      }
      size[words + (j >= half)] += __builtin_fabsf(w[j][15]);
    }
    for (int c = 0; c < dim; c++) total += q[c];
    float top = 0;
    for (int i = 0; i < parts; i++) top = size[i] > top ? size[i] : top;
    bool usable = top > 1e-30f && top < 3e38f && total - total == 0;
    const float unit = usable ? top / (kTop * kFactor) : total - total + (top - top);
    scale[r] = unit;
    sums[size_t(r) * kMaxGroups] = usable ? total / unit : unit;  // NaN where a query is not finite
    int16_t* block = tables + size_t(r / kRowBlock) * oscar_table_entries(dim);
    int16_t* factors = block + r % kRowBlock * 2;
    int16_t* out = block + kFactorEntries + r % kRowBlock * kEntries;
    float inverse[kMaxDim / 8 + 2];
    for (int i = 0; i < parts; i++) {
      const float share = usable ? size[i] / top * kFactor : 0.0f;
      const int factor = int(share) + 1;
      factors[i / 2 * kRowBlock * 2 + i % 2] = int16_t(factor);
      inverse[i] = usable ? 1.0f / (float(factor) * unit) : 0.0f;
    }
    for (int j = 0; j < words; j++) {
      for (int b = 0; b < 16; b++) w[j][b] *= inverse[b < 15 ? j : words + (j >= half)];
      for (int b = 0; b < 15; b += 5, out += kRowBlock * kEntries) fill_table(w[j] + b, 5, out);
    }
    for (int j = 0; j < words; j += 5, out += kRowBlock * kEntries) {
      float bits[5];
      const int count = words - j < 5 ? words - j : 5;
      for (int b = 0; b < count; b++) bits[b] = w[j + b][15];
      fill_table(bits, count, out);
    }
  }
}

/// logits[h][t] of NH query rows from `first` on and kLookUpTile keys, by look-up. At head_dim 128 that is 52 look-ups for 32
/// keys and a query row, where key_dots takes 128 VPDPBUSD, and less than half of the time. kWords: 16-bit words of codes in a
/// row; 0 for any number.
template <int NH, int kWords>
__attribute__((noinline)) void key_lookups(int head_dim, const uint16_t (*words)[kLookUpTile], const Meta& meta,
                                           const QueryRows& rows, int first, float (*logits)[kLookUpTile]) {
  constexpr int kVectors = 2;  // of 32 keys each: NH x 2 x 2 registers of 32-bit sums
  const int num_words = kWords ? kWords : head_dim / 8, num_last = (num_words + 4) / 5;
  const __m512i top_bit = _mm512_set1_epi16(-32768);
#pragma GCC unroll 1
  for (int t = 0; t < kLookUpTile; t += 32 * kVectors) {
    asm volatile("" : "+r"(t));  // keeps the compiler from making two copies of the loop, for the reason given in weigh
    const int16_t* factors = rows.tables + size_t(first / kRowBlock) * oscar_table_entries(8 * num_words);
    const int16_t* table = factors + kFactorEntries;
    __m512i sums[NH][kVectors][2];
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) sums[h][i][0] = sums[h][i][1] = _mm512_setzero_si512();
    }
    // VPERMW reads the lowest five bits of each index and ignores the others.
    const auto look_up = [](const int16_t* entries, __m512i index) {
      return _mm512_permutexvar_epi16(index, _mm512_load_si512(entries));
    };
    // sums += factor * part + next factor * next part, in 32 bits (VPDPWSSD).
    const auto add_pair = [&](int h, int i, __m512i part, __m512i next) {
      const __m512i factor = broadcast_word(factors + 2 * h);
      sums[h][i][0] = _mm512_dpwssd_epi32(sums[h][i][0], _mm512_unpacklo_epi16(part, next), factor);
      sums[h][i][1] = _mm512_dpwssd_epi32(sums[h][i][1], _mm512_unpackhi_epi16(part, next), factor);
    };
    for (int j = 0; j < num_words; j += 2, factors += kRowBlock * 2) {
      __m512i x[2][kVectors][3];
#pragma GCC unroll 8
      for (int k = 0; k < 2; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; i++) {
          x[k][i][0] = _mm512_load_si512(words[j + k] + t + 32 * i);
          x[k][i][1] = _mm512_srli_epi16(x[k][i][0], 5);
          x[k][i][2] = _mm512_srli_epi16(x[k][i][0], 10);
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++, table += kEntries) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; i++) {
          __m512i part[2];
#pragma GCC unroll 8
          for (int k = 0; k < 2; k++) {
            const int16_t* at = table + 3 * k * kRowBlock * kEntries;
            part[k] = _mm512_add_epi16(look_up(at, x[k][i][0]), look_up(at + kRowBlock * kEntries, x[k][i][1]));
            part[k] = _mm512_add_epi16(part[k], look_up(at + 2 * kRowBlock * kEntries, x[k][i][2]));
          }
          add_pair(h, i, part[0], part[1]);
        }
      }
      table += (6 * kRowBlock - NH) * kEntries;
    }
    // The two parts of the bits 15: those of five words, put side by side, index one more table.
    __m512i last[2][NH][kVectors];
#pragma GCC unroll 8
    for (int k = 0; k < 2; k++) {
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; i++) last[k][h][i] = _mm512_setzero_si512();
      }
      for (int at = k ? (num_last + 1) / 2 : 0; at < (k ? num_last : (num_last + 1) / 2); at++) {
        const int bits = num_words - 5 * at < 5 ? num_words - 5 * at : 5;
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; i++) {
          __m512i x = _mm512_setzero_si512();
          for (int b = 0; b < bits; b++) {
            const __m512i word = _mm512_load_si512(words[5 * at + b] + t + 32 * i);
            x = _mm512_ternarylogic_epi32(_mm512_srli_epi16(x, 1), word, top_bit, 0xf8);  // a | b & c
          }
          x = _mm512_srl_epi16(x, _mm_cvtsi32_si128(16 - bits));
#pragma GCC unroll 8
          for (int h = 0; h < NH; h++) last[k][h][i] = _mm512_add_epi16(last[k][h][i], look_up(table + h * kEntries, x));
        }
        table += kRowBlock * kEntries;
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) add_pair(h, i, last[0][h][i], last[1][h][i]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const __m512 scale = _mm512_set1_ps(rows.scale[first + h]);
      const __m512 total = _mm512_set1_ps(rows.sums[(first + h) * kMaxGroups]);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kVectors; i++) {
        const int at = t + 16 * i;
        const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[h][i / 2][i % 2]), _mm512_load_ps(&meta.step[0][at]));
        const __m512 logit = _mm512_fmadd_ps(_mm512_load_ps(&meta.centre[0][at]), total, dot);
        _mm512_store_ps(&logits[h][at], _mm512_mul_ps(logit, scale));
      }
    }
  }
}
