// Writes the message of a quote, as rpc/convert.py does through the protobuf library.

#include <cstdint>

namespace {

constexpr double kMaxDuration = 1e9, kMaxFraction = 0.999999999;

// Protobuf's wire format: a duration is {1: seconds, 2: nanos}, an estimate {1: expected, 2: p10, 3: p90}, a quote one of each
// quantity. Every part is shorter than 128 bytes, so its size is one byte.
char* write_varint(char* out, int64_t value) {
  uint64_t left = static_cast<uint64_t>(value);
  for (; left > 0x7f; left >>= 7) *out++ = static_cast<char>((left & 0x7f) | 0x80);
  *out++ = static_cast<char>(left);
  return out;
}

// As _fill_duration of rpc/convert.py.
char* write_duration(char* out, double seconds) {
  char* const size = out++;
  if (seconds >= 1.0) {
    const int64_t whole = static_cast<int64_t>(seconds < kMaxDuration ? seconds : kMaxDuration);
    *out++ = 1 << 3;
    out = write_varint(out, whole);
    seconds -= static_cast<double>(whole);
    if (seconds > kMaxFraction) seconds = kMaxFraction;
  }
  const int64_t nanos = static_cast<int64_t>(seconds * 1e9);
  if (nanos > 0) {
    *out++ = 2 << 3;
    out = write_varint(out, nanos);
  }
  *size = static_cast<char>(out - size - 1);
  return out;
}

}  // namespace

extern "C" {

// `numbers`: the predicted seconds of three quantities, then p10, p50 and p90 of the ratios of each. The size of the message.
int64_t dragoman_write_quote(const double* numbers, char* out) {
  char* const begin = out;
  for (int quantity = 0; quantity < 3; ++quantity) {
    const double predicted = numbers[quantity];
    const double* ratios = numbers + 3 + 3 * quantity;
    *out++ = static_cast<char>((quantity + 1) << 3 | 2);
    char* const size = out++;
    const double estimate[3] = {predicted * ratios[1], predicted * ratios[0], predicted * ratios[2]};
    for (int part = 0; part < 3; ++part) {
      *out++ = static_cast<char>((part + 1) << 3 | 2);
      out = write_duration(out, estimate[part]);
    }
    *size = static_cast<char>(out - size - 1);
  }
  return out - begin;
}

}
