"""Other libraries' products with quantized weights on a CPU, as arms of benchmarks.cpu_quantized.

A peer is a function of a case that returns an arm, or raises ``Skip`` with the reason. All take the
weight as they like it best, made before it is timed, and write results of their own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import ggml, mlx


class Skip(Exception):
    """Why a peer has no arm for a case."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight (G, N, K), in the parts that libraries make theirs of."""

    name: str
    q: jgg.Quantized
    codes: np.ndarray  # (G, N, K) uint8
    scales: np.ndarray  # (G, N, K / group), float32, or bytes as the mode has them
    values: np.ndarray  # (G, N, K) float32, exact

    @property
    def symmetric(self) -> bool:
        """Affine weights here are ``(code - 2**(bits - 1)) * scale``, which all libraries have."""
        return self.q.mode == "affine"


@dataclass(frozen=True)
class Case:
    """``op``: "grouped_qmm", "dx" (the product that its gradient of rows is) or "gather_qmm", of
    one row for each expert in the order of ``order``."""

    op: str
    weight: Weight
    x: np.ndarray  # (rows, K), or (rows, N) of dx
    dtype: str
    order: np.ndarray
    threads: int

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def experts(self) -> np.ndarray:
        """Each row's."""
        groups = len(self.weight.codes)
        if self.op == "gather_qmm":
            return self.order
        return np.repeat(np.arange(groups), self.rows // groups)


def need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"{name.split('.')[0]} is not installed") from error


# ---- ONNX Runtime ------------------------------------------------------------------------------


def onnxruntime(case: Case, level: int):
    """``MatMulNBits``: one graph with a node for each expert, which reads that expert's rows and
    writes its part of the result in place. One call runs all of them, on ``threads`` threads."""
    ort, onnx = need("onnxruntime"), need("onnx")
    w = case.weight
    if not w.symmetric or w.q.bits not in (4, 8):
        raise Skip(f"MatMulNBits has no {w.name}")
    if case.dtype != "float32":
        raise Skip(f"MatMulNBits takes no {case.dtype} x on CPUs")
    if case.op == "dx":
        raise Skip("MatMulNBits has no product with a transposed weight")
    groups, n, k = w.codes.shape
    each, size = case.rows // groups, w.q.group_size
    bytes_ = w.codes if w.q.bits == 8 else w.codes[..., ::2] | w.codes[..., 1::2] << 4
    helper, of_array = onnx.helper, onnx.numpy_helper.from_array
    nodes, constants, inputs, outputs = [], [], [], []
    for g in range(groups):
        constants.append(of_array(bytes_[g].reshape(n, k // size, -1), f"w{g}"))
        constants.append(of_array(w.scales[g].reshape(-1), f"s{g}"))
        nodes.append(
            helper.make_node(
                "MatMulNBits", [f"x{g}", f"w{g}", f"s{g}"], [f"y{g}"], domain="com.microsoft",
                K=k, N=n, bits=w.q.bits, block_size=size, accuracy_level=level,
            )
        )  # fmt: skip
        float32 = onnx.TensorProto.FLOAT
        inputs.append(helper.make_tensor_value_info(f"x{g}", float32, [each, k]))
        outputs.append(helper.make_tensor_value_info(f"y{g}", float32, [each, n]))
    graph = helper.make_graph(nodes, "experts", inputs, outputs, constants)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    out = np.zeros((case.rows, n), np.float32)
    for part in range(groups):
        g, begin = int(case.experts[part * each]), part * each
        rows, result = case.x[begin : begin + each], out[begin : begin + each]
        for bind, name, a in (
            (binding.bind_input, f"x{g}", rows),
            (binding.bind_output, f"y{g}", result),
        ):
            bind(name, "cpu", 0, np.float32, a.shape, a.ctypes.data)
    return Arm(lambda: session.run_with_iobinding(binding), lambda: out)


# ---- MLX ---------------------------------------------------------------------------------------


def mlx_cpu(case: Case):
    """``quantized_matmul`` of a batch of experts, which have equally many rows, on ``mx.cpu``;
    ``gather_qmm`` of pairs. Affine scales and biases have x's dtype."""
    mx = need("mlx.core")
    w = case.weight
    groups = len(w.codes)
    mx.set_default_device(mx.cpu)
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}.get(case.dtype)
    if dtype is None:
        raise Skip(f"has no arm with {case.dtype}")
    x = mlx.to_mlx(case.x).astype(dtype)
    weight = mx.array(np.asarray(w.q.weight))
    if w.symmetric:
        half = 1 << (w.q.bits - 1)
        scales = mlx.to_mlx(w.scales).astype(dtype)
        biases = mlx.to_mlx(-half * w.scales).astype(dtype)
    else:
        scales, biases = mx.array(np.asarray(w.q.scales)), None
    static = {
        "transpose": case.op != "dx", "group_size": w.q.group_size, "bits": w.q.bits,
        "mode": w.q.mode,
    }  # fmt: skip
    if case.op == "gather_qmm":
        lhs = mx.arange(case.rows, dtype=mx.uint32)
        rhs = mx.array(case.order.astype(np.uint32))
        rows = x[:, None]
        run = lambda: mx.gather_qmm(rows, weight, scales, biases, lhs, rhs, **static)
    else:
        rows = x.reshape(groups, case.rows // groups, -1)
        run = lambda: mx.quantized_matmul(rows, weight, scales, biases, **static)
    mx.eval(x, weight, scales, rows, *([] if biases is None else [biases]))
    kept: list[Any] = []

    def once() -> None:
        kept[:] = [run()]
        mx.eval(kept[0])

    result = lambda: np.array(kept[0].astype(mx.float32)).reshape(case.rows, -1)
    return Arm(once, result)


# ---- llama.cpp ---------------------------------------------------------------------------------


def llama_cpp(case: Case, together: bool):
    """``mul_mat_id``, its product for experts; or (``together`` is false) a graph with a
    ``mul_mat`` for each expert, of weights as it repacks them for this processor."""
    w = case.weight
    kind = {("affine", 4, 32): "Q4_0", ("affine", 8, 32): "Q8_0", ("mxfp4", 4, 32): "MXFP4"}.get(
        (w.q.mode, w.q.bits, w.q.group_size)
    )
    if kind is None:
        raise Skip(f"has no {w.name}")
    if case.dtype != "float32":
        raise Skip("rows are float32")
    if case.op == "dx":
        raise Skip("has no product with a transposed weight")
    try:
        library = ggml.library()
    except (ImportError, OSError, AttributeError) as error:
        raise Skip(f"no library with ggml's functions (JGG_LIBLLAMA): {error}") from error
    blocks = ggml.blocks(kind, w.codes, w.scales)
    product = ggml.Product(library, kind, blocks, w.codes.shape, case.experts, case.threads,
                           together)  # fmt: skip
    product.set(case.x)
    return Arm(product.run, product.result)


@dataclass(frozen=True)
class Arm:
    run: Any
    result: Any  # of the last run, float32 (rows, N)


#: Name, how it is made, and whether it rounds x to 8 bits (ONNX Runtime: accuracy levels 0 and 4).
PEERS = {
    "ONNX Runtime": (lambda case: onnxruntime(case, 0), False),
    "ONNX Runtime, 8-bit x": (lambda case: onnxruntime(case, 4), True),
    "MLX": (mlx_cpu, False),
    "llama.cpp, 8-bit x": (lambda case: llama_cpp(case, True), True),
    "llama.cpp mul_mat, 8-bit x": (lambda case: llama_cpp(case, False), True),
}


def weight_of(name: str, fields: dict[str, Any], shape, rng) -> Weight:
    """A random weight. Affine scales have 8 bits of a fraction, which float16 has, too."""
    values = rng.standard_normal(shape, np.float32)
    groups, n, k = shape
    if fields["mode"] != "affine":
        q = jgg.quantize(jnp.asarray(values), contract=-1, **fields)
        codes = unpacked(np.asarray(q.weight), q.bits)
        values = np.asarray(jgg.dequantize(q, jnp.float32))
        return Weight(name, q, codes, np.asarray(q.scales), values)
    bits, size = fields["bits"], fields["group_size"]
    in_groups = values.reshape(groups, n, k // size, size)
    half = 1 << (bits - 1)
    scales = abs(in_groups).max(-1) / np.float32(half - 0.5)
    scales = np.asarray(jnp.asarray(scales, jnp.bfloat16).astype(jnp.float32))
    codes = np.clip(np.round(in_groups / scales[..., None]) + half, 0, 2 * half - 1)
    values = (codes - half) * scales[..., None]
    codes = codes.astype(np.uint8).reshape(shape)
    q = jgg.Quantized(
        jnp.asarray(packed(codes, bits)), jnp.asarray(scales, jnp.bfloat16),
        jnp.asarray(-half * scales, jnp.bfloat16), None, mode="affine", bits=bits, group_size=size,
    )  # fmt: skip
    return Weight(name, q, codes, scales, values.reshape(shape))


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words of codes of 4 or 8 bits."""
    each = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, each).astype(np.uint32)
    return (parts << (np.arange(each, dtype=np.uint32) * np.uint32(bits))).sum(-1, dtype=np.uint32)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    shift = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = words[..., None] >> shift & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)
