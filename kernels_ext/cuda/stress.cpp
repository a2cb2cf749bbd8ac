// Stress of the push protocols without a GPU: ranks as groups of threads on the same table of slots, slowed down at random places.
//
// A twin of push.cuh and two_shot.cuh on the host: a thread is a lane, a barrier among a rank's lanes is the end of its grid, slots are
// atomic words, and calls of both algorithms and any size mix on one workspace. Checked are every result, that no push ever meets a slot
// that is still in use, and that the early look at both halves finds the other half at rest, whatever the delays. The kernel looks early
// with two ranks only; here every push call does, because the argument does not depend on their number.
//
// Built with -fsanitize=thread by tests/kernels_cuda/test_stress.py. Usage: stress RANKS LANES CALLS SEED.
// Exit 0: all right. Else 1 and one line. Each of these must fail: -DWBK_ONE_HALF leaves out the second half, -DWBK_NO_SENTINEL the
// write-back, -DWBK_OLD_LOOK takes for a look what the last push call but one, in the same half, has seen.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "wbk/cuda_layout.h"

namespace {

constexpr uint64_t kHole = ~0ull;
constexpr uint32_t kMostTokens = 40, kVectors = 3;

#ifdef WBK_ONE_HALF
uint32_t half_of(uint32_t) { return 0; }
#else
uint32_t half_of(uint32_t call) { return call % wbk::kHalves; }
#endif

[[noreturn]] void fail(uint32_t rank, uint32_t call, const std::string &what) {
  std::printf("rank %u, call %u: %s\n", rank, call, what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

struct Group {
  wbk::Layout layout;
  uint32_t lanes, calls;
  unsigned seed;
  std::vector<std::vector<std::atomic<uint64_t>>> slots; // by receiver
  std::vector<std::vector<uint64_t>> sums;               // by rank: [row][vector]
  std::vector<pthread_barrier_t> grids;                  // by rank: the lanes of its grid

  Group(uint32_t ranks, uint32_t lanes, uint32_t calls, unsigned seed)
      : layout{ranks, std::max(kMostTokens, 2 * ((kMostTokens + ranks - 1) / ranks)), kVectors}, lanes(lanes), calls(calls), seed(seed), grids(ranks) {
    for (uint32_t r = 0; r < ranks; ++r) {
      slots.emplace_back(layout.slot_bytes() / wbk::kVectorBytes);
      for (auto &word : slots[r]) word.store(kHole, std::memory_order_relaxed);
      sums.emplace_back(kMostTokens * kVectors);
      pthread_barrier_init(&grids[r], nullptr, lanes);
    }
  }
};

struct Plan { // of one call; every lane of every rank draws the same
  uint32_t tokens;
  bool two_shot;
};

Plan draw(std::minstd_rand &dice) {
  static const uint32_t sizes[] = {1, 2, 3, 7, 17, kMostTokens};
  return {sizes[dice() % 6], dice() % 2 == 0};
}

// Tells apart calls, rows, vectors and, in a sum, how often each rank is in it.
uint64_t value_of(uint32_t rank, uint32_t call, uint32_t row, uint32_t vector) {
  return (uint64_t(1) << (3 * rank)) * (1 + (call + row + vector) % 3);
}

struct Look { // what the slots of a lane's first row held before the first push
  uint64_t words[wbk::kMaxRanks][kVectors];

  Look() { std::fill_n(&words[0][0], wbk::kMaxRanks * kVectors, kHole); }
};

class Lane {
public:
  Lane(Group &g, uint32_t rank, uint32_t lane) : g(g), rank(rank), lane(lane), ranks(g.layout.ranks), delays(g.seed * 977 + rank * 31 + lane) {}

  void run() {
    std::minstd_rand shared(g.seed);
    for (call = 0; call < g.calls; ++call) {
      const Plan plan = draw(shared);
      plan.two_shot ? two_shot(plan.tokens) : push(plan.tokens);
      pthread_barrier_wait(&g.grids[rank]); // the end of the grid
      check(plan);
      pthread_barrier_wait(&g.grids[rank]); // results are read before the next call writes them
    }
  }

private:
  Group &g;
  const uint32_t rank, lane, ranks;
  uint32_t call = 0;
  std::minstd_rand delays;
#ifdef WBK_OLD_LOOK
  Look old[wbk::kHalves];
#endif

  void delay() {
    const uint32_t dice = delays() % 64;
    if (dice < 2) usleep(delays() % 300);
    else if (dice < 10) sched_yield();
  }

  std::atomic<uint64_t> &slot(uint32_t sender, uint32_t receiver, uint32_t row, uint32_t vector) {
    return slot(half_of(call), sender, receiver, row, vector);
  }
  std::atomic<uint64_t> &slot(uint32_t half, uint32_t sender, uint32_t receiver, uint32_t row, uint32_t vector) {
    const uint64_t plane = g.layout.plane(half, wbk::Layout::peer_place(sender, receiver), ranks - 1);
    return g.slots[receiver][plane + uint64_t(row) * kVectors + vector];
  }

  void send(uint32_t to, uint32_t row, uint32_t vector, uint64_t value) {
    delay();
    if (slot(rank, to, row, vector).exchange(value, std::memory_order_relaxed) != kHole)
      fail(rank, call, "pushed row " + std::to_string(row) + " to rank " + std::to_string(to) + " into a slot in use");
  }

  uint64_t receive(uint32_t from, uint32_t row, uint32_t vector, uint64_t value = kHole) { // value: what a look has given
    auto &word = slot(from, rank, row, vector);
    while (value == kHole && (value = word.load(std::memory_order_relaxed)) == kHole) sched_yield();
    delay();
#ifndef WBK_NO_SENTINEL
    word.store(kHole, std::memory_order_relaxed);
#endif
    return value;
  }

  uint64_t &sum(uint32_t row, uint32_t vector) { return g.sums[rank][row * kVectors + vector]; }

  Look look() {
    Look seen[wbk::kHalves];
    for (uint32_t half = 0; half < wbk::kHalves; ++half)
      for (uint32_t r = 0; r < ranks; ++r)
        for (uint32_t v = 0; v < kVectors && r != rank; ++v) {
          delay();
          seen[half].words[r][v] = slot(half, r, rank, lane, v).load(std::memory_order_relaxed);
          if (half != half_of(call) && seen[half].words[r][v] != kHole)
            fail(rank, call, "found a slot in use in the other half, row " + std::to_string(lane));
        }
#ifdef WBK_OLD_LOOK
    std::swap(seen[half_of(call)], old[half_of(call)]);
#endif
    return seen[half_of(call)];
  }

  void push(uint32_t tokens) {
    auto send_row = [&](uint32_t row) {
      for (uint32_t v = 0; v < kVectors; ++v)
        for (uint32_t r = 0; r < ranks; ++r)
          if (r != rank) send(r, row, v, value_of(rank, call, row, v));
    };
    if (lane >= tokens) return;
    const Look first = look();
    send_row(lane);
    for (uint32_t row = lane; row < tokens; row += g.lanes) {
      for (uint32_t v = 0; v < kVectors; ++v) {
        sum(row, v) = value_of(rank, call, row, v);
        for (uint32_t r = 0; r < ranks; ++r)
          if (r != rank) sum(row, v) += receive(r, row, v, row == lane ? first.words[r][v] : kHole);
      }
      if (row + g.lanes < tokens) send_row(row + g.lanes);
    }
  }

  void two_shot(uint32_t tokens) {
    const uint32_t groups = g.layout.groups(tokens);
    auto scatter = [&](uint32_t group) {
      for (uint32_t v = 0; v < kVectors; ++v)
        for (uint32_t r = 0; r < ranks; ++r)
          if (r != rank && group * ranks + r < tokens) send(r, wbk::Layout::part_row(group), v, value_of(rank, call, group * ranks + r, v));
    };
    if (lane < groups) scatter(lane);
    for (uint32_t group = lane; group < groups; group += g.lanes) {
      const uint32_t own = group * ranks + rank, finished = wbk::Layout::finished_row(group, groups);
      for (uint32_t v = 0; v < kVectors && own < tokens; ++v) {
        sum(own, v) = value_of(rank, call, own, v);
        for (uint32_t r = 0; r < ranks; ++r)
          if (r != rank) sum(own, v) += receive(r, wbk::Layout::part_row(group), v);
        for (uint32_t r = 0; r < ranks; ++r)
          if (r != rank) send(r, finished, v, sum(own, v));
      }
      if (group + g.lanes < groups) scatter(group + g.lanes);
      for (uint32_t i = 1; i < ranks; ++i) {
        const uint32_t owner = (rank + i) % ranks, row = group * ranks + owner;
        for (uint32_t v = 0; v < kVectors && row < tokens; ++v) sum(row, v) = receive(owner, finished, v);
      }
    }
  }

  void check(const Plan &plan) {
    for (uint32_t row = lane; row < plan.tokens; row += g.lanes)
      for (uint32_t v = 0; v < kVectors; ++v) {
        uint64_t expected = 0;
        for (uint32_t r = 0; r < ranks; ++r) expected += value_of(r, call, row, v);
        if (sum(row, v) != expected) fail(rank, call, "wrong sum in row " + std::to_string(row));
      }
  }
};

} // namespace

int main(int argc, char **argv) {
  if (argc != 5) {
    std::printf("usage: stress RANKS(2..16) LANES CALLS SEED\n");
    return 2;
  }
  const uint32_t ranks = std::atoi(argv[1]), lanes = std::atoi(argv[2]), calls = std::atoi(argv[3]);
  Group group(ranks, lanes, calls, std::atoi(argv[4]));
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    for (uint32_t lane = 0; lane < lanes; ++lane) threads.emplace_back([&, rank, lane] { Lane(group, rank, lane).run(); });
  for (auto &thread : threads) thread.join();
  for (uint32_t rank = 0; rank < ranks; ++rank)
    for (auto &word : group.slots[rank])
      if (word.load() != kHole) fail(rank, calls, "a slot is in use after the last call");
  std::printf("%u ranks, %u lanes, %u calls: all right\n", ranks, lanes, calls);
  return 0;
}
