// The store kernels for AVX-512.

#include <immintrin.h>

#include "kernels.h"

namespace {

#include "vec.h"
#include "store_impl.h"

}  // namespace

extern const StoreTable kStoreAvx512 = {store_rows};
