// The Hopper instructions the kernels use, one thin function each: mbarrier, bulk tensor copy, flags, registers.
// Semantics: PTX ISA, chapters "Asynchronous copies", "mbarrier" and "Memory consistency model".
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace h3::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other CTA of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The ring's waits and arrivals keep the default scope, the CTA. Cluster scope makes ptxas emit CCTL.IVALL (drop the L1)
// after every wait and MEMBAR.ALL.GPU before every arrival, which cost 40 to 170% of the whole GEMM. Nothing here needs
// it: stages are written by the copy engine and read by wgmma or after their own barrier, whose completion the mbarrier
// and wait_group order.

// Arrives on the barrier at the same shared-memory offset of CTA `cta` of this cluster (our own included).
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives with cluster-wide release: what this thread, and the threads it has synchronised with, stored before is
// visible to a thread of the other CTA that waits with barrier_wait_cluster.
__device__ __forceinline__ void barrier_arrive_release_cluster(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// H3_SPIN_LIMIT (debug builds) turns a wait that can never end into a trap with an error code instead of a hang.
#ifdef H3_SPIN_LIMIT
#define H3_SPIN_GUARD(counter) \
  if (++(counter) > (H3_SPIN_LIMIT)) __trap()
#else
#define H3_SPIN_GUARD(counter) (void)(counter)
#endif

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  uint32_t spins = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    H3_SPIN_GUARD(spins);
  }
}

__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  uint32_t spins = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    H3_SPIN_GUARD(spins);
  }
}

// The address, in the cluster's window, of `address` in CTA `cta`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t cta) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
  return remote;
}

// Stores to a CTA of the cluster, counted in bytes on that CTA's barrier; both are addresses in the cluster's window.
__device__ __forceinline__ void cluster_store(uint32_t address, uint32_t barrier, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
               "r"(barrier), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ float4 shared_load(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Copies one box of a 2D tensor map to shared memory; `x` is the contiguous coordinate. Elements outside the tensor
// arrive as zeros. The barrier counts the bytes.
__device__ __forceinline__ void copy_box(const CUtensorMap* map, uint32_t barrier, uint32_t target, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(target), "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same, delivered to the same offset of every CTA in `mask`, and counted on each one's own barrier.
__device__ __forceinline__ void copy_box_multicast(const CUtensorMap* map, uint32_t barrier, uint32_t target, int x,
                                                   int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

// Copies `bytes` (a multiple of 16) from global memory that threads wrote: each writer must have passed
// fence_before_copy, and a barrier that the copying thread waited for.
__device__ __forceinline__ void copy_bytes(const void* source, uint32_t barrier, uint32_t target, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void fence_before_copy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit values: lane l holds columns 2 (l % 4) and one more of row l / 4.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void flag_set(uint32_t* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ void flag_wait_and_clear(uint32_t* flag) {
  uint32_t value = 0;
  uint32_t spins = 0;
  while (value == 0) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    H3_SPIN_GUARD(spins);
  }
  asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}

}  // namespace h3::ptx
