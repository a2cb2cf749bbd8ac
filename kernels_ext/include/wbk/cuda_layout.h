// The one table of what lies where in a CUDA workspace. Host and device read it; nobody writes an offset by hand.
//
// Every rank of a group owns one block of memory that its peers can write: the slots. Rows of a call are dealt to *lanes*: row r
// of a call that uses G lanes belongs to lane r mod G. Each lane is a ring of `depth` slots for every peer, and counts the rows
// it has ever carried: row number s of lane l, sent by rank p, lies in slot (s mod depth, p, l) of the receiver.
//
//   slots[ring place 0..depth) [sender 0..ranks-1, the receiver left out] [lane 0..lanes) [row bytes]
//
// Beside it, in memory that only the owner touches: one 64-byte record a lane (the row count, once for every block of threads
// that may share the lane), and one state word for the whole workspace.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define WBK_BOTH __host__ __device__ __forceinline__
#else
#define WBK_BOTH inline
#endif

namespace wbk {

constexpr uint32_t kMaxRanks = 16;
constexpr uint32_t kVectorBytes = 16;      // one thread moves one vector
constexpr uint32_t kMaxCluster = 16;       // blocks of threads that can share one lane
constexpr uint32_t kDepth = 8;             // why eight: see push.cuh, "what ends an epoch"
constexpr uint32_t kLaneWords = kMaxCluster;

struct Layout {
  uint32_t ranks, lanes, vectors; // vectors of 16 bytes a row

  // The place of `sender` among the ranks other than `receiver`.
  static WBK_BOTH uint32_t peer_place(uint32_t sender, uint32_t receiver) { return sender < receiver ? sender : sender - 1; }

  WBK_BOTH uint32_t plane() const { return lanes * vectors; } // vectors of one slot of every lane

  // Index, in vectors, of the plane that holds row number `sequence` sent by the peer at `place`, which is one of `peers`.
  WBK_BOTH uint32_t plane_of(uint32_t sequence, uint32_t place, uint32_t peers) const {
    return ((sequence % kDepth) * peers + place) * plane();
  }

  WBK_BOTH uint64_t slot_bytes() const { return uint64_t(kDepth) * (ranks - 1) * plane() * kVectorBytes; }
  WBK_BOTH uint64_t lane_bytes() const { return uint64_t(lanes) * kLaneWords * sizeof(uint32_t); }
};

} // namespace wbk
