// The operations on tile registers that attend_amx.cpp uses, in two versions: AMX instructions, and the same arithmetic on
// AVX-512 vectors for tests on machines without AMX. Included inside an anonymous namespace, after vec.h.
//
// Tile registers 0 to 3 are sums C, 4 and 5 operands A, 6 and 7 operands B. A row is 64 bytes, 16 floats or 32 bfloat16:
//
//     C [rows][16] += A [rows][16][2] x B [16][16][2]      c[m][n] += a[m][k][0] * b[k][n][0] + a[m][k][1] * b[k][n][1]

constexpr int kNumTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

/// The operand of LDTILECFG.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

/// A configuration where A and C have `rows` rows and B has 16.
inline TileConfig tile_config(int rows) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < kNumTiles; i++) {
    config.row_bytes[i] = kTileRowBytes;
    config.rows[i] = uint8_t(i < 6 ? rows : kTileRows);
  }
  return config;
}

#if !defined(OSCAR_AMX_EMULATED)

/// The calling thread's tile registers. They are released in the destructor, since task switches of a thread that holds tile
/// registers take longer.
///
/// In assembly, not with the compiler's intrinsics: gcc 12's tile load does not say that it reads memory, so that the compiler
/// may move stores to the operand behind the load.
class Tiles {
 public:
  ~Tiles() { __asm__ volatile("tilerelease"); }
  /// Configure for query blocks of `rows` rows; clears all tile registers.
  void configure(int rows) {
    const TileConfig config = tile_config(rows);
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  template <int T>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  /// `stride`: bytes between rows.
  template <int T>
  void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

#else

/// The arithmetic of the instructions, in the order that Intel's manual gives for TDPBF16PS: one float32 sum of the even
/// products and one of the odd products, each made by fused multiply-adds from zero; then the sum of the two; then that is
/// added to C. Two differences: numbers below 2^-126 are kept, which the instruction takes as zero, and what would be an
/// invalid instruction traps.
class Tiles {
 public:
  void configure(int rows) {
    config_ = tile_config(rows);
    if (config_.palette != 1 || config_.start_row != 0 || rows < 1 || rows > kTileRows) __builtin_trap();
    __builtin_memset(data_, 0, sizeof(data_));
  }
  template <int T>
  void zero() {
    check(T);
    __builtin_memset(data_[T], 0, sizeof(data_[T]));
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    zero<T>();
    for (int r = 0; r < config_.rows[T]; r++) {
      __builtin_memcpy(data_[T][r], static_cast<const uint8_t*>(from) + r * stride, config_.row_bytes[T]);
    }
  }
  template <int T>
  void store(void* to, int64_t stride) {
    check(T);
    for (int r = 0; r < config_.rows[T]; r++) {
      __builtin_memcpy(static_cast<uint8_t*>(to) + r * stride, data_[T][r], config_.row_bytes[T]);
    }
  }
  template <int C, int A, int B>
  void multiply() {
    check(A), check(B), check(C);
    const int pairs = config_.row_bytes[A] / 4;
    if (config_.rows[C] != config_.rows[A] || config_.rows[B] != pairs || config_.row_bytes[C] != config_.row_bytes[B]) {
      __builtin_trap();
    }
    const __m512i high_half = _mm512_set1_epi32(int(0xffff0000));
    for (int m = 0; m < config_.rows[C]; m++) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int k = 0; k < pairs; k++) {
        const __m512i a = _mm512_set1_epi32(int(data_[A][m][k])), b = _mm512_load_si512(data_[B][k]);
        even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), even);
        odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high_half), (__m512)_mm512_and_si512(b, high_half), odd);
      }
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(data_[C][m]), _mm512_add_ps(even, odd));
      _mm512_store_ps(data_[C][m], sum);
    }
  }

 private:
  void check(int tile) const {
    if (config_.palette != 1 || tile >= kNumTiles) __builtin_trap();
  }
  TileConfig config_ = {};
  alignas(64) uint32_t data_[kNumTiles][kTileRows][kTileRowBytes / 4];
};

#endif
