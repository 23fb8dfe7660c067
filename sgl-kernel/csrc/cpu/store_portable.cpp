// The store kernels for any CPU that the compiler knows.

#include "kernels.h"

namespace {

#include "vec.h"
#include "store_impl.h"

}  // namespace

extern const StoreTable kStorePortable = {store_rows};
