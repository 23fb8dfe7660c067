// Prefetching the next tile's rows line by line. Included by attend_impl.h.

/// Move on to the next token or side. Where none is left, `at` becomes a line that may be asked for again and again: the caller
/// then needs no other branch.
inline __attribute__((always_inline)) void next_row(NextTileLines* lines) {
  if (lines->token >= lines->last) {
    lines->step = 0;
    lines->at = lines->k.base;
    lines->end = lines->at + 1;
    return;
  }
  const bool value = lines->value;
  const NextTileLines::Side& side = value ? lines->v : lines->k;
  const uint8_t* row = side.base + side.offset[lines->token];
  lines->at = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(row) & ~uintptr_t(63));
  lines->end = row + side.bytes;
  lines->step = 64;
  lines->token += value;
  lines->value = !value;
}

/// Prefetches one cache line a call. Calls are spread between other work, because a burst of requests would fill the buffers in
/// which loads wait too.
class Prefetcher {
 public:
  explicit Prefetcher(NextTileLines* lines)
      : lines_(lines), at_(lines->step ? lines->at : lines->end), end_(lines->end), step_(lines->step) {}
  ~Prefetcher() { lines_->at = at_; }
  inline __attribute__((always_inline)) void line() {
    if (__builtin_expect(at_ >= end_, 0)) {
      next_row(lines_);
      at_ = lines_->at;
      end_ = lines_->end;
      step_ = lines_->step;
    }
    __builtin_prefetch(at_);
    at_ += step_;
  }
  void lines(int count) {
    for (int i = 0; i < count; i++) line();
  }

 private:
  NextTileLines* lines_;
  const uint8_t *at_, *end_;
  int64_t step_;
};

/// Prefetch the lines that this head's share still has when its work is done.
inline void prefetch_rest(NextTileLines* lines) {
  Prefetcher prefetcher(lines);
  while (lines->token < lines->last) prefetcher.line();
}
