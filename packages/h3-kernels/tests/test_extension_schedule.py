"""The fused GEMM's schedule on the CPU: every unit once, and every tile's root the canonical tree, whatever the cut.

The C++ that runs here (csrc/schedule.cuh) is the C++ the kernel compiles: plan, cursor, carry and node protocol. A
cluster that waits for nodes that no earlier cluster sent would be a deadlock on the device and is an error here.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from h3_kernels.extension import SOURCES
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parent


def build(folder: Path, sources: Path) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    assert compiler is not None, "a C++ compiler is part of the test environment"
    out = folder / "schedule.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        f"-I{sources}",
    ]
    subprocess.run([compiler, *flags, str(TESTS / "schedule_harness.cpp"), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("harness"), SOURCES)


def canonical(partials: np.ndarray) -> np.ndarray:
    while partials.shape[1] > 1:
        partials = partials[:, 0::2] + partials[:, 1::2]
    return partials[:, 0]


def left_fold(partials: np.ndarray) -> np.ndarray:
    total = partials[:, 0].copy()
    for u in range(1, partials.shape[1]):
        total += partials[:, u]
    return total


def simulate(library: ctypes.CDLL, m: int, n: int, units: int, clusters: int, split: int, band: int = 8):
    tiles = m * n
    rng = np.random.default_rng(tiles * units + clusters)
    partials = (rng.standard_normal((tiles, units)) * 2.0 ** rng.integers(-12, 12, (tiles, units))).astype(
        np.float32
    )
    roots = np.full(tiles, np.nan, np.float32)
    seen = np.zeros((tiles, units), np.int32)
    longest = ctypes.c_int()
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (partials, roots, seen)]
    code = library.simulate(m, n, band, units, clusters, split, *pointers, ctypes.byref(longest))
    return code, partials, roots, seen, longest.value


@given(
    m=st.integers(1, 12),
    n=st.integers(1, 48),
    units=st.sampled_from([1, 2, 4, 8]),
    clusters=st.integers(1, 160),
    split=st.sampled_from([0, 1, 2, 4]),
    band=st.integers(1, 9),
)
@settings(max_examples=600, deadline=None)
def test_every_cut_gives_the_canonical_root(harness, m, n, units, clusters, split, band):
    code, partials, roots, seen, _ = simulate(harness, m, n, units, clusters, split, band)
    assert code == 0, f"protocol broken at schedule_harness.cpp:{code}"
    assert (seen == 1).all()
    assert (roots.view(np.int32) == canonical(partials).view(np.int32)).all()


def test_the_inputs_tell_a_left_fold_from_the_tree(harness):
    _, partials, roots, _, _ = simulate(harness, 1, 48, 8, 132, 1)
    assert (roots != left_fold(partials)).any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (((index - 1) << level) < first)", "if (false)"),
        ("level < levels; ++level", "level < levels - 1; ++level"),
        ("nodes += node_count(piece.first, piece.last)", "nodes += 1"),
    ],
    ids=["adds a sibling it does not hold", "stops a level early", "too few node slots"],
)
def test_a_broken_rule_is_caught(tmp_path: Path, old: str, new: str):
    text = (SOURCES / "schedule.cuh").read_text()
    assert text.count(old) == 1
    (tmp_path / "schedule.cuh").write_text(text.replace(old, new))
    broken = build(tmp_path, tmp_path)
    code, partials, roots, _, _ = simulate(broken, 1, 48, 8, 132, 1)
    assert code != 0 or (roots.view(np.int32) != canonical(partials).view(np.int32)).any()


# Rows and columns of the four H3 linears in tiles, and the units of work of the busiest cluster.
@pytest.mark.parametrize(
    ("m", "n", "units", "clusters", "split", "expected"),
    [
        (1, 48, 8, 132, 1, 3),  # 70 rows, 112 columns: 384 units on 132 clusters
        (33, 28, 8, 66, 0, 14 * 8),  # 8349 rows, 256 x 192: exactly 14 waves
        (4, 32, 8, 66, 2, 2 * 8),  # 925 rows, 256 x 168: two waves, nothing to cut
        (4, 42, 8, 66, 1, 2 * 8 + 5),  # 925 rows, 256 x 128: two waves and 36 tiles cut into 5 units each
    ],
)
def test_the_busiest_cluster(harness, m, n, units, clusters, split, expected):
    code, _, _, _, longest = simulate(harness, m, n, units, clusters, split)
    assert (code, longest) == (0, expected)


def test_the_raster_visits_every_tile_once(harness):
    for m, n, band in [(1, 1, 8), (33, 28, 8), (4, 42, 3), (7, 5, 16)]:
        out = np.zeros((m * n, 2), np.int32)
        harness.raster(m, n, band, out.ctypes.data_as(ctypes.c_void_p))
        assert sorted(map(tuple, out)) == [(i, j) for i in range(m) for j in range(n)]
