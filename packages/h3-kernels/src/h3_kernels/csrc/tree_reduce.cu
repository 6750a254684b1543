// The canonical tree over unit partials that a batched product left in memory, one rounding, and the error texts.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "abi.h"

namespace h3 {
namespace {

constexpr int kVector = 4;

template <int kUnits>
__device__ __forceinline__ float4 subtree(const float4* p, int64_t stride) {
  if constexpr (kUnits == 1) {
    return __ldcs(p);
  } else {
    const float4 left = subtree<kUnits / 2>(p, stride), right = subtree<kUnits / 2>(p + kUnits / 2 * stride, stride);
    return make_float4(__fadd_rn(left.x, right.x), __fadd_rn(left.y, right.y), __fadd_rn(left.z, right.z),
                       __fadd_rn(left.w, right.w));
  }
}

template <bool kFloat>
__device__ __forceinline__ float bias_at(const void* bias, int64_t n) {
  return kFloat ? static_cast<const float*>(bias)[n] : __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[n]);
}

template <bool kFloat>
__device__ __forceinline__ float4 add_bias(float4 v, const void* bias, int64_t n) {
  return make_float4(__fadd_rn(v.x, bias_at<kFloat>(bias, n)), __fadd_rn(v.y, bias_at<kFloat>(bias, n + 1)),
                     __fadd_rn(v.z, bias_at<kFloat>(bias, n + 2)), __fadd_rn(v.w, bias_at<kFloat>(bias, n + 3)));
}

template <int kUnits>
__global__ void tree_reduce(const float4* partials, void* y, const void* bias, int64_t vectors, int row_vectors,
                            int64_t y_stride, bool y_is_float, bool bias_is_float) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= vectors) return;
  float4 v = subtree<kUnits>(partials + i, vectors);
  const int64_t row = i / row_vectors, n = i % row_vectors * kVector;
  if (bias != nullptr) v = bias_is_float ? add_bias<true>(v, bias, n) : add_bias<false>(v, bias, n);
  if (y_is_float) {
    *reinterpret_cast<float4*>(static_cast<float*>(y) + row * y_stride + n) = v;
  } else {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(y) + row * y_stride + n) =
        make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
  }
}

}  // namespace
}  // namespace h3

extern "C" {

int h3_tree_reduce(const void* partials, void* y, const void* bias, int64_t rows, int64_t n, int64_t y_stride,
                   int32_t units, int32_t y_is_float, int32_t bias_is_float, void* stream) {
  if (rows < 1 || n < 4 || n % h3::kVector != 0 || n / h3::kVector > INT32_MAX) return -2;
  if (y_stride % h3::kVector != 0 || reinterpret_cast<uintptr_t>(partials) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(y) % 16 != 0)
    return -3;
  const int64_t vectors = rows * n / h3::kVector;
  const int row_vectors = static_cast<int>(n / h3::kVector);
  const auto* p = static_cast<const float4*>(partials);
  const auto s = static_cast<cudaStream_t>(stream);
  constexpr int kBlock = 256;
  const unsigned grid = static_cast<unsigned>((vectors + kBlock - 1) / kBlock);
  switch (units) {
    case 1: h3::tree_reduce<1><<<grid, kBlock, 0, s>>>(p, y, bias, vectors, row_vectors, y_stride, y_is_float, bias_is_float); break;
    case 2: h3::tree_reduce<2><<<grid, kBlock, 0, s>>>(p, y, bias, vectors, row_vectors, y_stride, y_is_float, bias_is_float); break;
    case 4: h3::tree_reduce<4><<<grid, kBlock, 0, s>>>(p, y, bias, vectors, row_vectors, y_stride, y_is_float, bias_is_float); break;
    case 8: h3::tree_reduce<8><<<grid, kBlock, 0, s>>>(p, y, bias, vectors, row_vectors, y_stride, y_is_float, bias_is_float); break;
    default: return -1;
  }
  return cudaGetLastError();
}

int h3_capture_id(void* stream, unsigned long long* id) {
  cudaStreamCaptureStatus status;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, id);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone) *id = 0;
  return error;
}

const char* h3_error_text(int code) {
  switch (code) {
    case 0: return "success";
    case -1: return "no such configuration, or it does not hold this number of units or these layouts";
    case -2: return "shape: n must be a multiple of 8 (4 for the reduction), and k of 64 per unit when units > 1";
    case -3: return "layout: pointers must be 16-byte aligned and strides multiples of 8 elements (4 for the reduction)";
    case -4: return "the driver does not export cuTensorMapEncodeTiled (CUDA 12.0 or newer needed)";
    case -5: return "cuTensorMapEncodeTiled refused the operand";
    case -6: return "scratch missing";
    default: return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown code";
  }
}

}  // extern "C"
