"""Handlers neither allocate nor synchronise: what they call of the CUDA API."""

import functools
import re
import threading
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_void_p,
    cast,
)
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import nvfp4_grouped_problems as nvfp4
import oracle
import pytest
from handler_watch import CALLS, Watch, cuda_library, needs_compiler, watched

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import convert
from jax_groupgemm._kernels import extension

# What may wait for the device or change its memory behind XLA's back, of the runtime and the driver
# alike; what may not be captured; and resources that one call would have to leave to the next.
FORBIDDEN = re.compile(
    r"alloc|free|synchronize|query|memcpy|memset(?!\w*async)|hostregister|hostfunc|mempool|memmap"
    r"|create|destroy|instantiate|moduleload|libraryload",
    re.IGNORECASE,
)


def test_forbidden():
    bad = """cudaMalloc cudaMallocAsync cudaFree cudaHostAlloc cudaMemcpy cudaMemcpyAsync cudaMemset
        cudaDeviceSynchronize cudaStreamSynchronize cudaEventQuery cudaStreamQuery cuMemAlloc_v2
        cuMemFreeAsync cuMemAllocFromPoolAsync cuMemcpyDtoH_v2 cuCtxSynchronize cuEventSynchronize
        cudaMemPoolCreate cudaStreamCreateWithFlags cudaLaunchHostFunc cuMemsetD8_v2"""
    good = """cudaLaunchKernel cudaLaunchKernelExC_v11060 cudaGetLastError cudaGetDevice
        cudaMemsetAsync cuMemsetD32Async cuMemsetD8Async_ptsz cudaFuncSetAttribute cuLaunchKernelEx
        cudaDeviceGetAttribute cudaOccupancyMaxActiveClusters cuTensorMapEncodeTiled"""
    assert all(FORBIDDEN.search(name) for name in bad.split())
    assert not any(FORBIDDEN.search(name) for name in good.split())


@needs_compiler
def test_watch_attributes_calls():
    """To the handler that runs on the same thread; once, where they begin."""

    class Data(Structure):
        _fields_ = [("site", c_int), ("function_name", c_char_p)]

    callback = CFUNCTYPE(None, c_void_p, c_int, c_uint, c_void_p)
    handler_type = CFUNCTYPE(c_void_p, c_void_p)
    subscribers, domains = [], set()

    @CFUNCTYPE(c_int, POINTER(c_void_p), callback, c_void_p)
    def subscribe(subscriber, function, _):
        subscriber[0] = 7
        subscribers.append(function)
        return 0

    @CFUNCTYPE(c_int, c_uint, c_void_p, c_int)
    def enable_domain(enable, subscriber, domain):
        domains.add((enable, subscriber, domain))
        return 0

    def call(name, domain=2, site=0):
        subscribers[0](None, domain, 5, cast(byref(Data(site, name)), c_void_p))

    @handler_type
    def handler(frame):
        for domain, site in (2, 0), (2, 1), (1, 0), (3, 0):
            call(b"cudaFree" if domain == 2 else b"cuMemFree", domain, site)
        thread = threading.Thread(target=call, args=(b"cudaMalloc",))
        thread.start()
        thread.join()
        return frame

    watch = Watch()
    watch.subscribe(SimpleNamespace(cuptiSubscribe=subscribe, cuptiEnableDomain=enable_domain))
    assert domains == {(1, 7, 1), (1, 7, 2)}
    wrapper = handler_type(watch.wrap("ours", cast(handler, c_void_p)))
    assert wrapper(123) == 123
    with watch.recorded() as calls:
        call(b"cudaMalloc")
        assert wrapper(5) == wrapper(5) == 5
        call(b"cudaMalloc")
    assert calls == {"ours": {CALLS: 2, "cudaFree": 2, "cuMemFree": 2}}


def grouped_mm_calls(watch: Watch):
    function, operands, _ = operations(MODES[:1])["grouped_mm, float32"]
    with watch.recorded() as calls:
        jax.block_until_ready(function(*operands))
    return calls


@needs_compiler
def test_watch_counts_handlers():
    want = {"jgg_mm": {CALLS: 2}, "jgg_wgrad": {CALLS: 1}}
    assert watched("cpu", grouped_mm_calls) == want


def with_gradients(function):
    def run(*operands):
        out, vjp = jax.vjp(function, *operands)
        return out, *vjp(out)

    return run


MODES = [("affine", 4), ("mxfp8", 8), ("nvfp4", 4), ("mxfp4", 4)]
MODES += [("affine", bits) for bits in (2, 3, 5, 6, 8)]


def operations(modes=MODES) -> dict[str, tuple]:
    """Public operations: a function, its operands, and the handlers that it calls on a GPU."""
    rng, key = np.random.default_rng(0), jax.random.key(0)
    sizes, segments = jnp.array([3, 0, 70, 17]), jnp.array([[0, 3], [3, 3], [3, 73], [50, 99]])
    lhs, rhs = jnp.array([5, 0, 99, 7, 31]), jnp.array([3, 0, 3, 1, 1])
    random = functools.partial(oracle.random, rng)
    x, w, v = random((100, 64)), random((4, 64, 128)), random((4, 128, 64))
    half = lambda *arrays: tuple(a.astype(jnp.bfloat16) for a in arrays)
    # In every mode; and those of which Hopper multiplies many rows with a repacked weight.
    q = {of: oracle.random_quantized(rng, (4, 128, 64), *of, dtype="bfloat16") for of in modes}
    as_stored, many = [*q.values()], random((4 * 2048, 64))
    repacked = [weight for of, weight in q.items() if of != ("mxfp8", 8)]
    products, mm = {"jgg_mm", "jgg_wgrad"}, functools.partial(jgg.grouped_mm, group_sizes=sizes)
    fused = lambda x, w, b, s, old: mm(
        x, w, bias=b, activation="swiglu", row_scale=s, existing_out=old
    )
    fused_operands = half(x, w, w[:, 0], x[:, 0], x)
    segmented = functools.partial(jgg.segmented_mm, segments=segments)
    gathered = lambda x, w, **options: jgg.gather_mm(x[:, None], w, lhs, rhs, **options)
    each = lambda function, **options: lambda x, qs: [function(x, q, **options) for q in qs]
    qmm = lambda x, q, **options: jgg.grouped_qmm(x, q, sizes, **options)
    gather_qmm = lambda x, q: jgg.gather_qmm(x[:, None], q, lhs, rhs)
    matmul = lambda x, q: jgg.quantized_matmul(x, jax.tree.map(lambda a: a[0], q))
    quantize = functools.partial(jgg.nvfp4_quantize, stochastic_rounding_key=key)
    along_t = functools.partial(quantize, axis=0, group_sizes=sizes, hadamard=True)
    linear = lambda x, w: jgg.nvfp4_grouped_linear(x, w, sizes, key=key)
    # NVFP4 operands; and one matrix of many rows, in parts that are added up.
    rows, weight = nvfp4.random(rng, 100, 64, scale=jnp.float32(0.5)), nvfp4.random(rng, 4, 128, 64)
    factors, bias, old = random((4,)), random((4, 128)), random((4, 64, 64))
    nvfp4_mm = lambda x, w: jgg.nvfp4_grouped_mm(x, w, sizes, bias=bias, alpha=factors)
    columns = nvfp4.along_t(rng, 64, sizes, 100)
    accumulate = lambda q, old, factors, **options: jgg.nvfp4_grouped_wgrad(
        q, q, sizes, existing_out=old, alpha=factors, **options
    )
    tall, all_rows = random((2600, 64)), jnp.array([2600])
    tall_columns = nvfp4.along_t(rng, 64, all_rows, 2600)
    in_parts = lambda x, w: jax.vjp(lambda w: jgg.grouped_mm(x, w, all_rows), w)[1](x)
    nvfp4_in_parts = lambda q: jgg.nvfp4_grouped_wgrad(q, q, all_rows)
    wgrad = {"jgg_dequantize", "jgg_wgrad"}
    experts, of_pairs = jnp.asarray(rng.integers(-1, 5, (100, 3)), jnp.int32), random((100, 3))

    def moe(x, weight):
        routing = jgg.route(experts, 4)
        return jgg.combine(jgg.dispatch(x, routing), routing, weight)

    of_moe = {f"jgg_moe_{name}" for name in ("route", "dispatch", "combine", "combine_backward")}
    on_sm80, on_sm90 = {"implementation": "sm80"}, {"implementation": "sm90"}
    return {
        "grouped_mm, float32": (with_gradients(mm), (x, w), products),
        "grouped_mm, bfloat16": (with_gradients(mm), half(x, w), products),
        "grouped_mm on sm80": (
            with_gradients(functools.partial(mm, **on_sm80)), half(x, w), products,
        ),
        "grouped_mm, float32 on sm90": (
            with_gradients(functools.partial(mm, **on_sm90)), (x, w), products | {"jgg_planes"},
        ),
        "grouped_mm, fused": (fused, fused_operands, {"jgg_mm"}),
        "ragged_dot": (lambda x, w: jgg.ragged_dot(x, w, sizes), half(x, w), {"jgg_mm"}),
        "segmented_mm, float32": (with_gradients(segmented), (x.T, x), products),
        "segmented_mm, bfloat16": (with_gradients(segmented), half(x.T, x), products),
        "gather_mm, float32": (with_gradients(gathered), (x, w), products),
        "gather_mm, bfloat16": (with_gradients(gathered), half(x, w), products),
        "gather_mm on sm90": (
            functools.partial(gathered, **on_sm90), half(x, w), {"jgg_mm"},
        ),
        "gradient in parts": (in_parts, half(tall, v[:1, :64]), {"jgg_wgrad"}),
        "grouped_qmm": (each(qmm), (*half(x), as_stored), {"jgg_qmm"}),
        "grouped_qmm, few rows": (each(qmm), (*half(x[:32]), as_stored), {"jgg_qmm"}),
        "grouped_qmm on sm80": (
            each(qmm, **on_sm80), (*half(x), as_stored), {"jgg_qmm"},
        ),
        "grouped_qmm, repacked on sm90": (
            each(qmm, **on_sm90), (*half(many), repacked), {"jgg_prepack", "jgg_qmm_packed"},
        ),
        "grouped_qmm, prepacked on sm90": (
            each(lambda x, q: qmm(x, jgg.prepack(q))), (*half(x), as_stored),
            {"jgg_prepack", "jgg_qmm_packed"},
        ),
        "grouped_qmm, prepacked on sm80": (
            each(lambda x, q: qmm(x, jgg.prepack(q), **on_sm80)), (*half(x), as_stored),
            {"jgg_prepack", "jgg_qmm_packed", "jgg_qmm"},
        ),
        "grouped_qmm, fp8 on sm90": (
            functools.partial(qmm, **on_sm90),
            (*half(random((100, 128))), oracle.random_quantized(rng, (4, 64, 128), "fp8")),
            {"jgg_qmm_fp8"},
        ),
        "grouped_qmm, fp8 packed on sm90": (
            lambda x, q: qmm(x, jgg.prepack(q), transpose_w=False),
            (*half(random((100, 64))), oracle.random_quantized(rng, (4, 64, 128), "fp8")),
            {"jgg_prepack_fp8", "jgg_qmm_packed"},
        ),
        "gather_qmm": (each(gather_qmm), (*half(x), as_stored), {"jgg_qmm"}),
        "quantized_matmul": (each(matmul), (*half(x[:8]), as_stored), {"jgg_qmm"}),
        "prepack": (lambda qs: [*map(jgg.prepack, qs)], (repacked,), {"jgg_prepack"}),
        "quantize": (
            lambda w: [jgg.quantize(w, mode=mode, bits=bits) for mode, bits in modes], (w,),
            {"jgg_quantize"},
        ),
        "dequantize": (
            lambda qs: [*map(jgg.dequantize, qs)], (as_stored,), {"jgg_dequantize"},
        ),
        "nvfp4_quantize": (quantize, half(x), {"jgg_nvfp4_quantize"}),
        "nvfp4_quantize, along T": (along_t, half(x), {"jgg_nvfp4_quantize"}),
        "nvfp4_quantize, 2-D": (
            functools.partial(quantize, scale_2d=True), half(w), {"jgg_nvfp4_quantize"},
        ),
        "fp8_quantize": (
            lambda x: [jgg.fp8_quantize(x, axis=axis, group_sizes=sizes) for axis in (-1, -2)],
            half(x), {"jgg_fp8_quantize"},
        ),
        "fp8_quantize, 128 x 128": (
            functools.partial(jgg.quantize, mode="fp8"), half(w), {"jgg_fp8_quantize"},
        ),
        "dequantize, fp8": (
            lambda w: jgg.dequantize(jgg.quantize(w, mode="fp8")), half(w),
            {"jgg_fp8_quantize", "jgg_fp8_dequantize"},
        ),
        "fp8_quantize, squares both ways": (
            lambda w: [
                convert.quantized_both("test", w, block=(128, 128), axis=axis)
                for axis in (-1, -2)
            ],
            half(w), {"jgg_fp8_quantize"},
        ),
        "fp8_quantize, rows both ways": (
            lambda x: convert.quantized_lines(x, sizes), half(x), {"jgg_fp8_quantize"},
        ),
        "nvfp4_grouped_mm": (nvfp4_mm, (rows, weight), {"jgg_dequantize", "jgg_qmm"}),
        "nvfp4_grouped_mm on sm90": (
            lambda x, w: jgg.nvfp4_grouped_mm(x, w, sizes, bias=bias, **on_sm90),
            (nvfp4.random(rng, 100, 128), nvfp4.random(rng, 4, 128, 128)),
            {"jgg_dequantize", "jgg_qmm"},
        ),
        "nvfp4_grouped_mm, prepacked on sm90": (
            lambda x, w: nvfp4_mm(x, jgg.prepack(w)), (rows, weight),
            {"jgg_dequantize", "jgg_prepack", "jgg_qmm_packed"},
        ),
        "nvfp4_grouped_wgrad": (accumulate, (columns, old, factors), wgrad),
        "nvfp4_grouped_wgrad, fused on sm90": (
            functools.partial(accumulate, **on_sm90), (columns, old, factors), wgrad,
        ),
        "nvfp4_grouped_wgrad in parts": (nvfp4_in_parts, (tall_columns,), wgrad),
        "nvfp4_grouped_linear": (
            with_gradients(linear), half(x, v), {"jgg_nvfp4_quantize"},
        ),
        "route, dispatch, combine": (with_gradients(moe), (*half(x), of_pairs), of_moe),
    }  # fmt: skip


@pytest.mark.slow
def test_operations_call_handlers():
    for name, (function, operands, handlers) in operations().items():
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
        found = set(re.findall(r"custom_call @(jgg_\w+)\(", lowered.as_text()))
        assert found >= handlers, (name, found)


# ---- on a GPU --------------------------------------------------------------------------------


def careless(watch: Watch):
    """Calls of a handler that does what it must not."""
    cuda, driver, codes = cuda_library("libcudart"), CDLL("libcuda.so.1"), []
    handler_type = CFUNCTYPE(c_void_p, c_void_p)

    @handler_type
    def handler(frame):
        memory = c_void_p()
        codes.append(cuda.cudaMalloc(byref(memory), c_size_t(64)))
        codes.append(cuda.cudaDeviceSynchronize())
        codes.append(cuda.cudaFree(memory))
        codes.append(driver.cuCtxSynchronize())
        return frame

    wrapper = handler_type(watch.wrap("careless", cast(handler, c_void_p)))
    with watch.recorded() as calls:
        codes.append(cuda.cudaDeviceSynchronize())  # not the handler's
        wrapper(None)
    assert codes == [0] * 5, codes
    return calls


def api_calls(watch: Watch):
    """Of a careless handler, and of each operation's when it is run once more."""
    jax.block_until_ready(jnp.ones(1))
    watch.subscribe()
    found = {"careless": {"handlers": [], "calls": careless(watch)}}
    for name, (function, operands, handlers) in operations().items():
        if "on sm90" not in name or 90 in extension.live_capabilities():
            found[name] = calls_of(watch, function, operands, handlers)
    return found


def calls_of(watch: Watch, function, operands, handlers):
    """Not the first time, and not captured: handlers run, and have what they keep."""
    lowered = jax.jit(function).lower(*operands)
    compiled = lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 2**30})
    for _ in range(2):
        jax.block_until_ready(compiled(*operands))
    with watch.recorded() as calls:
        jax.block_until_ready(compiled(*operands))
    targets = set(re.findall(r'custom_call_target="(jgg_\w+)"', str(compiled.as_text())))
    return {"handlers": sorted(targets | handlers), "calls": calls}


@pytest.mark.gpu
@needs_compiler
def test_handlers_neither_allocate_nor_synchronise():
    """CUPTI's word for it; it sees their launches, and what a careless handler does."""
    found = watched("CUDA", api_calls)
    (seen,) = found.pop("careless")["calls"].values()
    for name in ("cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cuCtxSynchronize"):
        assert any(function.startswith(name) for function in seen), (name, seen)
    (synchronize,) = (n for f, n in seen.items() if f.startswith("cudaDeviceSynchronize"))
    assert synchronize == 1  # and not that of somebody else
    problems = []
    for name, of in found.items():
        if sorted(of["calls"]) != of["handlers"]:
            problems.append((name, "handlers that run", sorted(of["calls"]), of["handlers"]))
        for handler, seen in of["calls"].items():
            launches = sum(seen[function] for function in seen if "LaunchKernel" in function)
            if launches < seen[CALLS] or any(map(FORBIDDEN.search, seen)):
                problems.append((name, handler, seen))
    assert not problems
    assert len(found) > 20
