// C ABI of the CPU kernels: raw pointers, no framework header. The wrappers in `oscar_kernel` check shapes and types; here
// sizes are trusted. Functions return 0 or one of `OscarStatus`; `oscar_cpu_status_text` says the sentence.
//
// Names: bs sequences; `group` = num_qo_heads / num_kv_heads query heads share a KV head.

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

/// Element types of the pointers that may have several.
typedef enum { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 } OscarDtype;

/// How a row of the pool is kept: 2-bit codes and (centre, step) pairs, or head_dim numbers of the windows' type (the lossless
/// format).
typedef enum { kPacked = 0, kWide = 1 } OscarRowKind;

/// One side (K or V) of a layer: its rows and what is done to a vector on its way in and out.
typedef struct {
  int32_t head_dim;         // elements in a row; a multiple of 16
  int32_t group_size;       // elements that share (centre, step); a multiple of 4 that divides head_dim
  int32_t row_kind;         // OscarRowKind
  int32_t transform_dtype;  // kFloat64 or kFloat32, type of `transform`
  const void* transform;    // [num_kv_heads, head_dim, head_dim], x' = (x - mean) @ T; null: none
  const double* mean;       // [num_kv_heads, head_dim] or null; of K alone
  const float* clip_ratio;  // [num_kv_heads] in (0, 1]
  const float* shaping;     // [num_kv_heads, head_dim, head_dim] strictly upper triangular, or null; see oscar/format/codec.py
  const float* partner;     // [num_kv_heads, head_dim, head_dim]: K side q' = q @ P, V side o = o' @ P; null: none
} OscarSide;

/// One layer's codec and storage.
typedef struct {
  int32_t num_kv_heads;
  int32_t group;         // query heads that share a KV head
  int32_t window_dtype;  // kBFloat16 or kFloat32
  int32_t reserved;
  OscarSide k, v;
  uint8_t* k_buffer;  // [num_slots, num_kv_heads, row_bytes]
  uint8_t* v_buffer;
  int64_t k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;  // bytes
  void* k_window;  // [num_rows + 1, num_kv_heads, head_dim] in window_dtype
  void* v_window;
  int64_t k_window_row_stride, k_window_head_stride, v_window_row_stride, v_window_head_stride;  // bytes
} OscarLayer;

/// What each sequence reads: slots of 2-bit rows and rows of the windows, both in CSR form.
typedef struct {
  int32_t bs;
  int32_t reserved;
  const int64_t* kv_indptr;      // [bs + 1]
  const int32_t* kv_indices;     // [kv_indptr[bs]] slots
  const int64_t* window_indptr;  // [bs + 1]
  const int32_t* window_indices; // [window_indptr[bs]] rows
} OscarPlan;

/// Decode or extend of one layer. Strides in elements.
typedef struct {
  const void* q;  // [num_tokens, num_qo_heads, head_dim], not transformed; decode: num_tokens = bs
  int32_t q_dtype;
  int32_t num_threads;
  int64_t q_token_stride, q_head_stride;
  float* out;  // [num_tokens, num_qo_heads, v_head_dim] float32, contiguous
  float sm_scale, logit_cap;
  const int64_t* qo_indptr;  // [bs + 1] ranges of new tokens; null in decode
  const void* k_new;         // extend: [num_tokens, num_kv_heads, head_dim], transformed, in window_dtype
  const void* v_new;
  int64_t k_new_token_stride, k_new_head_stride, v_new_token_stride, v_new_head_stride;  // bytes
} OscarAttend;

/// Store of one layer. Strides in elements.
typedef struct {
  const void* k;  // [num_tokens, num_kv_heads, head_dim], after RoPE
  const void* v;
  int32_t k_dtype, v_dtype;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int64_t num_tokens;
  const int64_t* loc;          // [num_tokens] slots to write
  const int64_t* window_rows;  // [num_tokens] rows of the windows to write
  void* k_out;                 // [num_tokens, num_kv_heads, head_dim] in window_dtype, contiguous
  void* v_out;
  int64_t no_row;  // the value in window_rows that means none: nothing is written there
  int32_t num_threads;
  int32_t reserved;
} OscarStore;

/// Constants of the format as this library was built, in the order of codec.h: version, bits, codes per byte, bytes of a
/// (centre, step) pair, bits of float32(1/3). Returns how many there are; writes at most `capacity`.
OSCAR_API int oscar_codec_constants(int64_t* out, int capacity);

/// Sizes of OscarSide, OscarLayer, OscarPlan, OscarAttend, OscarStore in bytes: a caller compares them with its own.
OSCAR_API int oscar_cpu_struct_sizes(int64_t* out, int capacity);

/// Levels this library holds, best last: null-terminated array of names ("portable", "avx2", "avx512", "amx"). Behind them
/// "amx_emulated", which tests ask for on machines without AMX and nothing chooses.
OSCAR_API const char* const* oscar_cpu_isa_names(void);

/// Whether CPU and operating system can run a level: 1 or 0; -1 for an unknown name.
OSCAR_API int oscar_cpu_isa_supported(const char* isa);

/// Why a level is not supported: what CPU or operating system lack, or refuse; null where it is, or for an unknown name.
OSCAR_API const char* oscar_cpu_isa_missing(const char* isa);

/// The level that a null `isa` means: OSCAR_CPU_ISA of the environment if set, else the best one supported.
OSCAR_API const char* oscar_cpu_default_isa(void);

OSCAR_API const char* oscar_cpu_status_text(int status);

/// Attention of one new token a sequence. isa: a name or null.
OSCAR_API int oscar_cpu_decode(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa);

/// Causal attention of new tokens over their cached prefix and among themselves.
OSCAR_API int oscar_cpu_extend(const OscarLayer* layer, const OscarPlan* plan, const OscarAttend* args, const char* isa);

/// Transform, clip, encode and write rows of new tokens, in place.
OSCAR_API int oscar_cpu_store(const OscarLayer* layer, const OscarStore* args, const char* isa);

/// Collect the masked entries of each row. indices [bs, n] int64 and mask [bs, n] bool with row strides in elements;
/// writes indptr [bs + 1] and out (room for bs * n).
OSCAR_API void oscar_cpu_compact(const int64_t* indices, int64_t indices_stride, const uint8_t* mask, int64_t mask_stride,
                                 int64_t bs, int64_t n, int64_t* indptr, int32_t* out);

/// Read `bytes` at `data` once with `num_threads`; returns a checksum. For bandwidth measurements.
OSCAR_API uint64_t oscar_cpu_read(const void* data, int64_t bytes, int num_threads, const char* isa);

#ifdef __cplusplus
}
#endif

#endif  // OSCAR_CPU_H_
