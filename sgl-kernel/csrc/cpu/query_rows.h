// Query rows: how they are made from the queries of a call, and how outputs are made from their states.

#ifndef OSCAR_QUERY_ROWS_H_
#define OSCAR_QUERY_ROWS_H_

#include <math.h>
#include <string.h>

#include "arena.h"
#include "kernels.h"

/// Whether logits of packed rows come from look-up tables, for `num_rows` query rows a KV head.
inline bool looks_up(const KernelTable& table, const OscarLayer& layer, int num_rows) {
  return layer.k.row_kind == kPacked && table.attend->looks_up && table.attend->looks_up(&layer, num_rows);
}

/// The arrays of QueryRows for all query rows of a call. A kernel is given a view of them: `view_rows` rows at most, of one KV
/// head, that are its own whole blocks.
struct QueryBuffers {
  int view_rows;
  float* q;
  float* scale;
  float* sums;
  int8_t* limbs;    // null where `tables` is not
  int16_t* tables;  // null where logits do not come from look-ups

  /// Room for `num_views` views, in the arena. `lookups`: with tables, not limbs.
  void reserve(Arena* arena, size_t num_views, int dim, bool lookups) {
    arena->reserve(&q, num_views * view_rows * dim);
    arena->reserve(&scale, num_views * view_rows);
    arena->reserve(&sums, num_views * view_rows * kMaxGroups);
    if (lookups) {
      arena->reserve(&tables, num_views * table_entries(dim));
    } else {
      arena->reserve(&limbs, num_views * limb_bytes(dim));
    }
  }
  size_t num_blocks() const { return size_t(view_rows + kRowBlock - 1) / kRowBlock; }
  size_t limb_bytes(int dim) const { return num_blocks() * kRowBlock * dim * 2; }
  size_t table_entries(int dim) const { return num_blocks() * oscar_table_entries(dim); }
  int8_t* limbs_of(int first, int dim) const { return limbs ? limbs + first / view_rows * limb_bytes(dim) : nullptr; }
  int16_t* tables_of(int first, int dim) const { return tables ? tables + first / view_rows * table_entries(dim) : nullptr; }

  /// Rows [first, first + count), where `first` begins a view.
  QueryRows view(int first, int count, int dim, float logit_cap) const {
    QueryRows rows = {};
    rows.num_rows = count;
    rows.dim = dim;
    rows.q = q + size_t(first) * dim;
    rows.limbs = limbs_of(first, dim);
    rows.scale = scale + first;
    rows.sums = sums + size_t(first) * kMaxGroups;
    rows.cap_log2e = logit_cap > 0 ? logit_cap * float(M_LOG2E) : 0.0f;
    rows.tables = tables_of(first, dim);
    return rows;
  }
};

/// Make the query rows of tokens [first, first + count) and one KV head: transform, scale, quantise. They become rows `row` and
/// on of `buffers`, kv_group_num rows a token. raw: scratch of count * kv_group_num * head_dim floats.
inline void prepare_queries(const KernelTable& table, const OscarLayer& layer, const OscarAttend& args, int head, int64_t first,
                            int64_t count, float* raw, const QueryBuffers& buffers, int row) {
  const int dim = layer.k.head_dim, kv_group_num = layer.kv_group_num, element = args.q.dtype == kFloat32 ? 4 : 2;
  float* q = buffers.q + size_t(row) * dim;
  float* untransformed = layer.k.read_transform ? raw : q;
  for (int64_t t = 0; t < count; t++) {
    for (int h = 0; h < kv_group_num; h++) {
      const int64_t at = (first + t) * args.q.token_stride + (int64_t(head) * kv_group_num + h) * args.q.head_stride;
      const char* query = static_cast<const char*>(args.q.data) + at * element;
      table.attend->to_float(query, args.q.dtype, dim, untransformed + (t * kv_group_num + h) * dim);
    }
  }
  const int num_rows = int(count) * kv_group_num;
  if (layer.k.read_transform) {
    table.attend->matmul(raw, num_rows, dim, layer.k.read_transform + size_t(head) * dim * dim, dim, q);
  }
  const float factor = args.logit_cap > 0 ? args.sm_scale / args.logit_cap : args.sm_scale * float(M_LOG2E);
  for (size_t i = 0; i < size_t(num_rows) * dim; i++) q[i] *= factor;
  if (layer.k.row_kind != kPacked) return;
  for (int r = 0; r < num_rows; r += buffers.view_rows) {
    const int view_count = num_rows - r < buffers.view_rows ? num_rows - r : buffers.view_rows, at = row + r;
    const float* view_q = buffers.q + size_t(at) * dim;
    float *scale = buffers.scale + at, *sums = buffers.sums + size_t(at) * kMaxGroups;
    if (buffers.tables) {
      table.attend->tabulate_queries(&layer.k, view_count, view_q, buffers.tables_of(at, dim), scale, sums);
    } else {
      table.attend->quantise_queries(&layer.k, view_count, view_q, buffers.limbs_of(at, dim), scale, sums);
    }
  }
}

/// Set the states of `num_rows` query rows to "no key seen".
inline void clear_states(float* states, int num_rows, int stride, int v_dim) {
  for (int r = 0; r < num_rows; r++, states += stride) {
    memset(states, 0, size_t(stride) * sizeof(float));
    states[v_dim] = -INFINITY;
  }
}

/// Merge the states of one KV head's query rows, apply the read transform of V, and write out [num_rows, v_dim]. Parts are
/// `part_stride` floats apart. merged: scratch of num_rows * v_dim floats.
inline void finish(const KernelTable& table, const OscarLayer& layer, int head, const float* parts, int num_parts,
                   int64_t part_stride, int num_rows, float* merged, float* out) {
  const int v_dim = layer.v.head_dim;
  const float* read_transform = layer.v.read_transform;
  table.attend->merge(&layer, parts, num_parts, part_stride, num_rows, read_transform ? merged : out);
  if (!read_transform) return;
  table.attend->matmul(merged, num_rows, v_dim, read_transform + size_t(head) * v_dim * v_dim, v_dim, out);
}

#endif  // OSCAR_QUERY_ROWS_H_
