"""The activations that kernels have: their names, and on the host their values and derivatives,
against the definition."""

import ctypes

import host_program
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_groupgemm._grouped.activations import ACTIVATIONS, activate
from jax_groupgemm._kernels import extension

#: Those that are XLA programs everywhere.
WITHOUT_KERNELS: set[str] = set()
#: The others, and whether they are gated.
KNOWN = {name: of.gated for name, of in ACTIVATIONS.items() if name not in WITHOUT_KERNELS}


@pytest.fixture(scope="module")
def kernels():
    library = host_program.build("activation_values")
    library.name_of.restype = ctypes.c_char_p
    library.is_gated.restype = ctypes.c_bool
    return library


def names(kernels) -> list[str]:
    return [kernels.name_of(i).decode() for i in range(kernels.activations())]


def values(kernels, name, x, up):
    """value, fast value, and the value that comes with the derivatives by x and by up."""
    value, fast, with_derivatives = (
        np.empty(shape, np.float32) for shape in (x.shape, x.shape, (x.size, 3))
    )
    pointers = [host_program.pointer(a) for a in (x, up, value, fast, with_derivatives)]
    kernels.values_of(names(kernels).index(name), x.size, *pointers)
    return value, fast, *with_derivatives.T


@host_program.needs_compiler
def test_they_are_those_that_python_names(kernels):
    assert {name: kernels.is_gated(i) for i, name in enumerate(names(kernels))} == KNOWN


@pytest.mark.skipif(extension.BUILD.problem is not None, reason="needs the extension module")
def test_the_extension_module_names_them():
    found = extension.rules().ACTIVATIONS
    assert found == KNOWN
    assert found[extension.rules().BACKWARD_ACTIVATION]


@host_program.needs_compiler
@pytest.mark.parametrize("name", KNOWN)
def test_values_and_derivatives(kernels, name):
    """Also at corners, which are at 0 and 7."""
    one = np.concatenate([np.linspace(-20, 20, 801), [7, -7, 0, 1e-30, -1e-30]])
    x, up = (a.astype(np.float32).ravel() for a in np.meshgrid(one, one[::20]))
    beside = lambda x, up: jnp.stack([x, up], 1) if KNOWN[name] else x[:, None]
    definition = lambda x, up: activate(beside(x, up), name)[:, 0]
    want, pull = jax.vjp(definition, jnp.asarray(x), jnp.asarray(up))
    by_x, by_up = pull(jnp.ones_like(want))
    got = values(kernels, name, x, up)
    for ours, theirs in zip(got, (want, want, want, by_x, by_up), strict=True):
        scale = np.maximum(1, np.abs(x) * (np.abs(up) if KNOWN[name] else 1))
        assert (np.abs(ours - np.asarray(theirs)) <= 2e-6 * scale).all()


@host_program.needs_compiler
@pytest.mark.parametrize("name", KNOWN)
def test_zeros_and_nan(kernels, name):
    """A row of zeros stays one, and NaN is not lost."""
    x, up = np.array([0, np.nan], np.float32), np.array([0, 1], np.float32)
    value, fast, beside, by_x, _ = values(kernels, name, x, up)
    for got in (value, fast, beside):
        assert got[0] == 0
        assert np.isnan(got[1])
    assert not np.isnan(by_x[0])
