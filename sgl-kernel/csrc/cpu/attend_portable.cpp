// Any CPU that the compiler knows: tiles are decoded to float32 and taken as the wide rows are.

#include "kernels.h"

namespace {

#include "vec.h"
#include "attend_impl.h"

}  // namespace

extern const AttendTable kAttendPortable = {attend_packed, attend_wide, matmul, quantise_queries, merge, convert_to_float,
                                            read_bytes};
