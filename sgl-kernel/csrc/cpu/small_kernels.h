// The kernels around attention, in float32: products with a matrix, limbs of queries, the merge of states. Included by
// attend_impl.h.

/// y = x @ matrix for N rows of x, so that each row of the matrix is read once for all of them.
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

/// Limbs, scale and sums of query rows as QueryRows describes them.
inline void quantise_queries(const OscarSide* k, int num_rows, const float* q, int8_t* limbs, float* scale, float* sums) {
  const int dim = k->head_dim, groups = dim / k->group_size;
  if (groups > kMaxGroups) return;  // such rows are decoded, and need no limbs
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
      // A NaN among the logits never raises the maximum, but it is in the sum.
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
