// Between the drivers, which split work over threads, and the per-ISA files, which do it. Each ISA file fills one table.
//
// Those files are compiled with flags that not every machine can run, so they include nothing of the standard library that
// could leave a shared inline function behind: the linker would keep one copy, and it may be theirs.

#ifndef OSCAR_KERNELS_H_
#define OSCAR_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "../codec.h"
#include "oscar_cpu.h"

enum {
  kTile = 64,       // keys handled at once; codes of one head and tile (2 KiB each of K and V at 128) stay in L1
  kRowBlock = 4,    // query rows handled at once: 4 x 2 limbs x 2 key blocks = 16 of 32 registers accumulate
  kMaxDim = 256,    // largest head_dim
  kLookUpTile = 128,  // keys handled at once where logits come from tables, which 8 heads' do not keep in L1
  kEntries = 32,      // of a table: all values of five bits
  kFactorEntries = 160,  // (kMaxDim / 8 + 2) * kRowBlock, up to a cache line
  kMaxGroups = 8,   // most (centre, step) pairs of a row that is not decoded first
};

/// Query rows of one KV head, prepared once. A row is one query token and one query head.
struct QueryRows {
  int num_rows;
  int dim;             // head_dim of K
  const float* q;      // [num_rows, dim] transformed, times sm_scale * log2(e); with a cap times sm_scale / cap
  const int8_t* limbs;  // q ~ scale * (256 * high + low), in blocks of kRowBlock rows: [dim / 4][kRowBlock][high, low][4]
  const float* scale;  // [num_rows]
  const float* sums;   // [num_rows, kMaxGroups]: per K group sum of 256 * high + low; avx2: of q, and no limbs or scale
  float cap_log2e;     // logit cap times log2(e): the logit in base 2 is cap_log2e * tanh(q . k); 0 for no cap
  /// Or null: logits by look-up, for rows with one K group, in blocks of kRowBlock query rows. A row of codes is 16-bit words
  /// of 8 channels. A part is a sum of entries that fits 16 bits: of each word those of bits 0..4, 5..9 and 10..14; then those
  /// of bit 15, five words at a time, in two parts. The sum of factor * part is (q . (code - 1.5)) / scale; `sums` has q / scale.
  ///
  ///     int16   0                                             kFactorEntries
  ///             | factors [parts / 2][kRowBlock][2] | padding | tables [oscar_lookups(dim)][kRowBlock][kEntries] |
  const int16_t* tables;
};

/// Tables of a row.
static inline int oscar_lookups(int dim) { return 3 * (dim / 8) + (dim / 8 + 4) / 5; }

/// Numbers of a block.
static inline size_t oscar_table_entries(int dim) { return kFactorEntries + size_t(oscar_lookups(dim)) * kRowBlock * kEntries; }

/// Softmax state of those rows, in base 2: o = (acc + r) / l. Sums over keys stay spread over vector lanes until the end.
///
///     float   0          v_dim     + 16      + 32
///             | acc      | m | pad | l lanes | r lanes of group 0 | r lanes of group 1 | ...
///
/// acc: sums of weight times code, or of weight times value. r: of p * (centre - 1.5 * step), the same for all channels
/// of a V group; of p * centre where code - 1.5 is multiplied, not codes. Only kernels that do not decode first use it.
struct State {
  float* data;
  int stride;  // floats between rows
};

enum { kLanes = 16 };

/// V groups whose r a state holds: kernels that do not decode first take no more.
static inline int oscar_state_groups(const OscarLayer* layer) {
  const int groups = layer->v.row_kind == kPacked ? layer->v.head_dim / layer->v.group_size : 0;
  return groups <= kMaxGroups ? groups : 0;
}

/// Floats of one row's state.
static inline int oscar_state_stride(const OscarLayer* layer) {
  return layer->v.head_dim + kLanes * (2 + oscar_state_groups(layer));
}

/// Lines to bring near while others are computed: a few tokens' slots of the next tile, K and V in turn.
struct Ahead {
  struct Side {
    const uint8_t* base;  // of the first head
    const int64_t* offset;
    int bytes;  // of a slot, all heads that are read
  };
  const uint8_t *at, *end;  // lines left of the row at hand
  int step;                 // 64; 0 when all is done, to ask for the same line again
  Side k, v;
  int token, last;  // tokens left: [token, last)
  bool value;       // whether the next row is of V
};

/// Rows of one side of a tile. A row is at base plus its offset, in bytes: bases change with the head, offsets are the slots'.
struct TileRows {
  const uint8_t* base;
  const int64_t* offset;  // [kTile] or [kLookUpTile]; entries beyond the tile's count repeat a valid one
};

/// Up to kTile keys of one KV head, or kLookUpTile of 2-bit rows with tables.
struct Tile {
  int count;  // keys, from 1
  TileRows k, v;
  const int32_t* limit;  // [num_rows] keys of this tile that a row sees, or null for all
  Ahead* ahead;          // what to prefetch
  /// Instead, K and V: of the rows of the next call, and of this head's in a later tile, bytes to ask for; of this call's rows
  /// where there is no such call.
  const TileRows *next, *later;
};

struct AttendTable {
  /// Rows of 2-bit codes.
  void (*attend_packed)(const OscarLayer* layer, const Tile* tile, const QueryRows* rows, const State* state);
  /// Rows of bf16 or float32 numbers: windows, new tokens and the lossless format.
  void (*attend_wide)(const OscarLayer* layer, int dtype, const Tile* tile, const QueryRows* rows, const State* state);
  /// y[n, cols] = x[n, dim] @ matrix[dim, cols] in float32.
  void (*matmul)(const float* x, int n, int dim, const float* matrix, int cols, float* y);
  /// Limbs, scales and sums, or sums alone, of rows whose q is in place.
  void (*quantise_queries)(const OscarSide* k, int num_rows, const float* q, int8_t* limbs, float* scale, float* sums);
  /// Merge `num_parts` states of `num_rows` rows (parts `part_stride` floats apart) into o [num_rows, v_dim].
  void (*merge)(const OscarLayer* layer, const float* parts, int num_parts, int64_t part_stride, int num_rows, float* o);
  /// Convert a vector of bf16, fp16 or float32 to float32.
  void (*to_float)(const void* x, int dtype, int n, float* y);
  /// Read memory; returns a checksum.
  uint64_t (*read)(const void* data, int64_t bytes);
  /// Whether tiles of 2-bit rows are looked up, in tiles of kLookUpTile keys, for so many query rows a KV head. Null for never.
  bool (*looks_up)(const OscarLayer* layer, int num_rows);
  /// Then instead of quantise_queries.
  void (*tabulate_queries)(const OscarSide* k, int num_rows, const float* q, int16_t* tables, float* scale, float* sums);
};

/// Tokens of one KV head of one side: where they come from and where they go. Strides in bytes.
struct StoreRows {
  const uint8_t* x;
  int dtype;
  int window_dtype;
  int64_t token_stride;
  const int64_t* loc;
  const int64_t* window_rows;
  int64_t no_row;   // in window_rows: write none
  uint8_t* buffer;  // of this head
  int64_t slot_stride;
  uint8_t* window;  // of this head
  int64_t window_row_stride;
  uint8_t* out;  // of this head
  int64_t out_stride;
};

struct StoreTable {
  /// Transform, clip, encode and write tokens [first, first + count) of one KV head.
  void (*store)(const OscarSide* side, int head, const StoreRows* rows, int64_t first, int64_t count);
};

struct KernelTable {
  const char* name;
  const AttendTable* attend;
  const StoreTable* store;
};

extern const AttendTable kAttendPortable;
extern const StoreTable kStorePortable;
#if defined(__x86_64__)
extern const AttendTable kAttendAvx2, kAttendAvx512, kAttendAmx, kAttendAmxEmulated;
extern const StoreTable kStoreAvx2, kStoreAvx512;
#endif

/// The table of a level, or null with *status set.
const KernelTable* oscar_pick(const char* isa, int* status);

/// Whether the kernels take the layer's head_dim.
static inline bool oscar_dims_fit(const OscarLayer* layer) {
  const int k = layer->k.head_dim, v = layer->v.head_dim;
  return k > 0 && v > 0 && k % 16 == 0 && v % 16 == 0 && k <= kMaxDim && v <= kMaxDim;
}

#endif  // OSCAR_KERNELS_H_
