// Two CTAs of a cluster share a tile by halving its units; here they trade the roots of their halves through
// distributed shared memory. CTA r finishes the rows of its math warpgroup r, so each sends and receives half a tile.
// For calls with few tokens: a round trip through global flags and L2 costs several microseconds of thirty.
#pragma once
#include "config_sm90.cuh"
#include "ptx_sm90.cuh"

namespace h3 {

template <class C>
struct Exchange {
  uint32_t buffer, full, empty;  // full counts the bytes that arrive; empty: the peer has read what was sent to it
  uint32_t phase;

  static constexpr int kGroupThreads = 128;

  // Sends or receives, by warpgroup; true for the warpgroup that ends with the tile's root in d.
  __device__ __forceinline__ bool trade(float (&d)[C::kAccumulators], uint32_t rank) {
    const uint32_t group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, peer = rank ^ 1;
    if (group == rank) {
      if (thread == 0) ptx::barrier_expect(full, C::kFragmentBytes / 2);
      ptx::barrier_wait_cluster(full, phase);
#pragma unroll
      for (int i = 0; i < C::kSlots; ++i) {
        const float4 other = ptx::shared_load(buffer + (i * kGroupThreads + thread) * 16);
        d[4 * i] = __fadd_rn(d[4 * i], other.x);  // a sum of two does not depend on which is the left one
        d[4 * i + 1] = __fadd_rn(d[4 * i + 1], other.y);
        d[4 * i + 2] = __fadd_rn(d[4 * i + 2], other.z);
        d[4 * i + 3] = __fadd_rn(d[4 * i + 3], other.w);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive_release_cluster(empty, peer);
    } else {
      ptx::barrier_wait_cluster(empty, phase ^ 1);
      const uint32_t target = ptx::cluster_address(buffer, peer), arrived = ptx::cluster_address(full, peer);
#pragma unroll
      for (int i = 0; i < C::kSlots; ++i)
        ptx::cluster_store(target + (i * kGroupThreads + thread) * 16, arrived, d[4 * i], d[4 * i + 1], d[4 * i + 2],
                           d[4 * i + 3]);
    }
    phase ^= 1;
    return group == rank;
  }
};

}  // namespace h3
