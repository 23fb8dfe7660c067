// C ABI of the CPU kernels: raw pointers, no framework header. The wrappers in `oscar_kernel` check shapes and types; the
// library trusts the sizes it is given. Functions return 0 or one of `OscarStatus`; `oscar_cpu_status_text` says the sentence.
//
// Names: bs sequences; kv_group_num = num_qo_heads / num_kv_heads query heads share a KV head (the GQA ratio); group_size
// elements of a row share one (centre, step) pair (the quantisation group). In the shapes of K and V rows, head_dim is the
// side's own.

#ifndef OSCAR_CPU_H_
#define OSCAR_CPU_H_

#include <stdint.h>

#if defined(__GNUC__)
#define OSCAR_API __attribute__((visibility("default")))
#else
#define OSCAR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { kOk = 0, kUnknownIsa = 1, kIsaMissing = 2, kBadShape = 3, kNoMemory = 4 } OscarStatus;

/// Element types.
typedef enum { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 } OscarDtype;

/// What a row of the pool holds. kPacked: 2-bit codes and (centre, step) pairs, see ../codec.h. kWide: head_dim numbers of the
/// layer's window_dtype; layers that stay in 16 bits and the lossless format have such rows.
typedef enum { kPacked = 0, kWide = 1 } OscarRowKind;

/// One side (K or V) of a layer: its format, what is done to a vector when it is written and read, and its storage.
typedef struct {
  int32_t head_dim;         // elements in a row; a multiple of 16, at most 256
  int32_t group_size;       // elements that share (centre, step); a multiple of 4 that divides head_dim
  int32_t row_kind;         // OscarRowKind
  int32_t transform_dtype;  // kFloat64 or kFloat32, type of `transform`
  const void* transform;    // [num_kv_heads, head_dim, head_dim], x' = (x - mean) @ T; null: x is written as it comes
  const double* mean;       // [num_kv_heads, head_dim] or null; always null on the V side
  const float* clip_ratio;  // [num_kv_heads] in (0, 1]
  const float* shaping;     // [num_kv_heads, head_dim, head_dim] strictly upper triangular, or null: see oscar/format/codec.py
  /// [num_kv_heads, head_dim, head_dim] R, which a reader applies. K side: to queries, q' = q @ R. V side: to outputs,
  /// o = o' @ R; null where the value transform is folded into the model's weights.
  const float* read_transform;
  uint8_t* buffer;                                // pool, [num_slots, num_kv_heads, row_bytes]
  int64_t slot_stride, head_stride;               // of `buffer`, in bytes
  uint8_t* window;                                // [num_rows + 1, num_kv_heads, head_dim] in window_dtype
  int64_t window_row_stride, window_head_stride;  // of `window`, in bytes
} OscarSide;

/// One layer.
typedef struct {
  int32_t num_kv_heads;
  int32_t kv_group_num;  // query heads that share a KV head
  int32_t window_dtype;  // kBFloat16 or kFloat32
  int32_t reserved;
  OscarSide k, v;
} OscarLayer;

/// Vectors of some tokens, [num_tokens, num_heads, head_dim]; the elements of a vector are adjacent.
typedef struct {
  const void* data;
  int32_t dtype;  // OscarDtype
  int32_t reserved;
  int64_t token_stride, head_stride;  // the unit is stated where the rows are used
} OscarRows;

/// What each sequence reads: slots of the pool and rows of the windows, both in CSR form.
typedef struct {
  int32_t bs;
  int32_t reserved;
  const int64_t* kv_indptr;       // [bs + 1]
  const int32_t* kv_indices;      // [kv_indptr[bs]] slots
  const int64_t* window_indptr;   // [bs + 1]
  const int32_t* window_indices;  // [window_indptr[bs]] rows
} OscarPlan;

/// Decode or extend of one layer.
typedef struct {
  OscarRows q;      // [num_tokens, num_qo_heads, head_dim], not transformed; decode: num_tokens = bs. Strides in elements
  OscarRows k_new;  // extend: [num_tokens, num_kv_heads, head_dim], transformed, in window_dtype. Strides in bytes
  OscarRows v_new;  // as k_new
  const int64_t* qo_indptr;   // extend: [bs + 1] ranges of new tokens; null in decode
  float* out;                 // [num_tokens, num_qo_heads, head_dim of V] float32, contiguous
  float sm_scale, logit_cap;  // logit_cap 0: none
  int32_t num_threads;
  int32_t reserved;
} OscarAttend;

/// Store of one layer.
typedef struct {
  OscarRows k, v;  // [num_tokens, num_kv_heads, head_dim], K after RoPE. Strides in elements
  int64_t num_tokens;
  const int64_t* loc;          // [num_tokens] slots to write
  const int64_t* window_rows;  // [num_tokens] rows of the windows to write
  int64_t no_row;              // the value in window_rows that means none: nothing is written there
  void* k_out;                 // [num_tokens, num_kv_heads, head_dim] in window_dtype, contiguous: the vectors, transformed
  void* v_out;
  int32_t num_threads;
  int32_t reserved;
} OscarStore;

/// Constants of the format as this library was built, in the order of codec.h: version, bits, codes per byte, bytes of a
/// (centre, step) pair, bits of float32(1/3). Returns how many there are; writes at most `capacity`.
OSCAR_API int oscar_codec_constants(int64_t* out, int capacity);

/// Sizes in bytes of OscarSide, OscarLayer, OscarPlan, OscarRows, OscarAttend and OscarStore. A caller compares them with its
/// own. Returns how many there are; writes at most `capacity`.
OSCAR_API int oscar_cpu_struct_sizes(int64_t* out, int capacity);

/// Instruction set levels in this library, best last: null-terminated array of names ("portable", "avx2", "avx512", "amx").
/// After them comes "amx_emulated", which tests ask for on machines without AMX and which is never chosen by itself.
OSCAR_API const char* const* oscar_cpu_isa_names(void);

/// Whether the CPU and the operating system can run a level: 1 or 0; -1 for an unknown name.
OSCAR_API int oscar_cpu_isa_supported(const char* isa);

/// Why a level is not supported: what the CPU or the operating system lacks or refuses. Null for a level that is supported and
/// for an unknown name.
OSCAR_API const char* oscar_cpu_isa_missing(const char* isa);

/// The level that a null `isa` means: OSCAR_CPU_ISA of the environment if set, else the best one supported.
OSCAR_API const char* oscar_cpu_default_isa(void);

OSCAR_API const char* oscar_cpu_status_text(int status);

/// Attention of one new token a sequence. isa: a level's name, or null for the default.
OSCAR_API int oscar_cpu_decode(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa);

/// Causal attention of new tokens over their cached prefix and among themselves.
OSCAR_API int oscar_cpu_extend(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa);

/// Transform the vectors of new tokens, and write them to the windows and, clipped and encoded, to the pool.
OSCAR_API int oscar_cpu_store(const OscarLayer* layer, const OscarStore* args, const char* isa);

/// Collect the masked entries of each row in CSR form. indices [bs, n] int64 and mask [bs, n] bool with row strides in
/// elements; writes indptr [bs + 1] and out, which needs room for bs * n + 1 entries.
OSCAR_API void oscar_cpu_compact(const int64_t* indices, int64_t indices_stride, const uint8_t* mask, int64_t mask_stride,
                                 int64_t bs, int64_t n, int64_t* indptr, int32_t* out);

/// Read `bytes` at `data` once with `num_threads`; returns a checksum. For bandwidth measurements.
OSCAR_API uint64_t oscar_cpu_read(const void* data, int64_t bytes, int num_threads, const char* isa);

#ifdef __cplusplus
}
#endif

#endif  // OSCAR_CPU_H_
