// Transform, clip, encode and write vectors of new tokens, byte for byte as `oscar/format/codec.py` says. Included inside an
// anonymous namespace by each store_<level>.cpp, which must be compiled with -ffp-contract=off: the format's operations are
// separate float32 operations.

typedef double D __attribute__((vector_size(4 * W)));
typedef double DUnaligned __attribute__((vector_size(4 * W), aligned(8), may_alias));
typedef float FHalfUnaligned __attribute__((vector_size(2 * W), aligned(4), may_alias));
constexpr int kDoubles = W / 2;

constexpr int kTokenBlock = 4;  // tokens handled at once

/// a * b + c in at least float64 precision. That is what makes the float32 result the same, whichever implementation computes
/// it.
inline D multiply_add(D a, D b, D c) {
#if defined(__AVX512F__)
  return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

inline D load_doubles(const double* p) { return *reinterpret_cast<const DUnaligned*>(p); }
inline D load_doubles(const float* p) { return __builtin_convertvector(*reinterpret_cast<const FHalfUnaligned*>(p), D); }

/// y[n] = x[n] @ matrix for N tokens. Each output sums its products in the order of the input channels, whatever N is, so that
/// the bytes of a token do not depend on its batch.
template <int N, class T>
inline void transform_rows(const double (*x)[kMaxDim], int dim, const T* matrix, double (*y)[kMaxDim]) {
  constexpr int kCols = 4;
  int c = 0;
  for (; c + kCols * kDoubles <= dim; c += kCols * kDoubles) {
    D acc[N][kCols] = {};
    for (int i = 0; i < dim; i++) {
      const T* row = matrix + size_t(i) * dim + c;
      for (int n = 0; n < N; n++) {
        const D factor = x[n][i] - D{};
        for (int j = 0; j < kCols; j++) acc[n][j] = multiply_add(factor, load_doubles(row + j * kDoubles), acc[n][j]);
      }
    }
    for (int n = 0; n < N; n++) {
      for (int j = 0; j < kCols; j++) *reinterpret_cast<DUnaligned*>(&y[n][c + j * kDoubles]) = acc[n][j];
    }
  }
  for (; c < dim; c += kDoubles) {
    D acc[N] = {};
    for (int i = 0; i < dim; i++) {
      const D column = load_doubles(matrix + size_t(i) * dim + c);
      for (int n = 0; n < N; n++) acc[n] = multiply_add(x[n][i] - D{}, column, acc[n]);
    }
    for (int n = 0; n < N; n++) *reinterpret_cast<DUnaligned*>(&y[n][c]) = acc[n];
  }
}

template <class T>
inline void transform_block(const double (*x)[kMaxDim], int n, int dim, const T* matrix, double (*y)[kMaxDim]) {
  if (n == kTokenBlock) {
    transform_rows<kTokenBlock>(x, dim, matrix, y);
  } else {
    for (int i = 0; i < n; i++) transform_rows<1>(x + i, dim, matrix, y + i);
  }
}

inline uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

/// Rounds to nearest, ties to even.
inline uint16_t float_to_bf16(float x) {
  uint32_t bits = float_bits(x);
  return x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}

/// Rounds to nearest, ties to even. |x| must be at most 65504.
inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(x, 0));
#else
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size < 0x38800000) {  // below 2^-14 the result is a multiple of 2^-24: adding 0.5 leaves it, rounded, in the low bits
    return uint16_t(sign | (float_bits(bits_float(size) + 0.5f) - float_bits(0.5f)));
  }
  const uint32_t rounded = size + 0xfff + (size >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
#endif
}

/// Clip a row at its index-th smallest |x|. That is the largest threshold with at most `index` numbers below it, found bit by
/// bit, since non-negative floats are ordered as their bits are. sixteen_bits: the numbers are bfloat16, whose lower bits are
/// zero.
inline void clip_row(float* x, int dim, int index, bool sixteen_bits) {
  if (index >= dim - 1) return;
  alignas(64) int32_t size[kMaxDim];
  for (int c = 0; c < dim; c++) size[c] = int32_t(float_bits(x[c]) & 0x7fffffff);
  int32_t threshold = 0;
  for (int bit = 30; bit >= (sixteen_bits ? 16 : 0); bit--) {
    const int32_t candidate = threshold | (1 << bit);
    int below = 0;
    for (int c = 0; c < dim; c++) below += size[c] < candidate;
    if (below <= index) threshold = candidate;
  }
  const float tau = bits_float(uint32_t(threshold));
  for (int c = 0; c < dim; c++) {
    float y = x[c] > -tau ? x[c] : -tau;
    x[c] = y < tau ? y : tau;
  }
}

inline void range_of(const float* x, int n, float* low, float* high) {
  float l = x[0], h = x[0];
  int c = 0;
  if (n >= W) {
    F low_lanes = load(x), high_lanes = low_lanes;
    for (c = W; c + W <= n; c += W) {
      F y = load(x + c);
      low_lanes = y < low_lanes ? y : low_lanes;
      high_lanes = y > high_lanes ? y : high_lanes;
    }
    for (int i = 0; i < W; i++) {
      l = low_lanes[i] < l ? low_lanes[i] : l;
      h = high_lanes[i] > h ? high_lanes[i] : h;
    }
  }
  for (; c < n; c++) {
    l = x[c] < l ? x[c] : l;
    h = x[c] > h ? x[c] : h;
  }
  *low = l;
  *high = h;
}

constexpr float kLargestHalf = 65504.0f, kSmallestHalf = 6.103515625e-5f;  // normal float16 numbers: the latter is 2^-14

/// Replace NaN by 0 and +-inf by +-kLargestHalf. Returns whether there were any.
inline bool replace_special(float* x, int dim) {
  int special = 0;
  for (int c = 0; c < dim; c++) special |= (float_bits(x[c]) & 0x7f800000) == 0x7f800000;
  if (special) {
    for (int c = 0; c < dim; c++) {
      x[c] = x[c] == x[c] ? (x[c] > 3.4028235e38f ? kLargestHalf : x[c] < -3.4028235e38f ? -kLargestHalf : x[c]) : 0.0f;
    }
  }
  return special;
}

/// The four numbers that a group's codes stand for, and the three bounds between them.
struct Grid {
  float level[kNumLevels], bound[kNumLevels - 1];
};

/// Make the grid of a group of n clipped numbers, and write its (centre, step) pair to `meta`.
inline void make_grid(const float* x, int n, uint8_t* meta, Grid* grid) {
  float low, high;
  range_of(x, n, &low, &high);
  float centre = (high + low) * 0.5f;
  centre = centre > kLargestHalf ? kLargestHalf : centre < -kLargestHalf ? -kLargestHalf : centre;
  float step = (high - low) * bits_float(kOneThirdBits);
  step = step > kLargestHalf ? kLargestHalf : step;
  if (step < kSmallestHalf) step = step < 0.5f * kSmallestHalf ? 0.0f : kSmallestHalf;
  const uint16_t centre16 = float_to_half(centre), step16 = float_to_half(step);
  __builtin_memcpy(meta, &centre16, 2);
  __builtin_memcpy(meta + 2, &step16, 2);
  centre = half_to_float(centre16);
  step = half_to_float(step16);
  for (int i = 0; i < kNumLevels; i++) grid->level[i] = centre + (i - kMidCode) * step;
  for (int i = 0; i < kNumLevels - 1; i++) grid->bound[i] = centre + (i + 0.5f - kMidCode) * step;
}

/// Codes of N rows (not clipped) whose rounding errors are passed on from channel to channel. Each channel must wait for the
/// one before it. So N rows are handled side by side, and what the next channel has been passed is kept in registers (`next`).
/// The W channels of one vector pass their errors to each other one at a time, and to later vectors all together; the order of
/// additions is the same.
template <int N>
inline void shaped_codes(const float (*x)[kMaxDim], const Grid (*grid)[kMaxDim / kCodesPerByte], int dim, int group_size,
                         const float* shaping, uint8_t (*code)[kMaxDim]) {
  alignas(64) float passed_on[N][kMaxDim] = {};
  float error[N][W];
  for (int first = 0, g = 0; first < dim; first += W) {
    float next[N];
    for (int n = 0; n < N; n++) next[n] = passed_on[n][first];
    for (int i = first; i < first + W; i++) {
      if (i == (g + 1) * group_size) g++;
      const float* row = shaping + size_t(i) * dim;
      const F factor = load(row + first);
      for (int n = 0; n < N; n++) {
        const Grid& q = grid[n][g];
        const float wanted = x[n][i] - next[n];
        const bool above0 = wanted > q.bound[0], above1 = wanted > q.bound[1], above2 = wanted > q.bound[2];
        code[n][i] = uint8_t(above0 + above1 + above2);
        const float lower = above0 ? q.level[1] : q.level[0], upper = above2 ? q.level[3] : q.level[2];
        const float e = (above1 ? upper : lower) - x[n][i];
        error[n][i - first] = e;
        if (i + 1 < first + W) next[n] = passed_on[n][i + 1] + e * row[i + 1];
        store(passed_on[n] + first, load(passed_on[n] + first) + (e - F{}) * factor);
      }
    }
    for (int c = first + W; c < dim; c += W) {
      F sum[N];
      for (int n = 0; n < N; n++) sum[n] = load(passed_on[n] + c);
      for (int i = 0; i < W; i++) {
        const F factor = load(shaping + size_t(first + i) * dim + c);
        for (int n = 0; n < N; n++) sum[n] += (error[n][i] - F{}) * factor;
      }
      for (int n = 0; n < N; n++) store(passed_on[n] + c, sum[n]);
    }
  }
}

/// Encode n rows, at most kTokenBlock, of float32 numbers x to packed[i]. x is clipped in place. sixteen_bits: as in clip_row.
inline void encode_rows(const OscarSide& side, int head, float (*x)[kMaxDim], int n, bool sixteen_bits,
                        uint8_t* const* packed) {
  const int dim = side.head_dim, quarter = dim / kCodesPerByte, size = side.group_size;
  const double rank = double(side.clip_ratio[head]) * dim;
  alignas(64) uint8_t code[kTokenBlock][kMaxDim];
  alignas(64) float whole[kTokenBlock][kMaxDim];
  Grid grid[kTokenBlock][kMaxDim / kCodesPerByte];
  for (int i = 0; i < n; i++) {
    const bool special = replace_special(x[i], dim);
    if (side.shaping) __builtin_memcpy(whole[i], x[i], size_t(dim) * 4);
    clip_row(x[i], dim, rank < dim - 1 ? int(rank) : dim - 1, sixteen_bits && !special);
    for (int g = 0; g < dim / size; g++) {
      make_grid(x[i] + g * size, size, packed[i] + quarter + g * kMetaBytes, &grid[i][g]);
    }
  }
  if (side.shaping) {
    const float* shaping = side.shaping + size_t(head) * dim * dim;
    if (n == kTokenBlock) {
      shaped_codes<kTokenBlock>(whole, grid, dim, size, shaping, code);
    } else {
      for (int i = 0; i < n; i++) shaped_codes<1>(whole + i, grid + i, dim, size, shaping, code + i);
    }
  } else {
    for (int i = 0; i < n; i++) {
      for (int g = 0; g < dim / size; g++) {
        const float b0 = grid[i][g].bound[0], b1 = grid[i][g].bound[1], b2 = grid[i][g].bound[2];
        for (int c = g * size; c < (g + 1) * size; c++) code[i][c] = uint8_t((x[i][c] > b0) + (x[i][c] > b1) + (x[i][c] > b2));
      }
    }
  }
  for (int i = 0; i < n; i++) {
    const uint8_t* q = code[i];
    for (int b = 0; b < quarter; b++) {
      packed[i][b] = uint8_t(q[b] | q[b + quarter] << 2 | q[b + 2 * quarter] << 4 | q[b + 3 * quarter] << 6);
    }
  }
}

/// StoreTable::store.
void store_rows(const OscarSide* side, int head, const StoreRows* rows, int64_t first, int64_t count) {
  const int dim = side->head_dim, element = rows->window_dtype == kBFloat16 ? 2 : 4;
  alignas(64) double x[kTokenBlock][kMaxDim], y[kTokenBlock][kMaxDim];
  alignas(64) float rows_float[kTokenBlock][kMaxDim];
  alignas(64) uint8_t stored[kMaxDim * 4];
  uint8_t* packed[kTokenBlock];
  for (int64_t start = first; start < first + count; start += kTokenBlock) {
    const int n = int(first + count - start < kTokenBlock ? first + count - start : kTokenBlock);
    if (side->transform) {
      const double* mean = side->mean ? side->mean + size_t(head) * dim : nullptr;
      for (int i = 0; i < n; i++) {
        float* row = rows_float[i];
        convert_to_float(rows->x + (start + i) * rows->token_stride, rows->dtype, dim, row);
        for (int c = 0; c < dim; c++) x[i][c] = mean ? double(row[c]) - mean[c] : double(row[c]);
      }
      const size_t matrix = size_t(head) * dim * dim;
      if (side->transform_dtype == kFloat64) {
        transform_block(x, n, dim, static_cast<const double*>(side->transform) + matrix, y);
      } else {
        transform_block(x, n, dim, static_cast<const float*>(side->transform) + matrix, y);
      }
    }
    for (int i = 0; i < n; i++) {
      float* row = rows_float[i];
      if (side->transform) {
        for (int c = 0; c < dim; c++) row[c] = float(y[i][c]);
      } else {
        convert_to_float(rows->x + (start + i) * rows->token_stride, rows->dtype, dim, row);
      }
      if (rows->window_dtype == kBFloat16) {
        uint16_t* bits = reinterpret_cast<uint16_t*>(stored);
        for (int c = 0; c < dim; c++) {
          bits[c] = float_to_bf16(row[c]);
          row[c] = bf16_to_float(bits[c]);
        }
      } else {
        __builtin_memcpy(stored, row, size_t(dim) * 4);
      }
      const size_t bytes = size_t(dim) * element;
      __builtin_memcpy(rows->out + (start + i) * rows->out_stride, stored, bytes);
      if (rows->window_rows[start + i] != rows->no_row) {
        __builtin_memcpy(rows->window + rows->window_rows[start + i] * rows->window_row_stride, stored, bytes);
      }
      packed[i] = rows->buffer + rows->loc[start + i] * rows->slot_stride;
      if (side->row_kind == kWide) __builtin_memcpy(packed[i], stored, bytes);
    }
    if (side->row_kind == kPacked) encode_rows(*side, head, rows_float, n, rows->window_dtype == kBFloat16, packed);
  }
}
