// Runs the fused GEMM's schedule and carry rules on the CPU, one fp32 number per (tile, unit), for
// test_extension_schedule.py. The clusters run in the order the kernel promises to need: senders before owners.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "schedule.cuh"

namespace {

constexpr int kLevels = 3;

struct State {
  const h3::Schedule& s;
  int levels;
  const float* partials;
  float* roots;
  std::vector<float> nodes;
  std::vector<int> ready;  // nodes each cluster has sent, -1 before its sender piece is complete
};

// Returns 0, or the line of the rule that broke.
int run_piece(State& x, int cluster, const h3::Piece& piece) {
  float saved[kLevels] = {};
  const bool owner = piece.first == 0;
  const int stop = owner ? x.s.units : piece.last;
  int sent = 0, sender = -1, received = 0;
  for (int unit = piece.first; unit < stop;) {
    int level = 0;
    float v;
    if (unit < piece.last) {
      v = x.partials[piece.tile * x.s.units + unit];
    } else {
      const int from = h3::owner_of(x.s, piece.tile, unit);
      if (from != sender) sender = from, received = 0;
      if (x.ready.at(from) < 0 || received >= x.ready[from]) return __LINE__;
      const int size = h3::node_size(unit, h3::piece_end(x.s, piece.tile, from));
      while (1 << level < size) ++level;
      v = x.nodes.at(x.s.first_node[from] + received++);
    }
    const h3::Carry carry(unit, level, x.levels, piece.first);
    for (int l = 0; l < kLevels; ++l)
      if (carry.add >> l & 1) v = saved[l] + v;
    if (carry.keep >= 0) saved[carry.keep] = v;
    if (carry.keep == h3::Carry::kSend) x.nodes.at(x.s.first_node[cluster] + sent++) = v;
    if (carry.keep == h3::Carry::kRoot) x.roots[piece.tile] = v;
    unit += 1 << level;
  }
  if (owner) return 0;
  for (int l = kLevels - 1; l >= 0; --l) {
    const int start = ((piece.last >> l) - 1) << l;
    if (l < x.levels && (piece.last >> l) % 2 == 1 && start >= piece.first)
      x.nodes.at(x.s.first_node[cluster] + sent++) = saved[l];
  }
  if (sent != x.s.first_node[cluster + 1] - x.s.first_node[cluster]) return __LINE__;
  x.ready[cluster] = sent;
  return 0;
}

}  // namespace

extern "C" {

// partials [tiles, units], roots [tiles], seen [tiles, units] counts how often a unit was computed.
int simulate(int tiles_m, int tiles_n, int band, int units, int clusters, int split, const float* partials, float* roots,
             int* seen, int* longest) {
  h3::Schedule s{};
  s.tiles_m = tiles_m, s.tiles_n = tiles_n, s.band = band, s.units = units, s.clusters = clusters;
  h3::schedule_plan(s, split);
  int levels = 0;
  while (1 << levels < units) ++levels;
  State state{s, levels, partials, roots, std::vector<float>(s.first_node[clusters]), std::vector<int>(clusters, -1)};
  *longest = 0;
  try {
    for (int cluster = clusters - 1; cluster >= 0; --cluster) {
      h3::Cursor cursor(s, cluster);
      h3::Piece piece;
      int work = 0;
      while (cursor.next(s, piece)) {
        for (int u = piece.first; u < piece.last; ++u) ++seen[piece.tile * units + u];
        work += piece.last - piece.first;
        if (const int line = run_piece(state, cluster, piece)) return line;
      }
      *longest = std::max(*longest, work);
    }
  } catch (const std::out_of_range&) {
    return __LINE__;  // a node without a slot
  }
  return 0;
}

// (m, n) of every tile in raster order.
void raster(int tiles_m, int tiles_n, int band, int* out) {
  h3::Schedule s{};
  s.tiles_m = tiles_m, s.tiles_n = tiles_n, s.band = band;
  for (int tile = 0; tile < tiles_m * tiles_n; ++tile) h3::tile_coordinates(s, tile, out[2 * tile], out[2 * tile + 1]);
}
}
