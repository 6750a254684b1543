// Compile-time shape of one fused GEMM, and where its pieces live. Which configuration serves which call: tuning.py.
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "schedule.cuh"

namespace h3 {

constexpr int kTileM = 128;
constexpr int kStageK = 64;
constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;
constexpr int kMathWarps = kMathThreads / 32;
constexpr int kMaxLevels = 3;
constexpr int kSharedBlock = 232448;  // shared memory of a block on sm_90 (CUDA programming guide, compute capabilities)

struct GemmParams {
  CUtensorMap map_a, map_b;
  Schedule schedule;
  int m, n;
  int unit_stages;  // 64-deep stages of one unit's chain
  int levels;       // log2(units)
  void* y;
  int64_t y_stride;
  int y_is_float;
  const void* bias;  // null, or one per weight row, in bf16 or fp32
  int bias_is_float;
  float* kept_scratch;  // [CTAs][global slots][256 threads][4]
  float* node_scratch;  // [nodes][cluster CTAs][slots][256 threads][4]
  uint32_t* flags;      // [clusters][cluster CTAs][math warps], zero between launches
};

// What one leaf of the tree is. kChain: the whole K, no tree. kUnit: one unit. kPair: two units, whose chains use two
// sets of accumulators, so that one is added while the tensor cores already work on the next.
enum class Leaf { kChain, kUnit, kPair };

// kSwap: the operands trade places (A holds the weight rows, B the tokens). H3's weights are whole tiles of 128 rows;
// tokens come in any number, of which kTileN wide tiles waste less. A product does not depend on the order of its two
// factors, so bits stay.
// kHalves = 2: two CTAs of a cluster take half of the units each (exchange_sm90.cuh).
template <int kTileN_, Leaf kLeaf_, int kCluster_, int kTransA_, int kTransB_, int kStages_, bool kSwap_ = false,
          int kHalves_ = 1>
struct Config {
  static constexpr int kTileN = kTileN_;
  static constexpr Leaf kLeaf = kLeaf_;
  static constexpr int kCluster = kCluster_;  // CTAs along M that share one B tile by multicast
  static constexpr int kTransA = kTransA_, kTransB = kTransB_;
  static constexpr int kStages = kStages_;
  static constexpr bool kSwap = kSwap_;
  static constexpr int kHalves = kHalves_;
  static constexpr int kClusterCtas = kCluster * kHalves;

  static constexpr int kAccumulators = kTileN / 2;  // a thread's share of 64 x kTileN
  static constexpr int kSlots = kAccumulators / 4;  // its 16-byte vectors
  static constexpr int kSlotBytes = kMathThreads * 16;
  static constexpr int kFragmentBytes = kSlots * kSlotBytes;
  static constexpr int kBytesA = kTileM * kStageK * 2, kBytesB = kTileN * kStageK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  // Nodes that wait for their right sibling, level by level, fill registers first, then shared memory, then global
  // scratch (which stays in L2). Each thread keeps its own share: no barrier guards it.
  static constexpr int kFirstLevel = kLeaf == Leaf::kPair ? 1 : 0;
  static constexpr int kLeafUnits = kLeaf == Leaf::kPair ? 2 : 1;
  static constexpr int kKeptSlots = kLeaf == Leaf::kChain ? 0 : (kMaxLevels - kFirstLevel) * kSlots;
  static constexpr int kRegisterBudget = 204;  // of 240; the rest addresses, counts and stages epilogue words
  static constexpr int kRegistersLeft = kRegisterBudget - kAccumulators * kLeafUnits;
  static constexpr int kRegisterSlots = min_of(kKeptSlots, kRegistersLeft > 0 ? kRegistersLeft / 4 : 0);
  static constexpr int kExchangeBytes = kHalves == 1 ? 0 : kFragmentBytes / 2;
  static constexpr int kBarrierBytes = (2 * kStages + 2) * 8;  // two a stage; two for the exchange, or one for returns
  static constexpr int kFixedBytes = 1024 + kStages * kStageBytes + kBarrierBytes + kExchangeBytes;
  static constexpr int kSharedLeft = kSharedBlock - kFixedBytes;
  static constexpr int kSharedSlots = min_of(kKeptSlots - kRegisterSlots, kSharedLeft / kSlotBytes);
  static constexpr int kGlobalSlots = kKeptSlots - kRegisterSlots - kSharedSlots;
  static constexpr int kSharedBytes = kFixedBytes + kSharedSlots * kSlotBytes;

  // Whole tiles of 8 units: what of the last level lies in scratch (its far slots) is written a few slots a stage, while
  // the next unit is multiplied, and returns through stages of the ring.
  static constexpr int kFarSlots = kLeaf == Leaf::kPair ? min_of(kSlots, kGlobalSlots) : 0;
  static constexpr int kStageSlots = kStageBytes / kSlotBytes;
  static constexpr int kReturnStages = (kFarSlots + kStageSlots - 1) / kStageSlots;
  static constexpr int kAhead = 2;  // stages of the next tile that are multiplied while a finished one is stored

  static_assert(kHalves == 1 || (kHalves == 2 && kCluster == 1 && kLeaf == Leaf::kUnit), "halves are two sets of units");
  static_assert(kSharedLeft >= 0, "the stages do not fit");
  static_assert(kAhead < kStages, "stages begun ahead are released when one more has begun");
  static_assert(kTransB == 0 || kTileN % 64 == 0, "an N-contiguous B is copied in blocks of 64 columns");
};

}  // namespace h3
