"""Where sharding meets JAX's own machinery: a shard_map over some mesh axes, exported modules, the
persistent cache, other platforms, the older partitioner. Four virtual devices."""

import contextlib
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, put

import jax_groupgemm as jgg
from jax_groupgemm._core import partition, partitioner, segments
from jax_groupgemm._core.products import Mm, Wgrad

BACKEND = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
pytestmark = pytest.mark.skipif(DEVICES < 4, reason="needs two mesh axes of two")

T, K, N, G = 32, 16, 24, 4
SIZES = np.array([9, 0, 11, 7], np.int32)


@pytest.fixture
def problem(rng):
    return oracle.random(rng, (T, K)), oracle.random(rng, (G, K, N)), jnp.asarray(SIZES)


def auto_mesh(**shape) -> Mesh:
    return mesh_of(tuple(shape.values()), tuple(shape), AxisType.Auto)


# ---- shard_map over some mesh axes -----------------------------------------------------------

# What is left to XLA, of the axes of x, within each part of "a", and of w; the result; collectives.
LEFT = {
    "N": ((), (None, None, "b"), (None, "b"), []),
    "N twice": ((), (None, None, ("c", "b")), (None, ("c", "b")), []),
    "K": ((None, "b"), (None, "b"), (), ["all-reduce"]),
    "K and N": ((None, "b"), (None, "b", "c"), (None, "c"), ["all-reduce"]),
    "K and N, in another order": ((None, "c"), (None, "c", "b"), (None, "b"), ["all-reduce"]),
    "T and N": (("c",), (None, None, "b"), ("c", "b"), []),
    "G": ((), ("b",), (), ["all-reduce"]),
    "T and G": (("c",), ("b",), ("c",), ["all-reduce"]),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
@pytest.mark.one_in(5)
def test_axes_that_a_shard_map_leaves(rng, sizes, name):
    """Nothing is gathered, and the result keeps its sharding."""
    x_left, w_left, out_left, wanted = LEFT[name]
    a, b, c = sizes
    mesh = auto_mesh(b=b, a=a, c=c)
    x, w = oracle.random(rng, (a * T, K)), oracle.random(rng, (G, K, N))
    each = np.stack([SIZES, SIZES[::-1]])[:a]
    rows = lambda left: P(("a", *left[:1]), *left[1:]) if left[:1] != (None,) else P("a", *left[1:])
    mapped = jax.shard_map(
        lambda x, w, s: jgg.grouped_mm(x, w, s[0]), mesh=mesh, in_specs=(P("a"), P(), P("a")),
        out_specs=P("a"), axis_names={"a"},
    )  # fmt: skip
    shard = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))
    args = shard(x, rows(x_left)), shard(w, P(*w_left)), shard(each, P("a"))
    f = jax.jit(mapped)
    out = f(*args)
    used = [size for axis, size in (("b", b), ("c", c)) if axis in str((x_left, w_left))]
    if all(size > 1 for size in used):
        assert collectives(f, *args) == wanted
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, rows(out_left)), 2)
    if a == 1:  # XLA refuses the sum over one device, of jnp.dot's gradient too
        oracle.assert_close(out, oracle.grouped_mm(x, w, SIZES))
        return
    grads = jax.jit(jax.grad(lambda x, w: jnp.sin(mapped(x, w, args[2])).sum(), (0, 1)))(*args[:2])
    want_dw = 0
    for i, s in enumerate(each):
        part = slice(i * T, (i + 1) * T)
        want = oracle.grouped_mm(x[part], w, s)
        oracle.assert_close(out[part], want)
        dx, dw = oracle.grouped_mm_grads(x[part], w, s, np.cos(want))
        oracle.assert_close(grads[0][part], dx)
        want_dw += dw
    oracle.assert_close(grads[1], want_dw)


def test_quantized_and_fused_products_in_a_partial_shard_map(rng):
    mesh = auto_mesh(b=2, a=2)
    x, q = oracle.random(rng, (T, 64)), oracle.random_quantized(rng, (G, 16, 64), "mxfp4", 4, 32)
    w, sizes = oracle.random(rng, (G, 64, 16)), jnp.array([3, 0, 11, 2])
    cases = {
        "quantized": (jgg.grouped_qmm, q, (None, "b"), []),
        "quantized, K": (jgg.grouped_qmm, q, (None, None, "b"), ["all-reduce"]),
        "fused": (
            lambda x, w, s: jgg.grouped_mm(x, w, s, bias=w[:, 0], activation="silu"),
            w, (None, None, "b"), [],
        ),
    }  # fmt: skip
    for name, (f, w, spec, wanted) in cases.items():
        mapped = jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"}
            )
        )
        args = put(mesh, x, "a"), put(mesh, w, *spec), put(mesh, sizes)
        assert collectives(mapped, *args) == wanted, name
        want = np.concatenate([f(x[:16], w, sizes), f(x[16:], w, sizes)])
        oracle.assert_close(mapped(*args), want, tolerance=2e-6)


# ---- export ----------------------------------------------------------------------------------

# Specs of x and w, collectives of the product and of its gradients.
EXPORTED = {
    "T": (P("a"), P(), [], ["all-reduce"]),
    "N": (P(), P(None, None, "a"), [], ["all-reduce"]),
    "K": (P(None, "a"), P(None, "a"), ["all-reduce"], []),
    "G": (P(), P("a"), ["all-reduce"], ["all-reduce"]),
}


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("abstract", [True, False])
@pytest.mark.one_in(3)
def test_export(problem, name, abstract):
    """A module that is exported without devices, or with, is divided by who loads it."""
    x_spec, w_spec, forward, backward = EXPORTED[name]
    mesh = auto_mesh(a=4)
    known = AbstractMesh((4,), ("a",)) if abstract else mesh
    specs = x_spec, w_spec, P()
    f = jax.jit(jgg.grouped_mm, in_shardings=tuple(NamedSharding(known, s) for s in specs))
    exported = export.export(f, platforms=[BACKEND], disabled_checks=jgg.EXPORT_DISABLED_CHECKS)(
        *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in problem)
    )
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    args = [put(mesh, v, *s) for v, s in zip(problem, specs, strict=True)]
    call, vjp = jax.jit(loaded.call), jax.jit(loaded.vjp().call)
    out = call(*args)
    assert collectives(call, *args) == forward
    oracle.assert_close(out, oracle.grouped_mm(*problem))
    ct = put(mesh, jnp.cos(out))
    assert collectives(vjp, *args, ct) == backward
    wants = oracle.grouped_mm_grads(*problem, np.asarray(ct))
    for got, want in zip(vjp(*args, ct), wants, strict=False):
        oracle.assert_close(got, want)


def test_export_for_several_platforms(problem):
    mesh = auto_mesh(a=4)
    specs = P(), P(None, None, "a"), P()
    f = jax.jit(jgg.grouped_mm, in_shardings=tuple(NamedSharding(mesh, s) for s in specs))
    exported = export.export(
        f, platforms=["cpu", "cuda", "tpu"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*problem)
    loaded = export.deserialize(exported.serialize())
    args = [put(mesh, v, *s) for v, s in zip(problem, specs, strict=True)]
    out = jax.jit(loaded.call)(*args)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "a")), 2)
    oracle.assert_close(out, oracle.grouped_mm(*problem))


def test_a_description_names_its_product(rng):
    """It is read as what was written; that of another format is refused."""
    q = oracle.random_quantized(rng, (2, 16, 64), "affine", 4, 32)
    x, w, sizes = jnp.ones((8, 64)), jnp.ones((2, 64, 16)), jnp.array([3, 5])
    products = [
        ("mm", w, Mm(rows=8, out_dtype="bfloat16", precision=jax.lax.Precision.HIGH)),
        ("qmm", q, Mm(rows=8, out_dtype=x.dtype, transpose_w=True, cotangent_dtype=x.dtype)),
        ("wgrad", x, Wgrad(groups=2, out_dtype="float8_e4m3fn", implementation="reference")),
    ]
    for name, b, product in products:
        for offset in (None, jnp.int32(1)):
            metadata = segments.sizes(sizes, offset)
            call = partition.Call(name, jax.tree.structure((x, b, metadata)), product)
            text = partitioner._written(call, "cpu", 4, None)
            assert partitioner._read(text.encode())[0] == call
    text = partitioner._written(call, "cpu", 4, None)
    with pytest.raises(ValueError, match=r"described in format 7, expected 1\. Export it again"):
        partitioner._read(text.replace('"format": 1', '"format": 7').encode())


# ---- the mesh of the operands ----------------------------------------------------------------

OWN_MESH = {
    "groups and their sizes": lambda put, x, w, s: jgg.grouped_mm(x, put(w, "a"), put(s, "a")),
    "K of x": lambda put, x, w, s: jgg.grouped_mm(put(x, None, "a"), w, s),
    "gathered": lambda put, x, w, s: jgg.gather_mm(
        put(x[:, None], "a"), put(w), None, put(jnp.arange(T) % G, "a")
    ),
    "gathered groups": lambda put, x, w, s: jgg.gather_mm(
        put(x[:, None]), put(w, "a"), None, put(jnp.arange(T) % G, "a")
    ),
    "segmented": lambda put, x, w, s: jgg.segmented_mm(
        put(x, None, "a"), put(x.T, "a"), put(jnp.array([[0, 3], [5, 9], [1, 2], [0, 16]]), "a")
    ),
}


@pytest.mark.parametrize("name", OWN_MESH)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.one_in(5)
def test_operands_bring_their_mesh(problem, name, compiled):
    """An Explicit mesh that nobody has set."""
    mesh = mesh_of((4,), ("a",), AxisType.Explicit)
    f = lambda put: OWN_MESH[name](put, *problem)
    run = lambda: f(lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec))))
    out = (jax.jit(run) if compiled else run)()
    oracle.assert_close(out, f(lambda v, *_: v))


# ---- the persistent cache --------------------------------------------------------------------

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_groupgemm as jgg

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
args = put(jnp.ones((8, 4))), put(jnp.ones((2, 4, 8)), None, None, "a"), put(jnp.array([3, 4]))
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
out = jax.jit(jgg.grouped_mm)(*args)
print(sum("cache_hits" in e for e in seen), float(out.sum()), out.sharding.spec)
"""


def test_another_process_finds_what_was_compiled(tmp_path):
    environment = {
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    run = lambda: subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], env=environment, capture_output=True, text=True,
        check=True, timeout=120,
    ).stdout.strip()  # fmt: skip
    said = f"{4.0 * 8 * 7} PartitionSpec(None, 'a')"
    assert run() == f"0 {said}".replace("PartitionSpec", "P")
    assert run() == f"1 {said}".replace("PartitionSpec", "P")


def test_a_call_says_which_kernels_it_is_divided_for(problem, monkeypatch):
    """A program that was compiled for other kernels, or measured tiles, is another program."""
    mesh = auto_mesh(a=4)
    args = put(mesh, problem[0]), put(mesh, problem[1], None, None, "a"), put(mesh, problem[2])
    lowered = lambda: jax.jit(lambda *a: jgg.grouped_mm(*a)).lower(*args).as_text()
    before = lowered()
    assert lowered() == before
    with jax.default_matmul_precision("tensorfloat32"):
        assert lowered() != before
    monkeypatch.setattr(partitioner.tuned, "fingerprint", lambda platform: f"others, {platform}")
    assert "others, " in lowered() != before
    traced = jax.jit(lambda *a: jgg.grouped_mm(*a)).trace(*args)
    monkeypatch.setattr(partitioner.proven, "proven", lambda: frozenset({"of a proof"}))
    assert "of a proof" in traced.lower(lowering_platforms=("cuda",)).as_text()


# ---- platforms without our partitioner -------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_tpus_get_plain_operations(problem, implementation):
    f = lambda *args: jgg.grouped_mm(*args, implementation=implementation, activation="silu")
    known = AbstractMesh((4,), ("a",))
    specs = P(), P(None, None, "a"), P()
    shardings = tuple(NamedSharding(known, spec) for spec in specs)
    for g in (f, jax.grad(lambda *args: f(*args).sum(), (0, 1))):
        traced = jax.jit(g, in_shardings=shardings).trace(
            *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in problem)
        )
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert re.findall(r"custom_call @(\w+)", text) == []


def test_xla_divides_plain_operations(problem, monkeypatch):
    """As where nobody can ask us: right, and columns need no communication."""
    monkeypatch.setattr(partitioner, "_CAN_ASK", False)
    mesh = auto_mesh(a=4)
    for x_spec, w_spec in ((P(), P(None, None, "a")), (P("a"), P()), (P(None, "a"), P(None, "a"))):
        args = put(mesh, problem[0], *x_spec), put(mesh, problem[1], *w_spec), put(mesh, problem[2])
        f = jax.jit(lambda *args: jgg.grouped_mm(*args, implementation="reference"))
        oracle.assert_close(f(*args), oracle.grouped_mm(*problem))
        assert w_spec != P(None, None, "a") or collectives(f, *args) == []


# ---- Shardy switched off ---------------------------------------------------------------------


@contextlib.contextmanager
def without_shardy():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.one_in(2)
def test_gspmd(problem, name):
    x_spec, w_spec, forward, _ = EXPORTED[name]
    mesh = auto_mesh(a=4)
    args = put(mesh, problem[0], *x_spec), put(mesh, problem[1], *w_spec), put(mesh, problem[2])
    f = jax.jit(lambda *args: jgg.grouped_mm(*args))
    grad = jax.jit(jax.grad(lambda x, w: jnp.sin(jgg.grouped_mm(x, w, args[2])).sum(), (0, 1)))
    with without_shardy():
        out, grads = f(*args), grad(*args[:2])
        assert collectives(f, *args) == forward
    want = oracle.grouped_mm(*problem)
    oracle.assert_close(out, want)
    for got, expected in zip(grads, oracle.grouped_mm_grads(*problem, np.cos(want)), strict=False):
        oracle.assert_close(got, expected)


def test_gspmd_in_a_partial_shard_map(problem):
    mesh = auto_mesh(a=2, b=2)

    def mapped(implementation):
        f = lambda *args: jgg.grouped_mm(*args, implementation=implementation)
        return jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=(P(None, "a"), P(None, "a"), P()), out_specs=P("a"),
                axis_names={"a"}, check_vma=False,
            )
        )  # fmt: skip

    with without_shardy():
        with pytest.raises(NotImplementedError, match=r"jgg mm: shard_map over \['a'\] leaves"):
            mapped(None)(*problem)
        out = mapped("reference")(*problem)
    x, w, _ = problem
    for i, part in enumerate((slice(0, 8), slice(8, 16))):
        want = oracle.grouped_mm(x[:, part], w[:, part], SIZES)
        oracle.assert_close(out[i * T : (i + 1) * T], want)


# ---- meshes and their devices ----------------------------------------------------------------


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (0, 2, 1, 3)])
@pytest.mark.one_in(2)
def test_devices_in_any_order(problem, order):
    mesh = Mesh(
        np.array(jax.devices())[[*order]].reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    f = jax.jit(jgg.grouped_mm)
    for x_spec, w_spec, wanted in (
        (P(("b", "a")), P(), []),
        (P("b", "a"), P(None, "a"), ["all-reduce"]),
        (P("a"), P("b"), ["all-reduce"]),
    ):
        args = put(mesh, problem[0], *x_spec), put(mesh, problem[1], *w_spec), put(mesh, problem[2])
        assert collectives(f, *args) == wanted
        oracle.assert_close(f(*args), oracle.grouped_mm(*problem))


def test_two_meshes(problem):
    """Of the same devices, in one program."""
    of_x, of_w = auto_mesh(a=4), auto_mesh(b=2, c=2)
    args = put(of_x, problem[0]), put(of_w, problem[1], None, "b", "c"), put(of_x, problem[2])
    f = jax.jit(jgg.grouped_mm)
    assert collectives(f, *args) == ["all-reduce"]
    oracle.assert_close(f(*args), oracle.grouped_mm(*problem))


def test_parts_that_depend_on_each_other_do_not_divide_two_axes():
    """Half of all devices, and a quarter of them that lies in a half, are no mesh."""
    devices = partitioner.Devices(np.arange(4), np.zeros(4, np.int64))
    half = devices._name(np.array([0, 0, 1, 1]), 2)
    other = devices._name(np.array([0, 1, 0, 1]), 2)
    quarter = devices._name(np.array([0, 1, 2, 3]), 4)
    assert devices.independent([half, other])
    assert not devices.independent([half, quarter])
    assert devices._name(np.array([0, 0, 1, 1]), 2) == half
