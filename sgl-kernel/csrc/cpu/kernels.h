// What the drivers and the kernels share. Drivers (decode.cpp, extend.cpp, store.cpp) split the work over threads. Kernels do
// it; there is one set for each instruction set level, in <op>_<level>.cpp, and each such file fills one table of functions.
//
// The kernels' files are compiled with flags that not every machine can run. So they include nothing of the standard library
// that could leave an inline function behind: the linker keeps one copy of such a function for all files, and it might keep the
// one that this machine cannot run.
//
// Words used in all files of this folder:
//
//     side        K or V of a layer.
//     row         One token's K or V of one KV head.
//     packed row  A row of 2-bit codes, with (centre, step) pairs behind them. Drawn in ../codec.h.
//     wide row    A row of bfloat16 or float32 numbers: rows of the windows, rows of new tokens, and rows of the pool in layers
//                 that are not packed.
//     quarter     The code bytes of a packed row, head_dim / 4 of them.
//     field       Two of the eight bits of a code byte. Field f of byte b is the code of channel f * quarter + b.
//     group       group_size channels of a packed row that share one (centre, step) pair.
//     key         One cached or new token as one KV head sees it: its K row and its V row.
//     query row   The query of one token and one query head. kv_group_num query heads share a KV head.
//     block       The query rows that a kernel handles at once: kRowBlock of them, 16 on AMX.
//     tile        The keys of one KV head that a kernel handles at once: up to kTile, or kLookUpTile in the look-up kernels.
//                 AMX's own tiles are called tile registers here.
//     source      Where the keys of one kind lie, and their list: the pool, or the windows.
//     range       Consecutive entries [begin, end) of a source's list.
//     split       A range of one sequence that one thread attends to. Decode merges the splits of a sequence at the end.
//     logit       q . k with all factors, in base 2: the softmax weight is 2^(logit - maximum).
//     state       What a query row has summed up so far: see State.
//     limb        One byte of a larger integer. The integer kernels hold a query number as 256 * high + low and a weight as
//                 128 * high + low.
//     lane        One number of a vector register.

#ifndef OSCAR_KERNELS_H_
#define OSCAR_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "../codec.h"
#include "oscar_cpu.h"

enum {
  kTile = 64,            // codes of one KV head's tile (2 KiB each of K and V at head_dim 128) stay in L1
  kLookUpTile = 128,     // the look-up tables of 8 heads do not fit L1, so more keys share each time they are read
  kRowBlock = 4,         // 4 rows x 2 limbs x 2 vectors of keys: 16 of 32 registers hold sums
  kMaxDim = 256,         // largest head_dim
  kEntries = 32,         // of a look-up table: one for each value of five bits
  kFactorEntries = 160,  // room for (kMaxDim / 8 + 2) * kRowBlock factors, rounded up to a cache line
  kMaxGroups = 8,        // rows with more groups are decoded to float32 before products are made of them
  kLanes = 16,           // floats that State keeps for one sum
};

/// Query rows of one KV head, prepared once for all tiles.
///
/// Kernels for packed rows that take products use `limbs`, with `scale` and `sums`. The avx2 kernels use `q` and `sums`. The
/// look-up kernels, for K rows with one group, use `tables`, with `scale` and `sums`.
///
/// Look-up tables. Two neighbouring code bytes are a 16-bit word: the codes of 8 channels. The bits of all words of a row are
/// divided into parts. A part is a sum of table entries that fits 16 bits. Bits 0-4, 5-9 and 10-14 of one word index three
/// tables, and the three entries are the word's part. The bits 15 of five words together index one more table; those tables
/// make two further parts, the first half of the words and the rest. Each part has a factor, and
/// sum of factor * part = (q . (code - 1.5)) / scale. In one block of query rows:
///
///     int16   0                                             kFactorEntries
///             | factors [parts / 2][kRowBlock][2] | padding | tables [oscar_lookups(dim)][kRowBlock][kEntries] |
struct QueryRows {
  int num_rows;
  int dim;              // head_dim of K
  const float* q;       // [num_rows, dim] transformed, times sm_scale * log2(e); with a logit cap times sm_scale / cap
  const int8_t* limbs;  // q ~ scale * (256 * high + low). Blocks of kRowBlock rows: [dim / 4][kRowBlock][high, low][4]
  const float* scale;   // [num_rows]
  /// [num_rows, kMaxGroups], a sum over the channels of each K group: of 256 * high + low where products are taken, of q on
  /// avx2, of q / scale with tables.
  const float* sums;
  float cap_log2e;        // logit cap times log2(e): the logit is cap_log2e * tanh(q . k); 0 for no cap
  const int16_t* tables;  // or null: this layer's logits do not come from look-ups
};

/// How many look-up tables a query row has.
static inline int oscar_lookups(int dim) { return 3 * (dim / 8) + (dim / 8 + 4) / 5; }

/// How many int16 the factors and tables of one block take.
static inline size_t oscar_table_entries(int dim) { return kFactorEntries + size_t(oscar_lookups(dim)) * kRowBlock * kEntries; }

/// Softmax state of query rows: the output is o = (acc + r) / l. Sums over keys stay spread over kLanes lanes until `merge`.
///
///     float   0          v_dim     + 16      + 32
///             | acc      | m | pad | l lanes | r lanes of group 0 | r lanes of group 1 | ...
///
/// m: the largest logit so far. l: sum of the weights. acc, a number a channel: sum of weight * value for wide rows, sum of
/// weight * step * code (or * (code - 1.5) on avx2) for packed rows. r, a number a V group, since it is the same for all
/// channels of the group: sum of weight * (centre - 1.5 * step) (avx2: weight * centre). Kernels that decode packed rows first
/// leave r at zero.
struct State {
  float* data;
  int stride;  // floats between rows
};

/// V groups for which a state has r; 0 where V rows are wide or have more groups than kernels for codes take.
static inline int oscar_state_groups(const OscarLayer* layer) {
  const int groups = layer->v.row_kind == kPacked ? layer->v.head_dim / layer->v.group_size : 0;
  return groups <= kMaxGroups ? groups : 0;
}

/// Floats of one query row's state.
static inline int oscar_state_stride(const OscarLayer* layer) {
  return layer->v.head_dim + kLanes * (2 + oscar_state_groups(layer));
}

/// Rows of one side of a tile: row t begins at base + offset[t] bytes. `base` depends on the head, `offset` does not.
struct TileRows {
  const uint8_t* base;
  const int64_t* offset;  // [kTile] or [kLookUpTile]; entries behind the last key repeat its offset
};

/// The cache lines of the next tile's rows, all heads, to prefetch while this tile is computed. A token's lines of K are
/// followed by its lines of V. `Prefetcher` (prefetch.h) takes the lines one by one.
struct NextTileLines {
  struct Side {
    const uint8_t* base;    // row of the first head
    const int64_t* offset;  // of each token
    int bytes;              // of a token's rows, from the first head's to the last head's
  };
  Side k, v;
  const uint8_t *at, *end;  // bytes of the current token and side whose lines are still to be prefetched
  int step;                 // 64: a line; 0 when no line is left, so that one line is asked for again and again
  int token, last;          // tokens still to come: [token, last)
  bool value;               // whether V comes next, not K
};

/// K and V rows to prefetch.
struct RowsToPrefetch {
  TileRows k, v;
};

/// Keys of one KV head: 1 to kTile, or 1 to kLookUpTile packed rows where QueryRows has tables.
///
/// A kernel prefetches in one of two ways: line by line from `next_lines`, or, in the look-up kernels of common shapes, one
/// byte of each of the kLookUpTile rows of `to_l1` and `to_l2`. attend_range.h says which rows those are.
struct Tile {
  int count;
  TileRows k, v;
  const int32_t* limit;  // [num_rows] how many keys of this tile a query row sees, or null for all
  NextTileLines* next_lines;
  const RowsToPrefetch *to_l1, *to_l2;
};

/// The attention kernels of one level. Functions that add to a state update it in place.
struct AttendTable {
  /// Add a tile of packed rows to the states.
  void (*attend_packed)(const OscarLayer* layer, const Tile* tile, const QueryRows* rows, const State* state);
  /// Add a tile of wide rows of `dtype` to the states.
  void (*attend_wide)(const OscarLayer* layer, int dtype, const Tile* tile, const QueryRows* rows, const State* state);
  /// y[n, cols] = x[n, dim] @ matrix[dim, cols] in float32.
  void (*matmul)(const float* x, int n, int dim, const float* matrix, int cols, float* y);
  /// Fill limbs, scale and sums of QueryRows from its q, or sums alone on levels without limbs.
  void (*quantise_queries)(const OscarSide* k, int num_rows, const float* q, int8_t* limbs, float* scale, float* sums);
  /// Merge `num_parts` states of `num_rows` rows each (parts are `part_stride` floats apart) into o [num_rows, v_dim].
  void (*merge)(const OscarLayer* layer, const float* parts, int num_parts, int64_t part_stride, int num_rows, float* o);
  /// Convert n numbers of type bfloat16, float16 or float32 to float32.
  void (*to_float)(const void* x, int dtype, int n, float* y);
  /// Read memory; returns a checksum.
  uint64_t (*read)(const void* data, int64_t bytes);
  /// Whether logits of packed rows come from look-up tables, for `num_rows` query rows a KV head. Then tiles have up to
  /// kLookUpTile keys, and tabulate_queries takes the place of quantise_queries. Null: never.
  bool (*looks_up)(const OscarLayer* layer, int num_rows);
  /// Fill tables, scale and sums of QueryRows from its q. Null where looks_up is.
  void (*tabulate_queries)(const OscarSide* k, int num_rows, const float* q, int16_t* tables, float* scale, float* sums);
};

/// New tokens' vectors of one KV head and one side: where they come from and where they are written. Strides in bytes.
struct StoreRows {
  const uint8_t* x;
  int dtype;
  int window_dtype;
  int64_t token_stride;
  const int64_t* loc;
  const int64_t* window_rows;
  int64_t no_row;   // the value in window_rows that means none
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

/// The table of a level (null: the default level), or null with *status set.
const KernelTable* oscar_pick(const char* isa, int* status);

/// Whether the kernels take the layer's head_dim.
static inline bool oscar_dims_fit(const OscarLayer* layer) {
  const int k = layer->k.head_dim, v = layer->v.head_dim;
  return k > 0 && v > 0 && k % 16 == 0 && v % 16 == 0 && k <= kMaxDim && v <= kMaxDim;
}

#endif  // OSCAR_KERNELS_H_
