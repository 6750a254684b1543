// y[m, n] = round(tree over units of chain over k of a[m, k] b[n, k]  (+ bias[n])), for sm_90a.
//
// One CTA computes 128 x kTileN outputs. Warpgroups 0 and 1 (math) own 64 rows each; one thread of warpgroup 2 (copy)
// feeds them through a ring of shared-memory stages, 64 k values deep:
//
//   copy: wait empty[s] -> expect bytes on full[s] -> copy A and B boxes
//   math: wait full[s] -> 4 wgmma steps -> wait for the previous stage's steps -> arrive on that stage's empty
//
// A tile is stored while the next one's first stages are multiplied. What registers and shared memory cannot hold of the
// last level of a tree of 8 units goes to scratch; the copy thread brings it back through stages of the same ring.
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

template <class C>
__device__ __forceinline__ bool is_whole(const GemmParams& p, const Piece& piece) {
  return piece.last - piece.first == p.schedule.units;
}

// Whether the far slots of a piece's tree return through the ring.
template <class C>
__device__ __forceinline__ bool returns(const GemmParams& p, const Piece& piece) {
  return C::kReturnStages > 0 && p.schedule.units == 1 << kMaxLevels && is_whole<C>(p, piece);
}

// This CTA's part of the scratch for nodes that wait.
template <class C>
__device__ __forceinline__ float4* kept_scratch(const GemmParams& p) {
  return reinterpret_cast<float4*>(p.kept_scratch) + static_cast<int64_t>(blockIdx.x) * (C::kGlobalSlots * kMathThreads);
}

// The copy thread: every stage of every piece of this cluster, in the order the math warps use them.
template <class C>
struct Copy {
  const GemmParams& p;
  uint32_t ring, full, empty, saved;  // saved: the math warps have written their far slots
  int stage;
  uint32_t phase, saved_phase;

  // The stage's shared memory once it is free; its barrier then expects `bytes`.
  __device__ __forceinline__ uint32_t next(uint32_t bytes) const {
    ptx::barrier_wait(empty + 8 * stage, phase ^ 1);
    ptx::barrier_expect(full + 8 * stage, bytes);
    return ring + stage * C::kStageBytes;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }

  __device__ __forceinline__ void bring_back() {
    ptx::barrier_wait(saved, saved_phase);
    saved_phase ^= 1;
    const float4* source = kept_scratch<C>(p) + (C::kGlobalSlots - C::kFarSlots) * kMathThreads;
    for (int left = C::kFarSlots; left > 0; left -= C::kStageSlots, source += C::kStageSlots * kMathThreads) {
      const uint32_t bytes = min_of(left, C::kStageSlots) * C::kSlotBytes, target = next(bytes);
      ptx::copy_bytes(source, full + 8 * stage, target, bytes);
      advance();
    }
  }

  __device__ __forceinline__ void run(int cluster, uint32_t rank) {
    const int part = C::kCluster == 1 ? 0 : static_cast<int>(rank);
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
        const uint32_t a = next(C::kStageBytes), b = a + C::kBytesA + part * Boxes<C>::kPartB;
        boxes.copy(p, full + 8 * stage, a, b, k);
        advance();
      }
      if (returns<C>(p, piece)) bring_back();
    }
  }
};

// The math warps' end of the ring. Between calls at most one stage's steps are in flight (kAhead after begin_ahead), and
// its shared memory is not yet released; `pending` names that stage, or the first of them.
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

  __device__ __forceinline__ void advance() {
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }

  // Starts one stage's steps.
  template <int kAdd>
  __device__ __forceinline__ void issue(Values& d) {
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
  }

  // Starts one stage's steps and returns when the stage before has finished.
  template <int kAdd>
  __device__ __forceinline__ void stage_steps(Values& d) {
    issue<kAdd>(d);
    wgmma::wait<1>();
    if (pending >= 0) release(pending);
    pending = stage;
    advance();
  }

  // A unit's chain of ascending 16-wide steps from zero: `begin` starts it, `rest` runs it to its last stage, and the
  // next `begin` or `finish` returns when it is complete. `between` runs after each stage is started.
  __device__ __forceinline__ void begin(Values& d) { stage_steps<0>(d); }
  template <class Between>
  __device__ __forceinline__ void rest(Values& d, int first, int stages, const Between& between) {
    for (int i = first; i < stages; ++i) {
      stage_steps<1>(d);
      between(i);
    }
  }
  __device__ __forceinline__ void rest(Values& d, int first, int stages) {
    for (int i = first; i < stages; ++i) stage_steps<1>(d);
  }

  // Starts the first kAhead stages of a unit, of which `settle` then waits for all but the last. No wait stands between
  // them: one that waits for nothing makes ptxas serialise every wgmma (message C7515).
  __device__ __forceinline__ void begin_ahead(Values& d, int unit_stages) {
    issue<0>(d);
    pending = stage;
    advance();
#pragma unroll
    for (int i = 1; i < C::kAhead; ++i) {
      if (i >= unit_stages) break;
      issue<1>(d);
      advance();
    }
  }
  __device__ __forceinline__ void settle(int unit_stages) {
    wgmma::wait<1>();
#pragma unroll
    for (int i = 1; i < C::kAhead; ++i) {
      if (i >= unit_stages) break;
      release(pending);
      if (++pending == C::kStages) pending = 0;
    }
  }

  __device__ __forceinline__ void finish() {
    wgmma::wait<0>();
    release(pending);
    pending = -1;
  }

  // A stage that holds no operands, with nothing in flight: its address once it is full, and giving it back.
  __device__ __forceinline__ uint32_t arrived() const {
    ptx::barrier_wait(full + 8 * stage, phase);
    return ring + stage * C::kStageBytes;
  }
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    release(stage);
    advance();
  }
};

template <class C>
struct Math {
  using Values = float[C::kAccumulators];

  const GemmParams& p;
  int cluster;
  uint32_t rank, saved;
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
      ring.rest(early, 1, p.unit_stages);
      finish_pair();
    } else {
      ring.begin(d);
      ring.rest(d, 1, p.unit_stages);
      ring.finish();
      wgmma::pin(d);
    }
  }

  // The second chain of a pair, and their sum.
  __device__ __forceinline__ void finish_pair() {
    ring.begin(d);
    wgmma::pin(early);
    ring.rest(d, 1, p.unit_stages);
    ring.finish();
    wgmma::pin(d);
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) d[i] = __fadd_rn(early[i], d[i]);
  }

  // A whole tile of pairs whose first stages are in flight, unrolled: while one pair is kept, the next one's first stage
  // is in flight. (In a loop ptxas would serialise every wgmma, message C7510: it must see what is in flight at each
  // point.)
  template <int kUnit = 0>
  __device__ __forceinline__ void whole_tile() {
    if constexpr (kUnit == 4 && C::kFarSlots > 0) {
      ring.rest(early, 1, p.unit_stages, [&](int i) { tree.save_far(i, i + 1, d); });
      tree.save_far(p.unit_stages, Tree<C>::kFarTurns + 1, d);
    } else {
      ring.rest(early, kUnit == 0 ? C::kAhead : 1, p.unit_stages);
    }
    finish_pair();
    if constexpr (kUnit % 4 == 2) tree.template add_if<1>(true, d);
    if constexpr (kUnit == 6) {
      tree.template add_if<2, C::kSlots - C::kFarSlots>(true, d);
      add_returned();
    }
    if constexpr (kUnit < 6) {
      if (p.schedule.units == kUnit + 2) return;
      ring.begin(early);
      if constexpr (kUnit == 4) announce_saved();
      if constexpr (kUnit % 4 == 0) tree.template save_if<1>(true, d);
      else tree.template save_if<2, C::kSlots - C::kFarSlots>(true, d);
      whole_tile<kUnit + 2>();
    }
  }

  // The far slots were written a unit ago, so the fence finds nothing to wait for.
  __device__ __forceinline__ void announce_saved() const {
    if constexpr (C::kReturnStages > 0) {
      ptx::fence_before_copy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(saved);
    }
  }

  // Adds the last slots of level 2, which the copy thread brought from scratch.
  __device__ __forceinline__ void add_returned() {
#pragma unroll
    for (int slot = C::kSlots - C::kFarSlots; slot < C::kSlots; slot += C::kStageSlots) {
      const uint32_t from = ring.arrived() + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < min_of(C::kStageSlots, C::kSlots - slot); ++i)
        Tree<C>::add_slot(ptx::shared_load(from + i * C::kSlotBytes), d, slot + i);
      ring.give_back();
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

  struct Place {
    int row, column;
  };
  __device__ __forceinline__ Place place(const Piece& piece) const {
    int tile_m, tile_n;
    tile_coordinates(p.schedule, piece.tile, tile_m, tile_n);
    return {tile_row<C>(tile_m, rank) * kTileM + threadIdx.x / 32 * 16, tile_n * C::kTileN};
  }

  // Every whole tile of pairs of this cluster: one is stored while the first stages of the next are in flight.
  __device__ __forceinline__ void whole_tiles(Cursor& cursor, Piece& piece, bool& more) {
    if (!more || !is_whole<C>(p, piece)) return;
    ring.begin_ahead(early, p.unit_stages);
    while (true) {
      ring.settle(p.unit_stages);
      whole_tile();
      const Place at = place(piece);
      more = cursor.next(p.schedule, piece);
      if (!more || !is_whole<C>(p, piece)) return Epilogue<C>::store(p, d, at.row, at.column);
      ring.begin_ahead(early, p.unit_stages);
      Epilogue<C>::store(p, d, at.row, at.column);
    }
  }

  __device__ __forceinline__ void run() {
    Cursor cursor(p.schedule, cluster);
    Piece piece;
    bool more = cursor.next(p.schedule, piece);
    if constexpr (C::kLeaf == Leaf::kPair) whole_tiles(cursor, piece, more);
    for (; more; more = cursor.next(p.schedule, piece)) {
      const Place at = place(piece);
      const bool active = at.row < p.m;  // a warp with no row of the matrix keeps the protocol and moves no data
      bool root = true;
      if constexpr (C::kLeaf == Leaf::kChain) leaf();
      else if (C::kHalves == 2) root = halves(own_part<C>(piece, rank));
      else root = fold(piece, active);
      if (root && active) Epilogue<C>::store(p, d, at.row, at.column);
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
  const uint32_t more = empty + 8 * C::kStages, exchange_buffer = more + 16;  // two more barriers: see kBarrierBytes
  const uint32_t rank = C::kClusterCtas == 1 ? 0 : ptx::cluster_rank();
  // Blocks start in ascending order; the reversed order lets senders start before the clusters that wait for them.
  const int cluster = p.schedule.clusters - 1 - static_cast<int>(blockIdx.x) / C::kClusterCtas;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      ptx::barrier_init(full + 8 * s, 1);
      ptx::barrier_init(empty + 8 * s, kMathWarps * C::kCluster);  // the math warps of every CTA that a copy reaches
    }
    if constexpr (C::kHalves == 2) {
      ptx::barrier_init(more, 1);
      ptx::barrier_init(more + 8, kMathWarps / 2);
    } else {
      ptx::barrier_init(more, kMathWarps);
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
      Copy<C> copy{p, ring, full, empty, more, 0, 0, 0};
      copy.run(cluster, rank);
    }
    __syncwarp();
  } else {
    ptx::registers_increase<240>();
    float4* shared_slots = reinterpret_cast<float4*>(shared + (kept - start)) + threadIdx.x;
    float4* global_slots = kept_scratch<C>(p) + threadIdx.x;
    Math<C> math{p, cluster, rank, more, {ring, full, empty, 0, 0, -1}, {{}, shared_slots, global_slots},
                 {exchange_buffer, more, more + 8, 0}, {}, {}};
    math.run();
  }
  if constexpr (C::kClusterCtas > 1) ptx::cluster_sync();  // a peer's copies and arrivals may still reach this CTA
#endif
}

}  // namespace h3
