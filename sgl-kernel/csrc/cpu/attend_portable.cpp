// The attention kernels for any CPU that the compiler knows: packed rows are decoded to float32 and then handled as wide rows.

#include "kernels.h"

namespace {

#include "vec.h"
#include "attend_impl.h"

}  // namespace

extern const AttendTable kAttendPortable = {attend_packed, attend_wide,      matmul,    quantise_queries,
                                            merge,         convert_to_float, read_bytes};
