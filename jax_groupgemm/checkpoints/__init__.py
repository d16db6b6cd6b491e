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

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np

from .._core.types import CheckpointFormat
from .._quantized.array import Quantized
from . import fp8, json_file, safetensors
from .formats import FORMATS, read
from .layer import Layer, Read, section
from .messages import brief, cut
from .safetensors import Header, Tensors

__all__ = ["Header", "Tensors", "act_order", "experts", "linear", "open", "read_json"]

Expected = tuple[int | None, ...]  # a shape, None: any size; (): any shape


def __dir__() -> list[str]:
    return __all__


def linear(
    tensors: Mapping[str, Any],
    prefix: str | Sequence[str],
    *,
    format: CheckpointFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
) -> Quantized:
    """One linear layer's weight ``(N, K)``, used as ``x @ w.T``; **K is cut into groups**.

    Args:
      tensors: name to array, as of :func:`open`; numpy or JAX arrays.
      prefix: the layer's name; its tensors are ``prefix + ".weight"`` and so on. A sequence of
        names gives their rows one after another, as of gate and up projections: N is the sum.
      format: ``"mlx"``, ``"awq"``, ``"gptq"``, ``"compressed-tensors"``, ``"modelopt"`` or
        ``"fp8"``.
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

      A layer's own ``bias`` and the scales of its input and of the cache are not part of it.

    Raises:
      ValueError: a tensor is missing, unknown, or of the wrong shape; the layer is not of
        ``shape``; config contradicts the
        tensors, says that the layer is not quantized, or names what is not supported; the layer is
        of a format that is not read; float32 scales too long for exact products ("awq", "gptq");
        zero points that other libraries read differently (v1, stored all ones); a layer in act
        order, which :func:`act_order` reads; fp8 rows to be joined that would begin within a block.
      TypeError: a tensor's dtype is not the format's, or an argument is not what it should be.
    """
    source = _Source("linear", tensors, format, config)
    return _rows(source, prefix, _sizes("linear", shape, "N, K"))[0]


def experts(
    tensors: Mapping[str, Any],
    prefixes: str | Sequence[str | Sequence[str]],
    *,
    format: CheckpointFormat,
    config: Mapping[str, Any] | None = None,
    shape: Sequence[int] | None = None,
) -> Quantized:
    """Weights ``(G, N, K)`` of G experts, for ``grouped_qmm``; **K is cut into groups**.

    Args:
      tensors, format, config: as of :func:`linear`.
      prefixes: one prefix of :func:`linear` per expert, in the experts' order; each may be a
        sequence, as of gate and up. Or one string, for tensors that hold all experts: formats
        "mlx" (``switch_mlp.gate_proj``), "gpt-oss" and "modelopt" (``experts.gate_up_proj``).
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
    """
    source = _Source("experts", tensors, format, config)
    expected = _sizes("experts", shape, "G, N, K")
    if isinstance(prefixes, str):
        return source.read(prefixes, expected, stacked=True)[0]
    return _stack(source, prefixes, expected)[0]


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
    """
    if format not in ("gptq", "compressed-tensors"):
        raise ValueError(
            f"jgg.checkpoints.act_order: format={brief(format)} is not one of 'gptq', "
            "'compressed-tensors'"
        )
    source = _Source("act_order", tensors, format, config, reorder=True)
    if isinstance(prefix, str):
        return _rows(source, prefix, _sizes("act_order", shape, "N, K"))
    return _stack(source, prefix, _sizes("act_order", shape, "G, N, K"))


def open(path: str | PathLike[str], *, max_header_bytes: int = safetensors.HEADER_LIMIT) -> Tensors:
    """The tensors of a safetensors checkpoint, by name, each read when it is asked for.

    Args:
      path: a ``.safetensors`` file; an index (``model.safetensors.index.json``); or a directory
        with an index or, without one, any number of files. If there are several indices it takes
        ``model.safetensors.index.json``; of ``model.safetensors`` and Mistral's
        ``consolidated.safetensors`` it takes the former. ``~`` is the home directory. Symbolic
        links are followed.
      max_header_bytes: a longer header, or index, is refused. The default is the format's own
        limit, of 100 MB.

    Returns:
      A mapping to read-only numpy arrays. ``.header(name)`` gives a tensor's ``dtype``, ``shape``
      and ``nbytes``, and reads nothing. Each access reads the tensor from its file, so you can read
      a checkpoint larger than memory tensor by tensor. ``open`` reads headers only, and no file
      stays open. With an index, the mapping has the tensors that the index names. bfloat16 and
      float8 arrays have JAX's dtypes. An access raises ValueError where the tensor's dtype is not
      known, or where its file has changed (device, inode, size or times) since it was opened.

    Raises:
      ValueError: a file is malformed (truncated, overlapping tensors), no regular file, or a Git
        LFS pointer; a tensor is in two files, and no index says in which; there are several
        indices, none of which is ``model.safetensors.index.json``; a tensor of the index is not in
        its file; the header is too long.
      FileNotFoundError: there is no such file, or one that the index names is missing.
      OSError: as the system says.

    https://github.com/huggingface/safetensors
    """
    _is_bytes("open", "max_header_bytes", max_header_bytes)
    return safetensors.read(path, max_header_bytes)


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
    """
    _is_bytes("read_json", "max_bytes", max_bytes)
    return json_file.read(path, max_bytes)


def _is_bytes(op: str, name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"jgg.checkpoints.{op}: {name}={brief(value)} is not a number of bytes")


class _Source:
    """The arguments of a call; the names are sorted once for all its prefixes."""

    def __init__(self, op: str, tensors, format: str, config, reorder: bool = False):
        if not isinstance(format, str) or format not in FORMATS:
            known = ", ".join(map(repr, FORMATS))
            raise ValueError(f"jgg.checkpoints.{op}: format={brief(format)} is not one of {known}")
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"jgg.checkpoints.{op}: tensors must be a mapping of names to arrays, got "
                f"{type(tensors).__name__}"
            )
        self.op, self.tensors, self.reorder, self.format = op, tensors, reorder, format
        other = next((name for name in tensors if not isinstance(name, str)), None)
        if other is not None:
            raise TypeError(
                f"jgg.checkpoints.{op}: names of tensors must be str, got {brief(other)}"
            )
        self.names = sorted(tensors)
        form = FORMATS[format]
        if config is None:
            if form.needs:
                raise ValueError(
                    f"jgg.checkpoints.{op}: format {format!r} needs config for {form.needs}: pass "
                    "config=jgg.checkpoints.read_json(path), of the checkpoint's config.json"
                )
            config = {}
        if not isinstance(config, Mapping):
            raise TypeError(f"jgg.checkpoints.{op}: config must be a dict, got {brief(config)}")
        self.model = config
        try:
            self.config = section(config, form.sections)
        except ValueError as error:
            raise ValueError(f"jgg.checkpoints.{op}: {error}") from error

    def several(self, prefixes) -> list:
        """The layers of one or more prefixes."""
        if not isinstance(prefixes, Iterable):
            raise TypeError(
                f"jgg.checkpoints.{self.op}: a prefix must be a name or a sequence of names, got "
                f"{brief(prefixes)}"
            )
        out = [*prefixes]
        if not out:
            raise ValueError(f"jgg.checkpoints.{self.op}: no prefixes")
        return out

    def read(self, prefix: str, expected: Expected = (), stacked: bool = False) -> Read:
        if not isinstance(prefix, str):
            raise TypeError(
                f"jgg.checkpoints.{self.op}: a prefix must be a name, got {brief(prefix)}"
            )
        layer = Layer(
            self.op, prefix, self.tensors, self.config, self.model, stacked, self.reorder, expected
        )
        return read(layer, self.format, self.names)


def _sizes(op: str, shape: Sequence[int] | None, letters: str) -> Expected:
    """The shape that a caller expects; () where any will do."""
    if shape is None:
        return ()
    text = f"jgg.checkpoints.{op}: shape={brief(shape)} is not ({letters}), the sizes of a weight"
    if not isinstance(shape, (tuple, list)):
        raise TypeError(text)
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in shape):
        raise TypeError(text)
    if len(shape) != len(letters.split(",")) or min(shape) < 1:
        raise ValueError(text)
    return tuple(map(int, shape))


def _rows(source: _Source, prefix: str | Sequence[str], expected: Expected) -> Any:
    """One layer, or several, row after row."""
    if isinstance(prefix, str):
        return source.read(prefix, expected)
    prefix = source.several(prefix)
    each = expected if len(prefix) == 1 else (None, *expected[1:])[: len(expected)]
    parts = [source.read(name, each) for name in prefix]
    count = sum(q.shape[0] for q, _ in parts)
    if expected and count != expected[0]:
        names = " and ".join(map(cut, prefix[:2])) + (" and others" if len(prefix) > 2 else "")
        raise ValueError(
            f"jgg.checkpoints.{source.op}: {names} have {count} rows together, expected "
            f"shape={expected}: are these the layers to be joined?"
        )
    if all(q.mode == "fp8" for q, _ in parts) and len(parts) > 1:
        joined = fp8.rows_to_join(source.op, prefix, [q for q, _ in parts])
        parts = [(q, None) for q in joined]
    first, order = parts[0]
    for name, part in zip(prefix, parts, strict=True):
        _same_kind(source.op, prefix[0], parts[0], name, part, slice(-1, None))
        if order is not None and np.any(order != part[1]):
            names = f"{cut(prefix[0])} and {cut(name)}"
            raise ValueError(
                f"jgg.checkpoints.{source.op}: {names} differ in order: read them one by one"
            )

    def join(*leaves):
        if leaves[0].ndim == 0:  # a global scale
            return np.repeat(np.stack(leaves), [q.shape[0] for q, _ in parts])
        return np.concatenate(leaves)

    return jax.tree.map(join, first, *(q for q, _ in parts[1:])), order


def _stack(source: _Source, prefixes: Sequence[str | Sequence[str]], expected: Expected) -> Any:
    """One layer per prefix, each read into its place."""
    prefixes = source.several(prefixes)
    if expected and len(prefixes) != expected[0]:
        raise ValueError(
            f"jgg.checkpoints.{source.op}: {len(prefixes)} prefixes, expected shape={expected}: "
            "pass one for each expert"
        )
    first = _rows(source, prefixes[0], expected[1:])
    out = jax.tree.map(lambda x: np.empty((len(prefixes), *x.shape), x.dtype), first)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
    del first
    for g, prefix in enumerate(prefixes):
        layer = _rows(source, prefix, expected[1:])
        _same_kind(source.op, prefixes[0], like, prefix, layer, slice(None))
        for whole, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(layer), strict=True):
            whole[g] = leaf
        layer = leaf = None  # freed before the next is read
    return out


def _same_kind(op: str, name_a, a, name_b, b, axes: slice) -> None:
    def kind(x):
        shapes = [(leaf.shape[axes], leaf.dtype) for leaf in jax.tree.leaves(x)]
        return jax.tree.structure(x), shapes

    if kind(a) != kind(b):
        name_a, name_b = cut(str(name_a)), cut(str(name_b))
        raise ValueError(
            f"jgg.checkpoints.{op}: {name_a} is {a[0]}, but {name_b} is {b[0]}: they are no one "
            "weight, read them one by one"
        )
