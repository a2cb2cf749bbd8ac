// Both push all-reduces for bf16 (push.cuh, two_shot.cuh).
#include "launch.cuh"

int wbk_push_bf16(const WbkCall &c, cudaStream_t stream, uint32_t *resident) { return wbk::push_of<__nv_bfloat16>(c, stream, resident); }
