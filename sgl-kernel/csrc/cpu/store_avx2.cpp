// The store kernels for AVX2 with FMA and F16C.

#include <immintrin.h>

#include "kernels.h"

namespace {

#include "vec.h"
#include "store_impl.h"

}  // namespace

extern const StoreTable kStoreAvx2 = {store_rows};
