// y[m, n] = round(tree over units of chain over k of a[m, k] b[n, k]  (+ bias[n])), for sm_90a.
//
// One CTA computes 128 x kTileN outputs. Warpgroups 0 and 1 (math) own 64 rows each; one thread of warpgroup 2 (copy)
// feeds them through a ring of shared-memory stages, 64 k values deep:
//
//   copy: wait empty[s] -> expect bytes on full[s] -> copy A and B boxes
//   math: wait full[s] -> 4 wgmma steps -> wait for the previous stage's steps -> arrive on that stage's empty
//
// When a leaf of the tree is done it is carried into the tree like a binary counter (schedule.cuh, Carry): finished left
// siblings are added, and what still waits for its right sibling is kept (tree_sm90.cuh).
#pragma once
#include "epilogue_sm90.cuh"
#include "exchange_sm90.cuh"
#include "ptx_sm90.cuh"
#include "tree_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace h3 {

// A CTA's part of a piece: all of it, or its half of the units.
template <class C>
__device__ __forceinline__ Piece own_part(Piece piece, uint32_t rank) {
  if constexpr (C::kHalves == 2) {
    const int half = (piece.last - piece.first) / 2;
    piece.first += static_cast<int>(rank) * half;
    piece.last = piece.first + half;
  }
  return piece;
}

// The CTA's row of tiles within its cluster's.
template <class C>
__device__ __forceinline__ int tile_row(int tile_m, uint32_t rank) {
  return C::kCluster == 1 ? tile_m : tile_m * C::kCluster + static_cast<int>(rank);
}

// What one CTA copies for one stage: all of its A tile, and its part of the B tile that it hands to all who share it.
template <class C>
struct Boxes {
  static constexpr int kRowsB = C::kTileN / C::kCluster;       // of an operand stored [n, k]
  static constexpr int kDepthB = kStageK / C::kCluster;        // of one stored [k, n]
  static constexpr int kBlock = 64 * kStageK * 2;              // bytes of 64 columns of an operand stored [k, n]
  static constexpr int kPartB = (C::kTransB ? kDepthB : kRowsB) * 128;  // bytes between the CTAs' parts
  int m, n, k_b;  // k_b: where this CTA's part of B starts within a stage

  __device__ __forceinline__ Boxes(int m, int n, int part)
      : m(m), n(C::kTransB ? n : n + part * kRowsB), k_b(C::kTransB ? part * kDepthB : 0) {}

  __device__ __forceinline__ void copy(const GemmParams& p, uint32_t barrier, uint32_t a, uint32_t b, int k) const {
    if constexpr (C::kTransA) {
      ptx::copy_box(&p.map_a, barrier, a, m, k);
      ptx::copy_box(&p.map_a, barrier, a + C::kBytesA / 2, m + 64, k);
    } else {
      ptx::copy_box(&p.map_a, barrier, a, k, m);
    }
#pragma unroll
    for (int block = 0; block < (C::kTransB ? C::kTileN / 64 : 1); ++block) {
      const int x = C::kTransB ? n + block * 64 : k, y = C::kTransB ? k + k_b : n;
      constexpr uint16_t kAll = (1 << C::kCluster) - 1;
      if constexpr (C::kCluster == 1) ptx::copy_box(&p.map_b, barrier, b + block * kBlock, x, y);
      else ptx::copy_box_multicast(&p.map_b, barrier, b + block * kBlock, x, y, kAll);
    }
  }
};

// The copy thread: every stage of every piece of this cluster, in the order the math warps use them.
template <class C>
__device__ __forceinline__ void copy_stages(const GemmParams& p, int cluster, uint32_t rank, uint32_t ring,
                                            uint32_t full, uint32_t empty) {
  const int part = C::kCluster == 1 ? 0 : static_cast<int>(rank);
  int stage = 0;
  uint32_t phase = 0;
  Cursor cursor(p.schedule, cluster);
  Piece piece;
  while (cursor.next(p.schedule, piece)) {
    int tile_m, tile_n;
    tile_coordinates(p.schedule, piece.tile, tile_m, tile_n);
    piece = own_part<C>(piece, rank);
    const Boxes<C> boxes(tile_row<C>(tile_m, rank) * kTileM, tile_n * C::kTileN, part);
    const int stages = (piece.last - piece.first) * p.unit_stages;
    int k = piece.first * p.unit_stages * kStageK;
    for (int i = 0; i < stages; ++i, k += kStageK) {
      ptx::barrier_wait(empty + 8 * stage, phase ^ 1);
      const uint32_t a = ring + stage * C::kStageBytes, b = a + C::kBytesA + part * Boxes<C>::kPartB;
      ptx::barrier_expect(full + 8 * stage, C::kStageBytes);
      boxes.copy(p, full + 8 * stage, a, b, k);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
}

// The math warps' end of the ring. Between calls at most one stage's steps are in flight, and its shared memory is not
// yet released; `pending` names that stage.
template <class C>
struct Ring {
  uint32_t ring, full, empty;
  int stage;
  uint32_t phase;
  int pending;

  using Values = float[C::kAccumulators];

  // Every math warp tells every CTA whose copies write this stage here.
  __device__ __forceinline__ void release(int finished) {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (C::kCluster == 1) {
      if (lane == 0) ptx::barrier_arrive(empty + 8 * finished);
    } else {
      if (lane < C::kCluster) ptx::barrier_arrive_cluster(empty + 8 * finished, lane);
    }
  }

  // Starts one stage's steps and returns when the stage before has finished.
  template <int kAdd>
  __device__ __forceinline__ void stage_steps(Values& d) {
    using Step = wgmma::Step<C::kTileN, C::kTransA, C::kTransB>;
    constexpr uint32_t kBlock = 64 * kStageK * 2;  // leading offset of a transposed operand: one 64-wide block
    constexpr int kStepA = (C::kTransA ? 16 * 128 : 32) >> 4, kStepB = (C::kTransB ? 16 * 128 : 32) >> 4;
    ptx::barrier_wait(full + 8 * stage, phase);
    const uint32_t base = ring + stage * C::kStageBytes;
    const uint64_t a = wgmma::descriptor(base + threadIdx.x / 128 * kBlock, C::kTransA ? kBlock : 16, 1024);
    const uint64_t b = wgmma::descriptor(base + C::kBytesA, C::kTransB ? kBlock : 16, 1024);
    wgmma::arrive();
    Step::template run<kAdd>(d, a, b);
#pragma unroll
    for (int step = 1; step < kStageK / 16; ++step) Step::template run<1>(d, a + step * kStepA, b + step * kStepB);
    wgmma::commit();
    wgmma::wait<1>();
    if (pending >= 0) release(pending);
    pending = stage;
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }

  // A unit's chain of ascending 16-wide steps from zero: `begin` starts it, `rest` runs it to its last stage, and the
  // next `begin` or `finish` returns when it is complete.
  __device__ __forceinline__ void begin(Values& d) { stage_steps<0>(d); }
  __device__ __forceinline__ void rest(Values& d, int stages) {
    for (int i = 1; i < stages; ++i) stage_steps<1>(d);
  }
  __device__ __forceinline__ void finish() {
    wgmma::wait<0>();
    release(pending);
    pending = -1;
  }
};

template <class C>
struct Math {
  using Values = float[C::kAccumulators];

  const GemmParams& p;
  int cluster;
  uint32_t rank;
  Ring<C> ring;
  Tree<C> tree;
  Exchange<C> exchange;
  Values d, early;

  __device__ __forceinline__ float* node(int index) const {
    return p.node_scratch + (static_cast<int64_t>(index) * C::kCluster + rank) * (kTileM * C::kTileN);
  }
  __device__ __forceinline__ uint32_t* flag(int of_cluster) const {
    return p.flags + (of_cluster * C::kCluster + rank) * kMathWarps + threadIdx.x / 32;
  }

  // The next leaf, in d.
  __device__ __forceinline__ void leaf() {
    if constexpr (C::kLeaf == Leaf::kPair) {
      ring.begin(early);
      finish_pair();
    } else {
      ring.begin(d);
      ring.rest(d, p.unit_stages);
      ring.finish();
      wgmma::pin(d);
    }
  }

  // The pair whose first stage is in flight.
  __device__ __forceinline__ void finish_pair() {
    ring.rest(early, p.unit_stages);
    ring.begin(d);
    wgmma::pin(early);
    ring.rest(d, p.unit_stages);
    ring.finish();
    wgmma::pin(d);
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) d[i] = __fadd_rn(early[i], d[i]);
  }

  // A whole tile of pairs, unrolled: while one pair is kept, the next one's first stage is in flight. (In a loop ptxas
  // would serialise every wgmma, message C7510: it must see what is in flight at each point.)
  template <int kUnit = 0>
  __device__ __forceinline__ void whole_tile() {
    if constexpr (kUnit == 0) ring.begin(early);
    finish_pair();
    if constexpr (kUnit % 4 == 2) tree.template add_if<1>(true, d);
    if constexpr (kUnit == 6) tree.template add_if<2>(true, d);
    if constexpr (kUnit < 6) {
      if (p.schedule.units == kUnit + 2) return;
      ring.begin(early);
      if constexpr (kUnit % 4 == 0) tree.template save_if<1>(true, d);
      else tree.template save_if<2>(true, d);
      whole_tile<kUnit + 2>();
    }
  }

  // Sends what still waits for a right sibling that another cluster computes: ascending units are descending levels.
  template <int kLevel>
  __device__ __forceinline__ void send_kept(const Piece& piece, int& sent, bool active) const {
    const int start = ((piece.last >> kLevel) - 1) << kLevel;
    if (kLevel < p.levels && (piece.last >> kLevel) % 2 == 1 && start >= piece.first) {
      if (active) tree.template send<kLevel>(node(p.schedule.first_node[cluster] + sent));
      ++sent;
    }
    if constexpr (kLevel > C::kFirstLevel) send_kept<kLevel - 1>(piece, sent, active);
  }

  // Waits for the cluster that computed the node at `unit`, once per sender, and loads the node; returns its level.
  __device__ __forceinline__ int receive(const Piece& piece, int unit, int& sender, int& received, bool active) {
    const int from = owner_of(p.schedule, piece.tile, unit);
    if (from != sender) {
      sender = from, received = 0;
      if (threadIdx.x % 32 == 0) ptx::flag_wait_and_clear(flag(from));
      __syncwarp();
    }
    if (active) Fragment<C>::load(node(p.schedule.first_node[from] + received), d);
    ++received;
    return 31 - __clz(node_size(unit, piece_end(p.schedule, piece.tile, from)));
  }

  // True if this cluster ends up with the root, in d.
  __device__ __forceinline__ bool fold(const Piece& piece, bool active) {
    const bool owner = piece.first == 0;
    const int stop = owner ? p.schedule.units : piece.last;
    int sent = 0, sender = -1, received = 0;
    for (int unit = piece.first; unit < stop;) {
      int level = C::kFirstLevel;
      if (unit < piece.last) leaf();
      else level = receive(piece, unit, sender, received, active);
      const Carry carry(unit, level, p.levels, piece.first);
      tree.apply(carry, d);
      if (carry.keep == Carry::kSend) {
        if (active) Fragment<C>::store(node(p.schedule.first_node[cluster] + sent), d);
        ++sent;
      }
      unit += 1 << level;
    }
    if (owner) return true;
    send_kept<kMaxLevels - 1>(piece, sent, active);
    __syncwarp();  // orders the warp's stores before the release that lane 0 makes for all of them
    if (threadIdx.x % 32 == 0) ptx::flag_set(flag(cluster));
    return false;
  }

  // Half of the units, then the other half's root from the peer.
  __device__ __forceinline__ bool halves(const Piece& piece) {
    for (int unit = piece.first; unit < piece.last; ++unit) {
      leaf();
      tree.apply(Carry(unit, 0, p.levels - 1, piece.first), d);
    }
    return exchange.trade(d, rank);
  }

  __device__ __forceinline__ void run() {
    Cursor cursor(p.schedule, cluster);
    Piece piece;
    while (cursor.next(p.schedule, piece)) {
      int tile_m, tile_n;
      tile_coordinates(p.schedule, piece.tile, tile_m, tile_n);
      const int row = tile_row<C>(tile_m, rank) * kTileM + threadIdx.x / 32 * 16;
      const bool active = row < p.m;  // a warp with no row of the matrix keeps the protocol and moves no data
      bool root = true;
      if constexpr (C::kLeaf == Leaf::kChain) leaf();
      else if (C::kLeaf == Leaf::kPair && piece.last - piece.first == p.schedule.units) whole_tile();
      else if (C::kHalves == 2) root = halves(own_part<C>(piece, rank));
      else root = fold(piece, active);
      if (root && active) Epilogue<C>::store(p, d, row, tile_n * C::kTileN);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1) tree_gemm_sm90(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  const uint32_t start = ptx::shared_address(shared);
  const uint32_t ring = (start + 1023) & ~1023u;  // swizzled stages lie on 1024-byte boundaries
  const uint32_t kept = ring + C::kStages * C::kStageBytes;
  const uint32_t full = kept + C::kSharedSlots * C::kSlotBytes, empty = full + 8 * C::kStages;
  const uint32_t exchange_full = empty + 8 * C::kStages, exchange_buffer = exchange_full + 16;
  const uint32_t rank = C::kClusterCtas == 1 ? 0 : ptx::cluster_rank();
  // Blocks start in ascending order; the reversed order lets senders start before the clusters that wait for them.
  const int cluster = p.schedule.clusters - 1 - static_cast<int>(blockIdx.x) / C::kClusterCtas;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      ptx::barrier_init(full + 8 * s, 1);
      ptx::barrier_init(empty + 8 * s, kMathWarps * C::kCluster);  // the math warps of every CTA that a copy reaches
    }
    if constexpr (C::kHalves == 2) {
      ptx::barrier_init(exchange_full, 1);
      ptx::barrier_init(exchange_full + 8, kMathWarps / 2);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (C::kClusterCtas == 1) __syncthreads();
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
    float4* shared_slots = reinterpret_cast<float4*>(shared + (kept - start)) + threadIdx.x;
    float4* global_slots = reinterpret_cast<float4*>(p.kept_scratch) + threadIdx.x +
                           static_cast<int64_t>(blockIdx.x) * (C::kGlobalSlots * kMathThreads);
    Math<C> math{p, cluster, rank, {ring, full, empty, 0, 0, -1}, {{}, shared_slots, global_slots},
                 {exchange_buffer, exchange_full, exchange_full + 8, 0}, {}, {}};
    math.run();
  }
  if constexpr (C::kClusterCtas > 1) ptx::cluster_sync();  // a peer's copies and arrivals may still reach this CTA
#endif
}

}  // namespace h3
