// Decode and extend: prepare queries, split the keys over threads, merge.
//
// Threads are OpenMP's. The library's soname is that of the libgomp which PyTorch brings and has loaded, so both share one pool
// of threads: none of their own would sit idle or fight over the cores, and a region after a torch operator starts warm.

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>

#include "kernels.h"

namespace {

constexpr int kTasksPerThread = 4; // enough that dynamic scheduling evens out
constexpr int64_t kMinChunk = 128; // keys: below, starting a task costs more than it shares
constexpr int kWindowShare = 4;    // a window row costs about as much as this many 2-bit rows
constexpr int64_t kSmallWork = 4 << 20;  // multiplications; below, waking a thread costs more than it takes over
constexpr int kQueryRows = 128;    // extend: rows of one KV head that share a decoded or transposed tile

/// One block of memory, handed out in 64-byte steps.
class Arena {
 public:
  ~Arena() { free(base_); }
  template <class T>
  void reserve(T** at, size_t count) {
    items_[num_++] = {reinterpret_cast<void**>(at), size_};
    size_ += (count * sizeof(T) + 63) / 64 * 64;
  }
  bool allocate() {
    base_ = aligned_alloc(64, size_ ? size_ : 64);
    for (int i = 0; base_ && i < num_; i++) *items_[i].at = static_cast<char*>(base_) + items_[i].offset;
    return base_ != nullptr;
  }

 private:
  struct Item {
    void** at;
    size_t offset;
  };
  Item items_[16];
  int num_ = 0;
  size_t size_ = 0;
  void* base_ = nullptr;
};

/// Query rows, as QueryRows points to them. A view is the rows of one KV head that a call of the kernel takes.
struct RowBuffers {
  float* q;
  int8_t* limbs;
  float* scale;
  float* sums;
  int16_t* tables;  // instead of limbs, or null
  int view_rows;    // most rows of a view

  /// Rows that a view takes in whole blocks.
  size_t block_rows() const { return size_t(view_rows + kRowBlock - 1) / kRowBlock * kRowBlock; }
  size_t limb_bytes(int dim) const { return block_rows() * dim * 2; }
  size_t table_entries(int dim) const { return block_rows() / kRowBlock * oscar_table_entries(dim); }
  int8_t* limbs_of(int first, int dim) const { return limbs + first / view_rows * limb_bytes(dim); }
  int16_t* tables_of(int first, int dim) const { return tables ? tables + first / view_rows * table_entries(dim) : nullptr; }

  QueryRows view(int first, int count, int dim, float cap) const {
    return {count, dim, q + size_t(first) * dim, limbs_of(first, dim), scale + first, sums + size_t(first) * kMaxGroups,
            cap > 0 ? cap * float(M_LOG2E) : 0.0f, tables_of(first, dim)};
  }
};

/// Transform, scale and quantise query tokens [first, first + count) of one KV head: rows token-major, then its query heads.
/// `raw` holds count * kv_group_num * head_dim floats.
void prepare(const KernelTable& table, const OscarLayer& layer, const OscarAttend& args, int head, int64_t first, int64_t count,
             float* raw, const RowBuffers& rows, int row) {
  const int dim = layer.k.head_dim, kv_group_num = layer.kv_group_num, element = args.q.dtype == kFloat32 ? 4 : 2;
  const float scale = args.logit_cap > 0 ? args.sm_scale / args.logit_cap : args.sm_scale * float(M_LOG2E);
  float* q = rows.q + size_t(row) * dim;
  float* target = layer.k.read_transform ? raw : q;
  for (int64_t t = 0; t < count; t++) {
    for (int h = 0; h < kv_group_num; h++) {
      const int64_t at = (first + t) * args.q.token_stride + (int64_t(head) * kv_group_num + h) * args.q.head_stride;
      const char* row_of_q = static_cast<const char*>(args.q.data) + at * element;
      table.attend->to_float(row_of_q, args.q.dtype, dim, target + (t * kv_group_num + h) * dim);
    }
  }
  const int num_rows = int(count) * kv_group_num;
  if (layer.k.read_transform) {
    table.attend->matmul(raw, num_rows, dim, layer.k.read_transform + size_t(head) * dim * dim, dim, q);
  }
  for (size_t i = 0; i < size_t(num_rows) * dim; i++) q[i] *= scale;
  if (layer.k.row_kind == kPacked) {
    for (int r = 0; r < num_rows; r += rows.view_rows) {
      const int count = num_rows - r < rows.view_rows ? num_rows - r : rows.view_rows, at = row + r;
      const float* q = rows.q + size_t(at) * dim;
      float *scale = rows.scale + at, *sums = rows.sums + size_t(at) * kMaxGroups;
      if (rows.tables) {
        table.attend->tabulate_queries(&layer.k, count, q, rows.tables_of(at, dim), scale, sums);
      } else {
        table.attend->quantise_queries(&layer.k, count, q, rows.limbs_of(at, dim), scale, sums);
      }
    }
  }
}

void clear_state(float* state, int rows, int stride, int v_dim) {
  for (int r = 0; r < rows; r++, state += stride) {
    memset(state, 0, size_t(stride) * sizeof(float));
    state[v_dim] = -INFINITY;
  }
}

bool looks_up(const KernelTable& table, const OscarLayer& layer, int num_rows) {
  return layer.k.row_kind == kPacked && table.attend->looks_up && table.attend->looks_up(&layer, num_rows);
}

/// Offsets of one tile's keys; entries beyond `count` repeat the last one.
struct Offsets {
  int64_t k[kLookUpTile], v[kLookUpTile];
};

/// Where the rows of one side lie. Strides in bytes.
struct SourceSide {
  const uint8_t* base;
  int64_t row_stride, head_stride;
  int row_bytes;

  void fill(const int32_t* index, int count, int keys, int64_t* offset) const {
    for (int t = 0; t < count; t++) offset[t] = index[t] * row_stride;
    for (int t = count; t < keys; t++) offset[t] = offset[count - 1];
  }
};

/// Where the keys of one kind lie.
struct Source {
  bool packed;
  int dtype;  // of wide rows
  const int32_t* indices;
  SourceSide k, v;
};

void fetch_into_l2(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

int wide_bytes(const OscarSide& side, int dtype) { return side.head_dim * (dtype == kBFloat16 ? 2 : 4); }

SourceSide pool_side(const OscarSide& side, int dtype) {
  return {side.buffer, side.slot_stride, side.head_stride,
          side.row_kind == kPacked ? oscar_row_bytes(side.head_dim, side.group_size) : wide_bytes(side, dtype)};
}

SourceSide window_side(const OscarSide& side, int dtype) {
  return {side.window, side.window_row_stride, side.window_head_stride, wide_bytes(side, dtype)};
}

Source pool_source(const OscarLayer& layer, const OscarPlan& plan) {
  const int dtype = layer.window_dtype;
  return {layer.k.row_kind == kPacked, dtype, plan.kv_indices, pool_side(layer.k, dtype), pool_side(layer.v, dtype)};
}

Source window_source(const OscarLayer& layer, const OscarPlan& plan) {
  const int dtype = layer.window_dtype;
  return {false, dtype, plan.window_indices, window_side(layer.k, dtype), window_side(layer.v, dtype)};
}

/// Keys [begin, end) of a source, `keys` at a time, for heads [first_head, last_head); `rows(head)`, `state(head)` say whose.
template <class RowsOf, class StateOf>
void attend_range(const KernelTable& table, const OscarLayer& layer, const Source& source, int64_t begin, int64_t end,
                  int first_head, int last_head, int keys, RowsOf rows, StateOf state) {
  Offsets offsets[3];  // of a tile and the two after it, in turn
  const int heads = last_head - first_head;
  const auto slot_side = [&](const SourceSide& side) {
    return Ahead::Side{side.base + first_head * side.head_stride, nullptr,
                       int((heads - 1) * side.head_stride) + side.row_bytes};
  };
  Ahead::Side k_slots = slot_side(source.k), v_slots = slot_side(source.v);
  const auto count_at = [&](int64_t start) { return start >= end ? 0 : end - start < keys ? int(end - start) : keys; };
  const auto fill = [&](Offsets* to, int64_t start) {
    if (start >= end) return;
    source.k.fill(source.indices + start, count_at(start), keys, to->k);
    source.v.fill(source.indices + start, count_at(start), keys, to->v);
  };
  fill(&offsets[0], begin);
  fill(&offsets[1], begin + keys);
  for (int t = 0; t < count_at(begin); t++) {  // no tile before has asked for the first one's rows
    fetch_into_l2(k_slots.base + offsets[0].k[t], k_slots.bytes);
    fetch_into_l2(v_slots.base + offsets[0].v[t], v_slots.bytes);
  }
  int now = 0;
  for (int64_t start = begin; start < end; start += keys, now = (now + 1) % 3) {
    fill(&offsets[(now + 2) % 3], start + 2 * keys);
    const int count_after = count_at(start + keys);
    const Offsets& here = offsets[now];
    const Offsets& after = count_after ? offsets[(now + 1) % 3] : here;
    const Offsets& second = count_at(start + 2 * keys) ? offsets[(now + 2) % 3] : here;
    // A tile ahead, in which the other heads have their turns. Of one head, that would be the next call.
    const Offsets& distant = heads > 1 ? after : second;
    Ahead ahead = {};
    k_slots.offset = after.k;
    v_slots.offset = after.v;
    ahead.k = k_slots;
    ahead.v = v_slots;
    TileRows next[2], later[2];
    Tile tile = {};
    tile.count = count_at(start);
    tile.ahead = &ahead;
    tile.next = next;
    tile.later = later;
    for (int head = first_head; head < last_head; head++) {
      ahead.last = count_after * (head - first_head + 1) / heads;  // each head's work brings its share of the tokens
      tile.k = {source.k.base + head * source.k.head_stride, here.k};
      tile.v = {source.v.base + head * source.v.head_stride, here.v};
      // Heads' rows lie side by side. Where they are shorter than a line, their last bytes are in all of a slot's lines but,
      // at times, the first head's first one; and what lies before them in theirs is of the head before.
      const int k_end = source.k.row_bytes - 1, v_end = source.v.row_bytes - 1;
      if (head + 1 < last_head) {
        next[0] = {tile.k.base + source.k.head_stride + k_end, here.k};
        next[1] = {tile.v.base + source.v.head_stride + v_end, here.v};
      } else {
        next[0] = {k_slots.base + k_end, after.k};
        next[1] = {v_slots.base + v_end, after.v};
      }
      later[0] = {tile.k.base + (head > first_head ? k_end : 0), distant.k};
      // New lines are every other head's; of another head's values, those of K and V take turns.
      const int v_head = head > first_head ? head - 1 : last_head - 1;
      later[1] = {source.v.base + v_head * source.v.head_stride + (v_head > first_head ? v_end : 0), distant.v};
      const QueryRows query_rows = rows(head);
      const State row_state = state(head);
      if (source.packed) {
        table.attend->attend_packed(&layer, &tile, &query_rows, &row_state);
      } else {
        table.attend->attend_wide(&layer, source.dtype, &tile, &query_rows, &row_state);
      }
    }
  }
}

/// Normalise, transform back and write rows of one KV head. o: scratch of num_rows * v_dim floats.
void finish(const KernelTable& table, const OscarLayer& layer, int head, const float* parts, int num_parts, int64_t part_stride,
            int num_rows, float* o, float* out) {
  const int v_dim = layer.v.head_dim;
  table.attend->merge(&layer, parts, num_parts, part_stride, num_rows, layer.v.read_transform ? o : out);
  if (layer.v.read_transform) {
    table.attend->matmul(o, num_rows, v_dim, layer.v.read_transform + size_t(head) * v_dim * v_dim, v_dim, out);
  }
}

/// Part of one sequence's keys.
struct Task {
  int32_t sequence;
  bool window;
  int64_t begin, end;
};

/// Wait for another thread's last piece of work; gives the core away if that takes long.
template <class Condition>
void wait_until(Condition done) {
  for (int spins = 0; !done(); spins++) {
    if (spins < 2000) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      sched_yield();
    }
  }
}

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

}  // namespace

extern "C" int oscar_cpu_decode(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return status;
  if (!oscar_dims_fit(layer)) return kBadShape;
  const int bs = plan->bs, heads = layer->num_kv_heads, kv_group_num = layer->kv_group_num;
  const int dim = layer->k.head_dim, v_dim = layer->v.head_dim, stride = oscar_state_stride(layer);
  if (bs == 0) return kOk;

  const int64_t cost = plan->kv_indptr[bs] + plan->window_indptr[bs] * kWindowShare;
  int threads = args->num_threads > 0 ? args->num_threads : 1;
  if (cost * heads * kv_group_num * (dim + v_dim) < kSmallWork) threads = 1;
  int64_t chunk = round_up(cost / (int64_t(threads) * kTasksPerThread) + 1, kLookUpTile);
  if (threads == 1) chunk = round_up(cost + 1, kLookUpTile);
  if (chunk < kMinChunk) chunk = kMinChunk;
  const int64_t window_chunk = chunk / kWindowShare < kTile ? kTile : round_up(chunk / kWindowShare, kTile);
  int64_t max_tasks = 0;
  for (int b = 0; b < bs; b++) {
    max_tasks += (plan->kv_indptr[b + 1] - plan->kv_indptr[b] + chunk - 1) / chunk;
    max_tasks += (plan->window_indptr[b + 1] - plan->window_indptr[b] + window_chunk - 1) / window_chunk;
  }

  const size_t rows = size_t(bs) * kv_group_num, head_rows = rows * heads, part = size_t(heads) * kv_group_num * stride;
  Arena arena;
  RowBuffers queries = {};
  queries.view_rows = kv_group_num;
  float *raw, *parts, *outputs;
  std::atomic<int64_t>* left;  // tasks of each sequence that are not done
  Task* tasks;
  int64_t* first_task;
  arena.reserve(&queries.q, head_rows * dim);
  const bool tables = looks_up(*table, *layer, kv_group_num);
  if (tables) {
    arena.reserve(&queries.tables, size_t(bs) * heads * queries.table_entries(dim));
  } else {
    arena.reserve(&queries.limbs, size_t(bs) * heads * queries.limb_bytes(dim));
  }
  arena.reserve(&queries.scale, head_rows);
  arena.reserve(&queries.sums, head_rows * kMaxGroups);
  arena.reserve(&raw, head_rows * dim);
  arena.reserve(&outputs, head_rows * v_dim);
  arena.reserve(&left, bs);
  arena.reserve(&parts, part * max_tasks);
  arena.reserve(&tasks, max_tasks);
  arena.reserve(&first_task, bs + 1);
  if (!arena.allocate()) return kNoMemory;

  int64_t num_tasks = 0;
  for (int b = 0; b < bs; b++) {
    first_task[b] = num_tasks;
    for (int64_t at = plan->window_indptr[b]; at < plan->window_indptr[b + 1]; at += window_chunk) {
      const int64_t end = plan->window_indptr[b + 1];
      tasks[num_tasks++] = {b, true, at, at + window_chunk < end ? at + window_chunk : end};
    }
    for (int64_t at = plan->kv_indptr[b]; at < plan->kv_indptr[b + 1]; at += chunk) {
      const int64_t end = plan->kv_indptr[b + 1];
      tasks[num_tasks++] = {b, false, at, at + chunk < end ? at + chunk : end};
    }
  }
  first_task[bs] = num_tasks;
  for (int b = 0; b < bs; b++) new (&left[b]) std::atomic<int64_t>(first_task[b + 1] - first_task[b]);
  const Source pool = pool_source(*layer, *plan), windows = window_source(*layer, *plan);

  // Three queues and no barrier: a thread that the system starts late, or takes away, delays the others only by what it has in
  // hand. On a busy machine a barrier a phase cost tens of milliseconds a call.
  std::atomic<int> next_head{0}, prepared{0};
  std::atomic<int64_t> next_task{0}, next_finish{0};
#pragma omp parallel num_threads(threads)
  {
    for (int head; (head = next_head.fetch_add(1)) < heads;) {
      prepare(*table, *layer, *args, head, 0, bs, raw + rows * dim * head, queries, int(rows * head));
      prepared.fetch_add(1, std::memory_order_release);
    }
    wait_until([&] { return prepared.load(std::memory_order_acquire) == heads; });
    for (int64_t i; (i = next_task.fetch_add(1)) < num_tasks;) {
      const Task& task = tasks[i];
      float* own = parts + part * i;
      clear_state(own, heads * kv_group_num, stride, v_dim);
      attend_range(
          *table, *layer, task.window ? windows : pool, task.begin, task.end, 0, heads,
          tables && !task.window ? kLookUpTile : kTile,
          [&](int head) { return queries.view(int(rows * head + size_t(task.sequence) * kv_group_num), kv_group_num, dim, args->logit_cap); },
          [&](int head) { return State{own + size_t(head) * kv_group_num * stride, stride}; });
      left[task.sequence].fetch_sub(1, std::memory_order_release);
    }
    for (int64_t i; (i = next_finish.fetch_add(1)) < int64_t(bs) * heads;) {
      const int b = int(i / heads), head = int(i % heads);
      wait_until([&] { return left[b].load(std::memory_order_acquire) == 0; });
      finish(*table, *layer, head, parts + part * first_task[b] + size_t(head) * kv_group_num * stride,
             int(first_task[b + 1] - first_task[b]), int64_t(part), kv_group_num, outputs + size_t(i) * kv_group_num * v_dim,
             args->out + size_t(i) * kv_group_num * v_dim);
    }
  }
  return kOk;
}

extern "C" int oscar_cpu_extend(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return status;
  if (!oscar_dims_fit(layer)) return kBadShape;
  const int bs = plan->bs, heads = layer->num_kv_heads, kv_group_num = layer->kv_group_num;
  const int dim = layer->k.head_dim, v_dim = layer->v.head_dim, stride = oscar_state_stride(layer);
  const int threads = args->num_threads > 0 ? args->num_threads : 1;
  const int64_t tokens = kv_group_num < kQueryRows ? kQueryRows / kv_group_num : 1;  // query tokens of a unit
  const int num_rows = int(tokens) * kv_group_num;

  struct Unit {
    int32_t sequence;
    int64_t begin, end;
  };
  int64_t num_units = 0;
  for (int b = 0; b < bs; b++) num_units += (args->qo_indptr[b + 1] - args->qo_indptr[b] + tokens - 1) / tokens;
  if (num_units == 0) return kOk;

  Arena arena;
  RowBuffers queries = {};
  queries.view_rows = num_rows;
  float *raw, *states, *o;
  Unit* units;
  int32_t* limits;
  const size_t all_rows = size_t(num_rows) * threads;
  const int widest = dim > v_dim ? dim : v_dim;
  arena.reserve(&queries.q, all_rows * dim);
  const bool tables = looks_up(*table, *layer, num_rows);
  if (tables) {
    arena.reserve(&queries.tables, threads * queries.table_entries(dim));
  } else {
    arena.reserve(&queries.limbs, threads * queries.limb_bytes(dim));
  }
  arena.reserve(&queries.scale, all_rows);
  arena.reserve(&queries.sums, all_rows * kMaxGroups);
  arena.reserve(&raw, all_rows * widest);
  arena.reserve(&o, all_rows * v_dim);
  arena.reserve(&states, all_rows * stride);
  arena.reserve(&limits, all_rows);
  arena.reserve(&units, size_t(num_units));
  if (!arena.allocate()) return kNoMemory;

  int64_t filled = 0;
  for (int b = 0; b < bs; b++) {
    for (int64_t at = args->qo_indptr[b]; at < args->qo_indptr[b + 1]; at += tokens) {
      const int64_t end = args->qo_indptr[b + 1];
      units[filled++] = {b, at, at + tokens < end ? at + tokens : end};
    }
  }
  const Source pool = pool_source(*layer, *plan), windows = window_source(*layer, *plan);

#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    const int first_row = thread * num_rows;
    float* const state_data = states + size_t(first_row) * stride;
    int32_t* const limit = limits + first_row;
    float* const own_raw = raw + size_t(first_row) * widest;
    float* const own_o = o + size_t(first_row) * v_dim;
    Offsets offsets;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_units * heads; i++) {
      // Heads innermost: the two threads read the same slots at about the same time.
      const Unit& unit = units[i / heads];
      const int head = int(i % heads), b = unit.sequence;
      const int64_t count = unit.end - unit.begin;
      prepare(*table, *layer, *args, head, unit.begin, count, own_raw, queries, first_row);
      const QueryRows rows = queries.view(first_row, int(count) * kv_group_num, dim, args->logit_cap);
      const State state = {state_data, stride};
      clear_state(state_data, rows.num_rows, stride, v_dim);
      const auto rows_of = [&](int) { return rows; };
      const auto state_of = [&](int) { return state; };
      attend_range(*table, *layer, windows, plan->window_indptr[b], plan->window_indptr[b + 1], head, head + 1, kTile,
                   rows_of, state_of);
      attend_range(*table, *layer, pool, plan->kv_indptr[b], plan->kv_indptr[b + 1], head, head + 1,
                   tables ? kLookUpTile : kTile, rows_of, state_of);

      const int64_t first_new = args->qo_indptr[b];
      for (int64_t start = first_new; start < unit.end; start += kTile) {
        Tile tile = {};
        tile.count = int(unit.end - start < kTile ? unit.end - start : kTile);
        for (int t = 0; t < kTile; t++) {
          const int64_t at = start + (t < tile.count ? t : tile.count - 1);
          offsets.k[t] = at * args->k_new.token_stride;
          offsets.v[t] = at * args->v_new.token_stride;
        }
        tile.k = {static_cast<const uint8_t*>(args->k_new.data) + head * args->k_new.head_stride, offsets.k};
        tile.v = {static_cast<const uint8_t*>(args->v_new.data) + head * args->v_new.head_stride, offsets.v};
        Ahead nothing = {};
        nothing.k.base = tile.k.base;
        tile.ahead = &nothing;
        if (start + tile.count - 1 > unit.begin) {  // some row must not see all of these keys
          for (int r = 0; r < rows.num_rows; r++) {
            const int64_t seen = unit.begin + r / kv_group_num + 1 - start;
            limit[r] = seen < 0 ? 0 : seen > kTile ? kTile : int32_t(seen);
          }
          tile.limit = limit;
        }
        table->attend->attend_wide(layer, layer->window_dtype, &tile, &rows, &state);
      }
      // Rows are token-major, heads of the kv_group_num within: out is [token, head, v_dim].
      float* merged = own_raw;
      finish(*table, *layer, head, state_data, 1, 0, rows.num_rows, own_o, merged);
      for (int64_t t = 0; t < count; t++) {
        memcpy(args->out + ((unit.begin + t) * heads + head) * kv_group_num * v_dim, merged + t * kv_group_num * v_dim,
               size_t(kv_group_num) * v_dim * sizeof(float));
      }
    }
  }
  return kOk;
}

extern "C" void oscar_cpu_compact(const int64_t* indices, int64_t indices_stride, const uint8_t* mask, int64_t mask_stride,
                                  int64_t bs, int64_t n, int64_t* indptr, int32_t* out) {
  int64_t count = 0;
  for (int64_t b = 0; b < bs; b++) {
    indptr[b] = count;
    for (int64_t i = 0; i < n; i++) {
      out[count] = int32_t(indices[b * indices_stride + i]);
      count += mask[b * mask_stride + i] != 0;
    }
  }
  indptr[bs] = count;
}

extern "C" uint64_t oscar_cpu_read(const void* data, int64_t bytes, int num_threads, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return 0;
  uint64_t total = 0;
  const int64_t part = bytes / num_threads / 4096 * 4096;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int i = 0; i < num_threads; i++) total += table->attend->read(static_cast<const char*>(data) + i * part, part);
  return total;
}
