// Attention over packed rows of any format: the tile is decoded to float32 and then handled as wide rows. Included by
// attend_impl.h.

typedef uint8_t BUnaligned __attribute__((vector_size(W), aligned(1), may_alias));

/// x[c] = code - 1.5 for each channel c of a packed row.
inline void unpack_row(const uint8_t* row, int quarter, float* x) {
  if constexpr (W == 4) {
    // With vectors of four numbers the compiler makes more of this loop than of the one below.
    for (int b = 0; b < quarter; b++) {
      const int byte = row[b];
      x[b] = float(byte & 3) - kMidCode;
      x[b + quarter] = float(byte >> 2 & 3) - kMidCode;
      x[b + 2 * quarter] = float(byte >> 4 & 3) - kMidCode;
      x[b + 3 * quarter] = float(byte >> 6) - kMidCode;
    }
  } else {
    for (int b = 0; b < quarter; b += W) {
      // Where the quarter is no multiple of W, the last vector overlaps the one before.
      const int at = b + W <= quarter ? b : (quarter >= W ? quarter - W : 0);
      I bytes;
      if (quarter >= W) {
        bytes = __builtin_convertvector(*reinterpret_cast<const BUnaligned*>(row + at), I);
      } else {
        for (int i = 0; i < W; i++) bytes[i] = i < quarter ? row[i] : 0;
      }
      for (int f = 0; f < kCodesPerByte; f++) {
        const I code = (bytes >> (2 * f)) & 3;
        store(x + f * quarter + at, __builtin_convertvector(code, F) - set1(kMidCode));
      }
    }
  }
}

/// Decode one packed row to float32. x must have room for W floats more than the row has channels.
inline void decode_row(const OscarSide& side, const uint8_t* row, float* x) {
  const int quarter = side.head_dim / kCodesPerByte;
  unpack_row(row, quarter, x);
  const uint8_t* meta = row + quarter;
  for (int g = 0; g < side.head_dim; g += side.group_size, meta += kMetaBytes) {
    const float centre = half_to_float(load_u16(meta));
    const float step = half_to_float(load_u16(meta + 2));
    int c = g;
    for (; c + W <= g + side.group_size; c += W) store(x + c, set1(centre) + load(x + c) * set1(step));
    for (; c < g + side.group_size; c++) x[c] = centre + x[c] * step;
  }
}

/// Add a tile of packed rows of any format. The decoded tile, 64 KiB at head_dim 128, stays in L2.
void decoded_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  alignas(64) float k[kTile * kMaxDim + W], v[kTile * kMaxDim + W];
  int64_t k_offset[kTile], v_offset[kTile];
  for (int t = 0; t < kTile; t++) {
    int at = t < tile.count ? t : tile.count - 1;
    k_offset[t] = int64_t(at) * layer.k.head_dim * 4;
    v_offset[t] = int64_t(at) * layer.v.head_dim * 4;
    if (t >= tile.count) continue;  // no rows of their own: these offsets repeat the last key
    decode_row(layer.k, tile.k.base + tile.k.offset[t], k + t * layer.k.head_dim);
    decode_row(layer.v, tile.v.base + tile.v.offset[t], v + t * layer.v.head_dim);
  }
  Tile decoded = tile;
  decoded.k = {reinterpret_cast<const uint8_t*>(k), k_offset};
  decoded.v = {reinterpret_cast<const uint8_t*>(v), v_offset};
  wide_tile<FloatRows>(layer, decoded, rows, state);
}

#if defined(OSCAR_INTEGER_DOTS)
// The including file defines both: kernels that compute on codes, and whether they take the formats of a layer.
bool integer_dots_fit(const OscarLayer& layer);
void packed_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state);
#endif

void attend_packed(const OscarLayer* layer, const Tile* tile, const QueryRows* rows, const State* state) {
#if defined(OSCAR_INTEGER_DOTS)
  if (integer_dots_fit(*layer)) {
    packed_tile(*layer, *tile, *rows, *state);
    return;
  }
#endif
  decoded_tile(*layer, *tile, *rows, *state);
  prefetch_rest(tile->next_lines);
}
