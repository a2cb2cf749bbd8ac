/* The C face of the CUDA kernels: no torch, no Python, no C++ types. Every function gives 0 or a code that
 * wbk_cuda_error_text() explains. Sizes are elements or bytes as named; pointers are device pointers unless said. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { WBK_CUDA_ABI = 2, WBK_CUDA_MAX_RANKS = 16 };
enum { WBK_BF16 = 0, WBK_FP16 = 1, WBK_FP32 = 2 };
enum { WBK_OP_ALL_REDUCE = 1, WBK_OP_ALL_REDUCE_ADD_RMS_NORM = 2 };
enum { WBK_ALGORITHM_PUSH = 0, WBK_ALGORITHM_TWO_SHOT_PUSH = 1 };

/* When the kernel lets the next kernel of the stream start (programmatic dependent launch). The next kernel still waits for
 * this one's end before it reads results, if it was launched that way; the choice only moves its prologue. */
enum { WBK_TRIGGER_AT_START = 0, WBK_TRIGGER_AFTER_PUSH = 1, WBK_TRIGGER_AFTER_POLL = 2, WBK_TRIGGER_NEVER = 3 };

/* What a kernel that gave up leaves in host-mapped memory. `valid` is written last. */
typedef struct {
  uint32_t valid, op, group, rank, peer, row, epoch, expected, seen, reserved[7];
} WbkReport;

/* One rank's own memory. Virtual ranks give one of these a rank, real ranks give one. */
typedef struct {
  const void *x;        /* [tokens, hidden], this rank's contribution */
  const void *residual; /* [tokens, hidden]; unused by all_reduce */
  void *sum;            /* [tokens, hidden]: the sum, or sum + residual. May be x or residual */
  void *norm;           /* [tokens, hidden]; unused by all_reduce */
  uint32_t *control;    /* wbk::Control, zeroed once; its state is non-zero when a call gave up, and later ones leave at once */
  WbkReport *report;    /* device address of host-mapped memory */
} WbkRank;

typedef struct {
  uint32_t op, dtype, ranks, first_rank, virtual_ranks; /* virtual_ranks 0: one real rank, first_rank */
  uint32_t tokens, hidden, plane_rows;                  /* plane_rows: rows of a sender's plane (cuda_layout.h) */
  uint32_t algorithm, cluster, max_lanes, trigger;      /* the choice; cluster: 2..16; max_lanes: alike on all ranks, 0: all */
  uint32_t round_twice, group, pdl, reserved;
  float eps, weight_bias;
  uint64_t timeout_ns; /* bound of one wait for a peer */
  const void *weight;  /* [hidden] */
  void *slots[WBK_CUDA_MAX_RANKS]; /* every rank's slots as this process sees them */
  WbkRank rank[WBK_CUDA_MAX_RANKS];
} WbkCall;

int wbk_cuda_abi(void);
uint64_t wbk_cuda_call_bytes(void); /* sizeof(WbkCall): a caller that mirrors it checks */
const char *wbk_cuda_error_text(int code);
uint64_t wbk_cuda_slot_bytes(uint32_t ranks, uint32_t plane_rows, uint32_t hidden, uint32_t dtype);
uint64_t wbk_cuda_control_bytes(void);

/* Lanes of such a call that can be on the device at once: equal on all ranks only if their devices are. */
int wbk_cuda_resident_lanes(const WbkCall *call, uint32_t *lanes);
/* Puts the fused all-reduce on `stream`. Checks arguments, never waits. */
int wbk_cuda_push(const WbkCall *call, void *stream);

int wbk_cuda_alloc(int device, uint64_t bytes, int fill, void **ptr);
int wbk_cuda_free(int device, void *ptr);
int wbk_cuda_host_alloc(uint64_t bytes, void **host, void **device);
int wbk_cuda_host_free(void *host);

/* Memory that other processes can map, in units of 2 MiB. IPC: ordinary memory, which may be freed only after every peer has closed
 * it. The others: virtual memory, which lives until the owner has freed it and every peer has closed it, in any order. */
enum { WBK_SHARE_IPC = 0, WBK_SHARE_FD = 1, WBK_SHARE_FABRIC = 2 };
typedef struct {
  unsigned char bytes[64]; /* IPC and FABRIC: what travels */
  int32_t fd;              /* FD: a descriptor of the process that holds this record, and that process's to close */
} WbkHandle;
int wbk_cuda_shared_alloc(int device, uint32_t share, uint64_t bytes, int fill, void **ptr, WbkHandle *handle);
int wbk_cuda_shared_free(int device, uint32_t share, uint64_t bytes, void *ptr);
int wbk_cuda_shared_open(int device, uint32_t share, uint64_t bytes, const WbkHandle *handle, void **ptr);
int wbk_cuda_shared_close(int device, uint32_t share, uint64_t bytes, void *ptr);

/* Multiprocessors, compute capability (90 for 9.0), 16-byte UUID; and whether `device` may reach `peer`. */
int wbk_cuda_device(int device, int *multiprocessors, int *arch, unsigned char uuid[16]);
int wbk_cuda_can_reach(int device, int peer, int *yes);
/* Keeps one thread of the stream busy for `ns`: tests use it to delay a rank. */
int wbk_cuda_delay(uint64_t ns, void *stream);

#ifdef __cplusplus
}
#endif
