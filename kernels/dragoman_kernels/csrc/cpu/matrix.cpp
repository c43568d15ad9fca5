#include "matrix.h"

#include <cstring>

#include "api.h"

namespace dragoman {
namespace {

uint16_t read_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

// GGUF Q4_0 {half d; 16 bytes}: d * (q - 8). Q4_1 {half d, half m; 16 bytes}: d * q + m. Byte j holds columns j and
// j + 16. Q4_0 becomes Q4_1 with m = -8 d, exact in half unless d is beyond 8188.
void pack_q4(Matrix& m, int dtype, const uint8_t* source) {
  const int blocks = m.cols / kBlock;
  const size_t head = dtype == DRAGOMAN_Q4_0 ? 2 : 4, block_bytes = head + 16;
  for (int row = 0; row < m.rows; ++row) {
    const int lane = row % 16;
    uint8_t* out = m.data.get() + row / 16 * m.group_bytes;
    const uint8_t* in = source + size_t(row) * blocks * block_bytes;
    for (int b = 0; b < blocks; ++b, in += block_bytes, out += kQ4BlockBytes) {
      const uint16_t d = read_half(in);
      const uint16_t low = dtype == DRAGOMAN_Q4_0 ? simd::float_to_half(-8.0f * simd::half_to_float(d)) : read_half(in + 2);
      std::memcpy(out + 256 + 2 * lane, &d, 2);
      std::memcpy(out + 288 + 2 * lane, &low, 2);
      const auto column = [&](int k) { return k < 16 ? in[head + k] & 15 : in[head + k - 16] >> 4; };
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
          out[64 * i + 4 * lane + j] = static_cast<uint8_t>(column(8 * i + j) | column(8 * i + 4 + j) << 4);
    }
  }
}

// GGUF Q8_0 {half d; 32 signed bytes}.
void pack_q8(Matrix& m, const uint8_t* source) {
  const int blocks = m.cols / kBlock;
  for (int row = 0; row < m.rows; ++row) {
    const int lane = row % 16;
    uint8_t* out = m.data.get() + row / 16 * m.group_bytes;
    uint8_t* scales = out + blocks * kQ8BlockBytes;
    const uint8_t* in = source + size_t(row) * blocks * 34;
    for (int b = 0; b < blocks; ++b, in += 34, out += kQ8BlockBytes) {
      std::memcpy(scales + 32 * b + 2 * lane, in, 2);
      for (int k = 0; k < kBlock; ++k)
        out[64 * (k / 4) + 4 * lane + k % 4] = static_cast<uint8_t>(in[2 + k] ^ 0x80);
    }
  }
}

void pack_plain(Matrix& m, size_t width, const uint8_t* source) {
  for (int row = 0; row < m.rows; ++row) {
    uint8_t* out = m.data.get() + row / 16 * m.group_bytes + row % 16 * width;
    const uint8_t* in = source + size_t(row) * m.cols * width;
    for (int k = 0; k < m.cols; ++k) std::memcpy(out + 16 * width * k, in + width * k, width);
  }
}

}  // namespace

Matrix pack(int dtype, int rows, int cols, const uint8_t* source) {
  Matrix m;
  m.rows = rows;
  m.cols = cols;
  m.groups = (rows + 15) / 16;
  const size_t blocks = cols / kBlock;
  switch (dtype) {
    case DRAGOMAN_F32: m.kind = Kind::kF32, m.group_bytes = size_t(cols) * 64; break;
    case DRAGOMAN_F16: m.kind = Kind::kF16, m.group_bytes = size_t(cols) * 32; break;
    case DRAGOMAN_Q8_0: m.kind = Kind::kQ8, m.group_bytes = blocks * (kQ8BlockBytes + 32); break;
    default: m.kind = Kind::kQ4, m.group_bytes = blocks * kQ4BlockBytes;
  }
  m.group_bytes = (m.group_bytes + 63) / 64 * 64;
  m.data = Buffer<uint8_t>(m.groups * m.group_bytes);
  m.data.prefer_large_pages();
  if (m.kind == Kind::kQ4)
    pack_q4(m, dtype, source);
  else if (m.kind == Kind::kQ8)
    pack_q8(m, source);
  else
    pack_plain(m, m.kind == Kind::kF32 ? 4 : 2, source);
  return m;
}

void read_row(const Matrix& m, int row, float* out) {
  const int lane = row % 16;
  const uint8_t* w = m.group(row / 16);
  for (int k = 0; k < m.cols; ++k) {
    const int b = k / kBlock, c = k % kBlock;
    if (m.kind == Kind::kF32) {
      std::memcpy(out + k, w + 64 * size_t(k) + 4 * lane, 4);
    } else if (m.kind == Kind::kF16) {
      out[k] = simd::half_to_float(read_half(w + 32 * size_t(k) + 2 * lane));
    } else if (m.kind == Kind::kQ8) {
      const float d = simd::half_to_float(read_half(w + m.cols / kBlock * kQ8BlockBytes + 32 * b + 2 * lane));
      out[k] = d * (w[b * kQ8BlockBytes + 64 * (c / 4) + 4 * lane + c % 4] - 128);
    } else {
      const uint8_t* block = w + b * kQ4BlockBytes;
      const int byte = block[64 * (c / 8) + 4 * lane + c % 4], q = c % 8 < 4 ? byte & 15 : byte >> 4;
      const float d = simd::half_to_float(read_half(block + 256 + 2 * lane));
      out[k] = d * q + simd::half_to_float(read_half(block + 288 + 2 * lane));
    }
  }
}

}  // namespace dragoman
