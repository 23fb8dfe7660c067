// Packed rows in memory to the operands of the AVX-512 kernels. Included by attend_avx512.cpp.
//
// kQuarter, in the templates: the quarter of rows with one group, where it is known at compile time; 0 for rows of any format.

constexpr int kMaxWords = kMaxDim / 16;  // 32-bit words of codes in a row

inline __m512i field_mask() { return _mm512_set1_epi8(3); }

/// float16 numbers in the low halves of 16 lanes.
inline __m512 meta_float(__m512i low16) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low16)); }

/// Whether the kernels for codes take a side's format: not too many groups, and each vector of channels within one group.
bool side_fits(const OscarSide& side) {
  const int quarter = side.head_dim / kCodesPerByte, groups = side.head_dim / side.group_size;
  return side.head_dim % 16 == 0 && groups <= kMaxGroups && (groups == 1 || (quarter % 16 == 0 && side.group_size % 16 == 0));
}

bool integer_dots_fit(const OscarLayer& layer) { return side_fits(layer.k) && side_fits(layer.v); }

/// 32 code bytes of a row. Where only `bytes` are left in it, the others are zero and not read.
inline __m256i load_codes(const uint8_t* p, int bytes) {
  if (bytes >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_maskz_loadu_epi32(__mmask8((1u << (bytes / 4)) - 1), p);
}

inline __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

/// Centres and steps of a tile's rows, by group.
struct Meta {
  alignas(64) float centre[kMaxGroups][kLookUpTile];
  alignas(64) float step[kMaxGroups][kLookUpTile];
};

/// Read the centres and steps of `keys` rows, a multiple of 16.
template <int kQuarter>
inline void read_meta(const OscarSide& side, const TileRows& rows, int keys, Meta* meta) {
  const int quarter = kQuarter ? kQuarter : side.head_dim / kCodesPerByte;
  const int groups = kQuarter ? 1 : side.head_dim / side.group_size;
  for (int g = 0; g < groups; g++) {
    const uint8_t* at = rows.base + quarter + g * kMetaBytes;
    for (int t = 0; t < keys; t += 16) {
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
      _mm512_store_ps(&meta->centre[g][t], meta_float(pair));
      _mm512_store_ps(&meta->step[g][t], meta_float(_mm512_srli_epi32(pair, 16)));
    }
  }
}

/// words[j][t] = 32-bit word j of the codes of key t, for the products of key_dots.
inline void transpose_keys(const Tile& tile, int head_dim, uint32_t (*words)[kTile]) {
  const int quarter = head_dim / kCodesPerByte;
  for (int t = 0; t < kTile; t += 16) {
    for (int first = 0; first < quarter; first += 32) {
      __m512i a[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        // A vector holds two rows that are four apart. The unpacking below then leaves its 128-bit lanes in the order of the
        // keys.
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

/// Transpose eight vectors of 16-bit words, within each 128-bit lane.
inline void transpose_lanes(__m512i* a) {
  __m512i b[8], c[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
    c[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
    c[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
    c[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm512_unpacklo_epi64(c[i], c[i + 4]);
    a[2 * i + 1] = _mm512_unpackhi_epi64(c[i], c[i + 4]);
  }
}

/// words[j] = 16-bit word j of the codes of each key of a tile, for look-ups. Of 32 keys that share a vector, 128-bit lane L
/// holds keys 4L to 4L+3 and then keys 16+4L to 16+4L+3. key_lookups unpacks 16-bit sums to 32 bits, which separates the two
/// halves of each 128-bit lane: that gives two vectors of 16 keys in order.
template <int kQuarter>
inline void transpose_keys(const Tile& tile, int head_dim, uint16_t (*words)[kLookUpTile]) {
  const int quarter = kQuarter ? kQuarter : head_dim / kCodesPerByte;
  for (int t = 0; t < kLookUpTile; t += 32) {
    for (int first = 0; first < quarter; first += 32) {
      const int left = quarter - first;
      __m512i a[2][8];
#pragma GCC unroll 8
      for (int s = 0; s < 2; s++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
          const int64_t* key = tile.k.offset + t + 8 * s + (i < 4 ? i : i + 12);
          const uint8_t *x = tile.k.base + key[0], *y = tile.k.base + key[4];
          a[s][i] = join(load_codes(x + first, left), load_codes(y + first, left));
        }
        transpose_lanes(a[s]);
      }
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        uint16_t (*to)[kLookUpTile] = words + first / 2 + j;
        if (2 * j < left) _mm512_store_si512(&to[0][t], _mm512_shuffle_i64x2(a[0][j], a[1][j], 0x88));
        if (2 * j + 16 < left) _mm512_store_si512(&to[8][t], _mm512_shuffle_i64x2(a[0][j], a[1][j], 0xdd));
      }
    }
  }
}

/// quads[i][z] = code bytes 16z to 16z+15 of keys 4i to 4i+3. Each 32-bit lane holds one byte of each of the four keys.
template <int kQuarter>
inline void interleave_values(const Tile& tile, int head_dim, int keys, uint8_t (*quads)[kMaxWords / 4][64]) {
  const int quarter = kQuarter ? kQuarter : head_dim / kCodesPerByte;
  const __m512i low_words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m512i high_words = _mm512_add_epi32(low_words, _mm512_set1_epi32(4));
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int i = 0; i < keys / 4; i++) {
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
