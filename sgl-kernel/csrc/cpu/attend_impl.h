// The attention kernels that need no instructions of their own: written in vectors of the compiler's, so each level's flags
// make its own copy. Included inside an anonymous namespace by each attend_<level>.cpp, after vec.h.
//
// A file that defines OSCAR_INTEGER_DOTS brings its own `packed_tile` for packed rows. In the other files attend_packed decodes
// each tile to float32.

#include "prefetch.h"
#include "wide_rows.h"
#include "decoded_rows.h"
#include "small_kernels.h"
