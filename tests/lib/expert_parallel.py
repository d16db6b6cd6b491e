"""What tests of experts on several devices share: problems, routings, the layer of one device."""

import functools

import jax
import jax.numpy as jnp
import meshes
import moe_oracle
import numpy as np
import oracle
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg

E, D, F, K = 8, 12, 14, 3
TOKENS = 5  # of each device
NAMES = ("x", "up", "down", "weight", "up_bias", "down_bias")
TRANSPORTS = ("gather", "all_to_all")
PER_DEVICE = P("e")


def mesh_of(devices: int, kind=AxisType.Auto) -> jax.sharding.Mesh:
    meshes.needs(devices)
    return jax.make_mesh((devices,), ("e",), axis_types=(kind,), devices=jax.devices()[:devices])


def problem(rng, tokens: int, *, dtype="float32", k=K, d=D, f=F, e=E) -> dict[str, jax.Array]:
    shapes = {
        "x": (tokens, d), "up": (e, d, 2 * f), "down": (e, f, d), "weight": (tokens, k),
        "up_bias": (e, 2 * f), "down_bias": (e, d),
    }  # fmt: skip
    scale = {"up": d**-0.5, "down": f**-0.5}
    make = lambda name: oracle.random(rng, shapes[name]) * scale.get(name, 1)
    return {n: make(n).astype("float32" if n == "weight" else dtype) for n in shapes}


def layer(args, index, **options):
    x, up, down, weight, up_bias, down_bias = (args[name] for name in NAMES)
    return jgg.moe_mlp(x, up, down, index, weight, up_bias=up_bias, down_bias=down_bias, **options)


def pulled(f):
    """``f``'s value and all of its gradients, as one program."""

    def run(args, index, ct):
        y, pull = jax.vjp(lambda args: f(args, index), args)
        return y, pull(ct)[0]

    return jax.jit(run)


@functools.cache
def one_device():
    return pulled(layer)


def across(devices: int, **options):
    """The layer of tokens and experts that lie along an axis of so many devices."""
    return jax.shard_map(
        functools.partial(layer, axis_name="e", **options), mesh=mesh_of(devices),
        in_specs=(PER_DEVICE, PER_DEVICE), out_specs=PER_DEVICE,
    )  # fmt: skip


def assert_quantized(run, args, index, mode) -> None:
    """``run(args, index, ct)`` returns the value and x's gradient, of quantized up and down."""
    rng = np.random.default_rng(0)
    quantized = {
        name: oracle.random_quantized(rng, args[name].swapaxes(1, 2).shape, mode, group_size=32)
        for name in ("up", "down")
    }
    ct = args["x"] / 2
    got = run({**args, **quantized}, index, ct)
    up, down = (oracle.dequantize(q).swapaxes(1, 2) for q in quantized.values())
    y, (dx, *_) = moe_oracle.moe_mlp(
        args["x"], up, down, index, args["weight"], oracle.f64(ct), up_bias=args["up_bias"],
        down_bias=args["down_bias"],
    )  # fmt: skip
    for one, want in zip(got, (y, dx), strict=True):
        oracle.assert_close(one, want, tolerance=1e-5)


def pulled_to_x(f):
    """``f``'s value and the gradient of x, as one program."""

    def run(args, index, ct):
        y, pull = jax.vjp(lambda x: f({**args, "x": x}, index), args["x"])
        return y, pull(ct)[0]

    return jax.jit(run)


def assert_like_float64(got, args, index, ct, tolerance=None) -> None:
    y, grads = got
    want, wanted = moe_oracle.moe_mlp(
        *(args[name] for name in ("x", "up", "down")), index, args["weight"], oracle.f64(ct),
        up_bias=args["up_bias"], down_bias=args["down_bias"],
    )  # fmt: skip
    oracle.assert_close(y, want, tolerance=tolerance)
    for name, of in zip(NAMES, wanted, strict=True):
        assert grads[name].dtype == args[name].dtype
        oracle.assert_close(grads[name], of, tolerance=tolerance)


def assert_equal(got, want) -> None:
    """To the last bit."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# ---- routings, (tokens, k) of experts --------------------------------------------------------


def anywhere(rng, shape, devices):
    """Also at no expert."""
    return rng.integers(-1, E + 1, shape)


def one_hot_expert(rng, shape, devices):
    """Half of all pairs are of expert 5."""
    return np.where(rng.random(shape) < 0.5, 5, rng.integers(0, E, shape))


def an_idle_device(rng, shape, devices):
    """No token is the first device's."""
    return rng.integers(E // devices % E, E, shape)


def one_device_has_all(rng, shape, devices):
    return rng.integers(E - E // devices, E, shape)


def same_expert_twice(rng, shape, devices):
    return np.broadcast_to(rng.integers(0, E, (shape[0], 1)), shape)


def nobody(rng, shape, devices):
    return np.full(shape, -1)


ROUTINGS = (
    anywhere, one_hot_expert, an_idle_device, one_device_has_all, same_expert_twice, nobody
)  # fmt: skip


def indices(rng, tokens: int, devices: int, k=K):
    """One of each routing."""
    return [jnp.asarray(routing(rng, (tokens, k), devices), jnp.int32) for routing in ROUTINGS]


def problem_of_processes():
    """The same in each of them."""
    rng = np.random.default_rng(5)
    tokens = 4 * TOKENS
    index = jnp.asarray(one_hot_expert(rng, (tokens, K), 4), jnp.int32)
    return problem(rng, tokens), index, oracle.random(rng, (tokens, D))
