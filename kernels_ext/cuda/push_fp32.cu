// Both push all-reduces for fp32 (push.cuh, two_shot.cuh).
#include "launch.cuh"

int wbk_push_fp32(const WbkCall &c, cudaStream_t stream, uint32_t *resident) { return wbk::push_of<float>(c, stream, resident); }
