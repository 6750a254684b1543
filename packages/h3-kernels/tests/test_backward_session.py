"""Theorem: in a session, dW and dbias do not depend on how rows are cut into microbatches, ordered or padded."""

import pytest
import torch
from h3_kernels.backward_session import active_session, backward_session
from h3_kernels.errors import LogicalKeysError, SessionError
from h3_kernels.logical_keys import LogicalKeys, canonical_order, keys_of_rows
from h3_kernels.lora import lora_linear
from h3_kernels.projection import projection, projection_group
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import assert_bitwise_equal, cancellation_inputs, count_differing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

ROWS, N, K = 24, 32, 16


class Block(torch.nn.Module):
    """A fused column-parallel linear, then a row-parallel one, both with biases."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"fc1": (N, K), "fc2": (K, N), "fc1_bias": (N,), "fc2_bias": (K,)}.items():
            values = torch.randn(*shape, generator=generator).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, x, keys):
        hidden = projection(x, self.fc1, self.fc1_bias, parts=(0, 1), logical_keys=keys)
        return row_parallel(hidden, self.fc2, self.fc2_bias, logical_keys=keys)


def data():
    """x and dy [ROWS, K] whose dW cancels between the two halves, and their keys."""
    x, _ = cancellation_inputs(ROWS, 1, K, seed=1)
    dy, _ = cancellation_inputs(ROWS, 1, K, seed=2)
    half = ROWS // 2
    x[half:], dy[half:] = x[:half], -dy[:half]
    dy[::5] *= 2.0**-6
    return x, dy, torch.stack([torch.arange(ROWS) // 6, torch.arange(ROWS) % 6], dim=1)


def run(cuts, order=None, use_checkpoint=False):
    """Gradients of a Block over microbatches that end at ``cuts``, its rows taken in ``order``."""
    block = Block()
    x, dy, keys = data()
    order = torch.arange(ROWS) if order is None else order
    with backward_session(block):
        for rows in order.tensor_split(cuts):
            batch_keys = LogicalKeys(keys[rows])
            arguments = (x[rows].requires_grad_(), batch_keys)
            y = checkpoint(block, *arguments, use_reentrant=False) if use_checkpoint else block(*arguments)
            y.backward(dy[rows])
    return {name: p.grad for name, p in block.named_parameters()}


def assert_same(a, b):
    for name, gradient in a.items():
        assert_bitwise_equal(gradient, b[name], name)


@pytest.fixture(scope="module")
def whole():
    return run([])


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=4).map(sorted), order=st.permutations(range(ROWS)))
def test_microbatches_and_row_order_change_no_bit(whole, cuts, order):
    assert_same(run(cuts, torch.tensor(order)), whole)


def test_a_session_of_one_microbatch_equals_a_plain_backward(whole):
    block = Block()
    x, dy, keys = data()
    block(x, LogicalKeys(keys)).backward(dy)
    assert_same({name: p.grad for name, p in block.named_parameters()}, whole)


def test_twin_adding_the_gradients_of_microbatches_is_caught(whole):
    block = Block()
    x, dy, keys = data()
    for rows in torch.arange(ROWS).tensor_split([ROWS // 2]):
        block(x[rows], LogicalKeys(keys[rows])).backward(dy[rows])
    assert count_differing(block.fc1.grad, whole["fc1"]) > block.fc1.numel() // 20


def test_recomputed_activations_are_the_same_use(whole):
    assert_same(run([7, 15], use_checkpoint=True), whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_falls_back_to_eager_and_keeps_the_bits(whole):
    block = Block()
    x, dy, keys = data()
    compiled = torch.compile(block, backend="aot_eager")
    with backward_session(block):
        compiled(x, LogicalKeys(keys)).backward(dy)
    assert_same({name: p.grad for name, p in block.named_parameters()}, whole)


def test_group_and_lora_take_part():
    x, dy, keys = data()
    weights = [torch.randn(K, K, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]

    def gradients(cuts):
        leaves = [w.clone().requires_grad_() for w in weights]
        a, b = weights[0][:4].clone().requires_grad_(), weights[1][:, :4].clone().requires_grad_()
        with backward_session():
            for rows in torch.arange(ROWS).tensor_split(cuts):
                batch_keys = LogicalKeys(keys[rows])
                q, k, v = projection_group(x[rows], leaves, logical_keys=batch_keys)
                y = lora_linear(x[rows], q + k + v, a, b, 0.5, logical_keys=batch_keys)
                y.backward(dy[rows])
        return {str(i): t.grad for i, t in enumerate([*leaves, a, b])}

    assert_same(gradients([5, 11]), gradients([]))


def test_frozen_weights_need_no_keys_and_get_no_gradient():
    x, dy, _ = data()
    block = Block().requires_grad_(False)
    leaf = x.clone().requires_grad_()
    with backward_session(block):
        block(leaf, None).backward(dy)
    assert leaf.grad is not None
    assert block.fc1.grad is None


def test_a_missing_backward_is_named_and_no_gradient_is_set():
    block = Block()
    x, dy, keys = data()
    halves = torch.arange(ROWS).chunk(2)
    message = r"2 uses .* no backward pass: fc1 \(12 rows\), fc2 \(12 rows\)"
    with pytest.raises(SessionError, match=message), backward_session(block):  # noqa: PT012
        ys = [block(x[rows], LogicalKeys(keys[rows])) for rows in halves]
        ys[0].backward(dy[halves[0]])
    assert block.fc1.grad is None
    assert active_session() is None


def forward_without_keys(block, x, dy, keys):
    block(x, None)


def weight_that_is_computed(block, x, dy, keys):
    projection(x, block.fc1 * 2, logical_keys=LogicalKeys(keys))


def same_keys_twice(block, x, dy, keys):
    same = LogicalKeys(keys)
    (block(x, same) + block(x, same)).backward(dy)


def equal_keys_in_two_microbatches(block, x, dy, keys):
    for _ in range(2):
        block(x, LogicalKeys(keys)).backward(dy)


def input_changed_in_place(block, x, dy, keys):
    changed = x.clone()
    block(changed, LogicalKeys(keys)).backward(dy)
    changed.zero_()


def gradient_already_there(block, x, dy, keys):
    block(x, LogicalKeys(keys)).backward(dy)
    block.fc1.grad = torch.zeros_like(block.fc1)


def storage_freed(block, x, dy, keys):
    block(x, LogicalKeys(keys)).backward(dy)
    block.fc1.untyped_storage().resize_(0)


def bias_of_two_weights(block, x, dy, keys):
    batch_keys = LogicalKeys(keys)
    other = block.fc1.detach().clone().requires_grad_()
    for weight in (block.fc1, other):
        projection(x, weight, block.fc1_bias, logical_keys=batch_keys)


def nested(block, x, dy, keys):
    with backward_session():
        pass


MISUSES = {
    forward_without_keys: (SessionError, "fc1 is used in a backward session without logical_keys"),
    weight_that_is_computed: (SessionError, r"parameter \[32, 16\] is computed, not a leaf"),
    same_keys_twice: (SessionError, "fc2 was used twice on the same LogicalKeys"),
    equal_keys_in_two_microbatches: (LogicalKeysError, "active keys must be unique"),
    input_changed_in_place: (SessionError, "x of fc1 was changed in place"),
    gradient_already_there: (SessionError, "fc1 already has a gradient"),
    storage_freed: (SessionError, "fc1 was freed or sharded"),
    bias_of_two_weights: (SessionError, "shared with another linear in other pairs"),
    nested: (SessionError, "do not nest"),
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_misuse_is_refused_and_sets_no_gradient(misuse):
    error, message = MISUSES[misuse]
    block = Block()
    with pytest.raises(error, match=message), backward_session(block):
        misuse(block, *data())
    assert block.fc2.grad is None
    assert active_session() is None


def test_a_finished_session_takes_no_more():
    block = Block()
    x, dy, keys = data()
    with backward_session(block) as session:
        y = block(x, LogicalKeys(keys))
        y.backward(dy, retain_graph=True)
    with pytest.raises(SessionError, match="has finished"):
        y.backward(dy)
    with pytest.raises(SessionError, match="has finished"):
        session.finish()


KEYS = st.integers(2, 3).flatmap(
    lambda width: st.lists(st.tuples(*[st.integers(-1, 3)] * width), min_size=1, max_size=40, unique=True)
)


@given(KEYS)
def test_order_is_lexicographic_without_padding(rows):
    order = canonical_order(torch.tensor(rows))
    expected = sorted((row, i) for i, row in enumerate(rows) if row[0] >= 0)
    found = range(len(rows)) if order is None else order.tolist()
    assert list(found) == [i for _, i in expected]
    assert (order is None) == ([i for _, i in expected] == list(range(len(rows))))


def test_keys_are_checked_and_owned():
    table = torch.tensor([[0, 1], [0, 0], [-1, 0], [-1, 0]])
    keys = LogicalKeys(table)
    table[0, 0] = 9
    assert keys.keys[0].tolist() == [0, 1]
    assert keys.order.tolist() == [1, 0], "equal keys are allowed on padding rows"
    with pytest.raises(LogicalKeysError, match=r"key \[0, 1\] is on rows 0 and 2"):
        LogicalKeys(torch.tensor([[0, 1], [0, 0], [0, 1]]))
    for wrong in (table.int(), table[:, :1], table[0], torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(LogicalKeysError, match=r"expected int64 \[T, 2\] or \[T, 3\]"):
            LogicalKeys(wrong)
    with pytest.raises(LogicalKeysError, match="4 keys for 3 rows"):
        projection(torch.ones(3, 8), torch.ones(8, 8), logical_keys=keys)


def test_keys_on_another_device_are_refused_before_anything_runs():
    """Found in backward otherwise; keys of rows already in order name no position and serve any device."""
    meta = torch.device("meta")
    shuffled, ordered = (LogicalKeys(torch.tensor(keys)) for keys in ([[0, 1], [0, 0]], [[0, 0], [0, 1]]))
    with pytest.raises(LogicalKeysError, match="keys are on cpu, their rows on meta"):
        keys_of_rows(shuffled, 2, meta)
    assert keys_of_rows(ordered, 2, meta) is ordered
    assert keys_of_rows(shuffled, 2, torch.device("cpu")) is shuffled
