// Which level runs: asked of the CPU and the operating system once.

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace {

const KernelTable kTables[] = {
    {"portable", &kAttendPortable, &kStorePortable},
#if defined(__x86_64__)
    {"avx2", &kAttendAvx2, &kStoreAvx2},
    {"avx512", &kAttendAvx512, &kStoreAvx512},
#endif
};
constexpr int kNumTables = sizeof(kTables) / sizeof(kTables[0]);

/// The compiler's runtime executes CPUID, and XGETBV for the registers that the operating system saves: a CPU with AVX-512
/// under a system that does not save its registers counts as one without.
bool supported(int table) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (table == 2) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  }
  if (table == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return table == 0;
}

int find(const char* isa) {
  for (int i = 0; i < kNumTables; i++) {
    if (strcmp(isa, kTables[i].name) == 0) return i;
  }
  return -1;
}

const char* default_isa() {
  const char* forced = getenv("OSCAR_CPU_ISA");
  if (forced && *forced) return forced;
  int best = 0;
  for (int i = 0; i < kNumTables; i++) best = supported(i) ? i : best;
  return kTables[best].name;
}

}  // namespace

extern "C" const char* oscar_cpu_default_isa(void) {
  static const char* const isa = default_isa();
  return isa;
}

extern "C" int oscar_cpu_isa_supported(const char* isa) {
  const int table = find(isa);
  return table < 0 ? -1 : supported(table);
}

extern "C" const char* const* oscar_cpu_isa_names(void) {
  static const char* names[kNumTables + 1];
  for (int i = 0; i < kNumTables; i++) names[i] = kTables[i].name;
  return names;
}

const KernelTable* oscar_pick(const char* isa, int* status) {
  static const int default_table = find(oscar_cpu_default_isa());
  static const bool default_runs = default_table >= 0 && supported(default_table);
  const int table = isa ? find(isa) : default_table;
  *status = table < 0 ? kUnknownIsa : (isa ? supported(table) : default_runs) ? kOk : kIsaMissing;
  return *status == kOk ? &kTables[table] : nullptr;
}

extern "C" const char* oscar_cpu_status_text(int status) {
  switch (status) {
    case kOk: return "ok";
    case kUnknownIsa: return "unknown instruction set level";
    case kIsaMissing: return "this CPU or its operating system lacks the instruction set level";
    case kBadShape: return "head_dim must be a multiple of 16, at most 256";
    case kNoMemory: return "out of memory";
    default: return "unknown status";
  }
}

extern "C" int oscar_codec_constants(int64_t* out, int capacity) {
  const int64_t values[] = {kFormatVersion, kBits, kCodesPerByte, kMetaBytes, kOneThirdBits};
  constexpr int count = sizeof(values) / sizeof(values[0]);
  for (int i = 0; i < count && i < capacity; i++) out[i] = values[i];
  return count;
}

extern "C" int oscar_cpu_struct_sizes(int64_t* out, int capacity) {
  const int64_t values[] = {sizeof(OscarSide), sizeof(OscarLayer), sizeof(OscarPlan), sizeof(OscarAttend), sizeof(OscarStore)};
  constexpr int count = sizeof(values) / sizeof(values[0]);
  for (int i = 0; i < count && i < capacity; i++) out[i] = values[i];
  return count;
}
