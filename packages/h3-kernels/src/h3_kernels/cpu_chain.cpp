// Fixed-order fp32 GEMM for the CPU: the same order as reference.py, compiled.
//
// out[m, n] = tree over units of ( chain over k of fp32(a[m, k] * b[n, k]) ), every operation rounded on its own.
// Vectorised over n only, so no element's order depends on the blocking or on the number of threads. Must be compiled
// with -ffp-contract=off: a fused multiply-add would skip the rounding of the product.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int kRows = 4;      // rows of one register tile
constexpr int kColumns = 32;  // columns of one register tile: two AVX-512 or four AVX2 registers per row
constexpr int kLevels = 4;    // partials alive in a tree of 8 units, the current one included

#if defined(__x86_64__) && defined(__GNUC__)
#define H3_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define H3_CLONES
#endif

struct Problem {
  const float* a;  // [m, k], row-major
  const void* b;   // [n, k], any strides, fp32 or bf16
  int64_t b_stride_n, b_stride_k;  // in elements
  bool b_is_bf16;
  float* out;  // [m, n], row-major
  int64_t m, n, k;
  int units;
};

inline float widen(float value) { return value; }

inline float widen(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Columns [column, column + columns) of b transposed, as fp32 [k, kColumns]; missing columns are zero.
template <typename T>
void pack(const Problem& p, int64_t column, int64_t columns, float* panel) {
  const T* b = static_cast<const T*>(p.b) + column * p.b_stride_n;
  if (columns < kColumns) std::fill_n(panel, p.k * kColumns, 0.0f);
  if (p.b_stride_n == 1) {
    for (int64_t k = 0; k < p.k; ++k)
      for (int64_t c = 0; c < columns; ++c) panel[k * kColumns + c] = widen(b[k * p.b_stride_k + c]);
  } else {
    // A transpose, in blocks of k whose panel lines (8 KiB) stay in L1 while all columns write into them.
    constexpr int64_t kBlock = 64;
    for (int64_t first = 0; first < p.k; first += kBlock)
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t k = first; k < std::min(first + kBlock, p.k); ++k)
          panel[k * kColumns + c] = widen(b[c * p.b_stride_n + k * p.b_stride_k]);
  }
}

// One tile of kRows x kColumns; b is a packed [k, kColumns] panel, rows beyond m are computed from row 0 and dropped.
H3_CLONES void tile(const Problem& p, const float* panel, int64_t row, int64_t column, int64_t columns) {
  const int64_t rows = std::min<int64_t>(kRows, p.m - row);
  const float* a[kRows];
  for (int r = 0; r < kRows; ++r) a[r] = p.a + (r < rows ? row + r : row) * p.k;
  float pending[kLevels][kRows][kColumns];
  int depth = 0;
  const int64_t width = p.k / p.units;
  for (int unit = 0; unit < p.units; ++unit) {
    float acc[kRows][kColumns] = {};
    for (int64_t k = unit * width; k < (unit + 1) * width; ++k) {
      const float* b = panel + k * kColumns;
      for (int r = 0; r < kRows; ++r) {
        const float scale = a[r][k];
        for (int c = 0; c < kColumns; ++c) acc[r][c] += scale * b[c];
      }
    }
    // Binary counter: unit u closes as many subtrees as u has trailing ones; the earlier partial is the left operand.
    for (int closed = unit; closed & 1; closed >>= 1) {
      --depth;
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] = pending[depth][r][c] + acc[r][c];
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) pending[depth][r][c] = acc[r][c];
    ++depth;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) p.out[(row + r) * p.n + column + c] = pending[0][r][c];
}

void columns_from(const Problem& p, int64_t first, int64_t stride) {
  std::vector<float> panel(static_cast<size_t>(p.k) * kColumns);
  for (int64_t column = first * kColumns; column < p.n; column += stride * kColumns) {
    const int64_t columns = std::min<int64_t>(kColumns, p.n - column);
    if (p.b_is_bf16) {
      pack<uint16_t>(p, column, columns, panel.data());
    } else {
      pack<float>(p, column, columns, panel.data());
    }
    for (int64_t row = 0; row < p.m; row += kRows) tile(p, panel.data(), row, column, columns);
  }
}

}  // namespace

extern "C" void h3_tree_gemm_f32(const float* a, const void* b, int64_t b_stride_n, int64_t b_stride_k,
                                 int b_is_bf16, float* out, int64_t m, int64_t n, int64_t k, int units, int threads) {
  const Problem p{a, b, b_stride_n, b_stride_k, b_is_bf16 != 0, out, m, n, k, units};
  const int64_t blocks = (n + kColumns - 1) / kColumns;
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, blocks));
  std::vector<std::thread> pool;
  pool.reserve(static_cast<size_t>(workers));
  for (int64_t w = 1; w < workers; ++w) {
    try {
      pool.emplace_back([&p, w, workers] { columns_from(p, w, workers); });
    } catch (const std::system_error&) {  // no more threads for this process: its columns are computed here
      columns_from(p, w, workers);
    }
  }
  columns_from(p, 0, workers);
  for (std::thread& worker : pool) worker.join();
}
