// Store: splits tokens, heads and sides over threads.

#include <stdint.h>

#include "kernels.h"

namespace {

// Tokens of one head and side in a task: long enough that a transform matrix (64 or 128 KiB) is read for many tokens.
constexpr int64_t kTokens = 32;

// Multiplications; below, waking a thread costs more than it takes over.
constexpr int64_t kSmallWork = 1 << 19;

int element_size(int dtype) { return dtype == kFloat32 ? 4 : 2; }

StoreRows rows_of(const OscarLayer& layer, const OscarStore& args, bool is_k, int head) {
  const OscarSide& side = is_k ? layer.k : layer.v;
  const int dtype = is_k ? args.k_dtype : args.v_dtype, element = element_size(dtype);
  const int64_t out_element = element_size(layer.window_dtype), out_head = side.head_dim * out_element;
  StoreRows rows = {};
  const int64_t head_stride = is_k ? args.k_head_stride : args.v_head_stride;
  rows.x = static_cast<const uint8_t*>(is_k ? args.k : args.v) + head * head_stride * element;
  rows.dtype = dtype;
  rows.window_dtype = layer.window_dtype;
  rows.token_stride = (is_k ? args.k_token_stride : args.v_token_stride) * element;
  rows.loc = args.loc;
  rows.window_rows = args.window_rows;
  rows.no_row = args.no_row;
  rows.buffer = is_k ? layer.k_buffer + head * layer.k_head_stride : layer.v_buffer + head * layer.v_head_stride;
  rows.slot_stride = is_k ? layer.k_slot_stride : layer.v_slot_stride;
  rows.window = static_cast<uint8_t*>(is_k ? layer.k_window : layer.v_window) +
                head * (is_k ? layer.k_window_head_stride : layer.v_window_head_stride);
  rows.window_row_stride = is_k ? layer.k_window_row_stride : layer.v_window_row_stride;
  rows.out = static_cast<uint8_t*>(is_k ? args.k_out : args.v_out) + head * out_head;
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
    // Blocks innermost, so that neighbouring tasks share a matrix.
    const int64_t first = unit % blocks * kTokens, rest = unit / blocks;
    const bool is_k = rest % 2 == 0;
    const int head = int(rest / 2);
    const StoreRows rows = rows_of(*layer, *args, is_k, head);
    const int64_t left = args->num_tokens - first;
    table->store->store(is_k ? &layer->k : &layer->v, head, &rows, first, left < kTokens ? left : kTokens);
  }
  return kOk;
}
