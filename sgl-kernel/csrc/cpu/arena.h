// Scratch memory of one call of a driver.

#ifndef OSCAR_ARENA_H_
#define OSCAR_ARENA_H_

#include <stddef.h>
#include <stdlib.h>

/// One block of memory for several arrays, each at a multiple of 64 bytes. First `reserve` every array, then `allocate` once,
/// which sets the arrays' pointers. The memory is freed with the arena.
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

#endif  // OSCAR_ARENA_H_
