"""Quantized checkpoints of other libraries as ``Quantized`` weights: ``jgg.checkpoints``.

Formats, by the name that ``format`` takes; ``w`` is one value, ``q`` its code, ``s`` its scale:

====================  ============================================  =============================
format                tensors under a prefix                        value
====================  ============================================  =============================
"mlx"                 weight, scales, biases                        ``q * s + bias``, or fp
"awq"                 qweight, qzeros, scales (AutoAWQ, gemm)       ``(q - z) * s``
"gptq"                qweight, qzeros, scales, g_idx (v1, v2)       ``(q - z) * s``
"compressed-tensors"  by its config's ``format``, or the tensors:
nvfp4-pack-quantized  weight_packed, _scale, _global_scale          ``e2m1 * s / global``
mxfp4-pack-quantized  weight_packed, _scale                         ``e2m1 * 2**(s - 127)``
mxfp8-quantized       weight, weight_scale                          ``e4m3 * 2**(s - 127)``
pack-quantized        weight_packed, _scale, _shape, _zero_point    ``(q - z) * s``
int-quantized         weight, weight_scale, weight_zero_point       ``(q - z) * s``
float-quantized       weight, weight_scale                          ``e4m3 * s``
"modelopt"            weight, weight_scale, weight_scale_2 (NVFP4)  ``e2m1 * s * scale_2``
stacked experts       gate_up_proj, _weight_scale, _weight_scale_2  ``e2m1 * s * scale_2``
FP8                   weight, weight_scale                          ``e4m3 * s``
"gpt-oss"             _blocks, _scales (MXFP4)                      ``e2m1 * 2**(s - 127)``
"fp8"                 weight, weight_scale_inv (128 x 128 blocks)   ``e4m3 * s``
"gguf"                weight, in blocks of llama.cpp:
Q4_0, Q5_0, Q8_0      s                                             ``(q - z) * s``
Q4_1, Q5_1            s, bias                                       ``q * s + bias``
Q3_K, Q6_K            d, i in groups of 16                          ``(q - z) * (d * i)``
Q2_K, Q4_K, Q5_K      d, dmin, i, j in groups of 16 or 32           ``q * (d * i) - dmin * j``
MXFP4, NVFP4          s; of NVFP4 also a tensor scale               ``e2m1 * s * scale``
====================  ============================================  =============================

``dequantize`` rounds the value of the formula once to float32, and then to other dtypes. It rounds
three numbers to float32 before that: ``q * s`` of "mlx"; ``q * s`` and ``z * s`` of
"compressed-tensors" (both exact with 16-bit scales); and ``1 / global``, which multiplies the exact
``e2m1 * s`` (within 3/2 units in the last place; exact for powers of two).

A layer of another format raises an error, which names that format and lists those that are read.

These functions read one tensor at a time, and arrays stay on the host: a result's leaves are numpy
arrays, views of ``tensors`` where the layouts agree. ``jax.device_put``, with a sharding if need
be, moves them to devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, overload

import numpy as np
from jax.typing import DTypeLike

from .._core.types import CheckpointFormat, QuantizedFormat
from .._quantized.array import Quantized
from . import files, gguf_file, json_file, safetensors
from .gguf_types import Blocks
from .messages import brief
from .safetensors import Header, Tensors
from .source import Source, rows, sizes, stack

__all__ = ["Blocks", "Header", "Tensors", "act_order", "experts", "linear", "open", "read_json"]


def __dir__() -> list[str]:
    return __all__


@overload
def linear(
    tensors: Mapping[str, Any],
    prefix: str | Sequence[str],
    *,
    format: QuantizedFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized: ...
@overload
def linear(
    tensors: Mapping[str, Any],
    prefix: str | Sequence[str],
    *,
    format: Literal["gguf"],
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized | np.ndarray: ...
def linear(
    tensors: Mapping[str, Any],
    prefix: str | Sequence[str],
    *,
    format: CheckpointFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized | np.ndarray:
    """One linear layer's weight ``(N, K)``, used as ``x @ w.T``; **K is cut into groups**.

    Args:
      tensors: name to array, as of :func:`open`; numpy or JAX arrays.
      prefix: the layer's name; its tensors are ``prefix + ".weight"`` and so on. A sequence of
        names gives their rows one after another, as of gate and up projections: N is the sum.
      format: ``"mlx"``, ``"awq"``, ``"gptq"``, ``"compressed-tensors"``, ``"modelopt"``,
        ``"fp8"`` or ``"gguf"``.
      config: the checkpoint's ``config.json`` as a dict, or its ``quantization_config``, which may
        stand in a part such as ``text_config``. The function compares it with the tensors. Formats
        "mlx" (bits, group size, mode, layer by layer), "gptq" (bits; the group size, where there
        are several groups and no ``g_idx``; ``checkpoint_format`` "gptq_v2", otherwise v1) and the
        integers of "compressed-tensors" (``num_bits``, ``group_size``) cannot be read without it.
        It may name layers as other releases of the model do: ``model.``, ``language_model.`` and
        ``text_model.`` in front of ``layers.`` do not count.
      shape: the ``(N, K)`` that your model expects; a layer of another shape is an error. Pass it
        for "mlx": without it, 8 bits in groups of 32 may be read as 4 bits in groups of 64 and
        twice the K, if config has the layer's entry under a name that is not known.
      scales_dtype: bfloat16, float16 or float32, to which scales and biases of mode ``"affine"``
        are rounded. None leaves those of the formats below. With bfloat16 a value is within
        ``2**-8 * (abs(q * scale) + abs(bias))``, and ``(q - z) * s`` of "gguf" within
        ``2**-8 * abs(value)``, of what it was; with float16 within an eighth of that, except for
        scales below ``2**-14``, which lose bits.

    Returns:
      A :class:`Quantized` of numpy arrays:

      - "mlx": as stored, except that it divides a ``global_scale`` tensor, MLX's amax, by 2688.
      - "awq", "gptq": affine with float32 scales and biases ``-z * s``, both exact; where a "gptq"
        config says ``sym``, of the stored dtype, in which ``-z * s`` is exact. Groups longer than
        128 become several with the same scale; the last group of K may be shorter.
      - "compressed-tensors": nvfp4 with a scalar ``global_scale``, float32
        ``1 / weight_global_scale``, ``(N,)`` for a sequence of names; mxfp4; mxfp8; or affine, as
        of "gptq", symmetric where there are no zero points. Float32 scales are taken, and
        ``(q - z) * s`` is then within ``2**(bits - 23) * abs(s)``.
      - "modelopt": nvfp4 with ``weight_scale_2`` as ``global_scale``, ``(N,)`` for a sequence of
        names; or fp8.
      - "fp8", float-quantized, "modelopt" FP8: fp8 with the blocks that the layer has, and float32
        scales; for a sequence of names each layer's own.
      - "gguf": affine, mxfp4 or nvfp4, as the table in the reference says; a **numpy array** where
        the tensor is F32, F16 or BF16. Scales and biases are float16 of Q4_0, Q4_1, Q5_0, Q5_1 and
        Q8_0, and float32 of Q2_K to Q6_K. All are exact, and values are those of llama.cpp, bit for
        bit, but for the signs of affine zeros.

      A layer's own ``bias`` and the scales of its input and of the cache are not part of it.

    Raises:
      ValueError: a tensor is missing, unknown, or of the wrong shape; the layer is not of
        ``shape``; config contradicts the
        tensors, says that the layer is not quantized, or names what is not supported; the layer is
        of a format, or of a type of GGUF, that is not read; scales that are not finite ("gguf"), or
        too large for their dtype; float32 scales too long for exact products ("awq", "gptq");
        zero points that other libraries read differently (v1, stored all ones); a layer in act
        order, which :func:`act_order` reads; fp8 rows to be joined that would begin within a block.
      TypeError: a tensor's dtype is not the format's, or an argument is not what it should be.

    Examples:
      >>> q = jgg.quantize(jnp.ones((64, 128)), bits=4, group_size=64, contract=-1)
      >>> parts = {"scales": q.scales, "biases": q.biases, "weight": q.weight}
      >>> tensors = {f"mlp.{name}": np.asarray(value) for name, value in parts.items()}
      >>> config = {"quantization": {"bits": 4, "group_size": 64}}
      >>> jgg.checkpoints.linear(tensors, "mlp", format="mlx", config=config).shape
      (64, 128)
    """
    source = Source("linear", tensors, format, config, scales_dtype=scales_dtype)
    return rows(source, prefix, sizes("linear", shape, "N, K"))[0]


@overload
def experts(
    tensors: Mapping[str, Any],
    prefixes: str | Sequence[str | Sequence[str]],
    *,
    format: QuantizedFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized: ...
@overload
def experts(
    tensors: Mapping[str, Any],
    prefixes: str | Sequence[str | Sequence[str]],
    *,
    format: Literal["gguf"],
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized | np.ndarray: ...
def experts(
    tensors: Mapping[str, Any],
    prefixes: str | Sequence[str | Sequence[str]],
    *,
    format: CheckpointFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
    scales_dtype: DTypeLike | None = None,
) -> Quantized | np.ndarray:
    """Weights ``(G, N, K)`` of G experts, for ``grouped_qmm``; **K is cut into groups**.

    Args:
      tensors, format, config, scales_dtype: as of :func:`linear`.
      prefixes: one prefix of :func:`linear` per expert, in the experts' order; each may be a
        sequence, as of gate and up. Or one string, for tensors that hold all experts: formats
        "mlx" (``switch_mlp.gate_proj``), "gguf" (``blk.0.ffn_down_exps``), "gpt-oss" and "modelopt"
        (``experts.gate_up_proj``). In "mlx" and "gguf" also a list of one sequence of such names,
        ``[["blk.0.ffn_gate_exps", "blk.0.ffn_up_exps"]]``, whose rows are joined in each expert.
      shape: the ``(G, N, K)`` that your model expects, as of :func:`linear`.

    Returns:
      A :class:`Quantized` of numpy arrays. Rows of gpt-oss' ``gate_up_proj``, stored gate and up
      by turns, are gate's and then up's, as activation ``"swiglu_oai"``, that model's, takes
      them, in format "gpt-oss" and in format "modelopt" where config has ``model_type`` "gpt_oss";
      its bias is to be reordered alike, ``concatenate([bias[:, ::2], bias[:, 1::2]], 1)``. Other
      rows are as stored.
      ``global_scale`` is ``(G,)``, or ``(G, N)`` where prefixes are sequences; of stacked experts
      ``()``, or as ``weight_scale_2`` is.

    Raises:
      ValueError: as of :func:`linear`; or experts differ in shape or dtype.
      TypeError: as of :func:`linear`.

    Besides the result, memory holds the tensors of one expert at a time.

    Examples:
      >>> q = jgg.quantize(jnp.ones((2, 64, 128)), mode="mxfp4", contract=-1)  # two experts
      >>> codes = np.asarray(q.weight).view(np.uint8).reshape(2, 64, 4, 16)  # as gpt-oss has them
      >>> tensors = {"down_proj_blocks": codes, "down_proj_scales": np.asarray(q.scales)}
      >>> jgg.checkpoints.experts(tensors, "down_proj", format="gpt-oss").shape
      (2, 64, 128)
    """
    source = Source("experts", tensors, format, config, scales_dtype=scales_dtype)
    expected = sizes("experts", shape, "G, N, K")
    if isinstance(prefixes, str):
        return source.read(prefixes, expected, stacked=True)[0]
    prefixes = source.several(prefixes)
    if source.are_stacked(prefixes):
        return rows(source, prefixes[0], expected, stacked=True)[0]
    return stack(source, prefixes, expected)[0]


def act_order(
    tensors: Mapping[str, Any],
    prefix: str | Sequence[str | Sequence[str]],
    *,
    config: Mapping[str, Any],
    format: CheckpointFormat = "gptq",
    shape: Sequence[int] | None = None,
) -> tuple[Quantized, np.ndarray]:
    """A weight in act order (``desc_act``), and the order of its K: ``x[..., order] @ w.T``.

    In act order ``g_idx`` (``weight_g_idx``) assigns channels to groups in any order. Groups of a
    ``Quantized`` are contiguous, so this function sorts channels by group: channel k of the result
    is channel ``order[k]`` of the layer, and values stay as they are.

    Args:
      tensors, config: as of :func:`linear`.
      prefix: one string for one layer ``(N, K)``, or prefixes of :func:`experts` for ``(G, N, K)``.
      format: ``"gptq"`` or ``"compressed-tensors"``.
      shape: the ``(N, K)``, or ``(G, N, K)``, that your model expects, as of :func:`linear`.

    Returns:
      A :class:`Quantized`, and ``order``, int32 ``(K,)`` or ``(G, K)``.

    Raises:
      ValueError: as of :func:`linear`; or groups are not of ``group_size`` channels each; or rows
        to be joined differ in order.

    Examples:
      >>> tensors = {  # two groups of channels, which take turns
      ...     "mlp.qweight": np.zeros((8, 64), np.int32),
      ...     "mlp.qzeros": np.zeros((2, 8), np.int32),
      ...     "mlp.scales": np.ones((2, 64), np.float16),
      ...     "mlp.g_idx": np.arange(64, dtype=np.int32) % 2,
      ... }
      >>> config = {
      ...     "quantization_config": {"bits": 4, "group_size": 32, "quant_method": "gptq"}
      ... }
      >>> w, order = jgg.checkpoints.act_order(tensors, "mlp", config=config)
      >>> w.shape, order[:3].tolist()
      ((64, 64), [0, 2, 4])
    """
    if format not in ("gptq", "compressed-tensors"):
        raise ValueError(
            f"jgg.checkpoints.act_order: format={brief(format)} is not one of 'gptq', "
            "'compressed-tensors'"
        )
    source = Source("act_order", tensors, format, config, reorder=True)
    if isinstance(prefix, str):
        return rows(source, prefix, sizes("act_order", shape, "N, K"))
    return stack(source, prefix, sizes("act_order", shape, "G, N, K"))


def open(path: str | PathLike[str], *, max_header_bytes: int = safetensors.HEADER_LIMIT) -> Tensors:
    """The tensors of a safetensors or GGUF checkpoint, by name, each read when it is asked for.

    Args:
      path: a ``.safetensors`` file; an index (``model.safetensors.index.json``); or a directory
        with an index or, without one, any number of files. If there are several indices it takes
        ``model.safetensors.index.json``; of ``model.safetensors`` and Mistral's
        ``consolidated.safetensors`` it takes the former. Or a ``.gguf`` file, any part of a split
        model (``-00001-of-00003.gguf``), or a GGUF file of another name, as Ollama has it. ``~`` is
        the home directory. Symbolic links are followed.
      max_header_bytes: a longer header, or index, is refused. The default is the limit that
        safetensors has, of 100 MB.

    Returns:
      A mapping to read-only numpy arrays. ``.header(name)`` gives a tensor's ``dtype``, ``shape``
      and ``nbytes``, and reads nothing. Each access reads the tensor from its file, so you can read
      a checkpoint larger than memory tensor by tensor. ``open`` reads headers only, and no file
      stays open. With an index, the mapping has the tensors that the index names. bfloat16 and
      float8 arrays have JAX's dtypes. An access raises ValueError where the tensor's dtype is not
      known, or where its file has changed (device, inode, size or times) since it was opened.

      GGUF's tensors of codes are :class:`Blocks`, which :func:`linear` and :func:`experts` read
      with ``format="gguf"``; ``dtype`` is then llama.cpp's type, such as ``"Q4_K"``. ``.metadata``
      is a mapping with the named values of a GGUF file: numbers, bools, strings, numpy arrays and
      lists.

    Raises:
      ValueError: a file is malformed (truncated, overlapping tensors), no regular file, or a Git
        LFS pointer; a GGUF file is of version 1, or big-endian; a tensor is in two files, and no
        index says in which; there are several indices, none of which is
        ``model.safetensors.index.json``; a tensor of the index is not in its file; parts of a split
        model do not fit each other; the header is too long.
      FileNotFoundError: there is no such file, or one that the index names is missing.
      OSError: as the system says.

    https://github.com/huggingface/safetensors,
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Examples:
      >>> import json, pathlib, struct, tempfile
      >>> entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
      >>> header = json.dumps({"w": entry}).encode()
      >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
      >>> _ = path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
      >>> tensors = jgg.checkpoints.open(path)
      >>> list(tensors), tensors["w"].shape, tensors.header("w").nbytes
      (['w'], (2, 4), 32)
    """
    _is_bytes("open", "max_header_bytes", max_header_bytes)
    where = files.absolute("open", path)
    if gguf_file.is_one(where):
        return gguf_file.read(where, max_header_bytes)
    return safetensors.read(where, max_header_bytes)


def read_json(path: str | PathLike[str], *, max_bytes: int = json_file.MAX_BYTES) -> dict[str, Any]:
    """The object of a JSON file that may hold anything: ``config.json``, and its like.

    Args:
      path: a regular file. ``~`` is the home directory. Symbolic links are followed.
      max_bytes: a longer file is refused. The default is 16 MiB.

    Returns:
      A dict. Its ints have at most 64 bits, its floats are finite, it is nested at most 100 deep.

    Raises:
      ValueError: no regular file, or one of more than ``max_bytes``; a Git LFS pointer; not UTF-8;
        malformed JSON, an object with two equal keys, or no object; nested deeper; a number that is
        too long or not finite (``Infinity``, ``1e999``), whose key is named.
      FileNotFoundError: there is no such file.
      OSError: as the system says.
      TypeError: ``path`` is no path.

    Examples:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "config.json")
      >>> _ = path.write_text('{"num_experts": 8}')
      >>> jgg.checkpoints.read_json(path)
      {'num_experts': 8}
    """
    _is_bytes("read_json", "max_bytes", max_bytes)
    return json_file.read(path, max_bytes)


def _is_bytes(op: str, name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"jgg.checkpoints.{op}: {name}={brief(value)} is not a number of bytes")
