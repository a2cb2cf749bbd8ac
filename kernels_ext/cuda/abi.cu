// The C face (cuda_abi.h): argument checks, choice of the dtype's instance, what a device is.
#include <cuda_runtime.h>
#include <string.h>

#include "../include/wbk/cuda_abi.h"
#include "../include/wbk/cuda_layout.h"
#include "../include/wbk/memory.cuh"

int wbk_push_bf16(const WbkCall &c, cudaStream_t stream, uint32_t *resident);
int wbk_push_fp16(const WbkCall &c, cudaStream_t stream, uint32_t *resident);
int wbk_push_fp32(const WbkCall &c, cudaStream_t stream, uint32_t *resident);

namespace {

uint32_t vectors_of(uint32_t hidden, uint32_t dtype) { return hidden / (dtype == WBK_FP32 ? 4 : 8); }

bool aligned(const void *p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

bool sound(const WbkCall &c, bool pointers) {
  const uint32_t copies = c.virtual_ranks ? c.virtual_ranks : 1;
  const bool norm = c.op == WBK_OP_ALL_REDUCE_ADD_RMS_NORM;
  if (!norm && c.op != WBK_OP_ALL_REDUCE) return false;
  if (c.dtype > WBK_FP32 || c.ranks < 2 || c.ranks > WBK_CUDA_MAX_RANKS || c.first_rank + copies > c.ranks) return false;
  if (c.hidden == 0 || c.hidden % 8 || c.hidden > 16384 || c.trigger > WBK_TRIGGER_NEVER) return false;
  const wbk::Layout layout{c.ranks, c.plane_rows, vectors_of(c.hidden, c.dtype)};
  if (c.algorithm > WBK_ALGORITHM_TWO_SHOT_PUSH) return false;
  if (!(c.algorithm == WBK_ALGORITHM_PUSH ? layout.holds_push(c.tokens) : layout.holds_two_shot(c.tokens))) return false;
  if (c.cluster < 2 || c.cluster > wbk::kMaxCluster) return false;
  if (!pointers) return true;
  for (uint32_t r = 0; r < c.ranks; ++r)
    if (!c.slots[r] || !aligned(c.slots[r])) return false;
  if (norm && (!c.weight || !aligned(c.weight))) return false;
  for (uint32_t i = 0; i < copies; ++i) {
    const WbkRank &k = c.rank[i];
    if (!k.control || !k.report) return false;
    if (c.tokens && (!k.x || !k.sum || !aligned(k.x) || !aligned(k.sum))) return false;
    if (c.tokens && norm && (!k.residual || !k.norm || !aligned(k.residual) || !aligned(k.norm))) return false;
  }
  return true;
}

int dispatch(const WbkCall &c, cudaStream_t stream, uint32_t *resident) {
  if (c.dtype == WBK_BF16) return wbk_push_bf16(c, stream, resident);
  return c.dtype == WBK_FP16 ? wbk_push_fp16(c, stream, resident) : wbk_push_fp32(c, stream, resident);
}

__global__ void delay_kernel(uint64_t ns) {
  const uint64_t start = wbk::clock_ns();
  while (wbk::clock_ns() - start < ns) __nanosleep(200);
}

} // namespace

extern "C" {

int wbk_cuda_abi(void) { return WBK_CUDA_ABI; }

uint64_t wbk_cuda_call_bytes(void) { return sizeof(WbkCall); }

const char *wbk_cuda_error_text(int code) {
  switch (code) {
  case -1: return "arguments out of range, null or not aligned to 16 bytes";
  case -2: return "more lanes than fit on the device at one time";
  case -3: return "this cluster size does not fit this hidden size";
  default: return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

uint64_t wbk_cuda_slot_bytes(uint32_t ranks, uint32_t plane_rows, uint32_t hidden, uint32_t dtype) {
  return wbk::Layout{ranks, plane_rows, vectors_of(hidden, dtype)}.slot_bytes();
}

uint64_t wbk_cuda_control_bytes(void) { return sizeof(wbk::Control); }

int wbk_cuda_resident_lanes(const WbkCall *call, uint32_t *lanes) { return sound(*call, false) ? dispatch(*call, nullptr, lanes) : -1; }

int wbk_cuda_push(const WbkCall *call, void *stream) {
  return sound(*call, true) ? dispatch(*call, static_cast<cudaStream_t>(stream), nullptr) : -1;
}

int wbk_cuda_device(int device, int *multiprocessors, int *arch, unsigned char uuid[16]) {
  cudaDeviceProp p;
  if (int code = cudaGetDeviceProperties(&p, device)) return code;
  *multiprocessors = p.multiProcessorCount;
  *arch = p.major * 10 + p.minor;
  memcpy(uuid, &p.uuid, 16);
  return 0;
}

int wbk_cuda_can_reach(int device, int peer, int *yes) { return cudaDeviceCanAccessPeer(yes, device, peer); }

int wbk_cuda_delay(uint64_t ns, void *stream) {
  delay_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(ns);
  return cudaGetLastError();
}

} // extern "C"
