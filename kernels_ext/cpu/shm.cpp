// All-reduce, and all-reduce + residual + RMSNorm, over POSIX shared memory. Picture of the protocol: ../README.md
//
// One call of one rank:
//   1 publish   copy the first piece of x into a slot (or leave x where it is, if it lies in the arena), then say so
//   2 match     wait for every peer's call line; unless all lines agree, leave before reading anybody's data
//   3 reduce    piece by piece: copy the next piece in, wait for the peers' piece, sum in group-rank order, add, norm
//   4 retire    say that the piece was read; a rank whose x is read in place waits for everybody's word
// Epochs count calls from 1. Pieces are counted over all calls, so a slot is free once all peers consumed the piece that
// was in it. An epoch ends for a rank when it returns; it can be at most one call ahead of any peer.
// Arch: any with lock-free 64-bit atomics and Linux futexes. Dtypes: bf16, fp16, fp32. Ranks: 1 to 16.
#include <algorithm>
#include <new>

#include "rows.h"
#include "wait.h"

#ifndef WBK_DELAY  // the stress program slows ranks down here, to make rare orders happen
#define WBK_DELAY(place)
#endif

namespace wbk {
namespace {

// Subnormals must survive even where the program switched them off (torch.set_flush_denormal).
class ExactArithmetic {
 public:
#if defined(__x86_64__)
  ExactArithmetic() : before_(_mm_getcsr()) {
    if (before_ & kNotExact) _mm_setcsr(before_ & ~kNotExact);
  }
  ~ExactArithmetic() {
    if (before_ & kNotExact) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kNotExact = 0x8040u | 0x6000u;  // flush to zero, denormals are zero, rounding direction
  unsigned before_;
#endif
};

enum class Kind { kCall, kProgress, kConsumed };

struct Call {
  wbk_call words;
  const void* x;
  const void* residual;
  const void* weight;
  void* residual_out;
  void* norm_out;
  uint64_t offset;      // of x in the own arena, or kCopiedIn
  uint64_t num_pieces;
  uint64_t num_copied;  // pieces of x in slots
  uint64_t num_done;    // pieces reduced
  bool published;
  bool matched;
  bool peer_in_place;   // some peer's x is read in place
};

}  // namespace
}  // namespace wbk

struct wbk_context {
  wbk_config config;
  wbk_layout layout;
  wbk::Segment* segments[WBK_MAX_RANKS];
  uint64_t row_bytes;
  uint64_t epoch;                       // of the call in progress, or of the last one
  uint64_t base;                        // pieces of all calls before this one
  uint64_t known_consumed[WBK_MAX_RANKS];
  uint64_t peer_offset[WBK_MAX_RANKS];
  wbk::Call call;
  bool in_call;
  bool broken;
  int64_t wait_started;                 // 0: not waiting
  int64_t slept_since;
  uint32_t wait_rank;                   // the wait that was last slow: for whom, for which flag, until it is what
  int wait_kind;
  uint64_t wait_target;
  std::atomic<bool> busy;
  wbk_failure failure;
};

namespace wbk {
namespace {

Segment& own(wbk_context& c) { return *c.segments[c.config.group_rank]; }

char* bytes_of(wbk_context& c, uint32_t g) { return reinterpret_cast<char*>(c.segments[g]); }

char* slot_of(wbk_context& c, uint32_t g, uint64_t piece) {
  return bytes_of(c, g) + c.layout.slots_offset + piece % c.layout.num_slots * c.layout.slot_bytes;
}

bool same_call(const wbk_call& a, const wbk_call& b) {
  return a.op == b.op && a.dtype == b.dtype && a.rounding == b.rounding && a.hidden == b.hidden &&
         a.tokens == b.tokens && copy_bits<uint32_t>(a.eps) == copy_bits<uint32_t>(b.eps) &&
         copy_bits<uint32_t>(a.weight_bias) == copy_bits<uint32_t>(b.weight_bias);
}

// Leave the group: keep the story, publish it, wake whoever waits for us.
int leave(wbk_context& c, const wbk_failure& failure) {
  if (c.broken) return WBK_FAILED;
  c.broken = true;
  c.failure = failure;
  if (c.config.num_ranks == 1) return WBK_FAILED;
  Segment& segment = own(c);
  segment.left.reporter = failure.reporter;
  segment.left.other = failure.other;
  segment.left.mask = failure.mask;
  segment.left.reporter_call = failure.reporter_call;
  segment.left.other_call = failure.other_call;
  const uint64_t first_lost = c.in_call ? c.epoch : c.epoch + 1;
  segment.left.epoch_and_cause.store(first_lost * 8 + failure.cause, std::memory_order_seq_cst);
  wake_sleepers(segment.calls[0].epoch);
  wake_sleepers(segment.calls[1].epoch);
  wake_sleepers(segment.progress.count);
  wake_sleepers(segment.consumed.count);
  return WBK_FAILED;
}

wbk_failure found_here(wbk_context& c, uint32_t cause, uint64_t mask) {
  wbk_failure f = {};
  f.cause = cause;
  f.reporter = c.config.group_rank;
  f.mask = mask;
  f.epoch = c.in_call ? c.epoch : c.epoch + 1;
  f.reporter_call = c.call.words;
  return f;
}

// If peer g will not complete this call: leave for its cause.
int follow_if_left(wbk_context& c, uint32_t g) {
  const LeftLine& left = c.segments[g]->left;
  const uint64_t word = left.epoch_and_cause.load(std::memory_order_acquire);
  if (word == 0 || word / 8 > c.epoch) return WBK_OK;
  wbk_failure f = {};
  f.cause = static_cast<uint32_t>(word % 8);
  f.reporter = left.reporter;
  f.other = left.other;
  f.mask = left.mask;
  f.epoch = word / 8;
  f.reporter_call = left.reporter_call;
  f.other_call = left.other_call;
  return leave(c, f);
}

int follow_whoever_left(wbk_context& c) {
  for (uint32_t g = 0; g < c.config.num_ranks; ++g)
    if (g != c.config.group_rank)
      if (const int status = follow_if_left(c, g)) return status;
  return WBK_OK;
}

// Leave if the ranks that have come did not all come with the same call. All name the same pair: the lowest rank and
// the first that differs from it; and who finds that a peer has left already takes over its record.
int leave_if_calls_differ(wbk_context& c) {
  const CallLine* first = nullptr;
  uint32_t first_rank = 0;
  for (uint32_t g = 0; g < c.config.num_ranks; ++g) {
    const CallLine& line = c.segments[g]->calls[c.epoch & 1];
    if (!has_reached(line.epoch, c.epoch)) continue;
    if (first == nullptr) {
      first = &line;
      first_rank = g;
    } else if (!same_call(first->call, line.call)) {
      if (const int status = follow_whoever_left(c)) return status;
      wbk_failure f = found_here(c, WBK_MISMATCH, 0);
      f.reporter = first_rank;
      f.reporter_call = first->call;
      f.other = g;
      f.other_call = line.call;
      return leave(c, f);
    }
  }
  return WBK_OK;
}

Flag& flag_of(wbk_context& c, uint32_t g, Kind kind) {
  Segment& segment = *c.segments[g];
  if (kind == Kind::kCall) return segment.calls[c.epoch & 1].epoch;
  return kind == Kind::kProgress ? segment.progress.count : segment.consumed.count;
}

// The peers that keep us waiting: those before whose flag we would stop in the present step.
uint64_t missing_now(wbk_context& c, Kind kind, uint64_t target) {
  uint64_t mask = 0;
  for (uint32_t g = 0; g < c.config.num_ranks; ++g) {
    if (g == c.config.group_rank || (kind == Kind::kProgress && c.peer_offset[g] != kCopiedIn)) continue;
    if (!has_reached(flag_of(c, g, kind), target)) mask |= 1ull << g;
  }
  return mask;
}

// While waiting, look at everybody: a rank we do not wait for may have left, or may have come with another call.
int look_around(wbk_context& c, Kind kind) {
  if (kind == Kind::kCall)
    if (const int status = leave_if_calls_differ(c)) return status;
  return follow_whoever_left(c);
}

int wait_slowly(wbk_context& c, uint32_t g, Kind kind, uint64_t target) {
  Flag& flag = flag_of(c, g, kind);
  for (uint32_t i = 0; i < c.config.num_yields; ++i) {
    sched_yield();
    if (has_reached(flag, target)) return WBK_OK;
  }
  // A wait that was paused goes on with its time; any other has its own, whatever an earlier one has used up.
  if (c.wait_started == 0 || c.wait_rank != g || c.wait_kind != static_cast<int>(kind) || c.wait_target != target) {
    c.wait_rank = g;
    c.wait_kind = static_cast<int>(kind);
    c.wait_target = target;
    c.wait_started = now_ns();
  }
  if (c.slept_since == 0) c.slept_since = now_ns();
  for (;;) {
    const int64_t now = now_ns();
    const int64_t waited = now - c.wait_started;
    if (waited >= c.config.timeout_ns)
      return leave(c, found_here(c, WBK_DEADLINE, missing_now(c, kind, target)));
    if (now - c.slept_since >= c.config.slice_ns) return WBK_AGAIN;
    const int64_t for_ns = std::min(c.config.timeout_ns - waited, c.config.slice_ns);
    const bool interrupted = sleep_below(flag, target, for_ns);
    if (has_reached(flag, target)) return WBK_OK;
    if (const int status = look_around(c, kind)) return has_reached(flag, target) ? WBK_OK : status;
    if (interrupted) return WBK_AGAIN;
  }
}

int wait_for(wbk_context& c, uint32_t g, Kind kind, uint64_t target) {
  Flag& flag = flag_of(c, g, kind);
  for (uint32_t i = 0; i <= c.config.num_spins; ++i) {
    if (has_reached(flag, target)) return WBK_OK;
    pause_briefly();
  }
  const int status = wait_slowly(c, g, kind, target);
  if (status == WBK_OK) c.wait_started = 0;
  return status;
}

int wait_for_all(wbk_context& c, Kind kind, uint64_t target) {
  for (uint32_t g = 0; g < c.config.num_ranks; ++g) {
    if (g == c.config.group_rank) continue;
    if (kind == Kind::kProgress && c.peer_offset[g] != kCopiedIn) continue;
    if (kind == Kind::kConsumed && c.known_consumed[g] >= target) continue;
    if (const int status = wait_for(c, g, kind, target)) return status;
    if (kind == Kind::kConsumed) c.known_consumed[g] = target;
  }
  return WBK_OK;
}

uint64_t rows_in_piece(const wbk_context& c, uint64_t piece) {
  return std::min(c.layout.rows_per_slot, c.call.words.tokens - piece * c.layout.rows_per_slot);
}

// Copy the next piece of x into its slot, once every peer has read what was there.
int copy_in(wbk_context& c) {
  const uint64_t piece = c.call.num_copied;
  const uint64_t number = c.base + piece;
  if (number >= c.layout.num_slots)
    if (const int status = wait_for_all(c, Kind::kConsumed, number + 1 - c.layout.num_slots)) return status;
  WBK_DELAY(1);
  std::memcpy(slot_of(c, c.config.group_rank, number),
              static_cast<const char*>(c.call.x) + piece * c.layout.rows_per_slot * c.row_bytes,
              rows_in_piece(c, piece) * c.row_bytes);
  c.call.num_copied = piece + 1;
  return WBK_OK;
}

int publish(wbk_context& c) {
  Call& call = c.call;
  if (call.offset == kCopiedIn && call.num_pieces > 0 && call.num_copied == 0)
    if (const int status = copy_in(c)) return status;
  CallLine& line = own(c).calls[c.epoch & 1];
  line.offset = call.offset;
  line.call = call.words;
  WBK_DELAY(2);
  call.published = true;
  raise_flag(line.epoch, c.epoch);
  return WBK_OK;
}

int match(wbk_context& c) {
  if (const int status = wait_for_all(c, Kind::kCall, c.epoch)) return status;
  if (const int status = leave_if_calls_differ(c)) return status;
  for (uint32_t g = 0; g < c.config.num_ranks; ++g) {
    const CallLine& line = c.segments[g]->calls[c.epoch & 1];
    c.peer_offset[g] = line.offset;
    if (g == c.config.group_rank) continue;
    c.known_consumed[g] = std::max(c.known_consumed[g], c.base);
    c.call.peer_in_place |= line.offset != kCopiedIn;
  }
  c.call.matched = true;
  return WBK_OK;
}

void reduce_piece(wbk_context& c, uint64_t piece) {
  const Call& call = c.call;
  const uint64_t skipped = piece * c.layout.rows_per_slot * c.row_bytes;
  RowsJob job;
  job.num_ranks = c.config.num_ranks;
  job.hidden = c.config.hidden;
  job.num_rows = rows_in_piece(c, piece);
  for (uint32_t g = 0; g < c.config.num_ranks; ++g) {
    if (g == c.config.group_rank) job.inputs[g] = static_cast<const char*>(call.x) + skipped;
    else if (c.peer_offset[g] == kCopiedIn) job.inputs[g] = slot_of(c, g, c.base + piece);
    else job.inputs[g] = bytes_of(c, g) + c.layout.arena_offset + c.peer_offset[g] + skipped;
  }
  const bool fused = call.words.op == WBK_ALL_REDUCE_ADD_RMS_NORM;
  job.residual = fused ? static_cast<const char*>(call.residual) + skipped : nullptr;
  job.norm_out = fused ? static_cast<char*>(call.norm_out) + skipped : nullptr;
  job.residual_out = static_cast<char*>(call.residual_out) + skipped;
  job.weight = call.weight;
  job.eps = call.words.eps;
  job.weight_bias = call.words.weight_bias;
  const bool twice = c.config.rounding == WBK_TWICE;
  if (c.config.dtype == WBK_BF16) reduce_rows_of<Bf16>(job, fused, twice);
  else if (c.config.dtype == WBK_FP16) reduce_rows_of<Fp16>(job, fused, twice);
  else reduce_rows_of<Fp32>(job, fused, twice);
}

int hand_over_next(wbk_context& c) {
  if (const int status = copy_in(c)) return status;
  raise_flag(own(c).progress.count, c.base + c.call.num_copied);
  return WBK_OK;
}

bool can_hand_over(wbk_context& c) {
  if (c.call.offset != kCopiedIn || c.call.num_copied == c.call.num_pieces) return false;
  const uint64_t number = c.base + c.call.num_copied;
  return number < c.layout.num_slots || missing_now(c, Kind::kConsumed, number + 1 - c.layout.num_slots) == 0;
}

int reduce(wbk_context& c) {
  Call& call = c.call;
  while (call.num_done < call.num_pieces) {
    const uint64_t piece = call.num_done;
    const bool next_is_due = call.num_copied == piece + 1 && piece + 1 < call.num_pieces;
    if (call.offset == kCopiedIn && next_is_due)
      if (const int status = hand_over_next(c)) return status;
    if (piece > 0) {  // the call line said that piece 0 is there
      const uint64_t target = c.base + piece + 1;
      while (missing_now(c, Kind::kProgress, target) != 0 && can_hand_over(c))  // rather than wait
        if (const int status = hand_over_next(c)) return status;
      if (const int status = wait_for_all(c, Kind::kProgress, target)) return status;
    }
    WBK_DELAY(3);
    reduce_piece(c, piece);
    WBK_DELAY(4);
    call.num_done = piece + 1;
    raise_flag(own(c).consumed.count, c.base + call.num_done);
  }
  return WBK_OK;
}

int retire(wbk_context& c) {
  if (c.call.offset != kCopiedIn)
    if (const int status = wait_for_all(c, Kind::kConsumed, c.base + c.call.num_pieces)) return status;
  // A peer that left in the middle may have written over an x that we read in place.
  if (c.call.peer_in_place)
    for (uint32_t g = 0; g < c.config.num_ranks; ++g)
      if (g != c.config.group_rank && c.peer_offset[g] != kCopiedIn)
        if (const int status = follow_if_left(c, g)) return status;
  return WBK_OK;
}

int advance(wbk_context& c) {
  const ExactArithmetic exact;
  c.slept_since = 0;
  int status = WBK_OK;
  if (c.config.num_ranks > 1) {
    if (!c.call.published && (status = publish(c))) return status;
    if (!c.call.matched && (status = match(c))) return status;
    if ((status = reduce(c))) return status;
    if ((status = retire(c))) return status;
  } else {
    for (; c.call.num_done < c.call.num_pieces; ++c.call.num_done) reduce_piece(c, c.call.num_done);
  }
  c.base += c.call.num_pieces;
  c.in_call = false;
  return WBK_OK;
}

int finish_or_pause(wbk_context& c) {
  const int status = advance(c);
  if (status != WBK_AGAIN) c.busy.store(false, std::memory_order_release);
  return status;
}

int begin(wbk_context& c, uint32_t op, uint64_t tokens, const void* x, float eps, float weight_bias) {
  if (c.busy.exchange(true, std::memory_order_acquire)) return WBK_BUSY;
  if (c.broken) {
    c.busy.store(false, std::memory_order_release);
    return WBK_FAILED;
  }
  Call& call = c.call;
  call.words = {op, c.config.dtype, c.config.rounding, c.config.hidden, tokens, eps, weight_bias};
  call.x = x;
  call.num_pieces = (tokens + c.layout.rows_per_slot - 1) / c.layout.rows_per_slot;
  call.num_copied = 0;
  call.num_done = 0;
  call.published = false;
  call.matched = false;
  call.peer_in_place = false;
  call.offset = kCopiedIn;
  if (c.config.num_ranks > 1) {
    const uintptr_t arena = reinterpret_cast<uintptr_t>(bytes_of(c, c.config.group_rank)) + c.layout.arena_offset;
    const uintptr_t at = reinterpret_cast<uintptr_t>(x);
    if (at >= arena && at - arena <= c.layout.arena_bytes && tokens * c.row_bytes <= c.layout.arena_bytes - (at - arena))
      call.offset = at - arena;
  }
  c.epoch += 1;
  c.in_call = true;
  c.wait_started = 0;
  return WBK_OK;
}

}  // namespace
}  // namespace wbk

extern "C" {

uint32_t wbk_abi_version(void) { return WBK_ABI_VERSION; }

int wbk_layout_of(uint32_t hidden, uint32_t dtype, uint64_t arena_bytes, wbk_layout* out) {
  return wbk::lay_out(hidden, dtype, arena_bytes, out);
}

void wbk_format_segment(void* segment, const wbk_layout* layout, uint32_t hidden, uint32_t dtype) {
  wbk::Header& header = static_cast<wbk::Segment*>(segment)->header;
  header.abi_version = WBK_ABI_VERSION;
  header.hidden = hidden;
  header.dtype = dtype;
  header.layout = *layout;
  header.magic = wbk::kMagic;
}

int wbk_check_segment(const void* segment, const wbk_layout* layout, uint32_t hidden, uint32_t dtype) {
  const wbk::Header& header = static_cast<const wbk::Segment*>(segment)->header;
  return header.magic == wbk::kMagic && header.abi_version == WBK_ABI_VERSION && header.hidden == hidden &&
         header.dtype == dtype && std::memcmp(&header.layout, layout, sizeof *layout) == 0;
}

wbk_context* wbk_open(const wbk_config* config) {
  if (config->abi_version != WBK_ABI_VERSION || config->num_ranks == 0 || config->num_ranks > WBK_MAX_RANKS ||
      config->group_rank >= config->num_ranks || config->rounding > WBK_TWICE)
    return nullptr;
  wbk_layout layout;
  if (!wbk::lay_out(config->hidden, config->dtype, config->arena_bytes, &layout)) return nullptr;
  wbk_context* c = new (std::nothrow) wbk_context();
  if (c == nullptr) return nullptr;
  c->config = *config;
  c->layout = layout;
  c->row_bytes = uint64_t{config->hidden} * wbk::item_bytes(config->dtype);
  for (uint32_t g = 0; g < config->num_ranks; ++g) c->segments[g] = static_cast<wbk::Segment*>(config->segments[g]);
  return c;
}

void wbk_close(wbk_context* context) { delete context; }

int wbk_all_reduce(wbk_context* context, uint64_t tokens, const void* x, void* out) {
  if (const int status = wbk::begin(*context, WBK_ALL_REDUCE, tokens, x, 0.0f, 0.0f)) return status;
  context->call.residual_out = out;
  return wbk::finish_or_pause(*context);
}

int wbk_all_reduce_add_rms_norm(wbk_context* context, uint64_t tokens, const void* x, const void* residual,
                                const void* weight, void* residual_out, void* norm_out, float eps, float weight_bias) {
  if (const int status = wbk::begin(*context, WBK_ALL_REDUCE_ADD_RMS_NORM, tokens, x, eps, weight_bias)) return status;
  context->call.residual = residual;
  context->call.weight = weight;
  context->call.residual_out = residual_out;
  context->call.norm_out = norm_out;
  return wbk::finish_or_pause(*context);
}

int wbk_resume(wbk_context* context) {
  if (!context->in_call || context->broken) return WBK_INVALID;
  return wbk::finish_or_pause(*context);
}

void wbk_leave(wbk_context* context, uint32_t cause, uint64_t mask) {
  wbk::leave(*context, wbk::found_here(*context, cause, mask));
  context->busy.store(false, std::memory_order_release);
}

void wbk_failure_of(const wbk_context* context, wbk_failure* out) { *out = context->failure; }

uint64_t wbk_missing(wbk_context* context) {
  if (!context->in_call || context->wait_started == 0) return 0;
  return wbk::missing_now(*context, static_cast<wbk::Kind>(context->wait_kind), context->wait_target);
}

}  // extern "C"
