// The one table of what lies where in a CUDA workspace. Host and device read it; nobody writes an offset by hand.
//
// Every rank of a group owns one block of memory that its peers write: the slots, a vector of 16 bytes for each vector of each row
// of each peer, twice, because calls alternate between two halves:
//
//   slots[half 0..1][sender 0..ranks-1, the receiver left out][row 0..rows)[vector 0..vectors)
//
// A push call of n tokens uses rows 0..n of a sender's plane. A two-shot call deals its tokens to the ranks in groups of as many
// tokens as there are ranks, member r of a group to rank r; it uses a row a group for what the sender contributes to the receiver's
// token, and behind these a row a group for the sender's own token when it is finished.
//
// Beside it, in memory that only the owner touches, the control words: how many calls there were, and whether one gave up.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define WBK_BOTH __host__ __device__ __forceinline__
#else
#define WBK_BOTH inline
#endif

namespace wbk {

constexpr uint32_t kMaxRanks = 16;
constexpr uint32_t kVectorBytes = 16; // one thread moves one vector
constexpr uint32_t kMaxCluster = 16;  // blocks of threads that can share one row
constexpr uint32_t kHalves = 2;

struct Layout {
  uint32_t ranks, rows, vectors; // rows of a plane; vectors of 16 bytes a row

  // The place of `sender` among the ranks other than `receiver`.
  static WBK_BOTH uint32_t peer_place(uint32_t sender, uint32_t receiver) { return sender < receiver ? sender : sender - 1; }

  // Vectors from the start of the slots to vector 0 of row 0 sent by the peer at `place`, which is one of `peers`, in a call's half.
  WBK_BOTH uint64_t plane(uint32_t half, uint32_t place, uint32_t peers) const {
    return (uint64_t(half) * peers + place) * (uint64_t(rows) * vectors);
  }

  WBK_BOTH uint32_t groups(uint32_t tokens) const { return (tokens + ranks - 1) / ranks; }
  static WBK_BOTH uint32_t part_row(uint32_t group) { return group; }
  static WBK_BOTH uint32_t finished_row(uint32_t group, uint32_t groups) { return groups + group; }

  WBK_BOTH bool holds_push(uint32_t tokens) const { return tokens <= rows; }
  WBK_BOTH bool holds_two_shot(uint32_t tokens) const { return 2 * groups(tokens) <= rows; }

  WBK_BOTH uint64_t slot_bytes() const { return plane(kHalves, 0, ranks - 1) * kVectorBytes; }
};

// The control words, 64 bytes. `calls` counts in units of kCall: a grid adds that much in all, each of its blocks a share when it has
// read the word, so the number of finished calls is right for every block that reads it, until this grid's last block has added.
struct Control {
  uint32_t calls, state, reserved[14];
};
constexpr uint32_t kCall = 1u << 16; // also a bound on the blocks of a grid; 2^32 / kCall is even, so halves go on alternating

} // namespace wbk
