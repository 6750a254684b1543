// Products of fp32 operands: one chain of fused multiply-adds an element, in ascending k, from zero. The order is that of
// h3-projection-gemm-v1 for fp32; tiles, stages and threads only share loads, so no choice here changes a bit.
#include <cuda_runtime.h>

#include "abi.h"

namespace h3 {
namespace {

// kM x kN elements a block, kRows x kColumns a thread, kDepth of K a stage.
template <int kM_, int kN_, int kRows_, int kColumns_, int kDepth_, int kStages_>
struct FmaTile {
  static constexpr int kM = kM_, kN = kN_, kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kAcross = kN / kColumns;  // threads side by side
  static constexpr int kThreads = kM / kRows * kAcross;
  // Operands lie transposed, so that a thread reads its rows at once; 4 words more keep 16-byte alignment and spread the
  // transposing stores over the banks.
  static constexpr int kPitchA = kM + 4, kPitchB = kN + 4;
  static constexpr int kStageWords = kDepth * (kPitchA + kPitchB);
  static_assert(kStages * kStageWords * 4 <= 48 * 1024, "shared memory a launch has without asking");
  static_assert(kM * kDepth % kThreads == 0 && kN * kDepth % kThreads == 0, "every thread copies as many words");
};

// Starts the copy of one word to shared memory; a zero in its place when it lies outside.
__device__ __forceinline__ void copy_word(float* target, const float* source, bool inside) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source), "r"(inside ? 4 : 0) : "memory");
}

// Starts the copy of rows [first, first + kRows) and k [k0, k0 + kDepth) of an operand, transposed.
template <int kRows, int kDepth, int kPitch, int kThreads>
__device__ __forceinline__ void copy_operand(float* target, const float* source, int64_t stride, int64_t first,
                                             int64_t rows, int64_t k0, int64_t k) {
#pragma unroll
  for (int i = 0; i < kRows * kDepth / kThreads; ++i) {
    const int word = i * kThreads + static_cast<int>(threadIdx.x), row = word / kDepth, step = word % kDepth;
    const bool inside = first + row < rows && k0 + step < k;
    copy_word(target + step * kPitch + row, inside ? source + (first + row) * stride + k0 + step : source, inside);
  }
}

template <int kCount>
__device__ __forceinline__ void read(float (&values)[kCount], const float* source) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(source + i);
      values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
    }
  } else {
    static_assert(kCount == 2, "rows and columns of a thread: 2 or a multiple of 4");
    const float2 v = *reinterpret_cast<const float2*>(source);
    values[0] = v.x, values[1] = v.y;
  }
}

template <class T>
__device__ __forceinline__ void multiply(float (&sum)[T::kRows][T::kColumns], const float* a, const float* b) {
  float x[T::kRows], w[T::kColumns];
  read(x, a);
  read(w, b);
#pragma unroll
  for (int i = 0; i < T::kRows; ++i)
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) sum[i][j] = __fmaf_rn(x[i], w[j], sum[i][j]);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads) fma_gemm(const __grid_constant__ H3Fma p) {
  __shared__ __align__(16) float stages[T::kStages][T::kStageWords];
  const int64_t tiles_n = (p.n + T::kN - 1) / T::kN;
  const int64_t m0 = blockIdx.x / tiles_n * T::kM, n0 = blockIdx.x % tiles_n * T::kN;
  const auto* a = static_cast<const float*>(p.a);
  const auto* b = static_cast<const float*>(p.b);

  const auto copy = [&](int64_t step) {
    const int64_t k0 = step * T::kDepth;
    float* stage = stages[step % T::kStages];
    if (k0 < p.k) {
      copy_operand<T::kM, T::kDepth, T::kPitchA, T::kThreads>(stage, a, p.a_stride, m0, p.m, k0, p.k);
      copy_operand<T::kN, T::kDepth, T::kPitchB, T::kThreads>(stage + T::kDepth * T::kPitchA, b, p.b_stride, n0, p.n, k0,
                                                             p.k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  for (int step = 0; step < T::kStages - 1; ++step) copy(step);
  const int row = static_cast<int>(threadIdx.x) / T::kAcross * T::kRows;
  const int column = static_cast<int>(threadIdx.x) % T::kAcross * T::kColumns;
  float sum[T::kRows][T::kColumns] = {};
  const int64_t steps = (p.k + T::kDepth - 1) / T::kDepth;
  for (int64_t step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(T::kStages - 2) : "memory");
    __syncthreads();  // this stage is whole, and the one before it has been read by all
    copy(step + T::kStages - 1);
    const float* x = stages[step % T::kStages] + row;
    const float* w = stages[step % T::kStages] + T::kDepth * T::kPitchA + column;
    const int64_t left = p.k - step * T::kDepth;
    if (left >= T::kDepth) {
#pragma unroll
      for (int i = 0; i < T::kDepth; ++i) multiply<T>(sum, x + i * T::kPitchA, w + i * T::kPitchB);
    } else {  // a step past K would turn a sum of -0 into +0
      for (int i = 0; i < left; ++i) multiply<T>(sum, x + i * T::kPitchA, w + i * T::kPitchB);
    }
  }

  const auto* bias = static_cast<const float*>(p.bias);
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    if (m0 + row + i >= p.m) break;
    float* y = static_cast<float*>(p.y) + (m0 + row + i) * p.y_stride + n0 + column;
    const int64_t inside = p.n - n0 - column;
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j)
      if (bias != nullptr && j < inside) sum[i][j] = __fadd_rn(sum[i][j], bias[n0 + column + j]);
    if (T::kColumns == 4 && inside >= 4 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
      *reinterpret_cast<float4*>(y) = make_float4(sum[i][0], sum[i][1], sum[i][T::kColumns - 2], sum[i][T::kColumns - 1]);
    } else {
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j)
        if (j < inside) y[j] = sum[i][j];
    }
  }
}

template <class T>
int launch(const H3Fma& p, cudaStream_t stream) {
  const int64_t tiles = (p.m + T::kM - 1) / T::kM * ((p.n + T::kN - 1) / T::kN);
  if (tiles > INT32_MAX) return -2;
  fma_gemm<T><<<static_cast<unsigned>(tiles), T::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace h3

extern "C" int h3_fma_gemm(const H3Fma* call, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (call->m < 1 || call->n < 1 || call->k < 1) return -2;
  switch (call->tile) {
    case 64: return h3::launch<h3::FmaTile<64, 64, 8, 4, 16, 4>>(*call, s);
    case 32: return h3::launch<h3::FmaTile<32, 32, 4, 4, 16, 4>>(*call, s);
    case 16: return h3::launch<h3::FmaTile<16, 16, 2, 2, 32, 4>>(*call, s);
    default: return -1;
  }
}
