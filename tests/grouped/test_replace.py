"""replace_ragged_dot: whose function is called, by which thread and program, and afterwards."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_groupgemm as jgg

JAXS = lax.ragged_dot, lax.ragged_dot_general
LHS, RHS, SIZES = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 1, 1])
NUMBERS = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
KINDS = {
    "ragged_dot": lambda *args: jax.lax.ragged_dot(*args),
    "ragged_dot_general": lambda *args: jax.lax.ragged_dot_general(*args, NUMBERS),
}


def of_ours(f, *args) -> bool:
    """Whether a program has our primitive; JAX's has its own."""
    text = str(jax.make_jaxpr(f)(*(args or (LHS, RHS, SIZES))))
    assert ("jgg_" in text) != ("ragged_dot" in text)
    return "jgg_" in text


def are_jaxs() -> bool:
    return (jax.lax.ragged_dot, jax.lax.ragged_dot_general) == JAXS


@pytest.fixture(autouse=True)
def afterwards():
    assert are_jaxs()
    yield
    assert are_jaxs()
    assert not any(of_ours(f) for f in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_block(kind):
    f = KINDS[kind]
    want = f(LHS, RHS, SIZES)
    with jgg.replace_ragged_dot():
        assert of_ours(f)
        assert of_ours(jax.grad(lambda *args: f(*args).sum(), (0, 1)))
        np.testing.assert_array_equal(f(LHS, RHS, SIZES), want)
        found, jaxs = getattr(jax.lax, kind), dict(zip(KINDS, JAXS, strict=True))[kind]
        assert inspect.signature(found) == inspect.signature(jaxs)
        assert found.__name__ == kind
    assert not of_ours(f)


def test_arguments_arrive():
    with jgg.replace_ragged_dot():
        out = jax.lax.ragged_dot(
            lhs=LHS, rhs=RHS[1:], group_sizes=SIZES, preferred_element_type=jnp.bfloat16,
            group_offset=jnp.array([1]),
        )  # fmt: skip
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), [0, 0, 4, 4, 0, 0])


def test_it_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), jgg.replace_ragged_dot():
        _ = 1 // 0
    assert are_jaxs()


def test_errors_are_ours():
    with jgg.replace_ragged_dot():
        with pytest.raises(ValueError, match=r"^jgg\.ragged_dot: rhs has shape"):
            jax.lax.ragged_dot(LHS, RHS[:, :2], SIZES)
        assert of_ours(KINDS["ragged_dot"])


def test_nested():
    with jgg.replace_ragged_dot():
        outer = jax.lax.ragged_dot
        with jgg.replace_ragged_dot():
            assert jax.lax.ragged_dot is outer
            assert of_ours(KINDS["ragged_dot"])
        assert of_ours(KINDS["ragged_dot"])


def test_as_a_decorator():
    @jgg.replace_ragged_dot()
    def run():
        return of_ours(KINDS["ragged_dot"])

    assert run()
    assert are_jaxs()
    assert run()


def test_programs_are_traced_again():
    """The one that was there before is found again."""
    traced = []

    @jax.jit
    def f(lhs, rhs, sizes):
        traced.append(jax.lax.ragged_dot)
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    f(LHS, RHS, SIZES)
    with jgg.replace_ragged_dot():
        f(LHS, RHS, SIZES)
        f(LHS, RHS, SIZES)
    f(LHS, RHS, SIZES)
    with jgg.replace_ragged_dot():
        f(LHS, RHS, SIZES)
    assert len(traced) == 2
    assert traced[0] is JAXS[0] is not traced[1]


def test_nothing_calls_itself(monkeypatch):
    """JAX's functions are JAX's within ours."""
    from jax_groupgemm._grouped import replace

    seen = []

    def ours(lhs, rhs, sizes):
        seen.append(of_ours(KINDS["ragged_dot"]))
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    monkeypatch.setitem(replace._OURS, "ragged_dot", ours)
    with jgg.replace_ragged_dot():
        out = jax.lax.ragged_dot(LHS, RHS, SIZES)
        jax.lax.ragged_dot(LHS, RHS, SIZES)
    assert seen == [False, False]
    np.testing.assert_array_equal(out[:, 0], [4, 4, 4, 4, 0, 0])


def test_a_function_that_was_imported_within_is_jaxs_again():
    with jgg.replace_ragged_dot():
        from jax.lax import ragged_dot

        assert of_ours(lambda *args: ragged_dot(*args))
    assert not of_ours(lambda *args: ragged_dot(*args))
    with jgg.replace_ragged_dot():
        assert of_ours(lambda *args: ragged_dot(*args))


def test_a_function_that_was_imported_before_stays_jaxs():
    with jgg.replace_ragged_dot():
        assert not of_ours(lambda *args: JAXS[0](*args))


def in_a_thread(f):
    results = []
    thread = threading.Thread(target=lambda: results.append(f()))
    thread.start()
    thread.join(60)
    return results[0]


def test_a_block_is_of_its_thread():
    def opens():
        with jgg.replace_ragged_dot():
            return of_ours(KINDS["ragged_dot"])

    with jgg.replace_ragged_dot():
        assert not in_a_thread(lambda: of_ours(KINDS["ragged_dot"]))
        assert in_a_thread(opens)
        assert of_ours(KINDS["ragged_dot"])


def test_threads_leave_in_any_order():
    """The first one opens and closes first."""
    opened, closed, results = threading.Event(), threading.Event(), []

    def second():
        with jgg.replace_ragged_dot():
            opened.set()
            closed.wait(60)
            results.append(of_ours(KINDS["ragged_dot"]))

    with jgg.replace_ragged_dot():
        thread = threading.Thread(target=second)
        thread.start()
        opened.wait(60)
    assert not of_ours(KINDS["ragged_dot"])
    closed.set()
    thread.join(60)
    assert results == [True]


def test_anothers_replacement_is_put_back():
    """It was there before, or comes within and outlives the block."""

    def doubled(*args, **kwargs):
        return 2 * JAXS[0](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_dot", doubled)
        with jgg.replace_ragged_dot():
            assert of_ours(KINDS["ragged_dot"])
        assert jax.lax.ragged_dot is doubled

    block = jgg.replace_ragged_dot()
    block.__enter__()
    below = jax.lax.ragged_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_dot", lambda *args: 2 * below(*args))
        assert of_ours(KINDS["ragged_dot"])
        block.__exit__(None, None, None)
        assert not of_ours(KINDS["ragged_dot"])
        assert float(jax.lax.ragged_dot(LHS, RHS, SIZES)[0, 0]) == 8
    # The function that was put back is a stand-in that calls JAX's.
    assert not of_ours(KINDS["ragged_dot"])
    jax.lax.ragged_dot = JAXS[0]
