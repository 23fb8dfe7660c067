// Operands of the products in attend_amx.cpp: B from a tile of keys or values, A from the numbers of query rows. Included
// there, inside the anonymous namespace.

constexpr int kBlock = kTileRows;  // query rows of a block
constexpr int kStep = 32;          // channels or keys in one row of A
constexpr int kKeyBlocks = kTile / 16;
constexpr int kMaxSteps = kMaxDim / kStep + kMaxGroups;  // the last step of a group may be part empty

/// Two operands A, whose sum is the numbers of a block of query rows.
struct HighLow {
  alignas(64) uint16_t high[kBlock][kStep], low[kBlock][kStep];
};

/// An operand B: pairs of bfloat16.
struct Pairs {
  alignas(64) uint32_t word[kStep / 2][16];
};

/// Centres and steps of a tile's rows, by group.
struct Affine {
  alignas(64) float centre[kMaxGroups][kTile], step[kMaxGroups][kTile];
};

/// One side of a tile, ready for all query rows.
struct Operand {
  int group_size, num_groups;
  const Affine* affine;  // null for wide rows, which have one group
  const Pairs* pairs;    // K: [num_groups][steps_of(group_size)][kKeyBlocks]; V: [kTile / kStep][head_dim / 16]
};

/// Rows of A that so many channels or keys fill.
inline int steps_of(int group_size) { return (group_size + kStep - 1) / kStep; }

/// Write 32 numbers, x and then y, as high + low to row `row` of `out`. Returns the sums high + low, those of x and of y added.
/// The high part is x with its lower bits cut off, so that the rest is exact; the low part is the rest, rounded.
inline F split(F x, F y, int row, HighLow* out) {
  const int32_t mask = int32_t(0xffff0000);
  const I x_top = (I)x & mask, y_top = (I)y & mask;
  const I x_rest = (I)(x - (F)x_top) + 0x8000, y_rest = (I)(y - (F)y_top) + 0x8000;
  // Indices of the upper halves of all 32-bit lanes, those of x first.
  alignas(64) static const uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(kUpper);
  _mm512_store_si512(out->high[row], _mm512_permutex2var_epi16((__m512i)x_top, upper, (__m512i)y_top));
  _mm512_store_si512(out->low[row], _mm512_permutex2var_epi16((__m512i)x_rest, upper, (__m512i)y_rest));
  return ((F)x_top + (F)(x_rest & mask)) + ((F)y_top + (F)(y_rest & mask));
}

/// Write the codes of a tile's rows as bfloat16, head_dim numbers a row.
void expand_codes(const OscarSide& side, const TileRows& rows, uint16_t* out) {
  const int quarter = side.head_dim / kCodesPerByte;
  // bfloat16 0, 1, 2, 3 again and again, so that the bits above a code do no harm.
  const __m512i values = _mm512_set1_epi64(0x404040003f800000);
  for (int t = 0; t < kTile; t++, out += side.head_dim) {
    const uint8_t* row = rows.base + rows.offset[t];
    for (int b = 0; b < quarter; b += 32) {
      const int left = quarter - b;
      const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (1u << left) - 1;
      const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, row + b));
      for (int f = 0; f < kCodesPerByte; f++) {
        const __m512i code = _mm512_permutexvar_epi16(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(2 * f)), values);
        _mm512_mask_storeu_epi16(out + f * quarter + b, mask, code);
      }
    }
  }
}

void read_affine(const OscarSide& side, const TileRows& rows, Affine* out) {
  const int groups = side.head_dim / side.group_size;
  for (int g = 0; g < groups; g++) {
    alignas(64) uint32_t pair[kTile];
    const uint8_t* at = rows.base + side.head_dim / kCodesPerByte + g * kMetaBytes;
    for (int t = 0; t < kTile; t++) pair[t] = load_u32(at + rows.offset[t]);
    for (int t = 0; t < kTile; t += 16) {
      const __m512i both = _mm512_load_si512(pair + t);
      store(&out->centre[g][t], (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
      store(&out->step[g][t], (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
    }
  }
}

/// Operands B of the logits from rows of bfloat16: a transpose of channel pairs. Where a group ends within a step, the channels
/// that it lacks are zero.
void pack_keys(const TileRows& rows, int dim, int group_size, Pairs* out) {
  for (int first = 0; first < dim; first += group_size) {
    for (int c = 0; c < group_size; c += kStep) {
      const __mmask16 mask = group_size - c < kStep ? 0xff : 0xffff;
      for (int n = 0; n < kTile; n += 16, out++) {
        __m512i x[16], y[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          x[i] = _mm512_maskz_loadu_epi32(mask, rows.base + rows.offset[n + i] + 2 * (first + c));
        }
        // First the words of four keys side by side, then the 128-bit lanes of four such vectors.
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
          const __m512i p = _mm512_unpacklo_epi32(x[i], x[i + 1]), q = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
          const __m512i r = _mm512_unpackhi_epi32(x[i], x[i + 1]), s = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
          y[i] = _mm512_unpacklo_epi64(p, q);
          y[i + 1] = _mm512_unpackhi_epi64(p, q);
          y[i + 2] = _mm512_unpacklo_epi64(r, s);
          y[i + 3] = _mm512_unpackhi_epi64(r, s);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const __m512i p = _mm512_shuffle_i64x2(y[j], y[j + 4], 0x88), q = _mm512_shuffle_i64x2(y[j + 8], y[j + 12], 0x88);
          const __m512i r = _mm512_shuffle_i64x2(y[j], y[j + 4], 0xdd), s = _mm512_shuffle_i64x2(y[j + 8], y[j + 12], 0xdd);
          _mm512_store_si512(out->word[j], _mm512_shuffle_i64x2(p, q, 0x88));
          _mm512_store_si512(out->word[j + 4], _mm512_shuffle_i64x2(r, s, 0x88));
          _mm512_store_si512(out->word[j + 8], _mm512_shuffle_i64x2(p, q, 0xdd));
          _mm512_store_si512(out->word[j + 12], _mm512_shuffle_i64x2(r, s, 0xdd));
        }
      }
    }
  }
}

/// Operands B of the output from rows of bfloat16: the numbers of two keys in each 32-bit lane.
void pack_values(const TileRows& rows, int dim, Pairs* out) {
  for (int t = 0; t < kTile; t += 2) {
    const uint8_t *a = rows.base + rows.offset[t], *b = rows.base + rows.offset[t + 1];
    Pairs* at = out + t / kStep * (dim / 16);
    for (int c = 0; c < dim; c += 16, at++) {
      const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 2 * c)));
      const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 2 * c)));
      _mm512_store_si512(at->word[t % kStep / 2], _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
    }
  }
}
