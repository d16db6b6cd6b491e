"""benchmarks.matrix and benchmarks.qlora: what they time, small and on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import matrix, qlora, quantized, timing


class Arm:
    """As timing.JaxArm, without a GPU."""

    def __init__(self, f, args, cold):
        self.out = jax.jit(f)(*args)

    def time(self, n):
        return [3.0] * n

    def result(self):
        return self.out

    def close(self):
        pass


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(timing, "JaxArm", Arm)
    for name, value in (("GROUPS", 4), ("N", 128), ("K", 256)):
        monkeypatch.setattr(matrix, name, value)
    yield
    timing.forget()


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [("nvfp4", "bfloat16", "linear"), ("affine4", "float16", "sm90"), ("fp8", "float32", "linear")],
)
@pytest.mark.parametrize("direction", matrix.DIRECTIONS)
def test_a_cell(small, name, dtype, layout, direction):
    record = matrix.measure(name, dtype, layout, direction, 8, 2)
    assert (record["us"], record["note"]) == (3.0, "")
    assert record["error"] < matrix.TOLERANCE[dtype]


def test_a_layout_that_is_not_there(small, monkeypatch):
    monkeypatch.setattr(matrix, "N", 96)  # no whole tiles
    record = matrix.measure("affine4", "float32", "sm90", "forward", 8, 2)
    assert (record["us"], record["note"]) == (None, "has no such layout")


def test_the_table():
    cell = dict(zip(matrix.KEYS, ("nvfp4", "float16", "sm90", "dx", 64), strict=True))
    rows = matrix.table([cell | {"us": 41.4}]).splitlines()
    assert len(rows) == 3
    assert rows[2] == "| nvfp4 | 64 | - / - | - / - | - / - | - / 41 | - / - | - / - |"


def test_a_step_of_qlora(monkeypatch):
    """The loss and its gradients are those of the dense layer."""
    for name, value in (("EXPERTS", 4), ("TOP_K", 2), ("WIDTH", 128), ("HIDDEN", 64), ("RANK", 4)):
        monkeypatch.setattr(qlora, name, value)
    adapters, x, frozen, expert, weight = qlora.operands("nvfp4", 16, False, "float32")
    step = jax.jit(jax.value_and_grad(qlora.loss, argnums=(0, 1)))
    value, (of_adapters, dx) = step(adapters, x, frozen, expert, weight)

    def dense(adapters, x):
        up, down = (
            quantized.to_bfloat16(w).astype("float32").swapaxes(1, 2) + a @ b
            for w, (a, b) in zip(frozen, adapters, strict=True)
        )
        gate, through = jnp.split(jnp.einsum("tk,ekn->etn", x, up), 2, axis=-1)
        out = jnp.einsum("etn,enk->etk", jax.nn.silu(gate) * through, down)
        share = (jax.nn.one_hot(expert, 4) * weight[..., None]).sum(1)
        return jnp.square(jnp.einsum("etk,te->tk", out, share)).mean()

    want, (want_adapters, want_dx) = jax.jit(jax.value_and_grad(dense, (0, 1)))(adapters, x)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    for got, wanted in zip(
        jax.tree.leaves((of_adapters, dx)), jax.tree.leaves((want_adapters, want_dx)), strict=True
    ):
        distance = np.linalg.norm(np.asarray(got) - np.asarray(wanted))
        assert distance <= 1e-3 * np.linalg.norm(np.asarray(wanted))
