// Store: new tokens, KV heads and sides are divided among threads.

#include <stdint.h>

#include "kernels.h"

namespace {

// Tokens of a task, which is for one head and one side: enough that reading the transform matrix (64 or 128 KiB) serves many
// tokens.
constexpr int64_t kTokens = 32;

// Multiplications. With fewer, waking a thread costs more than it saves.
constexpr int64_t kSmallWork = 1 << 19;

int64_t element_size(int dtype) { return dtype == kFloat32 ? 4 : 2; }

/// One side's vectors x of one KV head, and where they go. out: the side's k_out or v_out.
StoreRows rows_of(const OscarLayer& layer, const OscarSide& side, const OscarRows& x, void* out, const OscarStore& args,
                  int head) {
  const int64_t element = element_size(x.dtype), out_head = side.head_dim * element_size(layer.window_dtype);
  StoreRows rows = {};
  rows.x = static_cast<const uint8_t*>(x.data) + head * x.head_stride * element;
  rows.dtype = x.dtype;
  rows.window_dtype = layer.window_dtype;
  rows.token_stride = x.token_stride * element;
  rows.loc = args.loc;
  rows.window_rows = args.window_rows;
  rows.no_row = args.no_row;
  rows.buffer = side.buffer + head * side.head_stride;
  rows.slot_stride = side.slot_stride;
  rows.window = side.window + head * side.window_head_stride;
  rows.window_row_stride = side.window_row_stride;
  rows.out = static_cast<uint8_t*>(out) + head * out_head;
  rows.out_stride = out_head * layer.num_kv_heads;
  return rows;
}

}  // namespace

extern "C" int oscar_cpu_store(const OscarLayer* layer, const OscarStore* args, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return status;
  if (!oscar_dims_fit(layer)) return kBadShape;
  const int64_t blocks = (args->num_tokens + kTokens - 1) / kTokens, units = blocks * layer->num_kv_heads * 2;
  const int64_t work = args->num_tokens * layer->num_kv_heads * layer->k.head_dim * layer->k.head_dim;
  const int threads = work < kSmallWork || args->num_threads < 1 ? 1 : args->num_threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t unit = 0; unit < units; unit++) {
    // Tokens innermost, so that consecutive tasks use the same transform matrix.
    const int64_t first = unit % blocks * kTokens, rest = unit / blocks;
    const bool is_k = rest % 2 == 0;
    const int head = int(rest / 2);
    const OscarSide& side = is_k ? layer->k : layer->v;
    const StoreRows rows = rows_of(*layer, side, is_k ? args->k : args->v, is_k ? args->k_out : args->v_out, *args, head);
    const int64_t left = args->num_tokens - first;
    table->store->store(&side, head, &rows, first, left < kTokens ? left : kTokens);
  }
  return kOk;
}
