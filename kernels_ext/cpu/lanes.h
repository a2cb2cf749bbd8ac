// Two registers of fp32: load from and round to bf16, fp16 and fp32. `store` gives back the lanes as they were rounded.
//
// GCC/Clang vector types as wide as the machine's registers (AVX-512, AVX2, else 16 bytes: SSE, NEON), so there is one
// text for all machines; intrinsics stand only where one instruction replaces many. Never -ffast-math, never contraction
// to FMA: the bits must be those of the torch reference. A NaN is stored as the one GPUs write (0x7fff, 0x7fffffff).
//
// A Block holds neighbouring elements in the order that is cheapest for the type: for bf16 the even ones, then the odd
// ones, because a 32-bit word of two bf16 is split by one shift and one mask. Arithmetic by lane does not notice.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bf16 words are split by value");

namespace wbk {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define WBK_REGISTER_BYTES 64
#elif defined(__AVX2__) && defined(__F16C__)
#define WBK_REGISTER_BYTES 32
#else
#define WBK_REGISTER_BYTES 16
#endif

constexpr int kLanes = WBK_REGISTER_BYTES / 4;
constexpr int kBlock = 2 * kLanes;
typedef float Lanes __attribute__((vector_size(WBK_REGISTER_BYTES)));
typedef uint32_t Bits32 __attribute__((vector_size(WBK_REGISTER_BYTES)));
typedef uint16_t Bits16 __attribute__((vector_size(WBK_REGISTER_BYTES / 2)));

#define WBK_INLINE inline __attribute__((always_inline))

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct Fp32 { uint32_t bits; };

struct Block {
  Lanes a, b;
};

WBK_INLINE Block operator+(Block x, Block y) { return {x.a + y.a, x.b + y.b}; }
WBK_INLINE Block operator*(Block x, Block y) { return {x.a * y.a, x.b * y.b}; }
WBK_INLINE Block splat(float value) { return {Lanes{} + value, Lanes{} + value}; }

template <class To, class From>
WBK_INLINE To copy_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
WBK_INLINE Vector read(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector>
WBK_INLINE void write(void* p, const Vector& v) { std::memcpy(p, &v, sizeof v); }

WBK_INLINE Bits32 where(Bits32 mask, Bits32 yes, Bits32 no) { return (mask & yes) | (~mask & no); }

WBK_INLINE Bits32 nan_mask(Lanes x) { return copy_bits<Bits32>(x != x); }

// ---- fp32

WBK_INLINE Lanes one_nan(Lanes x) {
  return copy_bits<Lanes>(where(nan_mask(x), Bits32{} + 0x7fffffffu, copy_bits<Bits32>(x)));
}

WBK_INLINE Block load(const Fp32* p) { return {read<Lanes>(p), read<Lanes>(p + kLanes)}; }

WBK_INLINE Block store(Fp32* p, Block x) {
  x = {one_nan(x.a), one_nan(x.b)};
  write(p, x.a);
  write(p + kLanes, x.b);
  return x;
}

// ---- bf16

WBK_INLINE Block split(Bits32 words) {
  return {copy_bits<Lanes>(words << 16), copy_bits<Lanes>(words & 0xffff0000u)};
}

WBK_INLINE Bits32 nearest_even_bf16(Lanes x) {  // in the upper halves; the lower halves are rubbish
  const Bits32 u = copy_bits<Bits32>(x);
  return where(nan_mask(x), Bits32{} + 0x7fff0000u, u + 0x7fffu + ((u >> 16) & 1u));
}

WBK_INLINE Bits32 join_by_arithmetic(Block x) {
  return (nearest_even_bf16(x.a) >> 16) | (nearest_even_bf16(x.b) & 0xffff0000u);
}

#if WBK_REGISTER_BYTES == 64 && defined(__AVX512BF16__)
// The hardware's rounding, except for lanes it treats its own way: NaN, and subnormals, which it flushes.
WBK_INLINE Bits32 join(Block x) {
  constexpr int kNanOrSubnormal = 0xa1;
  const __m512 a = copy_bits<__m512>(x.a);
  const __m512 b = copy_bits<__m512>(x.b);
  if (__builtin_expect(_mm512_fpclass_ps_mask(a, kNanOrSubnormal) | _mm512_fpclass_ps_mask(b, kNanOrSubnormal), 0))
    return join_by_arithmetic(x);
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return copy_bits<Bits32>(_mm512_permutexvar_epi16(interleave, copy_bits<__m512i>(_mm512_cvtne2ps_pbh(b, a))));
}
#else
WBK_INLINE Bits32 join(Block x) { return join_by_arithmetic(x); }
#endif

WBK_INLINE Block load(const Bf16* p) { return split(read<Bits32>(p)); }

WBK_INLINE Block store(Bf16* p, Block x) {
  const Bits32 words = join(x);
  write(p, words);
  return split(words);
}

// ---- fp16

#if WBK_REGISTER_BYTES == 64

WBK_INLINE Lanes from_fp16(Bits16 half) { return copy_bits<Lanes>(_mm512_cvtph_ps(copy_bits<__m256i>(half))); }

WBK_INLINE Bits16 nearest_even_fp16(Lanes x) {
  return copy_bits<Bits16>(_mm512_cvtps_ph(copy_bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

WBK_INLINE Bits16 narrow(Bits32 wide) { return copy_bits<Bits16>(_mm512_cvtepi32_epi16(copy_bits<__m512i>(wide))); }

#elif WBK_REGISTER_BYTES == 32

WBK_INLINE Lanes from_fp16(Bits16 half) { return copy_bits<Lanes>(_mm256_cvtph_ps(copy_bits<__m128i>(half))); }

WBK_INLINE Bits16 nearest_even_fp16(Lanes x) {
  return copy_bits<Bits16>(_mm256_cvtps_ph(copy_bits<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}

WBK_INLINE Bits16 narrow(Bits32 wide) {  // every lane below 2^16
  const __m256i v = copy_bits<__m256i>(wide);
  return copy_bits<Bits16>(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}

#else  // integer arithmetic

WBK_INLINE Bits16 narrow(Bits32 wide) { return __builtin_convertvector(wide, Bits16); }

WBK_INLINE Lanes from_fp16(Bits16 half) {
  const Bits32 h = __builtin_convertvector(half, Bits32);
  const Bits32 sign = (h & 0x8000u) << 16;
  const Bits32 magnitude = h & 0x7fffu;
  const Bits32 normal = (magnitude << 13) + ((127u - 15u) << 23);
  const Bits32 special = (magnitude << 13) | 0x7f800000u;
  const Bits32 subnormal = copy_bits<Bits32>(__builtin_convertvector(magnitude, Lanes) * 0x1p-24f);  // exact
  const Bits32 is_special = copy_bits<Bits32>(magnitude >= 0x7c00u);
  const Bits32 is_subnormal = copy_bits<Bits32>(magnitude < 0x0400u);
  return copy_bits<Lanes>(sign | where(is_special, special, where(is_subnormal, subnormal, normal)));
}

WBK_INLINE Bits16 nearest_even_fp16(Lanes x) {
  const Bits32 u = copy_bits<Bits32>(x);
  const Bits32 sign = (u >> 16) & 0x8000u;
  const Bits32 a = u & 0x7fffffffu;
  const Bits32 normal = (a - ((127u - 15u) << 23) + 0x0fffu + ((a >> 13) & 1u)) >> 13;
  // Adding 0.5 puts the last fp16 subnormal bit (2^-24) at the last fp32 bit: the addition rounds to nearest even.
  const Bits32 subnormal = copy_bits<Bits32>(copy_bits<Lanes>(a) + 0.5f) - 0x3f000000u;
  const Bits32 is_small = copy_bits<Bits32>(a < 0x38800000u);
  const Bits32 is_huge = copy_bits<Bits32>(a >= 0x477ff000u);
  return narrow(sign | where(is_huge, Bits32{} + 0x7c00u, where(is_small, subnormal, normal)));
}

#endif

WBK_INLINE Bits16 fp16_bits(Lanes x) {
  const Bits16 is_nan = Bits16{} - narrow(nan_mask(x) & 1u);
  return (is_nan & (Bits16{} + uint16_t{0x7fff})) | (~is_nan & nearest_even_fp16(x));
}

WBK_INLINE Block load(const Fp16* p) { return {from_fp16(read<Bits16>(p)), from_fp16(read<Bits16>(p + kLanes))}; }

WBK_INLINE Block store(Fp16* p, Block x) {
  const Bits16 a = fp16_bits(x.a);
  const Bits16 b = fp16_bits(x.b);
  write(p, a);
  write(p + kLanes, b);
  return {from_fp16(a), from_fp16(b)};
}

// ---- the last, incomplete block of a row: missing lanes are +0.0 and are never stored

template <class T>
WBK_INLINE Block load_some(const T* p, uint64_t count) {
  T padded[kBlock] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

template <class T>
WBK_INLINE Block store_some(T* p, Block x, uint64_t count) {
  T padded[kBlock];
  const Block value = store(padded, x);
  std::memcpy(p, padded, count * sizeof(T));
  return value;
}

// The block as T would hold it.
template <class T>
WBK_INLINE Block rounded(Block x) {
  T unused[kBlock];
  return store(unused, x);
}

}  // namespace wbk
