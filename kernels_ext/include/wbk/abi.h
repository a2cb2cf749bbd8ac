/* The plain C interface of the CPU kernels: fixed-width numbers and pointers, no torch and no Python headers.
 *
 * One wbk_context belongs to one rank of one group. All state is in it, so N threads of one process can be N ranks.
 * A context serves one call at a time. Sizes and offsets come from wbk_layout and nowhere else.
 */
#ifndef WBK_ABI_H
#define WBK_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WBK_API __attribute__((visibility("default")))
#define WBK_ABI_VERSION 1u
#define WBK_MAX_RANKS 16u

enum wbk_dtype { WBK_BF16 = 0, WBK_FP16 = 1, WBK_FP32 = 2 };
enum wbk_rounding { WBK_ONCE = 0, WBK_TWICE = 1 };
enum wbk_op { WBK_ALL_REDUCE = 0, WBK_ALL_REDUCE_ADD_RMS_NORM = 1 };

/* What a call gives back. After WBK_AGAIN call wbk_resume; after WBK_FAILED read wbk_failure_of: the context is broken. */
enum wbk_status { WBK_OK = 0, WBK_AGAIN = 1, WBK_FAILED = 2, WBK_BUSY = 3, WBK_INVALID = 4 };

/* Why a rank left its group. The same record is published to the peers, which then leave for the same cause. */
enum wbk_cause {
  WBK_IN_GROUP = 0,
  WBK_CLOSED = 1,
  WBK_INTERRUPTED = 2,
  WBK_MISMATCH = 3,
  WBK_DEADLINE = 4,
  WBK_PEER_DEAD = 5,
};

/* What one rank says about its call. Equal on all ranks, or nobody reads anybody's data. */
typedef struct wbk_call {
  uint32_t op;
  uint32_t dtype;
  uint32_t rounding;
  uint32_t hidden;
  uint64_t tokens;
  float eps;
  float weight_bias;
} wbk_call;

typedef struct wbk_failure {
  uint32_t cause;       /* wbk_cause */
  uint32_t reporter;    /* group rank that found it first; WBK_MISMATCH: the lowest group rank that had come */
  uint32_t other;       /* WBK_MISMATCH: the first group rank that differs from `reporter` */
  uint32_t reserved;
  uint64_t mask;        /* WBK_DEADLINE, WBK_PEER_DEAD: bit g set for each group rank missing or dead */
  uint64_t epoch;       /* number of the call, from 1 */
  wbk_call reporter_call;
  wbk_call other_call;
} wbk_failure;

typedef struct wbk_layout {
  uint64_t segment_bytes; /* one rank's whole segment, a multiple of the page size */
  uint64_t slots_offset;
  uint64_t slot_bytes;
  uint64_t rows_per_slot;
  uint64_t num_slots;
  uint64_t arena_offset;
  uint64_t arena_bytes;
} wbk_layout;

typedef struct wbk_config {
  uint32_t abi_version;
  uint32_t num_ranks;
  uint32_t group_rank;
  uint32_t dtype;
  uint32_t rounding;
  uint32_t hidden;
  uint32_t num_spins;   /* polls before the first sched_yield */
  uint32_t num_yields;  /* sched_yields before sleeping */
  uint64_t arena_bytes;
  int64_t timeout_ns;   /* budget of each single wait */
  int64_t slice_ns;     /* longest sleep before WBK_AGAIN */
  void* segments[WBK_MAX_RANKS]; /* in group-rank order, each mapped here; unused if num_ranks is 1 */
} wbk_config;

typedef struct wbk_context wbk_context;

WBK_API uint32_t wbk_abi_version(void);

/* 0 for a size that cannot be laid out. */
WBK_API int wbk_layout_of(uint32_t hidden, uint32_t dtype, uint64_t arena_bytes, wbk_layout* out);

/* Write the header of a fresh, zeroed segment. Before its name is told to anybody. */
WBK_API void wbk_format_segment(void* segment, const wbk_layout* layout, uint32_t hidden, uint32_t dtype);

/* 1 if the mapped bytes are a segment of this version and layout. */
WBK_API int wbk_check_segment(const void* segment, const wbk_layout* layout, uint32_t hidden, uint32_t dtype);

WBK_API wbk_context* wbk_open(const wbk_config* config); /* NULL if the config makes no sense or memory is out */
WBK_API void wbk_close(wbk_context* context);            /* frees the context; the segments stay the caller's */

WBK_API int wbk_all_reduce(wbk_context* context, uint64_t tokens, const void* x, void* out);
WBK_API int wbk_all_reduce_add_rms_norm(wbk_context* context, uint64_t tokens, const void* x, const void* residual,
                                        const void* weight, void* residual_out, void* norm_out, float eps,
                                        float weight_bias);
WBK_API int wbk_resume(wbk_context* context);

/* Leave the group for a cause found outside (closed, interrupted, peer dead) and tell the peers. Once. */
WBK_API void wbk_leave(wbk_context* context, uint32_t cause, uint64_t mask);
WBK_API void wbk_failure_of(const wbk_context* context, wbk_failure* out);

/* Group ranks the paused call (WBK_AGAIN) waits for, as a bit mask. Others may have ended their part and be gone. */
WBK_API uint64_t wbk_missing(wbk_context* context);

#ifdef __cplusplus
}
#endif
#endif
