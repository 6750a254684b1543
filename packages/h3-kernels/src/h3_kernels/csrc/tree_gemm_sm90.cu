// Host side of tree_gemm_sm90: the table of configurations, tensor maps, plan and launch.
#include "abi.h"
#include "tree_gemm_sm90.cuh"

namespace h3 {
namespace {

enum Error { kOk = 0, kBadConfig = -1, kBadShape = -2, kBadLayout = -3, kNoDriverEntry = -4, kBadMap = -5, kScratch = -6 };

struct Entry {
  H3Config config;
  const void* kernel;
  int64_t fragment_bytes;
  int64_t kept_bytes;  // scratch of one CTA for nodes that wait
};

template <class C>
Entry entry() {
  return {{kTileM, C::kTileN, static_cast<int>(C::kLeaf), C::kCluster, C::kTransA, C::kTransB, C::kSwap, C::kHalves,
           C::kStages, C::kSharedBytes, C::kGlobalSlots * C::kSlotBytes},
          reinterpret_cast<const void*>(&tree_gemm_sm90<C>),
          C::kFragmentBytes,
          C::kGlobalSlots * C::kSlotBytes};
}

// Columns, leaf, CTAs that share B, A transposed, B transposed, stages, operands swapped, halves of the units.
const Entry kEntries[] = {
    // Trees: a weight [features, K], and one whose transpose is stored (dX).
    entry<Config<160, Leaf::kPair, 2, 0, 0, 5, true>>(),
    entry<Config<192, Leaf::kPair, 2, 0, 0, 4, true>>(),
    entry<Config<160, Leaf::kPair, 2, 1, 0, 5, true>>(),
    entry<Config<192, Leaf::kPair, 2, 1, 0, 4, true>>(),
    // Trees for few tokens.
    entry<Config<16, Leaf::kUnit, 1, 0, 0, 10, true>>(),
    entry<Config<32, Leaf::kUnit, 1, 0, 0, 8, true, 2>>(),
    entry<Config<72, Leaf::kUnit, 1, 0, 0, 7, true, 2>>(),
    entry<Config<128, Leaf::kUnit, 1, 0, 0, 5, true, 2>>(),
    entry<Config<72, Leaf::kUnit, 1, 1, 0, 7, true, 2>>(),
    entry<Config<128, Leaf::kUnit, 1, 1, 0, 5, true, 2>>(),
    // Single chains.
    entry<Config<72, Leaf::kChain, 1, 0, 0, 7, true>>(),
    entry<Config<256, Leaf::kChain, 2, 0, 0, 4>>(),
    entry<Config<192, Leaf::kChain, 2, 0, 0, 5>>(),
    entry<Config<224, Leaf::kChain, 1, 0, 0, 5>>(),
    entry<Config<168, Leaf::kChain, 1, 0, 0, 6>>(),
    entry<Config<256, Leaf::kChain, 2, 0, 1, 4>>(),
    entry<Config<128, Leaf::kChain, 1, 0, 1, 7>>(),
    entry<Config<256, Leaf::kChain, 2, 1, 1, 4>>(),
    entry<Config<128, Leaf::kChain, 1, 1, 1, 7>>(),
};
constexpr int kEntryCount = sizeof(kEntries) / sizeof(kEntries[0]);

int log2_units(int units) {
  for (int level = 0; level <= kMaxLevels; ++level)
    if (units == 1 << level) return level;
  return -1;
}

int validate(const H3Gemm& g) {
  if (g.config < 0 || g.config >= kEntryCount) return kBadConfig;
  const H3Config& c = kEntries[g.config].config;
  if (c.a_transposed != g.a_transposed || c.b_transposed != g.b_transposed) return kBadConfig;
  const int leaf_units = c.leaf == static_cast<int>(Leaf::kPair) ? 2 : 1;
  const int levels = log2_units(g.units);
  if (levels < 0 || g.units < leaf_units || (c.leaf == static_cast<int>(Leaf::kChain) && levels > 0)) return kBadConfig;
  if (g.split % leaf_units != 0 || g.units < c.halves || (c.halves > 1 && g.split != 0)) return kBadConfig;
  const int64_t features = c.swap ? g.m : g.n;
  if (g.m < 1 || g.n < 1 || g.k < 1 || features % 8 != 0 || g.m > INT32_MAX || g.n > INT32_MAX || g.k > INT32_MAX)
    return kBadShape;
  if (g.units > 1 && g.k % (g.units * kStageK) != 0) return kBadShape;
  if (g.a_stride % 8 != 0 || g.b_stride % 8 != 0 || g.y_stride % 8 != 0) return kBadLayout;
  for (const void* pointer : {g.a, g.b, static_cast<const void*>(g.y)})
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return kBadLayout;
  return kOk;
}

Schedule plan(const H3Gemm& g, int clusters) {
  const H3Config& c = kEntries[g.config].config;
  Schedule s{};
  s.tiles_m = static_cast<int>((g.m + kTileM * c.cluster - 1) / (kTileM * c.cluster));
  s.tiles_n = static_cast<int>((g.n + c.tile_n - 1) / c.tile_n);
  s.band = g.band > 0 ? g.band : 8;
  s.units = g.units;
  s.clusters = clusters < kMaxClusters ? clusters : kMaxClusters;
  schedule_plan(s, g.split);
  const int tiles = s.tiles_m * s.tiles_n;
  if (s.chunk == 0 && tiles < s.clusters) s.clusters = tiles;
  return s;
}

int64_t kept_bytes_of(const H3Gemm& g, const Schedule& s) {
  const Entry& e = kEntries[g.config];
  return g.units > 2 ? s.clusters * e.config.cluster * e.config.halves * e.kept_bytes : 0;
}

int64_t node_bytes_of(const H3Gemm& g, const Schedule& s) {
  const Entry& e = kEntries[g.config];
  return s.first_node[s.clusters] * e.config.cluster * e.fragment_bytes;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000,
                                                               cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(pointer)
                                                                        : nullptr;
  }();
  return function;
}

// A bf16 matrix of `rows` rows of `columns` contiguous elements, read in boxes of box_rows x 64.
int encode(CUtensorMap* map, const void* base, int64_t columns, int64_t rows, int64_t stride, int box_rows) {
  const EncodeTiled function = encode_tiled();
  if (function == nullptr) return kNoDriverEntry;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result = function(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kBadMap;
}

int encode_maps(const H3Gemm& g, GemmParams& p) {
  const H3Config& c = kEntries[g.config].config;
  const int code = g.a_transposed ? encode(&p.map_a, g.a, g.m, g.k, g.a_stride, kStageK)
                                  : encode(&p.map_a, g.a, g.k, g.m, g.a_stride, kTileM);
  if (code != kOk) return code;
  return g.b_transposed ? encode(&p.map_b, g.b, g.n, g.k, g.b_stride, kStageK / c.cluster)
                        : encode(&p.map_b, g.b, g.k, g.n, g.b_stride, c.tile_n / c.cluster);
}

int launch(const Entry& e, GemmParams& p, cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(p.schedule.clusters * e.config.cluster * e.config.halves);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = e.config.shared_bytes;
  launch.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = e.config.cluster * e.config.halves;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  void* arguments[] = {&p};
  return cudaLaunchKernelExC(&launch, e.kernel, arguments);
}

constexpr int kMaxDevices = 64;
int resident[kMaxDevices][kEntryCount];  // clusters a device holds at once; filled on first use, always the same value

int clusters_on(int config, int* clusters) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kMaxDevices && resident[device][config] > 0) {
    *clusters = resident[device][config];
    return kOk;
  }
  const Entry& e = kEntries[config];
  error = cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, e.config.shared_bytes);
  if (error != cudaSuccess) return error;
  int processors = 0;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(processors / 2 * 2);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = e.config.shared_bytes;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = e.config.cluster * e.config.halves;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(clusters, e.kernel, &launch);
  if (error != cudaSuccess) return error;
  if (*clusters < 1) return kBadConfig;
  if (device < kMaxDevices) resident[device][config] = *clusters;
  return kOk;
}

}  // namespace
}  // namespace h3

extern "C" {

int h3_sm90_config_count(void) { return h3::kEntryCount; }

int h3_sm90_config(int index, H3Config* out) {
  if (index < 0 || index >= h3::kEntryCount) return h3::kBadConfig;
  *out = h3::kEntries[index].config;
  return h3::kOk;
}

int64_t h3_sm90_flag_bytes(void) { return h3::kMaxClusters * 2 * h3::kMathWarps * sizeof(uint32_t); }

int h3_sm90_clusters(int config, int* clusters) {
  if (config < 0 || config >= h3::kEntryCount) return h3::kBadConfig;
  return h3::clusters_on(config, clusters);
}

int h3_sm90_scratch(const H3Gemm* call, int clusters, int64_t* bytes, int32_t* nodes) {
  const int code = h3::validate(*call);
  if (code != h3::kOk) return code;
  const h3::Schedule s = h3::plan(*call, clusters);
  *bytes = h3::kept_bytes_of(*call, s) + h3::node_bytes_of(*call, s);
  *nodes = s.first_node[s.clusters];
  return h3::kOk;
}

int h3_sm90_gemm(const H3Gemm* call, void* stream) {
  int code = h3::validate(*call);
  if (code != h3::kOk) return code;
  int clusters = 0;
  code = h3::clusters_on(call->config, &clusters);
  if (code != h3::kOk) return code;
  h3::GemmParams p{};
  p.schedule = h3::plan(*call, clusters);
  const int64_t kept = h3::kept_bytes_of(*call, p.schedule);
  if (kept + h3::node_bytes_of(*call, p.schedule) > 0 && call->scratch == nullptr) return h3::kScratch;
  code = h3::encode_maps(*call, p);
  if (code != h3::kOk) return code;
  p.m = static_cast<int>(call->m), p.n = static_cast<int>(call->n);
  p.unit_stages = static_cast<int>((call->k / call->units + h3::kStageK - 1) / h3::kStageK);
  p.levels = h3::log2_units(call->units);
  p.y = call->y, p.y_stride = call->y_stride, p.y_is_float = call->y_is_float;
  p.bias = call->bias, p.bias_is_float = call->bias_is_float;
  p.kept_scratch = static_cast<float*>(call->scratch);
  p.node_scratch = reinterpret_cast<float*>(static_cast<char*>(call->scratch) + kept);
  p.flags = static_cast<uint32_t*>(call->flags);
  return h3::launch(h3::kEntries[call->config], p, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
