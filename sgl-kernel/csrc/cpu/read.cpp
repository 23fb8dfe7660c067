// Reads memory with several threads, for bandwidth measurements.

#include "kernels.h"

extern "C" uint64_t oscar_cpu_read(const void* data, int64_t bytes, int num_threads, const char* isa) {
  int status;
  const KernelTable* table = oscar_pick(isa, &status);
  if (!table) return 0;
  uint64_t total = 0;
  const int64_t part = bytes / num_threads / 4096 * 4096;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int i = 0; i < num_threads; i++) total += table->attend->read(static_cast<const char*>(data) + i * part, part);
  return total;
}
