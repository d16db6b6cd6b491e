"""Random meshes, shardings and routings of ``moe_mlp`` with experts on several devices, against
float64 in numpy. A program is compiled once and tried with several routings.

``pytest --fuzz N`` runs N cases. A failure names its seed: ``JGG_CASE=expert_parallel:17`` and this
file run that one.
"""

import dataclasses
import math
import os

import expert_parallel as ep
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg

ROUTINGS = 5  # that one compiled program is tried with
PROGRAMS = 5  # of one test
WEEKLY = 100  # cases
MESHES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2))
AXES = ("e", "d", "m")

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def pytest_generate_tests(metafunc):
    family, _, seed = os.environ.get("JGG_CASE", "").partition(":")
    if family == "expert_parallel":
        metafunc.parametrize(("first", "count"), [(int(seed), 1)])
        return
    cases = metafunc.config.getoption("--fuzz")
    marks = [] if cases is not None else [pytest.mark.weekly]
    programs = -(-(WEEKLY if cases is None else cases) // ROUTINGS)
    metafunc.parametrize(
        ("first", "count"),
        [
            pytest.param(first, min(PROGRAMS, programs - first), marks=marks)
            for first in range(0, programs, PROGRAMS)
        ],
    )


def test_fuzz(first, count):
    for seed in range(first, first + count):
        rng = np.random.default_rng([seed, 40])
        try:
            case = Case.drawn(rng)
            check(rng, case)
        except Exception as error:
            error.add_note(f"JGG_CASE=expert_parallel:{seed}")
            raise


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    mesh: tuple[int, ...]  # of axes e, d and m
    explicit: bool
    tokens: tuple[str, ...]  # mesh axes that shard them
    hidden: bool  # whether m shards F
    experts: int  # of each device
    k: int
    each: int  # tokens of each device
    transport: str | None
    dtype: str
    activation: str
    biases: tuple[str, ...]
    transpose_w: bool
    enough: bool | None  # whether max_rows is; None without it

    @classmethod
    def drawn(cls, rng):
        pick = lambda options: options[rng.integers(len(options))]
        mesh = pick(MESHES)
        names = AXES[: len(mesh)]
        hidden = len(mesh) == 3 and bool(rng.integers(2))
        over = [name for name in names[1:] if not (hidden and name == "m") and rng.integers(2)]
        tokens = [*over, "e"] if rng.integers(4) else over
        rng.shuffle(tokens)
        explicit = bool(rng.integers(2))
        if not explicit and "e" not in tokens:
            tokens.append("e")
        return cls(
            mesh, explicit, tuple(tokens), hidden, experts=int(rng.integers(1, 4)),
            k=int(rng.integers(1, 6)), each=int(rng.integers(1, 8)),
            transport=pick((None, *ep.TRANSPORTS)), dtype=pick(("float32", "float32", "bfloat16")),
            activation=pick(("swiglu", "geglu", "relu2", "silu")),
            biases=tuple(name for name in ("up_bias", "down_bias") if rng.integers(2)),
            transpose_w=bool(rng.integers(2)), enough=pick((None, None, True, False)),
        )  # fmt: skip

    @property
    def gated(self) -> bool:
        return self.activation in moe_oracle.GATED

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(AXES, self.mesh, strict=False))

    @property
    def every(self) -> int:
        """Tokens of all devices."""
        return self.each * math.prod(self.sizes[name] for name in self.tokens)


def check(rng, case: Case) -> None:
    d, f = 4 * int(rng.integers(1, 4)), 2 * int(rng.integers(1, 5))
    args = ep.problem(
        rng, case.every, dtype=case.dtype, k=case.k, d=d, f=f, e=case.experts * case.sizes["e"]
    )
    if not case.gated:
        args["up"], args["up_bias"] = args["up"][..., :f], args["up_bias"][:, :f]
    for name in {"up_bias", "down_bias"} - {*case.biases}:
        args[name] = jnp.zeros_like(args[name])
    indices = [routing(rng, case) for _ in range(ROUTINGS)]
    run = program(case, room(case, indices))
    for index in indices:
        ct = oracle.random(rng, (case.every, d), case.dtype)
        y, grads = run(args, index, ct)
        if case.enough is False and pairs(case, index) > room(case, indices):
            assert np.isnan(np.asarray(y, np.float32)).any()
            continue
        compare(case, (y, grads), args, index, ct)


def compare(case: Case, got, args, index, ct) -> None:
    y, grads = got
    want, wanted = moe_oracle.moe_mlp(
        *(args[name] for name in ("x", "up", "down")), index, args["weight"], oracle.f64(ct),
        activation=case.activation, up_bias=args["up_bias"], down_bias=args["down_bias"],
    )  # fmt: skip
    close = lambda a, b: np.testing.assert_allclose(
        oracle.f64(a), b, rtol=0, atol=(1e-5 if case.dtype == "float32" else 0.04) * scale(b)
    )
    close(y, want)
    for name, of in zip(ep.NAMES, wanted, strict=True):
        if name in grads:
            close(np.asarray(grads[name]).reshape(of.shape), of)


def scale(a) -> float:
    return 3 * max(1.0, float(np.abs(a).max(initial=0)))


def routing(rng, case: Case):
    """One of those of the other tests, of as many experts as this case has."""
    kind = ep.ROUTINGS[rng.integers(len(ep.ROUTINGS))]
    devices, experts = case.sizes["e"], case.experts * case.sizes["e"]
    index = np.asarray(kind(rng, (case.every, case.k), min(devices, ep.E)))
    return jnp.asarray(np.where(index < ep.E, index % experts, experts), jnp.int32)


def pairs(case: Case, index) -> int:
    """Of the fullest device, whose tokens are those that share its place along other axes."""
    others = [name for name in case.tokens if name != "e"]
    shape = [case.sizes[name] for name in case.tokens]
    blocks = np.asarray(index).reshape(*shape, case.each * case.k)
    if "e" in case.tokens:
        blocks = np.moveaxis(blocks, case.tokens.index("e"), -2)
    blocks = blocks.reshape(math.prod(case.sizes[name] for name in others), -1)
    counts = [
        np.bincount(block[(block >= 0) & (block < case.experts * case.sizes["e"])] // case.experts,
                    minlength=1).max()
        for block in blocks
    ]  # fmt: skip
    return int(max(counts))


def room(case: Case, indices) -> int | None:
    if case.enough is None:
        return None
    most = max(pairs(case, index) for index in indices)
    return most if case.enough else max(most - 1, 0)


def program(case: Case, max_rows: int | None):
    """The layer's value and gradients, of operands that are put where the case says."""
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    names = AXES[: len(case.mesh)]
    mesh = jax.make_mesh(
        case.mesh, names, axis_types=(kind,) * len(names),
        devices=jax.devices()[: math.prod(case.mesh)],
    )  # fmt: skip
    hidden = "m" if case.hidden else None
    tokens = P(case.tokens or None)
    columns = (None, hidden) if case.gated else (hidden,)
    specs = {
        "x": tokens, "weight": tokens, "down_bias": P("e"), "up_bias": P("e", *columns),
        "up": P("e", *columns, None) if case.transpose_w else P("e", None, *columns),
        "down": P("e", None, hidden) if case.transpose_w else P("e", hidden, None),
    }  # fmt: skip
    options = {"activation": case.activation, "transpose_w": case.transpose_w}
    options |= {"transport": case.transport, "max_rows": max_rows}

    def layer(args, index, **more):
        biases = {name: args[name] for name in case.biases}
        return jgg.moe_mlp(
            args["x"], args["up"], args["down"], index, args["weight"], **biases, **options, **more
        )

    def local(args, index):
        if case.hidden:
            first = jax.lax.axis_index("m") == 0
            args = {**args, "down_bias": jnp.where(first, args["down_bias"], 0)}
        y = layer(args, index, axis_name="e")
        return jax.lax.psum(y, "m") if case.hidden else y

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    run = ep.pulled(layer if case.explicit else mapped)

    def placed(args, index, ct):
        args = dict(args)
        experts, d, f = args["up"].shape[0], args["x"].shape[1], args["down"].shape[1]
        if case.gated:
            args["up"] = args["up"].reshape(experts, d, 2, f)
            args["up_bias"] = args["up_bias"].reshape(experts, 2, f)
        if case.transpose_w:
            args["up"] = jnp.moveaxis(args["up"], 1, -1)
            args["down"] = args["down"].swapaxes(1, 2)
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            given = {name: put(a, specs[name]) for name, a in args.items()}
            y, grads = run(given, put(index, tokens), put(ct, tokens))
            y, grads = jax.device_get((y, grads))
        if case.transpose_w:
            grads["up"] = np.moveaxis(grads["up"], -1, 1)
            grads["down"] = grads["down"].swapaxes(1, 2)
        given = ("x", "up", "down", "weight", *case.biases)
        return y, {name: grads[name] for name in given}

    return placed
