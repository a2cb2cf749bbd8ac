// The push all-reduce for fp16 (push.cuh).
#include "launch.cuh"

int wbk_push_fp16(const WbkCall &c, cudaStream_t stream, uint32_t *resident) { return wbk::push_of<__half>(c, stream, resident); }
