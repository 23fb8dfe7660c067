// Decode: attention of one new token a sequence, its keys split over threads.
//
// Threads are OpenMP's. The library's soname is that of the libgomp which PyTorch brings and has loaded, so both share one pool
// of threads: no second pool sits idle or competes for the cores, and a parallel region right after a PyTorch operator finds
// the threads awake.

#include <sched.h>

#include <atomic>
#include <new>

#include "arena.h"
#include "attend_range.h"
#include "kernels.h"
#include "query_rows.h"

namespace {

constexpr int kSplitsPerThread = 4;      // enough that threads which finish early find more to do
constexpr int64_t kMinSplit = 128;       // keys; a smaller split costs more to start than it shares
constexpr int kWindowCost = 4;           // a wide row of a window takes about as long as this many packed rows
constexpr int64_t kSmallWork = 4 << 20;  // multiplications; with fewer, waking a thread costs more than it saves

/// A range of one sequence's keys that one thread attends to, for all KV heads.
struct Split {
  int32_t sequence;
  bool window;
  int64_t begin, end;
};

/// Keys in a split, by source.
struct SplitSizes {
  int64_t pool, window;
};

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

/// Sizes that give each thread kSplitsPerThread splits of about the same cost. cost: of all keys, in packed rows.
SplitSizes split_sizes(int64_t cost, int threads) {
  const int64_t share = threads == 1 ? cost : cost / (int64_t(threads) * kSplitsPerThread);
  SplitSizes sizes;
  sizes.pool = round_up(share + 1, kLookUpTile);
  if (sizes.pool < kMinSplit) sizes.pool = kMinSplit;
  sizes.window = sizes.pool / kWindowCost < kTile ? kTile : round_up(sizes.pool / kWindowCost, kTile);
  return sizes;
}

/// At most this many splits.
int64_t count_splits(const OscarPlan& plan, const SplitSizes& sizes) {
  int64_t count = 0;
  for (int b = 0; b < plan.bs; b++) {
    count += divide_up(plan.kv_indptr[b + 1] - plan.kv_indptr[b], sizes.pool);
    count += divide_up(plan.window_indptr[b + 1] - plan.window_indptr[b], sizes.window);
  }
  return count;
}

/// Write the splits, sequence by sequence. first_split [bs + 1]: where each sequence's begin. Returns how many there are.
int64_t make_splits(const OscarPlan& plan, const SplitSizes& sizes, Split* splits, int64_t* first_split) {
  int64_t count = 0;
  const auto add = [&](int32_t sequence, bool window, const int64_t* indptr, int64_t size) {
    for (int64_t at = indptr[sequence], end = indptr[sequence + 1]; at < end; at += size) {
      splits[count++] = {sequence, window, at, at + size < end ? at + size : end};
    }
  };
  for (int b = 0; b < plan.bs; b++) {
    first_split[b] = count;
    add(b, true, plan.window_indptr, sizes.window);
    add(b, false, plan.kv_indptr, sizes.pool);
  }
  first_split[plan.bs] = count;
  return count;
}

/// Wait for the last of the work that other threads have in hand. Gives the core away if that takes long.
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

}  // namespace

extern "C" int oscar_cpu_decode(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return status;
  if (!oscar_dims_fit(layer)) return kBadShape;
  const int bs = plan->bs, heads = layer->num_kv_heads, kv_group_num = layer->kv_group_num;
  const int dim = layer->k.head_dim, v_dim = layer->v.head_dim, stride = oscar_state_stride(layer);
  if (bs == 0) return kOk;

  const int64_t cost = plan->kv_indptr[bs] + plan->window_indptr[bs] * kWindowCost;
  int threads = args->num_threads > 0 ? args->num_threads : 1;
  if (cost * heads * kv_group_num * (dim + v_dim) < kSmallWork) threads = 1;
  const SplitSizes sizes = split_sizes(cost, threads);
  const int64_t max_splits = count_splits(*plan, sizes);

  // Query rows are ordered by KV head, then sequence, then query head.
  const size_t head_rows = size_t(bs) * kv_group_num, all_rows = head_rows * heads;
  const size_t split_floats = size_t(heads) * kv_group_num * stride;
  const bool lookups = looks_up(*table, *layer, kv_group_num);
  Arena arena;
  QueryBuffers queries = {};
  queries.view_rows = kv_group_num;
  queries.reserve(&arena, size_t(bs) * heads, dim, lookups);
  float *raw, *states, *merged;
  std::atomic<int64_t>* unfinished;  // splits of each sequence
  Split* splits;
  int64_t* first_split;
  arena.reserve(&raw, all_rows * dim);
  arena.reserve(&merged, all_rows * v_dim);
  arena.reserve(&unfinished, bs);
  arena.reserve(&states, split_floats * max_splits);
  arena.reserve(&splits, max_splits);
  arena.reserve(&first_split, bs + 1);
  if (!arena.allocate()) return kNoMemory;

  const int64_t num_splits = make_splits(*plan, sizes, splits, first_split);
  for (int b = 0; b < bs; b++) new (&unfinished[b]) std::atomic<int64_t>(first_split[b + 1] - first_split[b]);
  const Source pool = pool_source(*layer, *plan), windows = window_source(*layer, *plan);

  // Three queues and no barrier between them. A thread that the system starts late or takes away delays the others only by the
  // work it has in hand. With a barrier after each phase a call on a busy machine took tens of milliseconds longer.
  std::atomic<int> next_head{0}, prepared{0};
  std::atomic<int64_t> next_split{0}, next_output{0};
#pragma omp parallel num_threads(threads)
  {
    for (int head; (head = next_head.fetch_add(1)) < heads;) {
      prepare_queries(*table, *layer, *args, head, 0, bs, raw + head_rows * dim * head, queries, int(head_rows * head));
      prepared.fetch_add(1, std::memory_order_release);
    }
    wait_until([&] { return prepared.load(std::memory_order_acquire) == heads; });
    for (int64_t i; (i = next_split.fetch_add(1)) < num_splits;) {
      const Split& split = splits[i];
      float* own = states + split_floats * i;
      clear_states(own, heads * kv_group_num, stride, v_dim);
      const auto rows_of = [&](int head) {
        const int first = int(head_rows * head + size_t(split.sequence) * kv_group_num);
        return queries.view(first, kv_group_num, dim, args->logit_cap);
      };
      const auto state_of = [&](int head) { return State{own + size_t(head) * kv_group_num * stride, stride}; };
      attend_range(*table, *layer, split.window ? windows : pool, split.begin, split.end, 0, heads,
                   lookups && !split.window ? kLookUpTile : kTile, rows_of, state_of);
      unfinished[split.sequence].fetch_sub(1, std::memory_order_release);
    }
    for (int64_t i; (i = next_output.fetch_add(1)) < int64_t(bs) * heads;) {
      const int b = int(i / heads), head = int(i % heads);
      wait_until([&] { return unfinished[b].load(std::memory_order_acquire) == 0; });
      const float* parts = states + split_floats * first_split[b] + size_t(head) * kv_group_num * stride;
      const size_t at = size_t(i) * kv_group_num * v_dim;
      finish(*table, *layer, head, parts, int(first_split[b + 1] - first_split[b]), int64_t(split_floats), kv_group_num,
             merged + at, args->out + at);
    }
  }
  return kOk;
}
