// From masks to the CSR lists of OscarPlan.

#include "oscar_cpu.h"

extern "C" void oscar_cpu_compact(const int64_t* indices, int64_t indices_stride, const uint8_t* mask, int64_t mask_stride,
                                  int64_t bs, int64_t n, int64_t* indptr, int32_t* out) {
  int64_t count = 0;
  for (int64_t b = 0; b < bs; b++) {
    indptr[b] = count;
    for (int64_t i = 0; i < n; i++) {
      out[count] = int32_t(indices[b * indices_stride + i]);  // no branch: an entry that is not kept is written over
      count += mask[b * mask_stride + i] != 0;
    }
  }
  indptr[bs] = count;
}
