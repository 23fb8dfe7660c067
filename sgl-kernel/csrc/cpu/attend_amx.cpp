// AMX: with many query rows, as extend has them, logits and outputs of a tile are two matrix products in bfloat16. Fewer query
// rows, and float32 rows, go to the AVX-512 kernels.
//
// Both products take a block of 16 query rows and sum in float32. A, B and C are tile registers:
//
//     logits   A [query rows][32 channels]   B [16 channel pairs][16 keys][2]
//     output   A [query rows][32 keys]       B [16 key pairs][16 channels][2]
//
// The operands B of a tile are made once for all query rows. Codes 0..3 are exact in bfloat16, and windows and new tokens are
// bfloat16 already. Queries and weights are each the sum of two bfloat16 numbers, 16 bits in all. Centre and step enter once a
// group, as in the AVX-512 kernels, with sums of the operands as they were rounded.

#include <immintrin.h>

#include "kernels.h"

namespace {

#define OSCAR_INTEGER_DOTS 1
#include "vec.h"
#include "attend_impl.h"
#include "amx_tiles.h"
#include "amx_operands.h"

constexpr int kMinRows = 16;  // fewer query rows would not fill a tile register, nor pay for making the operands B

/// Whether the kernels here take a side's format: not too many groups, and each of whole vectors.
bool side_fits(const OscarSide& side) {
  const int groups = side.head_dim / side.group_size;
  return groups <= kMaxGroups && (groups == 1 || side.group_size % 16 == 0);
}

bool integer_dots_fit(const OscarLayer& layer) { return side_fits(layer.k) && side_fits(layer.v); }

/// Write row `row` of the operands A of the logits, from one query row. sums[g][row]: the sum of what A holds, for each K
/// group.
inline void split_query(const float* q, const Operand& keys, int row, HighLow* out, float (*sums)[kBlock]) {
  for (int g = 0; g < keys.num_groups; g++, q += keys.group_size) {
    F total = {};
    for (int c = 0; c < keys.group_size; c += kStep, out++) {
      total += split(load(q + c), c + 16 < keys.group_size ? load(q + c + 16) : F{}, row, out);
    }
    if (keys.affine) sums[g][row] = sum(total);
  }
}

/// Write row `row` of the operands A of the output, for V group g, from one query row's weights p. Where V rows are packed, A
/// has p * step, and the r lanes of the query row's state are updated.
inline void split_weights(const float* p, const Affine* affine, int g, int row, HighLow* out, float* lanes) {
  F offset = {};
  for (int t = 0; t < kTile; t += kStep, out++) {
    const F x = load(p + t), y = load(p + t + 16);
    if (affine) {
      const float *centre = &affine->centre[g][t], *step = &affine->step[g][t];
      offset += x * load(centre) + y * load(centre + 16);
      offset -= set1(kMidCode) * split(x * load(step), y * load(step + 16), row, out);
    } else {
      split(x, y, row, out);
    }
  }
  if (affine) store(lanes, load(lanes) + offset);
}

/// Tile registers C and, where that is below N, C + 1 += A x B. The two take turns, since a sum can be added to again after 52
/// cycles, and a product can start 16 cycles after another (Intel's figures).
template <int C, int N>
inline void multiply_two(Tiles& tiles, const Pairs* b) {
  constexpr bool kTwo = C + 1 < N;
  tiles.load<6>(b[C].word, sizeof(b->word[0]));
  if constexpr (kTwo) tiles.load<7>(b[C + 1].word, sizeof(b->word[0]));
  tiles.multiply<C, 4, 6>();
  if constexpr (kTwo) tiles.multiply<C + 1, 4, 7>();
  tiles.multiply<C, 5, 6>();
  if constexpr (kTwo) tiles.multiply<C + 1, 5, 7>();
}

/// Tile registers C 0..N-1 += A x B over `steps` steps. b: the first step's N operands; those of the next step are `b_stride`
/// behind.
template <int N>
inline void multiply(Tiles& tiles, const HighLow* a, int steps, const Pairs* b, int b_stride) {
  for (int s = 0; s < steps; s++, b += b_stride) {
    tiles.load<4>(a[s].high, sizeof(a->high[0]));
    tiles.load<5>(a[s].low, sizeof(a->low[0]));
    multiply_two<0, N>(tiles, b);
    if constexpr (N > 2) multiply_two<2, N>(tiles, b);
  }
}

/// logits[h][t] of a block of `count` query rows.
inline void block_logits(Tiles& tiles, const QueryRows& rows, int first, int count, const Operand& keys,
                         float (*logits)[kTile]) {
  HighLow queries[kMaxSteps];
  float sums[kMaxGroups][kBlock];
  alignas(64) float dots[kBlock][kTile];
  for (int h = 0; h < count; h++) split_query(rows.q + size_t(first + h) * rows.dim, keys, h, queries, sums);
  const int steps = steps_of(keys.group_size);
  float (*to)[kTile] = keys.affine ? dots : logits;
  for (int g = 0; g < keys.num_groups; g++) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    multiply<kKeyBlocks>(tiles, queries + g * steps, steps, keys.pairs + g * steps * kKeyBlocks, kKeyBlocks);
    tiles.store<0>(to[0], sizeof(to[0]));
    tiles.store<1>(to[0] + 16, sizeof(to[0]));
    tiles.store<2>(to[0] + 32, sizeof(to[0]));
    tiles.store<3>(to[0] + 48, sizeof(to[0]));
    if (!keys.affine) continue;
    for (int h = 0; h < count; h++) {
      const F total = set1(sums[g][h]), middle = set1(-kMidCode * sums[g][h]);
      for (int t = 0; t < kTile; t += W) {
        const F centre = load(&keys.affine->centre[g][t]), step = load(&keys.affine->step[g][t]);
        const F dot = (load(dots[h] + t) + middle) * step + centre * total;
        store(logits[h] + t, g ? load(logits[h] + t) + dot : dot);
      }
    }
  }
}

/// acc += weights x values, for a block of query rows and N times 16 channels. stride: bytes between rows of acc.
template <int N>
inline void add_values(Tiles& tiles, const HighLow* weights, int steps, const Pairs* values, int value_blocks, float* acc,
                       int64_t stride) {
  tiles.load<0>(acc, stride);
  if constexpr (N > 1) tiles.load<1>(acc + 16, stride);
  if constexpr (N > 2) tiles.load<2>(acc + 32, stride);
  if constexpr (N > 3) tiles.load<3>(acc + 48, stride);
  multiply<N>(tiles, weights, steps, values, value_blocks);
  tiles.store<0>(acc, stride);
  if constexpr (N > 1) tiles.store<1>(acc + 16, stride);
  if constexpr (N > 2) tiles.store<2>(acc + 32, stride);
  if constexpr (N > 3) tiles.store<3>(acc + 48, stride);
}

/// Add a tile to the states of all query rows, once its operands B are ready.
void attend_blocks(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state, const Operand& keys,
                   const Operand& values) {
  const int v_dim = layer.v.head_dim, r_groups = oscar_state_groups(&layer), steps = steps_of(tile.count);
  alignas(64) float logits[kBlock][kTile];
  HighLow weights[kTile / kStep];
  Tiles tiles;
  Prefetcher prefetcher(tile.next_lines);
  for (int first = 0; first < rows.num_rows; first += kBlock) {
    const int count = rows.num_rows - first < kBlock ? rows.num_rows - first : kBlock;
    if (first == 0 || count < kBlock) tiles.configure(count);
    block_logits(tiles, rows, first, count, keys, logits);
    float* const acc = state.data + size_t(first) * state.stride;
    for (int h = 0; h < count; h++) {
      prefetcher.line();
      float* row = acc + size_t(h) * state.stride;
      const int seen = tile.limit && tile.limit[first + h] < tile.count ? tile.limit[first + h] : tile.count;
      const float alpha = softmax_tile(logits[h], seen, rows.cap_log2e, row, v_dim, r_groups);
      if (alpha == 1.0f) continue;
      for (int c = 0; c < v_dim; c += W) store(row + c, load(row + c) * set1(alpha));
    }
    for (int g = 0; g < values.num_groups; g++) {
      for (int h = 0; h < count; h++) {
        float* lanes = acc + size_t(h) * state.stride + v_dim + kLanes * (2 + g);
        split_weights(logits[h], values.affine, g, h, weights, lanes);
      }
      const int64_t stride = int64_t(state.stride) * sizeof(float);
      for (int c = g * values.group_size, end = c + values.group_size; c < end; c += 64) {
        const Pairs* at = values.pairs + c / 16;
        switch ((end - c) / 16) {
          case 1: add_values<1>(tiles, weights, steps, at, v_dim / 16, acc + c, stride); break;
          case 2: add_values<2>(tiles, weights, steps, at, v_dim / 16, acc + c, stride); break;
          case 3: add_values<3>(tiles, weights, steps, at, v_dim / 16, acc + c, stride); break;
          default: add_values<4>(tiles, weights, steps, at, v_dim / 16, acc + c, stride);
        }
      }
    }
  }
}

void packed_tile(const OscarLayer& layer, const Tile& tile, const QueryRows& rows, const State& state) {
  if (rows.num_rows < kMinRows) {
    kAttendAvx512.attend_packed(&layer, &tile, &rows, &state);
    return;
  }
  alignas(64) uint16_t codes[kTile * kMaxDim];
  Pairs keys[kMaxSteps * kKeyBlocks], values[kTile / kStep * (kMaxDim / 16)];
  Affine k_affine, v_affine;
  int64_t offset[kTile];
  const TileRows expanded = {reinterpret_cast<const uint8_t*>(codes), offset};
  for (int t = 0; t < kTile; t++) offset[t] = int64_t(t) * layer.k.head_dim * 2;
  expand_codes(layer.k, tile.k, codes);
  pack_keys(expanded, layer.k.head_dim, layer.k.group_size, keys);
  for (int t = 0; t < kTile; t++) offset[t] = int64_t(t) * layer.v.head_dim * 2;
  expand_codes(layer.v, tile.v, codes);
  pack_values(expanded, layer.v.head_dim, values);
  read_affine(layer.k, tile.k, &k_affine);
  read_affine(layer.v, tile.v, &v_affine);
  attend_blocks(layer, tile, rows, state, {layer.k.group_size, layer.k.head_dim / layer.k.group_size, &k_affine, keys},
                {layer.v.group_size, layer.v.head_dim / layer.v.group_size, &v_affine, values});
  prefetch_rest(tile.next_lines);
}

void attend_wide_tiles(const OscarLayer* layer, int dtype, const Tile* tile, const QueryRows* rows, const State* state) {
  if (dtype != kBFloat16 || rows->num_rows < kMinRows) {
    attend_wide(layer, dtype, tile, rows, state);
    return;
  }
  const int dim = layer->k.head_dim, v_dim = layer->v.head_dim;
  Pairs keys[kMaxSteps * kKeyBlocks], values[kTile / kStep * (kMaxDim / 16)];
  pack_keys(tile->k, dim, dim, keys);
  pack_values(tile->v, v_dim, values);
  attend_blocks(*layer, *tile, *rows, *state, {dim, 1, nullptr, keys}, {v_dim, 1, nullptr, values});
  prefetch_rest(tile->next_lines);
}

/// Limbs are needed only where query rows go to the AVX-512 kernels.
void quantise_few(const OscarSide* k, int num_rows, const float* q, int8_t* limbs, float* scale, float* sums) {
  if (num_rows < kMinRows) quantise_queries(k, num_rows, q, limbs, scale, sums);
}

bool looks_up(const OscarLayer* layer, int num_rows) { return num_rows < kMinRows && kAttendAvx512.looks_up(layer, num_rows); }

void tabulate_queries(const OscarSide* k, int num_rows, const float* q, int16_t* tables, float* scale, float* sums) {
  kAttendAvx512.tabulate_queries(k, num_rows, q, tables, scale, sums);
}

}  // namespace

#if defined(OSCAR_AMX_EMULATED)
extern const AttendTable kAttendAmxEmulated = {
#else
extern const AttendTable kAttendAmx = {
#endif
    attend_packed, attend_wide_tiles, matmul, quantise_few, merge, convert_to_float, read_bytes, looks_up, tabulate_queries};
