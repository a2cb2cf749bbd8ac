// Puts a call on a stream: picks the kernel, lays the lanes on the device, checks that they are resident.
#pragma once
#include <mutex>
#include <vector>

#include "push.cuh"
#include "two_shot.cuh"

namespace wbk {

constexpr int kBadArguments = -1, kTooManyLanes = -2, kBadChoice = -3;

inline uint32_t round_up(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

// Rows (two-shot: groups) are dealt evenly: with at most `most` lanes some lane carries ceil(rows/most); no more lanes than that needs.
inline uint32_t lanes_for(uint32_t rows, uint32_t most) {
  if (rows == 0 || most == 0) return 0;
  const uint32_t each = (rows + most - 1) / most;
  return (rows + each - 1) / each;
}

template <class T, class Ranks> struct Push {
  const WbkCall &c;
  cudaStream_t stream;
  uint32_t *resident; // where to put the answer; null: launch

  int run() const {
    const bool norm = c.op == WBK_OP_ALL_REDUCE_ADD_RMS_NORM;
    return norm ? with_ranks<AddNorm>() : with_ranks<SumOnly>();
  }

  template <class Epilogue> int with_ranks() const {
    if constexpr (!Ranks::kTwo)
      if (c.algorithm == WBK_ALGORITHM_TWO_SHOT_PUSH) return go(two_shot_kernel<T, Epilogue, Ranks>, layout().groups(c.tokens));
    return go(push_kernel<T, Epilogue, Ranks>, c.tokens);
  }

  Layout layout() const { return {c.ranks, c.plane_rows, c.hidden / Numbers<T>::kCount}; }

  int go(void (*kernel)(PushArgs<Ranks>), uint32_t rows) const {
    const uint32_t vectors = layout().vectors, threads = round_up((vectors + c.cluster - 1) / c.cluster, 32);
    const uint32_t copies = c.virtual_ranks ? c.virtual_ranks : 1;
    if (threads > 1024 || threads / 32 * c.cluster > kMaxParts) return kBadChoice;

    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = attributes;
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {c.cluster, 1, 1};
    config.numAttrs += 1;
    config.gridDim = dim3(c.cluster);

    int most = 0;
    if (int code = resident_clusters(reinterpret_cast<const void *>(kernel), config, &most)) return code;
    most /= copies;
    if (resident) return *resident = most, 0;

    const uint32_t allowed = c.max_lanes ? c.max_lanes : uint32_t(most);
    if (most == 0 || allowed > uint32_t(most) || allowed * c.cluster >= kCall) return kTooManyLanes;
    const uint32_t lanes = lanes_for(rows, allowed);
    if (lanes == 0) return 0;
    config.gridDim = dim3(c.cluster, lanes, copies);
    if (c.pdl && !c.virtual_ranks) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
      config.numAttrs += 1;
    }
    if (c.virtual_ranks) { // one rank's blocks wait for another's: all must be resident, or none may start
      attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[config.numAttrs].val.cooperative = 1;
      config.numAttrs += 1;
    }

    PushArgs<Ranks> args{};
    for (uint32_t i = 0; i < copies; ++i) args.rank[i] = c.rank[i];
    for (uint32_t r = 0; r < c.ranks; ++r) args.slots[r] = static_cast<Vector *>(c.slots[r]);
    args.weight = static_cast<const Vector *>(c.weight);
    args.timeout_ns = c.timeout_ns;
    args.layout = layout();
    args.first_rank = c.first_rank, args.tokens = c.tokens, args.trigger = c.trigger;
    args.rows = (rows + lanes - 1) / lanes;
    args.round_twice = c.round_twice, args.group = c.group, args.op = c.op;
    args.inverse_hidden = 1.f / float(c.hidden), args.eps = c.eps, args.weight_bias = c.weight_bias;
    return cudaLaunchKernelEx(&config, kernel, args);
  }

  static int resident_clusters(const void *kernel, const cudaLaunchConfig_t &config, int *most) {
    struct Entry {
      const void *kernel;
      uint32_t threads, cluster;
      int device, clusters;
    };
    static std::mutex guard;
    static std::vector<Entry> known;
    int device = 0;
    if (int code = cudaGetDevice(&device)) return code;
    const uint32_t cluster = config.gridDim.x;
    std::lock_guard<std::mutex> hold(guard);
    for (const Entry &e : known)
      if (e.kernel == kernel && e.threads == config.blockDim.x && e.cluster == cluster && e.device == device) return *most = e.clusters, 0;
    if (cluster > 8)
      if (int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return code;
    int clusters = 0;
    if (int code = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)) return code;
    known.push_back({kernel, config.blockDim.x, cluster, device, clusters});
    return *most = clusters, 0;
  }
};

template <class T> int push_of(const WbkCall &c, cudaStream_t stream, uint32_t *resident) {
  if (c.ranks == 2 && c.algorithm == WBK_ALGORITHM_PUSH)
    return c.virtual_ranks ? Push<T, BothOfTwo>{c, stream, resident}.run() : Push<T, OneOfTwo>{c, stream, resident}.run();
  return c.virtual_ranks ? Push<T, AllOfMany>{c, stream, resident}.run() : Push<T, OneOfMany>{c, stream, resident}.run();
}

} // namespace wbk
