// How decode and extend walk a range of keys: tile by tile, for one or all KV heads, with the rows of later tiles prefetched.

#ifndef OSCAR_ATTEND_RANGE_H_
#define OSCAR_ATTEND_RANGE_H_

#include "kernels.h"

/// Where the rows of one side of a source lie. Strides in bytes.
struct SourceSide {
  const uint8_t* base;
  int64_t row_stride, head_stride;
  int row_bytes;

  /// Offsets of the rows that `index` lists. Entries from `count` to `keys` repeat the last one, so that kernels can read whole
  /// tiles.
  void fill_offsets(const int32_t* index, int count, int keys, int64_t* offset) const {
    for (int t = 0; t < count; t++) offset[t] = index[t] * row_stride;
    for (int t = count; t < keys; t++) offset[t] = offset[count - 1];
  }
  /// The rows of one head, beginning at byte `byte` of each.
  TileRows rows(int head, const int64_t* offset, int byte = 0) const { return {base + head * head_stride + byte, offset}; }
  /// The rows of heads [first, last) of each token, as one run of bytes.
  NextTileLines::Side lines(int first, int last, const int64_t* offset) const {
    return {base + first * head_stride, offset, int((last - 1 - first) * head_stride) + row_bytes};
  }
};

/// The pool or the windows. `indices` lists slots or window rows.
struct Source {
  bool packed;
  int dtype;  // of wide rows
  const int32_t* indices;
  SourceSide k, v;
};

inline int wide_row_bytes(const OscarSide& side, int dtype) { return side.head_dim * (dtype == kBFloat16 ? 2 : 4); }

inline SourceSide pool_side(const OscarSide& side, int dtype) {
  const bool packed = side.row_kind == kPacked;
  return {side.buffer, side.slot_stride, side.head_stride,
          packed ? oscar_row_bytes(side.head_dim, side.group_size) : wide_row_bytes(side, dtype)};
}

inline Source pool_source(const OscarLayer& layer, const OscarPlan& plan) {
  const int dtype = layer.window_dtype;
  return {layer.k.row_kind == kPacked, dtype, plan.kv_indices, pool_side(layer.k, dtype), pool_side(layer.v, dtype)};
}

inline SourceSide window_side(const OscarSide& side, int dtype) {
  return {side.window, side.window_row_stride, side.window_head_stride, wide_row_bytes(side, dtype)};
}

inline Source window_source(const OscarLayer& layer, const OscarPlan& plan) {
  const int dtype = layer.window_dtype;
  return {false, dtype, plan.window_indices, window_side(layer.k, dtype), window_side(layer.v, dtype)};
}

/// Offsets of the rows of one tile.
struct TileOffsets {
  int64_t k[kLookUpTile], v[kLookUpTile];
};

/// What a look-up kernel prefetches to L1: the rows of the next call, which is for the next head of this tile or the first head
/// of the next one.
///
/// A row is prefetched by its last byte. The rows of a token's heads lie side by side, and packed rows are shorter than a cache
/// line. So a row spans two lines at most, and the first of two also holds the end of the row before it, which has been
/// prefetched for the head before. Only the first head's first line can be missed; it comes from L2.
inline RowsToPrefetch rows_of_next_call(const Source& source, int head, int first_head, int last_head, const TileOffsets& here,
                                        const TileOffsets& next) {
  const bool last = head + 1 == last_head;
  const int next_head = last ? first_head : head + 1;
  const TileOffsets& offsets = last ? next : here;
  return {source.k.rows(next_head, offsets.k, source.k.row_bytes - 1),
          source.v.rows(next_head, offsets.v, source.v.row_bytes - 1)};
}

/// What a look-up kernel prefetches to L2: this head's K rows of a later tile, and another head's V rows. Again by their last
/// bytes; the first head's rows by their first, so that no line is missed.
///
/// V rows are those of another head so that requests for new lines are spread evenly. With 36-byte rows every other head,
/// about, begins a new line. If K and V rows of one head were prefetched together, one call would bring many new lines and the
/// next call few.
inline RowsToPrefetch rows_of_later_tile(const Source& source, int head, int first_head, int last_head,
                                         const TileOffsets& later) {
  const int v_head = head > first_head ? head - 1 : last_head - 1;
  return {source.k.rows(head, later.k, head > first_head ? source.k.row_bytes - 1 : 0),
          source.v.rows(v_head, later.v, v_head > first_head ? source.v.row_bytes - 1 : 0)};
}

inline void prefetch_to_l2(const NextTileLines::Side& side, int num_tokens) {
  for (int t = 0; t < num_tokens; t++) {
    for (int i = 0; i < side.bytes; i += 64) __builtin_prefetch(side.base + side.offset[t] + i, 0, 2);
  }
}

/// Add keys [begin, end) of a source to the states of KV heads [first_head, last_head), `keys` keys at a time: a tile for all
/// heads, then the next tile, so that the bytes of a token, which are adjacent, are read at about the same time.
/// `rows_of(head)` gives QueryRows, `state_of(head)` the State of those rows.
template <class RowsOf, class StateOf>
inline void attend_range(const KernelTable& table, const OscarLayer& layer, const Source& source, int64_t begin, int64_t end,
                         int first_head, int last_head, int keys, RowsOf rows_of, StateOf state_of) {
  const auto count_at = [&](int64_t start) { return start >= end ? 0 : end - start < keys ? int(end - start) : keys; };
  const auto fill = [&](TileOffsets* to, int64_t start) {
    if (start >= end) return;
    source.k.fill_offsets(source.indices + start, count_at(start), keys, to->k);
    source.v.fill_offsets(source.indices + start, count_at(start), keys, to->v);
  };
  TileOffsets offsets[3];  // of this tile and the two after it; each tile moves on by one
  fill(&offsets[0], begin);
  fill(&offsets[1], begin + keys);
  const int num_heads = last_head - first_head;
  // No earlier tile has prefetched the rows of the first one.
  prefetch_to_l2(source.k.lines(first_head, last_head, offsets[0].k), count_at(begin));
  prefetch_to_l2(source.v.lines(first_head, last_head, offsets[0].v), count_at(begin));
  int now = 0;
  for (int64_t start = begin; start < end; start += keys, now = (now + 1) % 3) {
    fill(&offsets[(now + 2) % 3], start + 2 * keys);
    const int next_count = count_at(start + keys);
    const TileOffsets& here = offsets[now];
    // Behind the last tile, its own rows stand for those of the tiles that do not exist.
    const TileOffsets& next = next_count ? offsets[(now + 1) % 3] : here;
    const TileOffsets& after_next = count_at(start + 2 * keys) ? offsets[(now + 2) % 3] : here;
    // Between this call and the same head's call on the next tile, the other heads have their calls: time enough for memory.
    // With one head the next tile is the next call, whose rows are prefetched to L1 already; then it is the tile after.
    const TileOffsets& later = num_heads > 1 ? next : after_next;
    NextTileLines next_lines = {};
    next_lines.k = source.k.lines(first_head, last_head, next.k);
    next_lines.v = source.v.lines(first_head, last_head, next.v);
    Tile tile = {};
    tile.count = count_at(start);
    tile.next_lines = &next_lines;
    for (int head = first_head; head < last_head; head++) {
      next_lines.last = next_count * (head - first_head + 1) / num_heads;  // each head prefetches its share of the tokens
      tile.k = source.k.rows(head, here.k);
      tile.v = source.v.rows(head, here.v);
      const RowsToPrefetch to_l1 = rows_of_next_call(source, head, first_head, last_head, here, next);
      const RowsToPrefetch to_l2 = rows_of_later_tile(source, head, first_head, last_head, later);
      tile.to_l1 = &to_l1;
      tile.to_l2 = &to_l2;
      const QueryRows rows = rows_of(head);
      const State state = state_of(head);
      if (source.packed) {
        table.attend->attend_packed(&layer, &tile, &rows, &state);
      } else {
        table.attend->attend_wide(&layer, source.dtype, &tile, &rows, &state);
      }
    }
  }
}

#endif  // OSCAR_ATTEND_RANGE_H_
