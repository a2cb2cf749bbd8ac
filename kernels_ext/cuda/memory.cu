// Memory of the C face (cuda_abi.h): one rank's own, and such that other processes can map. No multicast objects, ever.
#include <cuda.h>
#include <cuda_runtime.h>
#include <string.h>

#include "../include/wbk/cuda_abi.h"

namespace {

struct OnDevice { // makes `device` current for a scope, with its context
  int before = -1;
  explicit OnDevice(int device) {
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaFree(nullptr);
  }
  ~OnDevice() { cudaSetDevice(before); }
};

// Driver functions by name, so that the library needs no libcuda to be loaded on a machine without a GPU.
template <class F> int driver(const char *name, F *function) {
  cudaDriverEntryPointQueryResult found;
  if (int code = cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void **>(function), 12000, cudaEnableDefault, &found)) return code;
  return found == cudaDriverEntryPointSuccess ? 0 : int(cudaErrorNotSupported);
}
#define WBK_DRIVER(name) \
  decltype(&::name) name = nullptr; \
  if (int code = driver(#name, &name)) return code

CUmemAllocationHandleType type_of(uint32_t share) { return share == WBK_SHARE_FABRIC ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; }

// Gives the memory an address that `device` may read and write. The mapping keeps the memory; the handle is let go in any case.
int map(CUmemGenericAllocationHandle memory, int device, uint64_t bytes, void **ptr) {
  WBK_DRIVER(cuMemAddressReserve);
  WBK_DRIVER(cuMemAddressFree);
  WBK_DRIVER(cuMemMap);
  WBK_DRIVER(cuMemUnmap);
  WBK_DRIVER(cuMemSetAccess);
  WBK_DRIVER(cuMemRelease);
  CUdeviceptr address = 0;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  int code = cuMemAddressReserve(&address, bytes, 0, 0, 0);
  if (!code) {
    code = cuMemMap(address, bytes, 0, memory, 0);
    if (!code && (code = cuMemSetAccess(address, bytes, &access, 1))) cuMemUnmap(address, bytes);
    if (code) cuMemAddressFree(address, bytes);
  }
  cuMemRelease(memory);
  if (!code) *ptr = reinterpret_cast<void *>(address);
  return code;
}

int unmap(void *ptr, uint64_t bytes) {
  WBK_DRIVER(cuMemUnmap);
  WBK_DRIVER(cuMemAddressFree);
  if (int code = cuMemUnmap(reinterpret_cast<CUdeviceptr>(ptr), bytes)) return code;
  return cuMemAddressFree(reinterpret_cast<CUdeviceptr>(ptr), bytes);
}

int fill_with(void *ptr, int fill, uint64_t bytes) {
  if (int code = cudaMemset(ptr, fill, bytes)) return code;
  return cudaDeviceSynchronize();
}

int create(int device, uint32_t share, uint64_t bytes, void **ptr, WbkHandle *handle) {
  WBK_DRIVER(cuMemCreate);
  WBK_DRIVER(cuMemRelease);
  WBK_DRIVER(cuMemExportToShareableHandle);
  CUmemAllocationProp what{};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.requestedHandleTypes = type_of(share);
  what.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CUmemGenericAllocationHandle memory;
  if (int code = cuMemCreate(&memory, bytes, &what, 0)) return code;
  void *to = share == WBK_SHARE_FABRIC ? static_cast<void *>(handle->bytes) : static_cast<void *>(&handle->fd);
  if (int code = cuMemExportToShareableHandle(to, memory, type_of(share), 0)) {
    cuMemRelease(memory);
    return code;
  }
  return map(memory, device, bytes, ptr);
}

} // namespace

extern "C" {

int wbk_cuda_alloc(int device, uint64_t bytes, int fill, void **ptr) {
  OnDevice on(device);
  if (int code = cudaMalloc(ptr, bytes)) return code;
  return fill_with(*ptr, fill, bytes);
}

int wbk_cuda_free(int device, void *ptr) {
  OnDevice on(device);
  return cudaFree(ptr);
}

int wbk_cuda_shared_alloc(int device, uint32_t share, uint64_t bytes, int fill, void **ptr, WbkHandle *handle) {
  OnDevice on(device);
  handle->fd = -1;
  if (share != WBK_SHARE_IPC) {
    if (int code = create(device, share, bytes, ptr, handle)) return code;
    return fill_with(*ptr, fill, bytes);
  }
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof handle->bytes, "the ABI says 64 bytes");
  if (int code = cudaMalloc(ptr, bytes)) return code;
  if (int code = cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t *>(handle->bytes), *ptr)) {
    cudaFree(*ptr);
    *ptr = nullptr;
    return code;
  }
  return fill_with(*ptr, fill, bytes);
}

int wbk_cuda_shared_free(int device, uint32_t share, uint64_t bytes, void *ptr) {
  OnDevice on(device);
  return share == WBK_SHARE_IPC ? int(cudaFree(ptr)) : unmap(ptr, bytes);
}

int wbk_cuda_shared_open(int device, uint32_t share, uint64_t bytes, const WbkHandle *handle, void **ptr) {
  OnDevice on(device);
  if (share == WBK_SHARE_IPC) {
    cudaIpcMemHandle_t h;
    memcpy(&h, handle->bytes, sizeof h);
    return cudaIpcOpenMemHandle(ptr, h, cudaIpcMemLazyEnablePeerAccess);
  }
  WBK_DRIVER(cuMemImportFromShareableHandle);
  unsigned char copy[sizeof handle->bytes];
  memcpy(copy, handle->bytes, sizeof copy);
  void *from = share == WBK_SHARE_FABRIC ? static_cast<void *>(copy) : reinterpret_cast<void *>(intptr_t(handle->fd));
  CUmemGenericAllocationHandle memory;
  if (int code = cuMemImportFromShareableHandle(&memory, from, type_of(share))) return code;
  return map(memory, device, bytes, ptr);
}

int wbk_cuda_shared_close(int device, uint32_t share, uint64_t bytes, void *ptr) {
  OnDevice on(device);
  return share == WBK_SHARE_IPC ? int(cudaIpcCloseMemHandle(ptr)) : unmap(ptr, bytes);
}

int wbk_cuda_host_alloc(uint64_t bytes, void **host, void **device) {
  if (int code = cudaHostAlloc(host, bytes, cudaHostAllocMapped | cudaHostAllocPortable)) return code;
  memset(*host, 0, bytes);
  return cudaHostGetDevicePointer(device, *host, 0);
}

int wbk_cuda_host_free(void *host) { return cudaFreeHost(host); }

} // extern "C"
