// Which instruction set level runs. The CPU and the operating system are asked once.

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace {

enum Level { kPortable, kAvx2, kAvx512, kAmx, kAmxEmulated };  // in the order of kTables

const KernelTable kTables[] = {
    {"portable", &kAttendPortable, &kStorePortable},
#if defined(__x86_64__)
    {"avx2", &kAttendAvx2, &kStoreAvx2},
    {"avx512", &kAttendAvx512, &kStoreAvx512},
    {"amx", &kAttendAmx, &kStoreAvx512},
    {"amx_emulated", &kAttendAmxEmulated, &kStoreAvx512},
#endif
};
constexpr int kNumTables = sizeof(kTables) / sizeof(kTables[0]);
// The levels that may run without being asked for.
constexpr int kNumChosen = kNumTables < kAmxEmulated ? kNumTables : int(kAmxEmulated);

#if defined(__x86_64__)
/// What this machine lacks for AMX, or null. Asks the operating system to let the process use tile registers.
const char* missing_amx() {
  constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24;                  // CPUID leaf 7, EDX
  constexpr unsigned kOsxsaveBit = 1u << 27, kTileState = 1u << 17 | 1u << 18;  // CPUID leaf 1, ECX; XCR0
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16Bit) || !(d & kTileBit)) {
    return "the CPU has no AMX-TILE or no AMX-BF16";
  }
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsxsaveBit)) return "the operating system has not enabled XSAVE";
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & kTileState) != kTileState) return "the operating system does not save AMX tiles (XCR0 bits 17 and 18)";
#if defined(__linux__)
  // A signal frame once had no room for the 8 KiB of the tile registers, so a process must ask Linux for them, once.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return "Linux refuses this process the use of AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM)";
  }
#endif
  return nullptr;
}

/// Whether a level computes what `avx512` does for one tile of made-up numbers. 19 query rows are one whole block of AMX and
/// part of another.
bool agrees_with_avx512(const AttendTable& table) {
  constexpr int kRows = 19, kDim = 32, kStride = kDim + 2 * kLanes;
  OscarLayer layer = {};
  layer.k.head_dim = layer.v.head_dim = kDim;
  layer.k.row_kind = layer.v.row_kind = kWide;
  uint16_t k[kTile][kDim], v[kTile][kDim];
  float q[kRows][kDim], states[2][kRows][kStride] = {};
  int64_t offset[kTile];
  for (int t = 0; t < kTile; t++) {
    offset[t] = int64_t(t) * sizeof(k[0]);
    for (int i = 0; i < kDim; i++) {
      k[t][i] = uint16_t(0x3f00 + (t * 7 + i * 5) % 97 + (t + i) % 2 * 0x8000);  // bfloat16 of size 0.5 to 1.5
      v[t][i] = uint16_t(0x3f00 + (t * 3 + i * 11) % 89 + (t + i / 2) % 2 * 0x8000);
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int i = 0; i < kDim; i++) q[r][i] = float((r * 13 + i * 17) % 41 - 20) / 41;
    states[0][r][kDim] = states[1][r][kDim] = -INFINITY;
  }
  const QueryRows rows = {kRows, kDim, q[0], nullptr, nullptr, nullptr, 0};
  const AttendTable* const tables[2] = {&kAttendAvx512, &table};
  for (int i = 0; i < 2; i++) {
    NextTileLines nothing = {};
    nothing.k.base = reinterpret_cast<const uint8_t*>(k);
    Tile tile = {};
    tile.count = kTile - 3;
    tile.k = {reinterpret_cast<const uint8_t*>(k), offset};
    tile.v = {reinterpret_cast<const uint8_t*>(v), offset};
    tile.next_lines = &nothing;
    const State state = {states[i][0], kStride};
    for (int again = 0; again < 2; again++) tables[i]->attend_wide(&layer, kBFloat16, &tile, &rows, &state);
  }
  for (int r = 0; r < kRows; r++) {
    float top = 0, error = 0;
    for (int c = 0; c < kDim; c++) {
      top = fmaxf(top, fabsf(states[0][r][c]));
      error = fmaxf(error, fabsf(states[0][r][c] - states[1][r][c]));
      if (!(states[1][r][c] - states[1][r][c] == 0)) return false;  // not finite
    }
    if (error > 1e-3f * top || fabsf(states[0][r][kDim] - states[1][r][kDim]) > 1e-3f) return false;
  }
  return true;
}

const char* computed_otherwise(const AttendTable& table) {
  return agrees_with_avx512(table) ? nullptr : "its check at the start came out unlike level avx512";
}
#endif

/// What this machine lacks for a level, in words, or null. The compiler's runtime executes CPUID, and also XGETBV, which tells
/// what registers the operating system saves. So a CPU with AVX-512 counts as one without where the system does not save its
/// registers.
const char* missing(int table) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (table == kAvx2 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
    return "the CPU or its system has no AVX2, FMA or F16C";
  }
  if (table >= kAvx512 &&
      !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c"))) {
    return "the CPU or its system has no AVX-512 F, BW, VL, DQ, VNNI or F16C";
  }
  if (table == kAmx) {
    static const char* const lacks = missing_amx();
    static const char* const wrong = lacks ? lacks : computed_otherwise(kAttendAmx);
    return wrong;
  }
  if (table == kAmxEmulated) {
    static const char* const wrong = computed_otherwise(kAttendAmxEmulated);
    return wrong;
  }
#endif
  return nullptr;
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
  int best = kNumChosen - 1;
  while (missing(best)) best--;
  return kTables[best].name;
}

}  // namespace

extern "C" const char* oscar_cpu_default_isa(void) {
  static const char* const isa = default_isa();
  return isa;
}

extern "C" int oscar_cpu_isa_supported(const char* isa) {
  const int table = find(isa);
  return table < 0 ? -1 : !missing(table);
}

extern "C" const char* oscar_cpu_isa_missing(const char* isa) {
  const int table = find(isa);
  return table < 0 ? nullptr : missing(table);
}

extern "C" const char* const* oscar_cpu_isa_names(void) {
  static const char* names[kNumTables + 1];
  for (int i = 0; i < kNumTables; i++) names[i] = kTables[i].name;
  return names;
}

const KernelTable* oscar_pick(const char* isa, int* status) {
  static const int default_table = find(oscar_cpu_default_isa());
  static const bool default_runs = default_table >= 0 && !missing(default_table);
  const int table = isa ? find(isa) : default_table;
  *status = table < 0 ? kUnknownIsa : (isa ? !missing(table) : default_runs) ? kOk : kIsaMissing;
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
  const int64_t values[] = {sizeof(OscarSide), sizeof(OscarLayer),  sizeof(OscarPlan),
                            sizeof(OscarRows), sizeof(OscarAttend), sizeof(OscarStore)};
  constexpr int count = sizeof(values) / sizeof(values[0]);
  for (int i = 0; i < count && i < capacity; i++) out[i] = values[i];
  return count;
}
