"""How long a call takes on the device.

Every arm has ``time(n)``, microseconds of n calls, and ``result()``, which is written over NaN
(not MLX's), so that what writes nothing is noticed. Before every timed call
128 MiB are read and 128 MiB written, so that it finds nothing in the L2 cache; warm arms skip that,
and find there what their own last call left. Both kinds first run once untimed.

JAX: the time of every kernel of the call, helpers included (CUPTI). Torch: a CUDA graph of the call
between two events, replayed; the events are nodes of the graph, so launching it is not counted.

In situ: chained calls in one program, or as many in one CUDA graph, from outside, so that what lies
between kernels counts too, and the clock is that of a GPU that never rests.

A GPU that multiplies for some hundredths of a second reaches its limit of power and slows down by
up to a sixth, for whoever comes next. So arms rest before their turn.
"""

import functools
import importlib
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_groupgemm.tune.timing import SCRATCH, kernels, mark, mark_names, random, scratch, split

_kept: dict[Any, Any] = {}


def kept(key, make):
    """``make()``, or what it gave last where the key is the same: weights take longest to make."""
    if key not in _kept:
        forget()
        _kept[key] = make()
    return _kept[key]


def forget() -> None:
    """Free what is kept."""
    _kept.clear()


def mean_us(run, n: int, cold: bool) -> float:
    """Microseconds of one of n calls that run on other streams than JAX's: of all their kernels,
    since CUPTI's order is not theirs."""
    cleared, marks = scratch(cold), mark_names()
    run()
    with kernels() as found:
        for _ in range(n):
            jax.block_until_ready(mark(cleared))
            run()
    return 1e3 * sum(ms for name, ms in found if name not in marks) / n


IN_SITU = 10  # calls in one program
REST = 3  # times as long as the turn before


class JaxArm:
    """``f(*args)``. The result of each call is donated to the next, so that we choose where a call
    writes: one program, whose buffer ``result`` fills with NaN first."""

    def __init__(self, f, args, cold: bool):
        self.f, self.args, self.cold = f, args, cold
        into = lambda out, *args: f(*args)
        self.call = jax.jit(into, donate_argnums=0, keep_unused=True)
        self.kind = jax.eval_shape(f, *args)
        self.result()

    def result(self) -> Any:
        return jax.block_until_ready(self.call(poison(self.kind), *self.args))

    def time(self, n: int) -> list[float]:
        cleared, marks = scratch(self.cold), mark_names()
        out = self.result()
        with kernels() as found:
            for _ in range(n):
                mark(cleared)
                out = jax.block_until_ready(self.call(out, *self.args))
        return split(found, marks, n)

    @functools.cached_property
    def chain(self) -> Any:
        return Chain(self.f, self.args)

    def in_situ(self) -> float:
        """Microseconds of a call among others like it."""
        return self.chain.time()

    def in_situ_result(self) -> Any:
        """The result of a chain's last call; raises where it is not the calls that run."""
        one, _ = count(self.call, self.result(), *self.args)
        ran, out = count(self.chain.run)
        if ran < IN_SITU * one:
            raise RuntimeError(f"{IN_SITU} calls of {one} kernels became {ran} kernels")
        return out

    def close(self) -> None:
        self.args = ()
        vars(self).pop("chain", None)


class Chain:
    """A program of ``IN_SITU`` calls of ``f(*args)``, each of which waits for the one before.

    What its result decides is whether one element, of the smallest operand, stays as it is: it
    does, but XLA cannot know, so there is one small kernel more. The barrier holds the others."""

    def __init__(self, f, args):
        leaves, self.tree = jax.tree.flatten(args)
        self.place = min(range(len(leaves)), key=lambda i: leaves[i].nbytes)
        leaves[self.place] = jnp.array(leaves[self.place], copy=True)
        self.f, self.leaves = f, leaves
        self.program = jax.jit(self._calls, donate_argnums=0)
        jax.block_until_ready(self.run())

    def _calls(self, own, others):
        out: Any = None
        for _ in range(IN_SITU):
            leaves = [*others[: self.place], own, *others[self.place :]]
            out = self.f(*self.tree.unflatten(leaves))
            own, others = self._after(out, own, others)
        return out, own

    def _after(self, out, own, others):
        """The operands; never is any of them changed."""
        probe = jax.tree.leaves(out)[0]
        probe, at = probe[(0,) * probe.ndim], (0,) * own.ndim
        never = jnp.inf if jnp.issubdtype(probe.dtype, jnp.inexact) else jnp.iinfo(probe.dtype).max
        hit = probe == jnp.asarray(never, probe.dtype)
        own = own.at[at].set(jnp.where(hit, jnp.zeros_like(own[at]), own[at]))
        own, others, _ = jax.lax.optimization_barrier((own, others, probe))
        return own, others

    def run(self) -> Any:
        """The last result."""
        others = self.leaves[: self.place] + self.leaves[self.place + 1 :]
        out, self.leaves[self.place] = self.program(self.leaves[self.place], others)
        return out

    def time(self, programs: int = 4) -> float:
        """Microseconds of a call. Programs follow each other, so that the host is ahead."""
        out = jax.block_until_ready(self.run())
        begin = time.perf_counter()
        for _ in range(programs):
            out = self.run()
        jax.block_until_ready(out)
        return 1e6 * (time.perf_counter() - begin) / (programs * IN_SITU)


def count(run, *args) -> tuple[int, Any]:
    """How many kernels ``run(*args)`` runs, and its result."""
    with kernels() as found:
        out = jax.block_until_ready(run(*args))
    return len(found), out


def in_situ(arms: dict, turns: int, wrong: Callable[[str, Any], str | None]):
    """Microseconds of a call in a chain, of the arms that can be chained, in turns; and notes on
    those that failed. ``wrong(name, result)`` says what is."""
    chained = (JaxArm, TorchArm)
    times: dict[str, list[float]] = {n: [] for n, arm in arms.items() if isinstance(arm, chained)}
    notes = {}
    for turn in range(turns):
        for name in [n for n in times if f"in situ {n}" not in notes]:
            try:
                if turn == 0 and (why := wrong(name, arms[name].in_situ_result())):
                    raise RuntimeError(why)
                times[name].append(arms[name].in_situ())
            except Exception as why:
                notes[f"in situ {name}"] = reason(why)
    good = {n: statistics.median(t) for n, t in times.items() if f"in situ {n}" not in notes}
    return good, notes


@functools.partial(jax.jit, static_argnums=0)
def _filled(kind):
    return [jnp.full(shape, _nonsense(dtype), dtype) for shape, dtype in kind]


def _nonsense(dtype):
    """NaN; of integers the largest, which is NaN as a scale and nothing else."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def poison(kind) -> Any:
    """Arrays of such shapes and dtypes that no call should leave as they are."""
    leaves, tree = jax.tree.flatten(kind)
    return tree.unflatten(_filled(tuple((leaf.shape, leaf.dtype) for leaf in leaves)))


@functools.cache
def torch():
    module = importlib.import_module("torch")
    if not module.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    return module


@functools.cache
def _torch_scratch():
    return [torch().randn(SCRATCH, device="cuda") for _ in range(2)]


class TorchArm:
    """``f()`` returns a tensor. ``inside`` tells whether the events are nodes of the graph."""

    def __init__(self, f, cold: bool):
        self.cold = cold
        self.out: Any = None
        self.f: Any = f  # and with it what the graph reads
        f()  # compiles, and takes workspace
        torch().cuda.synchronize()
        try:
            self._capture(f, inside=True)
            if not self.time(1)[0] > 0:
                raise RuntimeError("events in graphs measure nothing")
        except (TypeError, ValueError, RuntimeError):  # a torch without events in graphs
            self._capture(f, inside=False)

    def _capture(self, f, inside: bool) -> None:
        self.inside = inside
        options = {"enable_timing": True} | ({"external": True} if inside else {})
        self.begin, self.end = (torch().cuda.Event(**options) for _ in range(2))
        self.graph = torch().cuda.CUDAGraph()
        source, target = _torch_scratch()
        with torch().cuda.graph(self.graph, capture_error_mode="thread_local"):
            if inside and self.cold:
                torch().add(source, 1.0, out=target)
            if inside:
                self.begin.record()
            self.out = f()
            if inside:
                self.end.record()

    @functools.cached_property
    def chain(self) -> Any:
        """A graph of ``IN_SITU`` calls."""
        graph = torch().cuda.CUDAGraph()
        with torch().cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(IN_SITU):
                self.f()
        graph.replay()
        return graph

    def in_situ(self, programs: int = 4) -> float:
        """As JaxArm's."""
        chain = self.chain
        torch().cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(programs):
            chain.replay()
        torch().cuda.synchronize()
        return 1e6 * (time.perf_counter() - begin) / (programs * IN_SITU)

    def in_situ_result(self) -> jax.Array:
        return self.result()

    def _replay(self) -> float:
        if self.inside:
            self.graph.replay()
        else:
            source, target = _torch_scratch()
            if self.cold:
                torch().add(source, 1.0, out=target)
            self.begin.record()
            self.graph.replay()
            self.end.record()
        torch().cuda.synchronize()
        return 1e3 * self.begin.elapsed_time(self.end)

    def time(self, n: int) -> list[float]:
        return [self._replay() for _ in range(n + 1)][1:]

    def result(self) -> jax.Array:
        """The result of a replay into an array full of NaN."""
        self.out.fill_(float("nan"))
        self._replay()
        out = jnp.from_dlpack(self.out.contiguous())
        torch().cuda.synchronize()
        return out

    def close(self) -> None:
        self.graph.reset()
        if "chain" in vars(self):
            vars(self).pop("chain").reset()
        self.out = self.f = None
        torch().cuda.empty_cache()


class SumArm:
    """One arm after the other: the sum of their times, and the last one's result."""

    def __init__(self, *arms):
        self.arms = arms

    def time(self, n: int) -> list[float]:
        return [sum(times) for times in zip(*(arm.time(n) for arm in self.arms), strict=True)]

    def result(self) -> Any:
        return self.arms[-1].result()

    def close(self) -> None:
        for arm in self.arms:
            arm.close()


def interleaved(arms: dict, repetitions: int, turns: int = 4) -> tuple[dict, dict]:
    """Microseconds by arm, the arms taking turns, and why an arm that failed did."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    failed: dict[str, str] = {}
    before = 0.0  # seconds
    for turn in range(turns):
        count = (repetitions + turn) // turns
        for name, arm in arms.items():
            if name in failed or not count:
                continue
            try:
                time.sleep(min(REST * before, 0.5))
                before = 0.0
                taken = arm.time(count)
                before = 1e-6 * sum(taken)
                times[name] += taken
            except Exception as error:
                failed[name] = reason(error)
    return {name: t for name, t in times.items() if name not in failed}, failed


def reason(error: Exception) -> str:
    """The first line of a message, short enough for a table; without one, where it was raised."""
    lines = str(error).strip().splitlines()
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def _fp8_ceiling(size: int = 8192) -> float:
    """FLOP/s of cuBLAS in e4m3, with a scale for each row and column."""
    try:
        arm = _fp8_by_torch(size)
    except Exception as why:
        print(f"C of fp8 by XLA's product without scales, torch has none: {reason(why)}")
        operands = [random(seed, (size, size)).astype("float8_e4m3fn") for seed in range(2)]
        product = lambda a, b: jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.bfloat16)
        arm = JaxArm(product, operands, cold=False)
    return 2 * size**3 / statistics.median(arm.time(20)) * 1e6


def _fp8_by_torch(size: int) -> TorchArm:
    of = functools.partial(torch().randn, size, size, device="cuda")
    a, b = (of().to(torch().float8_e4m3fn) for _ in range(2))
    scales = [torch().ones(shape, device="cuda") for shape in ((size, 1), (1, size))]
    run = lambda: torch()._scaled_mm(
        a, b.t(), *scales, out_dtype=torch().bfloat16, use_fast_accum=True
    )
    return TorchArm(run, cold=False)


def ceilings(kinds) -> tuple[dict[str, float], float]:
    """FLOP/s of a dense product by kind, and bytes/s of a copy."""
    flops = {}
    for kind in kinds:
        if kind == "fp8":
            flops[kind] = _fp8_ceiling()
            continue
        size = 8192 if kind == "bfloat16" else 4096
        dtype = "bfloat16" if kind == "bfloat16" else "float32"
        precision = {"float32": "highest", "tf32": "tensorfloat32"}.get(kind)
        operands = [random(seed, (size, size), dtype) for seed in range(2)]
        product = functools.partial(jnp.matmul, precision=precision)
        times = JaxArm(product, operands, cold=False).time(20)
        flops[kind] = 2 * size**3 / statistics.median(times) * 1e6
    # A copy is no kernel, so it is timed from outside: large, many in a row.
    buffer = jax.block_until_ready(jax.jit(lambda: jnp.full(2**31, 1.5, jnp.bfloat16))())
    copy = jax.jit(lambda v: jnp.copy(v))
    best = float("inf")
    for _ in range(9):
        begin = time.perf_counter()
        jax.block_until_ready([copy(buffer) for _ in range(8)])
        best = min(best, (time.perf_counter() - begin) / 8)
    return flops, 2 * buffer.nbytes / best
