// The C ABI that extension.py calls through ctypes: plain pointers and integers, no torch header, so one build serves
// every torch version. Every function returns 0 or a code that h3_error_text explains. Mirrored in extension.py.
#pragma once
#include <stdint.h>

extern "C" {

typedef struct {
  const void* a;  // bf16 [m, k], or its transpose [k, m] when a_transposed
  const void* b;  // bf16 [n, k], or its transpose [k, n] when b_transposed
  void* y;        // [m, n], bf16 or fp32; [n, m] for a configuration that swaps the operands
  const void* bias;
  int64_t m, n, k;
  int64_t a_stride, b_stride, y_stride;  // elements between rows of the arrays as stored
  int32_t a_transposed, b_transposed;
  int32_t y_is_float, bias_is_float;
  int32_t units;
  int32_t config;  // index into the table that h3_sm90_config describes
  int32_t split;   // units per cut of a streamed tile, a multiple of the leaf's; 0 never cuts a tile
  int32_t band;    // tile rows per raster band
  void* scratch;   // at least h3_sm90_scratch() bytes, 16-byte aligned
  void* flags;     // at least h3_sm90_flag_bytes() bytes, zero before the first call; every launch leaves them zero
} H3Gemm;

typedef struct {
  int32_t tile_m, tile_n;
  int32_t leaf;  // 0: a chain over all of K; 1: units are leaves of the tree; 2: pairs of units are
  int32_t cluster, a_transposed, b_transposed;
  int32_t swap;  // a holds the weight rows, b the tokens; y is still [tokens, features]
  int32_t halves;  // CTAs of a cluster that share a tile's units
  int32_t stages, shared_bytes, kept_bytes;
} H3Config;

typedef struct {
  const void* a;     // fp32 [m, k]
  const void* b;     // fp32 [n, k]
  void* y;           // fp32 [m, n]
  const void* bias;  // fp32 [n], or null
  int64_t m, n, k;
  int64_t a_stride, b_stride, y_stride;  // elements between rows
  int32_t tile;  // rows and columns of a block: 16, 32 or 64
} H3Fma;

// y = a times b transposed, plus bias: one chain of fused multiply-adds an element, in ascending k.
int h3_fma_gemm(const H3Fma* call, void* stream);

int h3_sm90_config_count(void);
int h3_sm90_config(int index, H3Config* out);
int h3_sm90_scratch(const H3Gemm* call, int clusters, int64_t* bytes, int32_t* nodes);
int64_t h3_sm90_flag_bytes(void);
int h3_sm90_clusters(int config, int* clusters);  // how many clusters of this config the current device holds at once
int h3_sm90_gemm(const H3Gemm* call, void* stream);

// y[i] = round(tree over u of partials[u][i]); partials fp32 [units, rows, n] contiguous.
int h3_tree_reduce(const void* partials, void* y, const void* bias, int64_t rows, int64_t n, int64_t y_stride,
                   int32_t units, int32_t y_is_float, int32_t bias_is_float, void* stream);

int h3_capture_id(void* stream, unsigned long long* id);  // 0 when the stream is not being captured
const char* h3_error_text(int code);
}
