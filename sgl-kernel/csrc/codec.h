// The 2-bit row format for C++ and CUDA. `oscar/format/codec.py` defines it. A test compares the integers below with that
// module; the tests of bytes compare the rest.
//
//     byte   0                          31 32      33 34    35        head_dim = 128, one group
//            +----------------------------+----------+--------+
//            | codes: head_dim / 4 bytes  | centre   | step   |
//            +----------------------------+----------+--------+
//
// Code byte b holds channels b, b + q, b + 2q, b + 3q (q = head_dim / 4) in bits 0-1, 2-3, 4-5, 6-7.
// x_hat = centre + (code - 1.5) * step in float32; centre and step are float16.

#ifndef OSCAR_CODEC_H_
#define OSCAR_CODEC_H_

#include <stdint.h>

enum {
  kFormatVersion = 1,
  kBits = 2,
  kCodesPerByte = 4,
  kMetaBytes = 4,  // one (centre, step) pair of float16
  kNumLevels = 4,
};

// float32(1/3), as bits so that no compiler rounds it again.
static const uint32_t kOneThirdBits = 0x3eaaaaab;

// A code stands for code - kMidCode steps from the centre: -1.5, -0.5, 0.5 or 1.5.
static constexpr float kMidCode = 1.5f;

static_assert(kCodesPerByte * kBits == 8, "codes fill a byte");
static_assert((1 << kBits) == kNumLevels, "one level a code");

static inline int oscar_code_bytes(int head_dim) { return head_dim / kCodesPerByte; }

static inline int oscar_row_bytes(int head_dim, int group_size) {
  return oscar_code_bytes(head_dim) + head_dim / group_size * kMetaBytes;
}

#endif  // OSCAR_CODEC_H_
