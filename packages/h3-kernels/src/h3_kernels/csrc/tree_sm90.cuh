// The canonical tree in a thread's registers, shared memory and scratch, for its share of one tile.
#pragma once
#include "config_sm90.cuh"

namespace h3 {

// A fragment in memory: 16-byte vector i of thread t lies at [i][t], so that a warp touches 512 bytes in a row.
template <class C>
struct Fragment {
  static __device__ __forceinline__ void store(float* base, const float (&v)[C::kAccumulators]) {
    float4* out = reinterpret_cast<float4*>(base) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kSlots; ++i)
      out[i * kMathThreads] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }

  // Another CTA wrote these: read through L2.
  static __device__ __forceinline__ void load(const float* base, float (&v)[C::kAccumulators]) {
    const float4* in = reinterpret_cast<const float4*>(base) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kSlots; ++i) {
      const float4 x = __ldcg(in + i * kMathThreads);
      v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
    }
  }
};

// Nodes that wait for their right sibling. Register slots are read and written under a predicate, not a branch: with
// branches the compiler copies and spills whole fragments where paths meet.
template <class C>
struct Tree {
  static constexpr int kRegisters = C::kRegisterSlots > 0 ? 4 * C::kRegisterSlots : 1;
  float kept[kRegisters];
  float4* shared_slots;  // this thread's first vector
  float4* global_slots;

  static __device__ __forceinline__ constexpr int slot(int level, int i) {
    return (level - C::kFirstLevel) * C::kSlots + i;
  }
  __device__ __forceinline__ float4* memory(int slot) const {
    return slot < C::kRegisterSlots + C::kSharedSlots
               ? shared_slots + (slot - C::kRegisterSlots) * kMathThreads
               : global_slots + (slot - C::kRegisterSlots - C::kSharedSlots) * kMathThreads;
  }

  template <int kLevel, int kEnd = C::kSlots>
  __device__ __forceinline__ void save_if(bool wanted, const float (&v)[C::kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kEnd; ++i) {
      if (slot(kLevel, i) >= C::kRegisterSlots) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p mov.f32 %0, %1;}"
                     : "+f"(kept[4 * slot(kLevel, i) + j])
                     : "f"(v[4 * i + j]), "r"(static_cast<int>(wanted)));
    }
    if constexpr (kEnd > 0 && slot(kLevel, kEnd - 1) >= C::kRegisterSlots) {
      if (!wanted) return;
#pragma unroll
      for (int i = 0; i < kEnd; ++i)
        if (slot(kLevel, i) >= C::kRegisterSlots)
          *memory(slot(kLevel, i)) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
  }

  // v = left + v: the kept node is the earlier one. Only its first kEnd slots.
  template <int kLevel, int kEnd = C::kSlots>
  __device__ __forceinline__ void add_if(bool wanted, float (&v)[C::kAccumulators]) const {
#pragma unroll
    for (int i = 0; i < kEnd; ++i) {
      if (slot(kLevel, i) >= C::kRegisterSlots) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p add.rn.f32 %0, %1, %0;}"
                     : "+f"(v[4 * i + j])
                     : "f"(kept[4 * slot(kLevel, i) + j]), "r"(static_cast<int>(wanted)));
    }
    if constexpr (kEnd > 0 && slot(kLevel, kEnd - 1) >= C::kRegisterSlots) {
      if (!wanted) return;
#pragma unroll
      for (int i = 0; i < kEnd; ++i)
        if (slot(kLevel, i) >= C::kRegisterSlots) add_slot(*memory(slot(kLevel, i)), v, i);
    }
  }

  // Far slots of level 2 are written two beside each stage of the next unit, from stage 1 to stage kFarTurns. This writes
  // those whose stage lies in [first, last), under a predicate as above.
  static constexpr int kFarTurns = (C::kFarSlots + 1) / 2;
  __device__ __forceinline__ void save_far(int first, int last, const float (&v)[C::kAccumulators]) const {
    constexpr int kFirst = C::kSlots - C::kFarSlots;
    const size_t base = __cvta_generic_to_global(memory(slot(2, kFirst)));
#pragma unroll
    for (int k = 0; k < C::kFarSlots; ++k) {
      const int i = 4 * (kFirst + k), turn = 1 + k / 2;
      asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(
                       base + k * C::kSlotBytes),
                   "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3]), "r"(static_cast<int>(first <= turn && turn < last))
                   : "memory");
    }
  }

  static __device__ __forceinline__ void add_slot(const float4& left, float (&v)[C::kAccumulators], int i) {
    v[4 * i] = __fadd_rn(left.x, v[4 * i]);
    v[4 * i + 1] = __fadd_rn(left.y, v[4 * i + 1]);
    v[4 * i + 2] = __fadd_rn(left.z, v[4 * i + 2]);
    v[4 * i + 3] = __fadd_rn(left.w, v[4 * i + 3]);
  }

  // Copies the node kept at a level to scratch.
  template <int kLevel>
  __device__ __forceinline__ void send(float* target) const {
    float4* out = reinterpret_cast<float4*>(target) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kSlots; ++i) {
      const int s = slot(kLevel, i);
      if (s < C::kRegisterSlots)
        out[i * kMathThreads] = make_float4(kept[4 * s], kept[4 * s + 1], kept[4 * s + 2], kept[4 * s + 3]);
    }
    const int in_registers = min_of(C::kSlots, C::kRegisterSlots > slot(kLevel, 0) ? C::kRegisterSlots - slot(kLevel, 0) : 0);
#pragma unroll 2
    for (int i = in_registers; i < C::kSlots; ++i) out[i * kMathThreads] = *memory(slot(kLevel, i));
  }

  __device__ __forceinline__ void apply(const Carry& carry, float (&v)[C::kAccumulators]) {
    if constexpr (C::kFirstLevel == 0) add_if<0>(carry.add & 1, v);
    add_if<1>(carry.add & 2, v);
    add_if<2>(carry.add & 4, v);
    if constexpr (C::kFirstLevel == 0) save_if<0>(carry.keep == 0, v);
    save_if<1>(carry.keep == 1, v);
    save_if<2>(carry.keep == 2, v);
  }
};

}  // namespace h3
