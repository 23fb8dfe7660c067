// Attention over a tile of wide rows in float32, and the softmax of a tile. Included by attend_impl.h.

/// Wide rows of one type, read as vectors of floats.
struct FloatRows {
  static constexpr int kBytes = 4;
  static F at(const uint8_t* row, int channel) { return load(reinterpret_cast<const float*>(row) + channel); }
};
struct Bf16Rows {
  static constexpr int kBytes = 2;
  static F at(const uint8_t* row, int channel) { return load_bf16(reinterpret_cast<const uint16_t*>(row) + channel); }
};

/// Keys (for logits) and vectors of channels (for values) whose sums are held in registers at once. With kRowBlock query rows
/// that makes 16 sums where there are 32 registers, and 8 where there are 16.
constexpr int kKeyBlock = W == 16 ? 4 : 2;
constexpr int kChannelBlock = W == 16 ? 4 : 2;

/// logits[h][t] = q_h . k_t for NH query rows and all keys of the tile.
template <int NH, class Rows>
inline void wide_logits(const Tile& tile, const float* q, int dim, float (*logits)[kTile]) {
  Prefetcher prefetcher(tile.next_lines);
  for (int t = 0; t < tile.count; t += kKeyBlock) {
    F acc[NH][kKeyBlock] = {};
    const uint8_t* row[kKeyBlock];
    for (int i = 0; i < kKeyBlock; i++) row[i] = tile.k.base + tile.k.offset[t + i];
    prefetcher.lines(kKeyBlock * dim * Rows::kBytes / 64);  // as many lines as are read here
    for (int c = 0; c < dim; c += W) {
      F key[kKeyBlock];
      for (int i = 0; i < kKeyBlock; i++) key[i] = Rows::at(row[i], c);
      for (int h = 0; h < NH; h++) {
        F query = load(q + h * dim + c);
        for (int i = 0; i < kKeyBlock; i++) acc[h][i] += query * key[i];
      }
    }
    for (int h = 0; h < NH; h++) {
      if constexpr (kKeyBlock == 4) {
        sum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3], &logits[h][t], 1);
      } else {
        for (int i = 0; i < kKeyBlock; i++) logits[h][t + i] = sum(acc[h][i]);
      }
    }
  }
}

/// acc[h] = acc[h] * alpha[h] + sum over t of p[h][t] * v_t, for channels [first, first + NC * W).
template <int NH, int NC, class Rows>
inline void wide_values(const Tile& tile, const float (*p)[kTile], const float* alpha, float* const* acc_row, int first) {
  F acc[NH][NC] = {};
  Prefetcher prefetcher(tile.next_lines);
  for (int t = 0; t < tile.count; t++) {
    const uint8_t* row = tile.v.base + tile.v.offset[t];
    prefetcher.lines(NC * W * Rows::kBytes / 64);
    F value[NC];
    for (int c = 0; c < NC; c++) value[c] = Rows::at(row, first + c * W);
    for (int h = 0; h < NH; h++) {
      F weight = set1(p[h][t]);
      for (int c = 0; c < NC; c++) acc[h][c] += weight * value[c];
    }
  }
  for (int h = 0; h < NH; h++) {
    for (int c = 0; c < NC; c++) {
      float* out = acc_row[h] + first + c * W;
      store(out, load(out) * set1(alpha[h]) + acc[h][c]);
    }
  }
}

/// Apply the logit cap to one query row's logits, and set those from `count` to `keys`, which it must not see, to -inf.
inline void finish_logits(float* logits, int count, int keys, float cap_log2e) {
  if (cap_log2e > 0) {
    for (int t = 0; t < count; t += W) store(logits + t, set1(cap_log2e) * tanhv(load(logits + t)));
  }
  for (int t = count; t < keys; t++) logits[t] = -kInfinity;
}

/// Raise the maximum in a query row's state to `top` if that is larger. Returns the factor that brings the sums of the state to
/// the new maximum.
inline float raise_maximum(float* row, int v_dim, float top) {
  const float before = row[v_dim];
  if (!(top > before)) return 1.0f;
  row[v_dim] = top;
  return before == -kInfinity ? 0.0f : exp2v(set1(before - top))[0];
}

/// Turn one query row's logits of a tile into weights, in place, and add them to l of its state. `count`: keys that the row
/// sees. Returns the factor that the caller must apply to acc of the state; l and r have it already.
inline float softmax_tile(float* logits, int count, float cap_log2e, float* row, int v_dim, int groups) {
  finish_logits(logits, count, kTile, cap_log2e);
  F high = load(logits);
  for (int t = W; t < kTile; t += W) high = vmax(load(logits + t), high);
  const float alpha = raise_maximum(row, v_dim, largest(high)), top = row[v_dim];
  // Without a maximum every logit is -inf, whose weight is 0, or NaN, whose weight must be NaN: for both any finite origin does.
  const float origin = top == -kInfinity ? 0.0f : top;
  F total = {};
  for (int t = 0; t < kTile; t += W) {
    F p = exp2v(load(logits + t) - set1(origin));
    store(logits + t, p);
    total += p;
  }
  float* lanes = row + v_dim + kLanes;
  store(lanes, load(lanes) * set1(alpha) + total);
  for (int g = 1; g <= groups; g++) store(lanes + g * kLanes, load(lanes + g * kLanes) * set1(alpha));
  return alpha;
}

/// Add a tile to the states of NH query rows from `first` on.
template <int NH, class Rows>
inline void wide_rows(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, int first, const State& state) {
  alignas(64) float logits[NH][kTile];
  wide_logits<NH, Rows>(tile, rows.q + size_t(first) * rows.dim, rows.dim, logits);
  const int v_dim = layer.v.head_dim, groups = oscar_state_groups(&layer);
  float alpha[NH];
  float* acc_row[NH];
  for (int h = 0; h < NH; h++) {
    acc_row[h] = state.data + size_t(first + h) * state.stride;
    int count = tile.limit && tile.limit[first + h] < tile.count ? tile.limit[first + h] : tile.count;
    alpha[h] = softmax_tile(logits[h], count, rows.cap_log2e, acc_row[h], v_dim, groups);
  }
  int c = 0;
  for (; c + kChannelBlock * W <= v_dim; c += kChannelBlock * W) {
    wide_values<NH, kChannelBlock, Rows>(tile, logits, alpha, acc_row, c);
  }
  for (; c < v_dim; c += W) wide_values<NH, 1, Rows>(tile, logits, alpha, acc_row, c);
}

template <class Rows>
inline void wide_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  for (int first = 0; first < rows.num_rows; first += kRowBlock) {
    switch (rows.num_rows - first) {
      case 1: wide_rows<1, Rows>(layer, tile, rows, first, state); break;
      case 2: wide_rows<2, Rows>(layer, tile, rows, first, state); break;
      case 3: wide_rows<3, Rows>(layer, tile, rows, first, state); break;
      default: wide_rows<4, Rows>(layer, tile, rows, first, state);
    }
  }
}

void attend_wide(const OscarLayer* layer, int dtype, const Tile* tile, const QueryRows* rows, const State* state) {
  if (dtype == kBFloat16) {
    wide_tile<Bf16Rows>(*layer, *tile, *rows, *state);
  } else {
    wide_tile<FloatRows>(*layer, *tile, *rows, *state);
  }
  prefetch_rest(tile->next_lines);
}
