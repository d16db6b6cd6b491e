"""``replace_ragged_dot``: code that calls JAX's ``ragged_dot`` calls ours, for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax

from .ragged_dot import ragged_dot, ragged_dot_general

_OURS: dict[str, Callable] = {
    "ragged_dot": ragged_dot,
    "ragged_dot_general": ragged_dot_general,
}
# A thread's own, and part of the key of JAX's caches: a function that was traced with one value is
# traced again with the other.
_ours_are_called = jax.make_user_context(False)
_lock = threading.Lock()
_contexts: dict[Callable, int] = {}  # how many contexts need each stand-in


@contextlib.contextmanager
def replace_ragged_dot() -> Iterator[None]:
    """``jax.lax.ragged_dot`` is :func:`ragged_dot`, and ``jax.lax.ragged_dot_general`` is
    :func:`ragged_dot_general`, in a ``with`` block; **rows stay grouped as they are**.

    For code that cannot be changed::

        with jgg.replace_ragged_dot():
            train()

    The block puts back what it found, also where it ends with an exception. Blocks may be nested.

    - JAX traces programs again: a program that ``jax.jit`` traced before the block calls our
      functions within it, and JAX's afterwards. Programs compiled ahead of time, by
      ``.lower(...).compile()``, stay as they are.
    - Code that ran ``from jax.lax import ragged_dot`` before the block keeps JAX's function, which
      the block cannot replace: import such modules within the block. Outside of the block, the
      function that they imported acts as JAX's.
    - A block acts in the thread that opened it. Other threads, also those that this one starts,
      have JAX's functions: open a block in each. Threads may open and close blocks in any order.
    - Within our functions JAX's functions are JAX's, so no function calls itself.

    Returns:
      A context manager, which also decorates functions.

    Raises:
      ValueError, TypeError: from calls within the block, as :func:`ragged_dot` has them.

    Examples:
      >>> lhs, rhs = jnp.ones((5, 8)), jnp.ones((2, 8, 4))
      >>> with jgg.replace_ragged_dot():
      ...     y = jax.lax.ragged_dot(lhs, rhs, jnp.array([2, 3]))  # runs this library's product
      >>> y.shape
      (5, 4)
    """
    stand_ins = _install()
    try:
        with _ours_are_called(True):
            yield
    finally:
        _remove(stand_ins)


def _install() -> dict[str, Callable]:
    with _lock:
        stand_ins = {}
        for name, ours in _OURS.items():
            found = getattr(jax.lax, name)
            if found not in _contexts:
                # Somebody else's replacement is wrapped as JAX's own is.
                found = _stand_in(found, ours)
                setattr(jax.lax, name, found)
            _contexts[found] = _contexts.get(found, 0) + 1
            stand_ins[name] = found
        return stand_ins


def _remove(stand_ins: dict[str, Callable]) -> None:
    with _lock:
        for name, stand_in in stand_ins.items():
            _contexts[stand_in] -= 1
            if _contexts[stand_in]:
                continue
            del _contexts[stand_in]
            # Whoever replaced ours meanwhile still calls it. It calls JAX's then.
            if getattr(jax.lax, name) is stand_in:
                setattr(jax.lax, name, stand_in.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache  # one function for every block: JAX's caches know it again
def _stand_in(original: Callable, ours: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args, **kwargs):
        if not _ours_are_called.value:
            return original(*args, **kwargs)
        with _ours_are_called(False):
            return ours(*args, **kwargs)

    return call
