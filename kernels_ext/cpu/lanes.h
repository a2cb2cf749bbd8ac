// Sixteen fp32 lanes: load from and round to bf16, fp16 and fp32. `store` gives back the lanes as they were rounded.
//
// GCC/Clang vector types: the compiler lowers them to AVX-512, two AVX2 or four SSE/NEON registers, so there is one text
// for all machines. Never -ffast-math, never contraction to FMA: the bits must be those of the torch reference.
// A NaN is stored as the one NaN GPUs write (0x7fff, 0x7fffffff). AVX512_BF16 is not used: it flushes subnormals.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wbk {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits32 __attribute__((vector_size(64)));
typedef uint16_t Bits16 __attribute__((vector_size(32)));

#define WBK_INLINE inline __attribute__((always_inline))

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct Fp32 { uint32_t bits; };

template <class To, class From>
WBK_INLINE To copy_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

WBK_INLINE Lanes splat(float value) { return Lanes{} + value; }

WBK_INLINE Bits32 where(Bits32 mask, Bits32 yes, Bits32 no) { return (mask & yes) | (~mask & no); }

WBK_INLINE Bits32 nan_mask(Lanes x) { return copy_bits<Bits32>(x != x); }

WBK_INLINE Lanes load(const Fp32* p) {
  Lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

WBK_INLINE Lanes rounded(Lanes x, Fp32) {
  return copy_bits<Lanes>(where(nan_mask(x), Bits32{} + 0x7fffffffu, copy_bits<Bits32>(x)));
}

WBK_INLINE Lanes store(Fp32* p, Lanes x) {
  x = rounded(x, Fp32{});
  std::memcpy(p, &x, sizeof x);
  return x;
}

WBK_INLINE Lanes load(const Bf16* p) {
  Bits16 half;
  std::memcpy(&half, p, sizeof half);
  return copy_bits<Lanes>(__builtin_convertvector(half, Bits32) << 16);
}

WBK_INLINE Bits32 bf16_bits(Lanes x) {
  const Bits32 u = copy_bits<Bits32>(x);
  const Bits32 nearest_even = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return where(nan_mask(x), Bits32{} + 0x7fffu, nearest_even);
}

WBK_INLINE Lanes store(Bf16* p, Lanes x) {
  const Bits32 bits = bf16_bits(x);
  const Bits16 half = __builtin_convertvector(bits, Bits16);
  std::memcpy(p, &half, sizeof half);
  return copy_bits<Lanes>(bits << 16);
}

WBK_INLINE Lanes rounded(Lanes x, Bf16) { return copy_bits<Lanes>(bf16_bits(x) << 16); }

#if defined(__F16C__) && defined(__AVX2__)

WBK_INLINE Lanes fp16_to_lanes(Bits16 half) {
#if defined(__AVX512F__)
  return copy_bits<Lanes>(_mm512_cvtph_ps(copy_bits<__m256i>(half)));
#else
  __m128i parts[2];
  std::memcpy(parts, &half, sizeof half);
  const __m256 wide[2] = {_mm256_cvtph_ps(parts[0]), _mm256_cvtph_ps(parts[1])};
  Lanes x;
  std::memcpy(&x, wide, sizeof x);
  return x;
#endif
}

WBK_INLINE Bits16 lanes_to_fp16(Lanes x) {
#if defined(__AVX512F__)
  return copy_bits<Bits16>(_mm512_cvtps_ph(copy_bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  __m256 wide[2];
  std::memcpy(wide, &x, sizeof x);
  const __m128i parts[2] = {_mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT)};
  Bits16 half;
  std::memcpy(&half, parts, sizeof half);
  return half;
#endif
}

#else  // integer arithmetic, one text for every other machine

WBK_INLINE Lanes fp16_to_lanes(Bits16 half) {
  const Bits32 h = __builtin_convertvector(half, Bits32);
  const Bits32 sign = (h & 0x8000u) << 16;
  const Bits32 magnitude = h & 0x7fffu;
  const Bits32 normal = (magnitude << 13) + ((127u - 15u) << 23);
  const Bits32 special = (magnitude << 13) | 0x7f800000u;
  // A subnormal is magnitude * 2^-24, exact in fp32.
  const Bits32 subnormal = copy_bits<Bits32>(__builtin_convertvector(copy_bits<Bits32>(magnitude), Lanes) * 0x1p-24f);
  const Bits32 is_special = copy_bits<Bits32>(magnitude >= 0x7c00u);
  const Bits32 is_subnormal = copy_bits<Bits32>(magnitude < 0x0400u);
  return copy_bits<Lanes>(sign | where(is_special, special, where(is_subnormal, subnormal, normal)));
}

WBK_INLINE Bits16 lanes_to_fp16(Lanes x) {
  const Bits32 u = copy_bits<Bits32>(x);
  const Bits32 sign = (u >> 16) & 0x8000u;
  const Bits32 a = u & 0x7fffffffu;
  const Bits32 normal = (a - ((127u - 15u) << 23) + 0x0fffu + ((a >> 13) & 1u)) >> 13;
  // Adding 0.5 puts the last fp16 subnormal bit (2^-24) at the last fp32 bit: the addition rounds to nearest even.
  const Bits32 subnormal = copy_bits<Bits32>(copy_bits<Lanes>(a) + 0.5f) - 0x3f000000u;
  const Bits32 is_small = copy_bits<Bits32>(a < 0x38800000u);
  const Bits32 is_huge = copy_bits<Bits32>(a >= 0x477ff000u);
  return __builtin_convertvector(sign | where(is_huge, Bits32{} + 0x7c00u, where(is_small, subnormal, normal)), Bits16);
}

#endif

WBK_INLINE Lanes load(const Fp16* p) {
  Bits16 half;
  std::memcpy(&half, p, sizeof half);
  return fp16_to_lanes(half);
}

WBK_INLINE Bits16 fp16_bits(Lanes x) {
  const Bits16 is_nan = __builtin_convertvector(nan_mask(x), Bits16);
  return (is_nan & (Bits16{} + uint16_t{0x7fff})) | (~is_nan & lanes_to_fp16(x));
}

WBK_INLINE Lanes store(Fp16* p, Lanes x) {
  const Bits16 half = fp16_bits(x);
  std::memcpy(p, &half, sizeof half);
  return fp16_to_lanes(half);
}

WBK_INLINE Lanes rounded(Lanes x, Fp16) { return fp16_to_lanes(fp16_bits(x)); }

// The last, incomplete sixteen of a row: missing lanes are +0.0 and are never stored.
template <class T>
WBK_INLINE Lanes load_some(const T* p, uint64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

template <class T>
WBK_INLINE Lanes store_some(T* p, Lanes x, uint64_t count) {
  T padded[kLanes];
  const Lanes value = store(padded, x);
  std::memcpy(p, padded, count * sizeof(T));
  return value;
}

}  // namespace wbk
