// The AMX level with its tile operations on AVX-512 vectors: slow, never chosen on its own, for tests where no CPU has AMX.

#define OSCAR_AMX_EMULATED 1
#include "attend_amx.cpp"
