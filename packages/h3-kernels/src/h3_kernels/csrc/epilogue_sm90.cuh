// Writes a warp's share of a finished tile: bias in fp32, one rounding, coalesced stores.
//
// In wgmma's accumulator layout value 4j + 2h + c of a thread is row g + 8h, column 8j + 2q + c of its warp's 16 rows
// (g = lane / 4, q = lane % 4; PTX ISA, "wgmma register fragment D").
#pragma once
#include <cuda_bf16.h>

#include "config_sm90.cuh"
#include "ptx_sm90.cuh"

namespace h3 {

template <class C>
struct Epilogue {
  using Values = float[C::kAccumulators];
  static constexpr int kBlocks = C::kTileN / 8;

  static __device__ __forceinline__ void store(const GemmParams& p, Values& d, int row0, int column0) {
    if constexpr (C::kSwap) store_swapped(p, d, row0, column0);
    else if (p.y_is_float) store_float(p, d, row0, column0);
    else store_bf16(p, d, row0, column0);
  }

  static __device__ __forceinline__ float bias_of(const GemmParams& p, int feature) {
    return p.bias_is_float ? static_cast<const float*>(p.bias)[feature]
                           : __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[feature]);
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  static __device__ __forceinline__ void add_column_bias(const GemmParams& p, Values& d, int column) {
    if (p.bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (column + 8 * j + c >= p.n) continue;
        const float bias = bias_of(p, column + 8 * j + c);
        d[4 * j + c] = __fadd_rn(d[4 * j + c], bias);
        d[4 * j + 2 + c] = __fadd_rn(d[4 * j + 2 + c], bias);
      }
    }
  }

  static __device__ __forceinline__ void store_float(const GemmParams& p, Values& d, int row0, int column0) {
    const int lane = threadIdx.x % 32, row = row0 + lane / 4, column = column0 + lane % 4 * 2;
    add_column_bias(p, d, column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= p.m) continue;
      float* y = static_cast<float*>(p.y) + (row + 8 * h) * p.y_stride + column;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
        if (column0 + 8 * j < p.n) *reinterpret_cast<float2*>(y + 8 * j) = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    }
  }

  // Word b of lane q becomes word q of lane b within each quad of lanes.
  static __device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) {
    const uint32_t a = __shfl_xor_sync(~0u, q & 1 ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, q & 1 ? w[2] : w[3], 1);
    if (q & 1) w[0] = a, w[2] = b;
    else w[1] = a, w[3] = b;
    const uint32_t c = __shfl_xor_sync(~0u, q & 2 ? w[0] : w[2], 2), e = __shfl_xor_sync(~0u, q & 2 ? w[1] : w[3], 2);
    if (q & 2) w[0] = c, w[1] = e;
    else w[2] = c, w[3] = e;
  }

  // The lanes of a quad trade words until each holds 8 neighbouring columns: 16-byte stores, 64 bytes a quad.
  static __device__ __forceinline__ void store_bf16(const GemmParams& p, Values& d, int row0, int column0) {
    const int lane = threadIdx.x % 32, q = lane % 4, row = row0 + lane / 4;
    add_column_bias(p, d, column0 + 2 * q);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = row + 8 * h < p.m;
      __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + (row + 8 * h) * p.y_stride + column0;
#pragma unroll
      for (int j = 0; j < kBlocks / 4 * 4; j += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack(d[4 * (j + i) + 2 * h], d[4 * (j + i) + 2 * h + 1]);
        transpose_quad(w, q);
        if (inside && column0 + 8 * (j + q) < p.n)
          *reinterpret_cast<uint4*>(y + 8 * (j + q)) = make_uint4(w[0], w[1], w[2], w[3]);
      }
#pragma unroll
      for (int j = kBlocks / 4 * 4; j < kBlocks; ++j)
        if (inside && column0 + 8 * j < p.n)
          *reinterpret_cast<uint32_t*>(y + 8 * j + 2 * q) = pack(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    }
  }

  static __device__ __forceinline__ void add_row_bias(const GemmParams& p, Values& d, int feature) {
    if (p.bias == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = feature + 8 * h < p.m ? bias_of(p, feature + 8 * h) : 0.0f;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        d[4 * j + 2 * h] = __fadd_rn(d[4 * j + 2 * h], bias);
        d[4 * j + 2 * h + 1] = __fadd_rn(d[4 * j + 2 * h + 1], bias);
      }
    }
  }

  // Rows are weight rows (columns of y), columns are tokens.
  static __device__ __forceinline__ void store_swapped(const GemmParams& p, Values& d, int row0, int column0) {
    add_row_bias(p, d, row0 + threadIdx.x % 32 / 4);
    if (p.y_is_float) store_swapped_float(p, d, row0, column0);
    else store_swapped_bf16(p, d, row0, column0);
  }

  static __device__ __forceinline__ void store_swapped_float(const GemmParams& p, Values& d, int row0, int column0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int feature = row0 + lane / 4 + 8 * h;
      if (feature >= p.m) continue;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int token = column0 + 8 * j + lane % 4 * 2;
        float* y = static_cast<float*>(p.y) + token * p.y_stride + feature;
        if (token < p.n) y[0] = d[4 * j + 2 * h];
        if (token + 1 < p.n) y[p.y_stride] = d[4 * j + 2 * h + 1];
      }
    }
  }

  // Blocks of 8 features x 8 tokens are transposed, then a quad of lanes trades words as in store_bf16: each lane holds
  // 8 features of a token, two lanes the warp's 16 features of it, a whole 32-byte sector.
  static __device__ __forceinline__ void store_swapped_bf16(const GemmParams& p, Values& d, int row0, int column0) {
    const int lane = threadIdx.x % 32, q = lane % 4, feature = row0 + q % 2 * 8;
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int value = 4 * min_of(j + i / 2, kBlocks - 1) + i % 2 * 2;
        w[i] = ptx::transpose_8x8(pack(d[value], d[value + 1]));
      }
      transpose_quad(w, q);
      const int block = j + q / 2, token = column0 + 8 * block + lane / 4;
      if (block < kBlocks && token < p.n && feature < p.m)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.y) + token * p.y_stride + feature) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
};

}  // namespace h3
