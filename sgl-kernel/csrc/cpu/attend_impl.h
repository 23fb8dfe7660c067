// Attention over one tile of keys, and the small float kernels around it. Included inside an anonymous namespace by each ISA
// file. A file that defines OSCAR_INTEGER_DOTS brings its own `packed_tile`; attend_packed of the others
// decodes the tile to float32 first, at most kTile rows of one head at a time.

/// Key or value rows as vectors of floats.
struct FloatRows {
  static constexpr int kBytes = 4;
  static F at(const uint8_t* row, int channel) { return load(reinterpret_cast<const float*>(row) + channel); }
};
struct Bf16Rows {
  static constexpr int kBytes = 2;
  static F at(const uint8_t* row, int channel) { return load_bf16(reinterpret_cast<const uint16_t*>(row) + channel); }
};

/// The next row of what is ahead.
inline __attribute__((always_inline)) void next_row(Ahead* ahead) {
  if (ahead->token >= ahead->last) {
    ahead->step = 0;
    ahead->at = ahead->k.base;
    ahead->end = ahead->at + 1;
    return;
  }
  const bool value = ahead->value;
  const Ahead::Side& side = value ? ahead->v : ahead->k;
  const uint8_t* row = side.base + side.offset[ahead->token];
  ahead->at = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(row) & ~uintptr_t(63));
  ahead->end = row + side.bytes;
  ahead->step = 64;
  ahead->token += value;
  ahead->value = !value;
}

/// Prefetches a cache line a call, between other work: a burst would fill the buffers that loads wait in, too.
class Prefetcher {
 public:
  explicit Prefetcher(Ahead* ahead)
      : ahead_(ahead), at_(ahead->step ? ahead->at : ahead->end), end_(ahead->end), step_(ahead->step) {}
  ~Prefetcher() { ahead_->at = at_; }
  inline __attribute__((always_inline)) void line() {
    if (__builtin_expect(at_ >= end_, 0)) {
      next_row(ahead_);
      at_ = ahead_->at;
      end_ = ahead_->end;
      step_ = ahead_->step;
    }
    __builtin_prefetch(at_);
    at_ += step_;
  }
  void lines(int count) {
    for (int i = 0; i < count; i++) line();
  }

 private:
  Ahead* ahead_;
  const uint8_t *at_, *end_;
  int64_t step_;
};

/// What the loops left.
inline void prefetch_rest(Ahead* ahead) {
  Prefetcher prefetcher(ahead);
  while (ahead->token < ahead->last) prefetcher.line();
}

/// Keys, and channel vectors, that are accumulated at once: 16 accumulators with 32 registers, 8 with 16.
constexpr int kKeyBlock = W == 16 ? 4 : 2;
constexpr int kChannelBlock = W == 16 ? 4 : 2;

/// logits[h][t] = q_h . k_t for NH rows and the whole tile.
template <int NH, class Rows>
inline void wide_logits(const Tile& tile, const float* q, int dim, float (*logits)[kTile]) {
  Prefetcher prefetcher(tile.ahead);
  for (int t = 0; t < tile.count; t += kKeyBlock) {
    F acc[NH][kKeyBlock] = {};
    const uint8_t* row[kKeyBlock];
    for (int i = 0; i < kKeyBlock; i++) row[i] = tile.k.base + tile.k.offset[t + i];
    prefetcher.lines(kKeyBlock * dim * Rows::kBytes / 64);  // as much as is read
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

/// acc[h] = acc[h] * alpha[h] + sum_t p[h][t] v_t for channels [first, first + NC * W).
template <int NH, int NC, class Rows>
inline void wide_values(const Tile& tile, const float (*p)[kTile], const float* alpha, float* const* acc_row, int first) {
  F acc[NH][NC] = {};
  Prefetcher prefetcher(tile.ahead);
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

/// Cap one row's logits and mask those from `count` to `keys`.
inline void finish_logits(float* logits, int count, int keys, float cap_log2e) {
  if (cap_log2e > 0) {
    for (int t = 0; t < count; t += W) store(logits + t, set1(cap_log2e) * tanhv(load(logits + t)));
  }
  for (int t = count; t < keys; t++) logits[t] = -kInfinity;
}

/// Move a row's running maximum to at least `top`. Returns the factor for what the row has accumulated so far.
inline float raise_maximum(float* row, int v_dim, float top) {
  const float before = row[v_dim];
  if (!(top > before)) return 1.0f;
  row[v_dim] = top;
  return before == -kInfinity ? 0.0f : exp2v(set1(before - top))[0];
}

/// Logits of one row to weights in place, and into the row's sums. Returns the factor for the row's accumulators.
inline float softmax_tile(float* logits, int count, float cap_log2e, float* row, int v_dim, int groups) {
  finish_logits(logits, count, kTile, cap_log2e);
  F high = load(logits);
  for (int t = W; t < kTile; t += W) high = vmax(load(logits + t), high);
  const float alpha = raise_maximum(row, v_dim, largest(high)), top = row[v_dim];
  if (top == -kInfinity) {
    for (int t = 0; t < kTile; t += W) store(logits + t, F{});
    return 1.0f;
  }
  F total = {};
  for (int t = 0; t < kTile; t += W) {
    F p = exp2v(load(logits + t) - set1(top));
    store(logits + t, p);
    total += p;
  }
  float* lanes = row + v_dim + kLanes;
  store(lanes, load(lanes) * set1(alpha) + total);
  for (int g = 1; g <= groups; g++) store(lanes + g * kLanes, load(lanes + g * kLanes) * set1(alpha));
  return alpha;
}

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
  prefetch_rest(tile->ahead);
}

typedef uint8_t B __attribute__((vector_size(W)));
typedef uint8_t BUnaligned __attribute__((vector_size(W), aligned(1), may_alias));

/// Codes of a row to code - 1.5.
inline void unpack_row(const uint8_t* row, int quarter, float* x) {
  if constexpr (W == 4) {
    // Without shifts by lane a table is quicker.
    static const float level[kNumLevels] = {-kMidCode, 1 - kMidCode, 2 - kMidCode, 3 - kMidCode};
    for (int b = 0; b < quarter; b++) {
      const int byte = row[b];
      x[b] = level[byte & 3];
      x[b + quarter] = level[byte >> 2 & 3];
      x[b + 2 * quarter] = level[byte >> 4 & 3];
      x[b + 3 * quarter] = level[byte >> 6];
    }
  } else {
    for (int b = 0; b < quarter; b += W) {
      // The last vector of a row whose quarter is no multiple of W overlaps the one before.
      const int at = b + W <= quarter ? b : (quarter >= W ? quarter - W : 0);
      I bytes;
      if (quarter >= W) {
        bytes = __builtin_convertvector((B)*reinterpret_cast<const BUnaligned*>(row + at), I);
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

/// One 2-bit row to float32. x has room for W floats more than the row.
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

/// Any format, by decoding the tile to float32 in L2.
void decoded_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  alignas(64) float k[kTile * kMaxDim + W], v[kTile * kMaxDim + W];
  int64_t k_offset[kTile], v_offset[kTile];
  for (int t = 0; t < kTile; t++) {
    int at = t < tile.count ? t : tile.count - 1;
    k_offset[t] = int64_t(at) * layer.k.head_dim * 4;
    v_offset[t] = int64_t(at) * layer.v.head_dim * 4;
    if (t >= tile.count) continue;
    decode_row(layer.k, tile.k.base + tile.k.offset[t], k + t * layer.k.head_dim);
    decode_row(layer.v, tile.v.base + tile.v.offset[t], v + t * layer.v.head_dim);
  }
  Tile decoded = tile;
  decoded.k = {reinterpret_cast<const uint8_t*>(k), k_offset};
  decoded.v = {reinterpret_cast<const uint8_t*>(v), v_offset};
  wide_tile<FloatRows>(layer, decoded, rows, state);
}

#if defined(OSCAR_INTEGER_DOTS)
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
  prefetch_rest(tile->ahead);
}

/// y = x @ matrix, four rows of x at a time so that each row of the matrix is read once for four.
template <int N>
inline void matmul_rows(const float* x, int dim, const float* matrix, int cols, float* y) {
  constexpr int kCols = 4;
  for (int c = 0; c < cols;) {
    if (c + kCols * W <= cols) {
      F acc[N][kCols] = {};
      for (int i = 0; i < dim; i++) {
        const float* row = matrix + size_t(i) * cols + c;
        for (int n = 0; n < N; n++) {
          for (int j = 0; j < kCols; j++) acc[n][j] += set1(x[n * dim + i]) * load(row + j * W);
        }
      }
      for (int n = 0; n < N; n++) {
        for (int j = 0; j < kCols; j++) store(y + size_t(n) * cols + c + j * W, acc[n][j]);
      }
      c += kCols * W;
    } else {
      F acc[N] = {};
      for (int i = 0; i < dim; i++) {
        for (int n = 0; n < N; n++) acc[n] += set1(x[n * dim + i]) * load(matrix + size_t(i) * cols + c);
      }
      for (int n = 0; n < N; n++) store(y + size_t(n) * cols + c, acc[n]);
      c += W;
    }
  }
}

void matmul(const float* x, int n, int dim, const float* matrix, int cols, float* y) {
  int i = 0;
  for (; i + 4 <= n; i += 4) matmul_rows<4>(x + size_t(i) * dim, dim, matrix, cols, y + size_t(i) * cols);
  for (; i < n; i++) matmul_rows<1>(x + size_t(i) * dim, dim, matrix, cols, y + size_t(i) * cols);
}

inline void quantise_queries(const OscarSide* k, int num_rows, const float* q, int8_t* limbs, float* scale, float* sums) {
  const int dim = k->head_dim, groups = dim / k->group_size;
  if (groups > kMaxGroups) return;  // the integer path does not take them
  constexpr float kTop = 127 * 256;
  for (int r = 0; r < num_rows; r++, q += dim, sums += kMaxGroups) {
    int8_t* out = limbs + size_t(r / kRowBlock) * kRowBlock * dim * 2 + r % kRowBlock * 8;
    float top = 0;
    for (int c = 0; c < dim; c++) {
      float size = __builtin_fabsf(q[c]);
      top = size > top ? size : top;
    }
    bool usable = top > 1e-30f && top < 3e38f;
    float inverse = usable ? kTop / top : 0.0f;
    scale[r] = usable ? top / kTop : top - top;
    for (int g = 0; g < groups; g++) {
      int codes = 0;
      for (int c = g * k->group_size; c < (g + 1) * k->group_size; c++) {
        float scaled = q[c] * inverse;
        int rounded = scaled == scaled ? int(scaled + (scaled < 0 ? -0.5f : 0.5f)) : 0;
        int upper = (rounded + 128) >> 8;
        int8_t* at = out + c / 4 * (kRowBlock * 8) + c % 4;
        at[0] = int8_t(upper);
        at[4] = int8_t(rounded - 256 * upper);
        codes += rounded;
      }
      sums[g] = usable ? float(codes) : top - top;  // NaN where a query is not finite
    }
  }
}

void merge(const OscarLayer* layer, const float* parts, int num_parts, int64_t part_stride, int num_rows, float* o) {
  const int v_dim = layer->v.head_dim, groups = oscar_state_groups(layer), stride = oscar_state_stride(layer);
  for (int r = 0; r < num_rows; r++, o += v_dim) {
    const float* row = parts + size_t(r) * stride;
    float top = -kInfinity, total = 0;
    for (int i = 0; i < num_parts; i++) top = row[i * part_stride + v_dim] > top ? row[i * part_stride + v_dim] : top;
    for (int c = 0; c < v_dim; c += W) store(o + c, F{});
    for (int i = 0; i < num_parts; i++) {
      const float* part = row + i * part_stride;
      const float sum_l = sum(load(part + v_dim + kLanes));
      // A NaN among the logits never raises the maximum, but is in the sum.
      if (part[v_dim] == -kInfinity && sum_l == 0) continue;
      const float weight = part[v_dim] == -kInfinity ? 1.0f : exp2v(set1(part[v_dim] - top))[0];
      total += weight * sum_l;
      for (int c = 0; c < v_dim; c += W) store(o + c, load(o + c) + set1(weight) * load(part + c));
      for (int g = 0; g < groups; g++) {
        const float offset = weight * sum(load(part + v_dim + kLanes * (2 + g)));
        for (int c = g * layer->v.group_size; c < (g + 1) * layer->v.group_size; c++) o[c] += offset;
      }
    }
    if (total == 0) continue;
    for (int c = 0; c < v_dim; c += W) store(o + c, load(o + c) / set1(total));
  }
}

uint64_t read_bytes(const void* data, int64_t bytes) {
  typedef uint64_t U __attribute__((vector_size(4 * W), aligned(8), may_alias));
  typedef uint64_t V __attribute__((vector_size(4 * W)));
  const U* p = static_cast<const U*>(data);
  V a = {}, b = {}, c = {}, d = {};
  for (int64_t i = 0; i + 4 <= bytes / (4 * W); i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  a += b + c + d;
  uint64_t total = 0;
  for (int i = 0; i < W / 2; i++) total += a[i];
  return total;
}
