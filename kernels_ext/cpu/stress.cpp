// Stress: N ranks as N threads of one process through the real kernel, slowed down at random places, every sum checked.
//
// Built with -fsanitize=thread by tests/backends/test_stress.py; useful without it too. Usage: stress RANKS CALLS SEED.
// Exit 0: all sums right, and every rank left a broken group with a failure rather than a hang. Else 1 and one line.
#include <cstdint>
#include <random>

namespace {
thread_local std::minstd_rand delays;
void delay(int place);
}  // namespace
#define WBK_DELAY(place) delay(place)

#include "shm.cpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t kHidden = 3000;  // 12000 bytes a row in fp32: five rows a slot, and a tail in every row
constexpr uint64_t kMostTokens = 96;  // twenty pieces, more than there are slots

void delay(int place) {
  const uint32_t dice = delays() % 64;
  if (dice < 2) usleep(delays() % 300);
  else if (dice < 8) sched_yield();
  (void)place;
}

struct Plan {  // of one call; every rank draws the same
  uint64_t tokens;
  bool fused;
  uint32_t in_place;  // bit g: rank g passes memory of its arena
};

Plan draw(std::minstd_rand& dice) {
  static const uint64_t sizes[] = {0, 1, 2, 7, 33, kMostTokens};
  return {sizes[dice() % 6], dice() % 2 == 0, static_cast<uint32_t>(dice())};
}

[[noreturn]] void fail(uint32_t rank, int call, const std::string& what) {
  std::printf("rank %u, call %d: %s\n", rank, call, what.c_str());
  std::_Exit(1);
}

float value_of(uint32_t rank, int call) { return static_cast<float>((1u << rank) + static_cast<unsigned>(call) % 7); }

int finish(wbk_context* context, int status) {
  while (status == WBK_AGAIN) status = wbk_resume(context);
  return status;
}

void rank_main(uint32_t rank, uint32_t ranks, int calls, unsigned seed, const std::vector<char*>* segments) {
  delays.seed(seed * 31 + rank);
  wbk_config config = {};
  config.abi_version = WBK_ABI_VERSION;
  config.num_ranks = ranks;
  config.group_rank = rank;
  config.dtype = WBK_FP32;
  config.hidden = kHidden;
  config.num_spins = 20;
  config.num_yields = 4;
  config.arena_bytes = kMostTokens * kHidden * 4;
  config.timeout_ns = 60'000'000'000;
  config.slice_ns = 5'000'000;
  for (uint32_t g = 0; g < ranks; ++g) config.segments[g] = (*segments)[g];
  wbk_context* context = wbk_open(&config);
  if (context == nullptr) fail(rank, 0, "the kernel refused the configuration");

  std::vector<float> plain(kMostTokens * kHidden), sum(plain.size()), norm(plain.size()), weight(kHidden, 1.0f);
  const std::vector<float> residual(plain.size(), 5.0f);
  float* arena = reinterpret_cast<float*>((*segments)[rank] + context->layout.arena_offset);
  std::minstd_rand shared(seed);
  for (int call = 0; call < calls; ++call) {
    const Plan plan = draw(shared);
    const uint64_t count = plan.tokens * kHidden;
    float* x = plan.in_place >> rank & 1 ? arena : plain.data();
    std::fill(x, x + count, value_of(rank, call));
    int status;
    if (plan.fused)
      status = wbk_all_reduce_add_rms_norm(context, plan.tokens, x, residual.data(), weight.data(), sum.data(),
                                           norm.data(), 1e-6f, 0.0f);
    else
      status = wbk_all_reduce(context, plan.tokens, x, sum.data());
    if (finish(context, status) != WBK_OK) fail(rank, call, "the call failed");
    std::fill(x, x + count, -1.0f);  // whoever still reads would see this
    float expected = plan.fused ? 5.0f : 0.0f;
    for (uint32_t g = 0; g < ranks; ++g) expected += value_of(g, call);
    for (uint64_t i = 0; i < count; ++i)
      if (sum[i] != expected)
        fail(rank, call, "element " + std::to_string(i) + " is " + std::to_string(sum[i]) + ", expected " +
                             std::to_string(expected));
  }

  // The last rank leaves; all others must follow, with its cause.
  if (rank == ranks - 1) {
    usleep(2000);
    wbk_leave(context, WBK_INTERRUPTED, 0);
  } else {
    wbk_failure failure;
    if (finish(context, wbk_all_reduce(context, kMostTokens, plain.data(), sum.data())) != WBK_FAILED)
      fail(rank, calls, "a rank left and the call did not fail");
    wbk_failure_of(context, &failure);
    if (failure.cause != WBK_INTERRUPTED || failure.reporter != ranks - 1) fail(rank, calls, "wrong cause or reporter");
  }
  wbk_close(context);
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t ranks = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 4;
  const int calls = argc > 2 ? std::atoi(argv[2]) : 100;
  const unsigned seed = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1;
  wbk_layout layout;
  if (ranks < 2 || ranks > WBK_MAX_RANKS || !wbk_layout_of(kHidden, WBK_FP32, kMostTokens * kHidden * 4, &layout)) {
    std::printf("usage: stress RANKS(2..16) CALLS SEED\n");
    return 2;
  }
  std::vector<char*> segments;
  for (uint32_t g = 0; g < ranks; ++g) {
    segments.push_back(static_cast<char*>(std::aligned_alloc(4096, layout.segment_bytes)));
    std::memset(segments[g], 0, layout.segment_bytes);
    wbk_format_segment(segments[g], &layout, kHidden, WBK_FP32);
  }
  std::vector<std::thread> threads;
  for (uint32_t g = 0; g < ranks; ++g) threads.emplace_back(rank_main, g, ranks, calls, seed, &segments);
  for (std::thread& thread : threads) thread.join();
  for (char* segment : segments) std::free(segment);
  std::printf("%u ranks, %d calls, seed %u: all right\n", ranks, calls, seed);
  return 0;
}
