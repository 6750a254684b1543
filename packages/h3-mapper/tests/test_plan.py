"""Theorems about plans: names and shapes are the released model's, every plan is a permutation of rows,
the computed inverse is the table's inverse, the proof refuses wrong plans. No tensors, no files."""

import dataclasses
import hashlib
import itertools

import pytest
from h3_mapper import H3Config, Layout, Plan, Rows, atoms, groups, plan, prove, spans, tensors
from h3_mapper.errors import PlanError
from hypothesis import given
from mapper_testkit import TINY, configs

FULL = H3Config()
PAIRS = list(itertools.product(Layout, Layout))


def test_the_released_model_has_the_published_counts():
    by_layout = {layout: tensors(FULL, layout) for layout in Layout}
    assert {k.value: len(v) for k, v in by_layout.items()} == {
        "diffusers": 638,
        "release": 535,
        "module": 535,
    }
    elements = sum(s.nbytes // (4 if s.dtype == "F32" else 2) for s in by_layout[Layout.DIFFUSERS])
    assert elements == 33_122_992_896
    assert sum(s.dtype == "F32" for s in by_layout[Layout.DIFFUSERS]) == 12
    assert sum(s.dtype == "F32" for s in by_layout[Layout.RELEASE]) == 13
    assert len(groups(FULL)) == 53


@pytest.mark.parametrize(
    ("layout", "digest"),
    [
        ("diffusers", "e7272fff28d2aa623e517d7de0e19ba48c1ded4e99540959ecf787fa8c3ca0e8"),
        ("release", "4e6d28b72755fdbaff627081b6f8046286c4e6bd3b2ec55c95f459d852984ee1"),
        ("module", "4e6d28b72755fdbaff627081b6f8046286c4e6bd3b2ec55c95f459d852984ee1"),
    ],
)
def test_names_shapes_dtypes_and_order_are_the_engines_own(layout, digest):
    """sha256 of the full-size state dicts of diffusers 0.42.1 and vllm-omni 0.30.0, built on the meta device.

    `test_engines.py` rebuilds both and compares name by name; this needs neither.
    """
    lines = (f"{s.name} {list(s.shape)} {s.dtype}" for s in tensors(FULL, Layout(layout)))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == digest


def test_vsa_gates_add_one_tensor_to_each_main_block():
    gated = FULL.with_gates(True)
    extra = {s.name for s in tensors(gated, Layout.RELEASE)} - {s.name for s in tensors(FULL, Layout.RELEASE)}
    assert extra == {f"blocks.{n}.attn.to_gate_compress.weight" for n in range(50)}
    assert len(tensors(gated, Layout.MODULE)) == 585


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(config=configs())
def test_every_plan_covers_every_source_byte_exactly_once(source, target, config):
    assert prove(plan(config, source, target)).nbytes == sum(a.nbytes for a in atoms(config))


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(config=configs())
def test_the_computed_inverse_is_the_table_read_the_other_way(source, target, config):
    forward = plan(config, source, target)
    assert forward.inverse() == plan(config, target, source)
    assert forward.inverse().inverse() == forward


@given(config=configs())
def test_atoms_are_the_same_rows_in_every_layout(config):
    wanted = {a.name: a.rows for a in atoms(config)}
    for layout in Layout:
        seen: dict[str, int] = {}
        for name, held in spans(config, layout).items():
            assert [s.row for s in held] == list(
                itertools.accumulate((s.stop - s.start for s in held), initial=0)
            )[:-1]
            for span in held:
                assert seen.get(span.atom, 0) == span.start, f"{name}: {span} is out of order"
                seen[span.atom] = span.stop
        assert seen == wanted


def rows_of(config: H3Config, source: Layout, target: Layout, name: str) -> tuple[Rows, ...]:
    return next(t.rows for t in plan(config, source, target).targets if t.name == name)


def test_release_qkv_rows_are_per_head_q_k_v():
    """Written out by hand for two heads of 32 rows; checking a prefix alone would pass for one head."""
    q, k, v = (f"transformer_blocks.1.attn.to_{c}.weight" for c in "qkv")
    got = rows_of(TINY, Layout.DIFFUSERS, Layout.RELEASE, "blocks.1.attn.qkv_proj.weight")
    assert got == (
        Rows(q, 0, 32),
        Rows(k, 0, 32),
        Rows(v, 0, 32),
        Rows(q, 32, 64),
        Rows(k, 32, 64),
        Rows(v, 32, 64),
    )
    module = rows_of(TINY, Layout.DIFFUSERS, Layout.MODULE, "blocks.1.attn.qkv_proj.weight")
    assert module == (Rows(q, 0, 64), Rows(k, 0, 64), Rows(v, 0, 64))


@pytest.mark.parametrize("native", [Layout.RELEASE, Layout.MODULE])
def test_fc1_is_gate_first_natively_and_value_first_in_diffusers(native):
    fc1, proj = "token_refiner.blocks.0.mlp.fc1.weight", "token_refiner.refiner_blocks.0.ff.net.0.proj.weight"
    assert rows_of(TINY, Layout.DIFFUSERS, native, fc1) == (Rows(proj, 80, 160), Rows(proj, 0, 80))
    assert rows_of(TINY, native, Layout.DIFFUSERS, proj) == (Rows(fc1, 80, 160), Rows(fc1, 0, 80))


def test_release_to_module_moves_qkv_rows_only():
    moved = {t.name for t in plan(TINY, Layout.RELEASE, Layout.MODULE).targets if len(t.rows) > 1}
    assert moved == {n for n in spans(TINY, Layout.MODULE) if n.endswith("qkv_proj.weight")}


def edited(original: Plan, name: str, rows: tuple[Rows, ...]) -> Plan:
    targets = tuple(dataclasses.replace(t, rows=rows) if t.name == name else t for t in original.targets)
    return dataclasses.replace(original, targets=targets)


def wrong_plans():
    good = plan(TINY, Layout.DIFFUSERS, Layout.RELEASE)
    fc1, proj = "blocks.0.mlp.fc1.weight", "transformer_blocks.0.ff.net.0.proj.weight"
    yield "used twice", edited(good, fc1, (Rows(proj, 0, 80), Rows(proj, 0, 80)))
    yield "never used", edited(good, fc1, (Rows(proj, 1, 81), Rows(proj, 81, 160), Rows(proj, 159, 160)))
    yield "give 159", edited(good, fc1, (Rows(proj, 0, 159),))
    yield "takes rows 0:161", edited(good, fc1, (Rows(proj, 0, 161),))
    yield "does not have", edited(good, fc1, (Rows("elsewhere", 0, 160),))
    yield "takes rows of", edited(good, fc1, (Rows("proj_in.weight", 0, 48),))
    yield "never used", dataclasses.replace(good, targets=good.targets[:-1])


@pytest.mark.parametrize(("message", "wrong"), list(wrong_plans()))
def test_prove_refuses_a_wrong_plan(message, wrong):
    with pytest.raises(PlanError, match=message):
        prove(wrong)
    with pytest.raises(PlanError):
        wrong.inverse()


def test_a_layout_that_does_not_exist_names_those_that_do():
    with pytest.raises(ValueError, match="'comfy' is not a layout; expected diffusers, release, module"):
        Layout("comfy")
