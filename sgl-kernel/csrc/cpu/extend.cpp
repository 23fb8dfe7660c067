// Extend: causal attention of new tokens over their cached prefix and among themselves.

#include <omp.h>
#include <string.h>

#include "arena.h"
#include "attend_range.h"
#include "kernels.h"
#include "query_rows.h"

namespace {

constexpr int kUnitRows = 128;  // query rows of a unit, which share each tile once it is transposed or decoded

/// Consecutive new tokens of one sequence. A thread takes one unit and one KV head at a time.
struct Unit {
  int32_t sequence;
  int64_t begin, end;
};

/// Add the new tokens [first_new, unit.end) of the unit's sequence to the states, each query row up to its own token. limit:
/// scratch for a number a query row.
void attend_new_tokens(const KernelTable& table, const OscarLayer& layer, const OscarAttend& args, const Unit& unit, int head,
                       const QueryRows& rows, const State& state, int32_t* limit) {
  const auto rows_of = [&](const OscarRows& x, int64_t start, int count, int64_t* offset) {
    for (int t = 0; t < kTile; t++) offset[t] = (start + (t < count ? t : count - 1)) * x.token_stride;
    return TileRows{static_cast<const uint8_t*>(x.data) + head * x.head_stride, offset};
  };
  TileOffsets offsets;
  for (int64_t start = args.qo_indptr[unit.sequence]; start < unit.end; start += kTile) {
    Tile tile = {};
    tile.count = int(unit.end - start < kTile ? unit.end - start : kTile);
    tile.k = rows_of(args.k_new, start, tile.count, offsets.k);
    tile.v = rows_of(args.v_new, start, tile.count, offsets.v);
    NextTileLines no_lines = {};
    no_lines.k.base = tile.k.base;  // where no line is left, a kernel asks for this one
    tile.next_lines = &no_lines;
    if (start + tile.count - 1 > unit.begin) {  // some query row must not see all of these keys
      for (int r = 0; r < rows.num_rows; r++) {
        const int64_t seen = unit.begin + r / layer.kv_group_num + 1 - start;
        limit[r] = seen < 0 ? 0 : seen > kTile ? kTile : int32_t(seen);
      }
      tile.limit = limit;
    }
    table.attend->attend_wide(&layer, layer.window_dtype, &tile, &rows, &state);
  }
}

}  // namespace

extern "C" int oscar_cpu_extend(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return status;
  if (!oscar_dims_fit(layer)) return kBadShape;
  const int bs = plan->bs, heads = layer->num_kv_heads, kv_group_num = layer->kv_group_num;
  const int dim = layer->k.head_dim, v_dim = layer->v.head_dim, stride = oscar_state_stride(layer);
  const int threads = args->num_threads > 0 ? args->num_threads : 1;
  const int64_t unit_tokens = kv_group_num < kUnitRows ? kUnitRows / kv_group_num : 1;
  const int unit_rows = int(unit_tokens) * kv_group_num;
  int64_t num_units = 0;
  for (int b = 0; b < bs; b++) num_units += (args->qo_indptr[b + 1] - args->qo_indptr[b] + unit_tokens - 1) / unit_tokens;
  if (num_units == 0) return kOk;

  // Scratch for the query rows of one unit and one KV head, for each thread.
  const size_t all_rows = size_t(unit_rows) * threads;
  const int widest = dim > v_dim ? dim : v_dim;
  const bool lookups = looks_up(*table, *layer, unit_rows);
  Arena arena;
  QueryBuffers queries = {};
  queries.view_rows = unit_rows;
  queries.reserve(&arena, threads, dim, lookups);
  float *raw, *states, *merged;
  Unit* units;
  int32_t* limits;
  arena.reserve(&raw, all_rows * widest);
  arena.reserve(&merged, all_rows * v_dim);
  arena.reserve(&states, all_rows * stride);
  arena.reserve(&limits, all_rows);
  arena.reserve(&units, size_t(num_units));
  if (!arena.allocate()) return kNoMemory;

  int64_t filled = 0;
  for (int b = 0; b < bs; b++) {
    for (int64_t at = args->qo_indptr[b], end = args->qo_indptr[b + 1]; at < end; at += unit_tokens) {
      units[filled++] = {b, at, at + unit_tokens < end ? at + unit_tokens : end};
    }
  }
  const Source pool = pool_source(*layer, *plan), windows = window_source(*layer, *plan);

#pragma omp parallel num_threads(threads)
  {
    const int first_row = omp_get_thread_num() * unit_rows;
    const State state = {states + size_t(first_row) * stride, stride};
    float* const own_raw = raw + size_t(first_row) * widest;
    float* const own_merged = merged + size_t(first_row) * v_dim;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_units * heads; i++) {
      // Heads innermost, so that threads read the same slots at about the same time.
      const Unit& unit = units[i / heads];
      const int head = int(i % heads), b = unit.sequence;
      const int64_t count = unit.end - unit.begin;
      prepare_queries(*table, *layer, *args, head, unit.begin, count, own_raw, queries, first_row);
      const QueryRows rows = queries.view(first_row, int(count) * kv_group_num, dim, args->logit_cap);
      clear_states(state.data, rows.num_rows, stride, v_dim);
      const auto rows_of = [&](int) { return rows; };
      const auto state_of = [&](int) { return state; };
      attend_range(*table, *layer, windows, plan->window_indptr[b], plan->window_indptr[b + 1], head, head + 1, kTile, rows_of,
                   state_of);
      attend_range(*table, *layer, pool, plan->kv_indptr[b], plan->kv_indptr[b + 1], head, head + 1,
                   lookups ? kLookUpTile : kTile, rows_of, state_of);
      attend_new_tokens(*table, *layer, *args, unit, head, rows, state, limits + first_row);
      // The unit's outputs are [token, query head of this KV head, v_dim]; `out` has all query heads of a token together.
      float* outputs = own_raw;
      finish(*table, *layer, head, state.data, 1, 0, rows.num_rows, own_merged, outputs);
      for (int64_t t = 0; t < count; t++) {
        memcpy(args->out + ((unit.begin + t) * heads + head) * kv_group_num * v_dim, outputs + t * kv_group_num * v_dim,
               size_t(kv_group_num) * v_dim * sizeof(float));
      }
    }
  }
  return kOk;
}
