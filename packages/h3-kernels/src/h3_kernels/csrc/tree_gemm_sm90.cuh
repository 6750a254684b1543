// y[m, n] = round(tree over units of chain over k of a[m, k] b[n, k]  (+ bias[n])), for sm_90a.
//
// One CTA computes 128 x kTileN outputs. Warpgroups 0 and 1 (math) own 64 rows each; one thread of warpgroup 2 (copy)
// feeds them through a ring of shared-memory stages, 64 k values deep:
//
//   copy: wait empty[s] -> expect bytes on full[s] -> copy A and B boxes
//   math: wait full[s] -> 4 wgmma steps -> wait for the previous stage's steps -> arrive on that stage's empty
//
// A unit's chain starts with an instruction that ignores the accumulator, so nothing is cleared. When a unit ends, the
// accumulator is carried into the tree like a binary counter: `carry` adds finished left siblings, and keeps what still
// waits for its right sibling in the level's home. The two math warpgroups drift apart by up to the ring's depth, so
// one carries while the other keeps the tensor cores busy.
//
// Homes, by measurement (docs/measured-facts.md): level 0 in registers; level 1 in registers up to 128 columns, else in
// shared memory; level 2 in shared memory up to 128 columns, else in global scratch (L2), where it is written and read
// once a tile. A home is private to a thread, in the layout of its accumulator: no barrier guards it.
#pragma once
#include <cuda_bf16.h>

#include "ptx_sm90.cuh"
#include "schedule.cuh"
#include "wgmma_sm90.cuh"

namespace h3 {

constexpr int kTileM = 128;
constexpr int kStageK = 64;
constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;
constexpr int kMathWarps = kMathThreads / 32;
constexpr int kMaxLevels = 3;
constexpr int kSharedLimit = 232448 - 1024;  // a block's limit, less room to align the ring to 1024 bytes

struct GemmParams {
  CUtensorMap map_a, map_b;
  Schedule schedule;
  int m, n;
  int unit_stages;  // 64-deep stages of one unit's chain
  int levels;       // log2(units)
  void* y;
  int64_t y_stride;
  int y_is_float;
  const void* bias;  // null, or [n] in bf16 or fp32
  int bias_is_float;
  float* level_scratch;  // [CTAs][128 * kTileN], levels whose home is global
  float* node_scratch;   // [nodes][kCluster][128 * kTileN]
  uint32_t* flags;       // [clusters][kCluster][math warps], zero between launches
};

enum class Home { kRegisters, kShared, kGlobal };

template <int kTileN_, bool kTree_, int kCluster_, int kTransA_, int kTransB_>
struct Config {
  static constexpr int kTileN = kTileN_;
  static constexpr bool kTree = kTree_;
  static constexpr int kCluster = kCluster_;  // CTAs along M that share one B tile by multicast
  static constexpr int kTransA = kTransA_, kTransB = kTransB_;
  static constexpr bool kWide = kTileN > 128;
  static constexpr int kAccumulators = kTileN / 2;  // a thread's share of 64 x kTileN
  static constexpr int kBytesA = kTileM * kStageK * 2, kBytesB = kTileN * kStageK * 2;
  static constexpr int kFragmentBytes = kTileM * kTileN * 4;
  static constexpr int kLevelBytes = kTree ? kFragmentBytes : 0;  // exactly one level lives in shared memory
  static constexpr int kStagesFit = (kSharedLimit - kLevelBytes - 1024) / (kBytesA + kBytesB);
  static constexpr int kStages = kStagesFit < 8 ? kStagesFit : 8;
  static constexpr int kSharedBytes = 1024 + kStages * (kBytesA + kBytesB) + kLevelBytes + 2 * 8 * kStages;
  static constexpr int kRegisterLevels = kTree ? (kWide ? 1 : 2) : 0;
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  static_assert(kTransB == 0 || kTileN % 64 == 0, "an N-contiguous B is copied in blocks of 64 columns");

  static H3_BOTH constexpr Home home(int level) {
    if (level == 0) return Home::kRegisters;
    if (level == 1) return kWide ? Home::kShared : Home::kRegisters;
    return kWide ? Home::kGlobal : Home::kShared;
  }
};

// A warp's place in the CTA's fragment buffers: vector i of thread t lies at [i][t], so a warp reads 512 bytes in row.
template <class C>
struct Fragment {
  static __device__ __forceinline__ void store(float* base, const float (&v)[C::kAccumulators]) {
    float4* out = reinterpret_cast<float4*>(base) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i)
      out[i * kMathThreads] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }

  // v = left + v: the left operand is the earlier subtree.
  static __device__ __forceinline__ void add(const float* base, float (&v)[C::kAccumulators]) {
    const float4* in = reinterpret_cast<const float4*>(base) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i) {
      const float4 left = in[i * kMathThreads];
      v[4 * i] = __fadd_rn(left.x, v[4 * i]);
      v[4 * i + 1] = __fadd_rn(left.y, v[4 * i + 1]);
      v[4 * i + 2] = __fadd_rn(left.z, v[4 * i + 2]);
      v[4 * i + 3] = __fadd_rn(left.w, v[4 * i + 3]);
    }
  }

  static __device__ __forceinline__ void copy(const float* from, float* to) {
#pragma unroll 4
    for (int i = threadIdx.x; i < C::kAccumulators / 4 * kMathThreads; i += kMathThreads)
      reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
  }

  // Another CTA wrote these: read through L2.
  static __device__ __forceinline__ void load(const float* base, float (&v)[C::kAccumulators]) {
    const float4* in = reinterpret_cast<const float4*>(base) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i) {
      const float4 x = __ldcg(in + i * kMathThreads);
      v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
    }
  }
};

// The copy thread: every stage of every piece of this cluster, in the order the math warps use them.
template <class C>
__device__ __forceinline__ void copy_stages(const GemmParams& p, int cluster, uint32_t rank, uint32_t ring,
                                            uint32_t full, uint32_t empty) {
  int stage = 0;
  uint32_t phase = 0;
  Cursor cursor(p.schedule, cluster);
  Piece piece;
  while (cursor.next(p.schedule, piece)) {
    int tile_m, tile_n;
    tile_coordinates(p.schedule, piece.tile, tile_m, tile_n);
    const int m = (tile_m * C::kCluster + static_cast<int>(rank)) * kTileM;
    const int n = tile_n * C::kTileN;
    const int stages = (piece.last - piece.first) * p.unit_stages;
    int k = piece.first * p.unit_stages * kStageK;
    for (int i = 0; i < stages; ++i, k += kStageK) {
      ptx::barrier_wait(empty + 8 * stage, phase ^ 1);
      const uint32_t a = ring + stage * (C::kBytesA + C::kBytesB), b = a + C::kBytesA, barrier = full + 8 * stage;
      ptx::barrier_expect(barrier, C::kBytesA + C::kBytesB);
      if constexpr (C::kTransA) {
        ptx::copy_box(&p.map_a, barrier, a, m, k);
        ptx::copy_box(&p.map_a, barrier, a + C::kBytesA / 2, m + 64, k);
      } else {
        ptx::copy_box(&p.map_a, barrier, a, k, m);
      }
      // Each CTA of the cluster fetches its share of B and hands it to all.
      constexpr uint16_t kAll = (1 << C::kCluster) - 1;
      if constexpr (C::kTransB) {
        constexpr int kRows = kStageK / C::kCluster;
#pragma unroll
        for (int block = 0; block < C::kTileN / 64; ++block) {
          const uint32_t target = b + block * (64 * kStageK * 2) + rank * (kRows * 128);
          if constexpr (C::kCluster == 1)
            ptx::copy_box(&p.map_b, barrier, target, n + block * 64, k);
          else
            ptx::copy_box_multicast(&p.map_b, barrier, target, n + block * 64, k + static_cast<int>(rank) * kRows, kAll);
        }
      } else {
        constexpr int kRows = C::kTileN / C::kCluster;
        const uint32_t target = b + rank * (kRows * 128);
        if constexpr (C::kCluster == 1)
          ptx::copy_box(&p.map_b, barrier, target, k, n);
        else
          ptx::copy_box_multicast(&p.map_b, barrier, target, k, n + static_cast<int>(rank) * kRows, kAll);
      }
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
}

// The math warps' end of the ring.
template <class C>
struct Ring {
  uint32_t ring, full, empty;
  int stage;
  uint32_t phase;

  // Every math warp tells every CTA whose copies write this stage here.
  __device__ __forceinline__ void release(int finished) {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (C::kCluster == 1) {
      if (lane == 0) ptx::barrier_arrive(empty + 8 * finished);
    } else {
      if (lane < C::kCluster) ptx::barrier_arrive_cluster(empty + 8 * finished, lane);
    }
  }

  // One unit: a chain of 16-wide steps from zero, k ascending.
  __device__ __forceinline__ void chain(float (&d)[C::kAccumulators], int stages, int group) {
    using Step = wgmma::Step<C::kTileN, C::kTransA, C::kTransB>;
    constexpr uint32_t kBlock = 64 * kStageK * 2;  // leading offset of a transposed operand: one 64-wide block
    constexpr int kStepA = (C::kTransA ? 16 * 128 : 32) >> 4, kStepB = (C::kTransB ? 16 * 128 : 32) >> 4;
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) d[i] = 0.0f;
    wgmma::pin(d);
    int previous = -1;
    for (int i = 0; i < stages; ++i) {
      ptx::barrier_wait(full + 8 * stage, phase);
      const uint32_t base = ring + stage * (C::kBytesA + C::kBytesB);
      const uint64_t a = wgmma::descriptor(base + group * (64 * kStageK * 2), C::kTransA ? kBlock : 16, 1024);
      const uint64_t b = wgmma::descriptor(base + C::kBytesA, C::kTransB ? kBlock : 16, 1024);
      wgmma::arrive();
#pragma unroll
      for (int step = 0; step < kStageK / 16; ++step)
        Step::run(d, a + step * kStepA, b + step * kStepB);
      wgmma::commit();
      wgmma::wait<1>();
      if (previous >= 0) release(previous);
      previous = stage;
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
    wgmma::wait<0>();
    wgmma::pin(d);
    release(previous);
  }
};

// Writes a thread's share of the tile. In wgmma's layout value 4j + 2h + c is row g + 8h, column 8j + 2q + c of the
// warp's 16 rows (g = lane / 4, q = lane % 4). For bf16 the four lanes of a quad trade 4-byte words until each holds
// 8 neighbouring columns, so that stores are 16 bytes wide.
template <class C>
struct Epilogue {
  static __device__ __forceinline__ void add_bias(const GemmParams& p, float (&d)[C::kAccumulators], int column) {
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = column + 8 * j + c;
        if (n >= p.n) continue;
        const float bias = p.bias_is_float ? static_cast<const float*>(p.bias)[n]
                                           : __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[n]);
        d[4 * j + c] = __fadd_rn(d[4 * j + c], bias);
        d[4 * j + 2 + c] = __fadd_rn(d[4 * j + 2 + c], bias);
      }
    }
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  static __device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) {
    const uint32_t a = __shfl_xor_sync(~0u, q & 1 ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, q & 1 ? w[2] : w[3], 1);
    if (q & 1) w[0] = a, w[2] = b;
    else w[1] = a, w[3] = b;
    const uint32_t c = __shfl_xor_sync(~0u, q & 2 ? w[0] : w[2], 2), e = __shfl_xor_sync(~0u, q & 2 ? w[1] : w[3], 2);
    if (q & 2) w[0] = c, w[1] = e;
    else w[2] = c, w[3] = e;
  }

  static __device__ __forceinline__ void store(const GemmParams& p, float (&d)[C::kAccumulators], int row0, int n0) {
    const int lane = threadIdx.x % 32, q = lane % 4, row = row0 + lane / 4;
    if (p.bias != nullptr) add_bias(p, d, n0 + 2 * q);
    if (p.y_is_float) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= p.m) continue;
        float* y = static_cast<float*>(p.y) + (row + 8 * h) * p.y_stride + n0 + 2 * q;
#pragma unroll
        for (int j = 0; j < C::kTileN / 8; ++j)
          if (n0 + 8 * j < p.n) *reinterpret_cast<float2*>(y + 8 * j) = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
      }
      return;
    }
    constexpr int kBlocks = C::kTileN / 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = row + 8 * h < p.m;
      __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + static_cast<int64_t>(row + 8 * h) * p.y_stride + n0;
#pragma unroll
      for (int j = 0; j < kBlocks / 4 * 4; j += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack(d[4 * (j + i) + 2 * h], d[4 * (j + i) + 2 * h + 1]);
        transpose_quad(w, q);
        if (inside && n0 + 8 * (j + q) < p.n)
          *reinterpret_cast<uint4*>(y + 8 * (j + q)) = make_uint4(w[0], w[1], w[2], w[3]);
      }
#pragma unroll
      for (int j = kBlocks / 4 * 4; j < kBlocks; ++j)
        if (inside && n0 + 8 * j < p.n)
          *reinterpret_cast<uint32_t*>(y + 8 * j + 2 * q) = pack(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    }
  }
};

// The tree of one tile, fed with nodes in ascending order of their first unit. Register homes are read and written
// under a predicate, not a branch: with branches the compiler copies and spills whole fragments where paths meet.
template <class C>
struct Tree {
  static constexpr int kSaved = C::kRegisterLevels > 0 ? C::kRegisterLevels : 1;
  float saved[kSaved][C::kAccumulators];
  float* shared_level;
  float* global_level;

  template <int kLevel>
  __device__ __forceinline__ float* memory() const {
    return C::home(kLevel) == Home::kShared ? shared_level : global_level;
  }

  template <int kLevel>
  __device__ __forceinline__ void save_if(bool wanted, const float (&v)[C::kAccumulators]) {
    if constexpr (C::home(kLevel) == Home::kRegisters) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i)
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p mov.f32 %0, %1;}"
                     : "+f"(saved[kLevel][i])
                     : "f"(v[i]), "r"(static_cast<int>(wanted)));
    } else if (wanted) {
      Fragment<C>::store(memory<kLevel>(), v);
    }
  }

  template <int kLevel>
  __device__ __forceinline__ void add_if(bool wanted, float (&v)[C::kAccumulators]) const {
    if constexpr (C::home(kLevel) == Home::kRegisters) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i)
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p add.rn.f32 %0, %1, %0;}"
                     : "+f"(v[i])
                     : "f"(saved[kLevel][i]), "r"(static_cast<int>(wanted)));
    } else if (wanted) {
      Fragment<C>::add(memory<kLevel>(), v);
    }
  }

  // Copies what is kept at a level to another place.
  template <int kLevel>
  __device__ __forceinline__ void send(float* target) const {
    if constexpr (C::home(kLevel) == Home::kRegisters) Fragment<C>::store(target, saved[kLevel]);
    else Fragment<C>::copy(memory<kLevel>(), target);
  }

  __device__ __forceinline__ void apply(const Carry& carry, float (&v)[C::kAccumulators]) {
    add_if<0>(carry.add & 1, v);
    add_if<1>(carry.add & 2, v);
    add_if<2>(carry.add & 4, v);
    save_if<0>(carry.keep == 0, v);
    save_if<1>(carry.keep == 1, v);
    save_if<2>(carry.keep == 2, v);
  }
};

template <class C>
struct Math {
  const GemmParams& p;
  int cluster;
  uint32_t rank;
  Ring<C> ring;
  Tree<C> tree;

  __device__ __forceinline__ float* node(int index) const {
    return p.node_scratch + (static_cast<int64_t>(index) * C::kCluster + rank) * (kTileM * C::kTileN);
  }
  __device__ __forceinline__ uint32_t* flag(int of_cluster) const {
    return p.flags + (of_cluster * C::kCluster + rank) * kMathWarps + threadIdx.x / 32;
  }

  // Sends what still waits for a right sibling that another cluster computes: ascending units are descending levels.
  template <int kLevel>
  __device__ __forceinline__ void send_saved(const Piece& piece, int& sent, bool active) const {
    const int start = ((piece.last >> kLevel) - 1) << kLevel;
    if (kLevel < p.levels && (piece.last >> kLevel) % 2 == 1 && start >= piece.first) {
      if (active) tree.template send<kLevel>(node(p.schedule.first_node[cluster] + sent));
      ++sent;
    }
    if constexpr (kLevel > 0) send_saved<kLevel - 1>(piece, sent, active);
  }

  __device__ __forceinline__ void piece(const Piece& piece) {
    float d[C::kAccumulators];
    int tile_m, tile_n;
    tile_coordinates(p.schedule, piece.tile, tile_m, tile_n);
    const int group = threadIdx.x / 128;
    const int row = (tile_m * C::kCluster + static_cast<int>(rank)) * kTileM + threadIdx.x / 32 * 16;
    const bool active = row < p.m;  // a warp with no row of the matrix keeps the protocol and moves no data
    if constexpr (!C::kTree) {
      ring.chain(d, p.unit_stages, group);
    } else {
      const bool owner = piece.first == 0;
      const int stop = owner ? p.schedule.units : piece.last;
      int sent = 0, sender = -1, received = 0;
      for (int unit = piece.first; unit < stop;) {
        int level = 0;
        if (unit < piece.last) {
          ring.chain(d, p.unit_stages, group);
        } else {
          const int from = owner_of(p.schedule, piece.tile, unit);
          if (from != sender) {
            sender = from, received = 0;
            if (threadIdx.x % 32 == 0) ptx::flag_wait_and_clear(flag(from));
            __syncwarp();
          }
          const int size = node_size(unit, piece_end(p.schedule, piece.tile, from));
          level = 31 - __clz(size);
          if (active) Fragment<C>::load(node(p.schedule.first_node[from] + received), d);
          ++received;
        }
        const Carry carry(unit, level, p.levels, piece.first);
        tree.apply(carry, d);
        if (carry.keep == Carry::kSend) {
          if (active) Fragment<C>::store(node(p.schedule.first_node[cluster] + sent), d);
          ++sent;
        }
        unit += 1 << level;
      }
      if (!owner) {
        send_saved<kMaxLevels - 1>(piece, sent, active);
        __syncwarp();  // orders the warp's stores before the release that lane 0 makes for all of them
        if (threadIdx.x % 32 == 0) ptx::flag_set(flag(cluster));
        return;
      }
    }
    if (active) Epilogue<C>::store(p, d, row, tile_n * C::kTileN);
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1) tree_gemm_sm90(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  const uint32_t ring = (ptx::shared_address(shared) + 1023) & ~1023u;
  const uint32_t level = ring + C::kStages * (C::kBytesA + C::kBytesB);
  const uint32_t full = level + C::kLevelBytes, empty = full + 8 * C::kStages;
  const uint32_t rank = C::kCluster == 1 ? 0 : ptx::cluster_rank();
  // Blocks start in ascending order; the reversed order lets senders start before the clusters that wait for them.
  const int cluster = p.schedule.clusters - 1 - static_cast<int>(blockIdx.x) / C::kCluster;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      ptx::barrier_init(full + 8 * s, 1);
      ptx::barrier_init(empty + 8 * s, kMathWarps * C::kCluster);  // the math warps of every CTA that a copy reaches
    }
    ptx::barrier_init_fence();
  }
  if constexpr (C::kCluster == 1) __syncthreads();
  else ptx::cluster_sync();
  if (threadIdx.x >= kMathThreads) {
    ptx::registers_decrease<24>();
    if (threadIdx.x == kMathThreads) {
      ptx::prefetch_map(&p.map_a);
      ptx::prefetch_map(&p.map_b);
      copy_stages<C>(p, cluster, rank, ring, full, empty);
    }
    __syncwarp();
  } else {
    ptx::registers_increase<240>();
    Math<C> math{p, cluster, rank, {ring, full, empty, 0, 0}, {}};
    if constexpr (C::kTree) {
      math.tree.shared_level = reinterpret_cast<float*>(shared + (level - ptx::shared_address(shared)));
      math.tree.global_level = p.level_scratch + static_cast<int64_t>(blockIdx.x) * (kTileM * C::kTileN);
    }
    Cursor cursor(p.schedule, cluster);
    Piece piece;
    while (cursor.next(p.schedule, piece)) math.piece(piece);
  }
  if constexpr (C::kCluster > 1) ptx::cluster_sync();  // a peer's copies and arrivals may still reach this CTA
#endif
}

}  // namespace h3
