// A vector of 16 bytes as fp32 numbers and back; conversions round to nearest even, subnormals stay.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "memory.cuh"

namespace wbk {

template <class T> struct Numbers;

template <> struct Numbers<__nv_bfloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(uint32_t w, float *f) {
    f[0] = __uint_as_float(w << 16);
    f[1] = __uint_as_float(w & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float *f) {
    __nv_bfloat162 v = __floats2bfloat162_rn(f[0], f[1]);
    return *reinterpret_cast<uint32_t *>(&v);
  }
  static constexpr int kStep = 2;
};

template <> struct Numbers<__half> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(uint32_t w, float *f) {
    float2 v = __half22float2(*reinterpret_cast<__half2 *>(&w));
    f[0] = v.x;
    f[1] = v.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float *f) {
    __half2 v = __floats2half2_rn(f[0], f[1]);
    return *reinterpret_cast<uint32_t *>(&v);
  }
  static constexpr int kStep = 2;
};

template <> struct Numbers<float> {
  static constexpr int kCount = 4;
  static __device__ __forceinline__ void unpack(uint32_t w, float *f) { f[0] = __uint_as_float(w); }
  static __device__ __forceinline__ uint32_t pack(const float *f) { return __float_as_uint(f[0]); }
  static constexpr int kStep = 1;
};

template <class T> __device__ __forceinline__ void unpack(Vector v, float (&f)[Numbers<T>::kCount]) {
  constexpr int kStep = Numbers<T>::kStep;
  Numbers<T>::unpack(uint32_t(v.lo), f);
  Numbers<T>::unpack(uint32_t(v.lo >> 32), f + kStep);
  Numbers<T>::unpack(uint32_t(v.hi), f + 2 * kStep);
  Numbers<T>::unpack(uint32_t(v.hi >> 32), f + 3 * kStep);
}

template <class T> __device__ __forceinline__ Vector pack(const float (&f)[Numbers<T>::kCount]) {
  constexpr int kStep = Numbers<T>::kStep;
  Vector v;
  v.lo = uint64_t(Numbers<T>::pack(f)) | uint64_t(Numbers<T>::pack(f + kStep)) << 32;
  v.hi = uint64_t(Numbers<T>::pack(f + 2 * kStep)) | uint64_t(Numbers<T>::pack(f + 3 * kStep)) << 32;
  return v;
}

} // namespace wbk
