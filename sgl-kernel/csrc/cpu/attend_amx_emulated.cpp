// The AMX level with its tile operations emulated on AVX-512 vectors: for tests on machines without AMX. Slow, and never chosen
// by itself.

#define OSCAR_AMX_EMULATED 1
#include "attend_amx.cpp"
