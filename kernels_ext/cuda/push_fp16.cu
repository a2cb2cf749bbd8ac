// Both push all-reduces for fp16 (push.cuh, two_shot.cuh).
#include "launch.cuh"

int wbk_push_fp16(const WbkCall &c, cudaStream_t stream, uint32_t *resident) { return wbk::push_of<__half>(c, stream, resident); }
