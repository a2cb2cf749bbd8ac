// One rank's shared segment, and the one table its sizes and offsets come from.
//
//   | header | call line, even | call line, odd | progress | consumed | left | ... | slots | arena |
//
// Only the owner writes its segment, except for the sleeper counts. A flag and what it guards share a 64-byte line.
#pragma once

#include <atomic>
#include <cstddef>

#include "wbk/abi.h"

namespace wbk {

constexpr uint64_t kMagic = 0x31304b42572d4d46ull;  // changes whenever this file changes meaning
constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlotTarget = 64 * 1024;  // rows are handed over in pieces of about this size
constexpr uint64_t kNumSlots = 16;
constexpr uint64_t kCopiedIn = ~0ull;  // offset of a tensor that comes through the slots

static_assert(std::atomic<uint64_t>::is_always_lock_free, "flags are shared between processes");

// A number that grows, and how many peers sleep until it does.
struct Flag {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
};

// 1 publish: `epoch` is stored last. Two lines in turn: a slow peer may still read the one of the call before.
struct alignas(64) CallLine {
  Flag epoch;
  uint64_t offset;  // of x in the owner's arena, or kCopiedIn
  wbk_call call;
};

struct alignas(64) CountLine {
  Flag count;
};

// Why the owner left. `epoch_and_cause` is stored last: the first call it will not complete, times 8, plus the cause.
struct alignas(64) LeftLine {
  std::atomic<uint64_t> epoch_and_cause;
  uint32_t reporter;
  uint32_t other;
  uint64_t mask;
  wbk_call reporter_call;
  alignas(64) wbk_call other_call;
};

struct alignas(64) Header {
  uint64_t magic;
  uint32_t abi_version;
  uint32_t hidden;
  uint32_t dtype;
  wbk_layout layout;
};

struct Segment {
  Header header;
  CallLine calls[2];
  CountLine progress;  // pieces of x copied in so far, over all calls
  CountLine consumed;  // pieces of everybody's x read so far, over all calls
  LeftLine left;
};

static_assert(sizeof(CallLine) == 64, "one line");
static_assert(sizeof(Segment) <= kPage, "the first page");

inline uint32_t item_bytes(uint32_t dtype) { return dtype == WBK_FP32 ? 4 : 2; }

inline bool lay_out(uint32_t hidden, uint32_t dtype, uint64_t arena_bytes, wbk_layout* out) {
  if (hidden == 0 || dtype > WBK_FP32 || arena_bytes > (1ull << 46)) return false;
  const auto up = [](uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; };
  const uint64_t row_bytes = uint64_t{hidden} * item_bytes(dtype);
  out->rows_per_slot = row_bytes >= kSlotTarget ? 1 : kSlotTarget / row_bytes;
  out->slot_bytes = up(out->rows_per_slot * row_bytes, 64);
  out->num_slots = kNumSlots;
  out->slots_offset = kPage;
  out->arena_offset = up(out->slots_offset + out->num_slots * out->slot_bytes, kPage);
  out->arena_bytes = up(arena_bytes, kPage);
  out->segment_bytes = out->arena_offset + out->arena_bytes;
  return true;
}

}  // namespace wbk
