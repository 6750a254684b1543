// Which cluster computes which units of which tile. Pure arithmetic, shared by the kernel, the launcher and the CPU
// tests (tests/test_extension_schedule.py), because a mistake here is a deadlock or a wrong tree.
//
// Tiles are numbered along M first within bands of `band` tile rows, so that tiles in flight together share operands
// in L2. The first `whole` tiles are computed whole, one per cluster and wave. The tiles left over after the last
// full wave would leave most of the chip idle; units are independent leaves of the tree, so these tiles are laid end
// to end as one line of units and cut into one `chunk` per cluster. A cluster that starts inside a tile sends the
// subtree roots ("nodes") it can finish to the cluster that holds unit 0 of the tile, which adds them in tree order.
// Nothing depends on which cluster is faster: every sum is fixed by the tree.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define H3_BOTH __host__ __device__ __forceinline__
#else
#define H3_BOTH inline
#endif

namespace h3 {

H3_BOTH constexpr int min_of(int a, int b) { return a < b ? a : b; }

constexpr int kMaxClusters = 160;  // more than the SMs of any Hopper part

struct Piece {
  int tile;   // cluster tile
  int first;  // units [first, last) of it
  int last;
};

struct Schedule {
  int tiles_m, tiles_n;  // cluster tiles along M and N
  int band;              // tile rows per band
  int units;             // a power of two
  int clusters;          // persistent clusters launched
  int whole;             // tiles computed whole
  int chunk;             // units per cluster in the streamed tiles; 0 when there are none
  uint16_t first_node[kMaxClusters + 1];  // nodes sent by clusters before this one
};

H3_BOTH int schedule_streamed(const Schedule& s) { return s.tiles_m * s.tiles_n - s.whole; }

// The largest aligned subtree that starts at unit `start` and ends by `last`.
H3_BOTH int node_size(int start, int last) {
  int size = 1;
  while (start % (2 * size) == 0 && start + 2 * size <= last) size *= 2;
  return size;
}

H3_BOTH int node_count(int first, int last) {
  int count = 0;
  for (int start = first; start < last; start += node_size(start, last)) ++count;
  return count;
}

// Walks the pieces of one cluster in the order it computes them.
struct Cursor {
  int tile, position, end;

  H3_BOTH Cursor(const Schedule& s, int cluster) {
    const int line = schedule_streamed(s) * s.units;
    tile = cluster;
    position = cluster * s.chunk < line ? cluster * s.chunk : line;
    end = position + s.chunk < line ? position + s.chunk : line;
  }

  H3_BOTH bool next(const Schedule& s, Piece& piece) {
    if (tile < s.whole) {
      piece = {tile, 0, s.units};
      tile += s.clusters;
      return true;
    }
    if (position >= end) return false;
    const int streamed = position / s.units;
    const int first = position % s.units;
    const int last = end - position < s.units - first ? first + end - position : s.units;
    piece = {s.whole + streamed, first, last};
    position += last - first;
    return true;
  }
};

// The cluster that computes unit `unit` of a streamed tile, and the unit of that tile at which its piece ends.
H3_BOTH int owner_of(const Schedule& s, int tile, int unit) { return ((tile - s.whole) * s.units + unit) / s.chunk; }
H3_BOTH int piece_end(const Schedule& s, int tile, int cluster) {
  const int end = (cluster + 1) * s.chunk - (tile - s.whole) * s.units;
  return end < s.units ? end : s.units;
}

H3_BOTH void tile_coordinates(const Schedule& s, int tile, int& m, int& n) {
  const int per_band = s.band * s.tiles_n;
  const int first_m = tile / per_band * s.band;
  const int rows = s.tiles_m - first_m < s.band ? s.tiles_m - first_m : s.band;
  m = first_m + tile % per_band % rows;
  n = tile % per_band / rows;
}

// What happens to a finished node: `add` bit l says that the left sibling kept at level l is added (ascending), then the
// sum is kept at level `keep`, sent to the tile's owner, or is the root.
struct Carry {
  static constexpr int kSend = -1, kRoot = -2;
  int add, keep;

  // The node of 2^level units at unit `start`, in a piece that begins at unit `first`, of a tree of `levels` levels.
  H3_BOTH Carry(int start, int level, int levels, int first) : add(0), keep(kRoot) {
    for (; level < levels; ++level) {
      const int index = start >> level;
      if (index % 2 == 0) {
        keep = level;
        return;
      }
      if (((index - 1) << level) < first) {
        keep = kSend;
        return;
      }
      add |= 1 << level;
      start = (index - 1) << level;
    }
  }
};

// Fills whole, chunk and first_node. `split` = 0 forbids cutting tiles (a single chain, or no scratch), otherwise
// chunks are multiples of `split` units: larger means fewer nodes.
inline void schedule_plan(Schedule& s, int split) {
  const int tiles = s.tiles_m * s.tiles_n;
  const int left = tiles % s.clusters;
  const bool stream = split > 0 && split < s.units && left != 0;
  s.whole = stream ? tiles - left : tiles;
  const int steps = stream ? (left * s.units / split + s.clusters - 1) / s.clusters : 0;
  s.chunk = steps * split;
  if (s.chunk >= s.units) {  // every cluster would hold a whole tile anyway
    s.whole = tiles;
    s.chunk = 0;
  }
  int nodes = 0;
  for (int c = 0; c < s.clusters; ++c) {
    s.first_node[c] = static_cast<uint16_t>(nodes);
    Cursor cursor(s, c);
    Piece piece;
    while (cursor.next(s, piece))
      if (piece.first > 0) nodes += node_count(piece.first, piece.last);
  }
  s.first_node[s.clusters] = static_cast<uint16_t>(nodes);
}

}  // namespace h3
