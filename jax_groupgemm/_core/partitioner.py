"""Auto sharding: how XLA's partitioner learns to divide a grouped product.

A product whose operands XLA may divide is lowered as one custom call, ``jgg_product``. It says, in
the words of Shardy, which axes of its operands and of its result belong together (a sharding rule),
and its configuration says which product it is. Where XLA has decided how the operands are sharded
it asks us (``_partition``) for what one device runs.

Nothing in the call belongs to this process. So the persistent cache finds a compiled program, and
whoever loads an exported program divides it. The call names no mesh either. A sharding tells which
part of an axis each device has, and a plan needs no more: devices are numbers here, and a mesh axis
is an array that says which part each device has.

Within a ``shard_map`` over some mesh axes, the partitioner numbers the devices that share what is
mapped anew, in an order of its own. One more operand, sharded over all axes that are left, shows
that order.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._kernels import extension, proven, tuned
from .partition import WHOLE, Call, explicit_mesh_of, plan_by
from .products import Mm, Wgrad
from .segments import Form, Metadata

FORMAT = 1

#: Where a compiled program may ask us; elsewhere it is the product of whole operands, as XLA
#: divides what that is made of.
_PLATFORMS = ("cpu", "cuda", "rocm")

#: The name of an axis over all devices, by number, in what one device runs.
_DEVICES = "jgg_devices"


# ---- devices by number -----------------------------------------------------------------------


class Devices:
    """All devices, and which part of what each of them has. "Mesh axes" are names that it gives.

    ``local`` is the number by which shardings know each device, ``group`` that of the devices that
    share what a ``shard_map`` maps.
    """

    def __init__(self, local: np.ndarray, group: np.ndarray):
        self._local, self._group = local, group
        self._parts: list[np.ndarray] = []  # of each name: the part of each device, by local number
        self.shape: dict[str, int] = {}
        self._used: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many there are that shardings know."""
        return int(self._local.max()) + 1

    def entries(self, sharding, rank: int) -> P:
        """A sharding as a spec, of names that are given here."""
        if sharding is None or not sharding.is_tiled():
            return P(*[None] * rank)
        dims = sharding.tile_assignment_dimensions()
        tiles = np.reshape(sharding.tile_assignment_devices(), dims)
        out = []
        for axis in range(rank):
            part = np.zeros(self.count, np.int32)
            part[tiles] = np.indices(dims)[axis]
            out.append(self._name(part, dims[axis]) if dims[axis] > 1 else None)
        return P(*out)

    def _name(self, part: np.ndarray, parts: int) -> str:
        for name, known in zip(self.shape, self._parts, strict=True):
            if np.array_equal(known, part):
                return name
        self._parts.append(part)
        self.shape[str(len(self.shape))] = parts
        return str(len(self.shape) - 1)

    def independent(self, names: Sequence[str]) -> bool:
        """Whether as many devices have each combination of parts. Remembers the names if so."""
        counts = np.bincount(self._combined(names), minlength=self._product(names))
        if len(set(counts)) > 1:
            return False
        self._used = tuple(names)
        return True

    def sharding(self, spec: P):
        """A spec as XLA's sharding."""
        import jaxlib.xla_client as xc

        names = [entry[0] if entry else None for entry in spec]
        given = [name for name in names if name is not None]
        if not given:
            return xc.HloSharding.replicate()
        order = np.lexsort((np.arange(self.count), self._combined(given)))
        dims = [1 if name is None else self.shape[name] for name in names]
        copies = self.count // math.prod(dims)
        if copies == 1:
            return xc.HloSharding.subgroup_with_device_ordering(
                order.reshape(dims).astype(np.int64)
            )
        return xc.HloSharding.subgroup_with_device_ordering(
            order.reshape(*dims, copies).astype(np.int64),
            subgroup_types=[xc.OpSharding.Type.REPLICATED],
        )

    def index(self, names: Sequence[str]):
        """Which part this device has."""
        part = self._combined(names)[self._local]
        here = lax.axis_index(_DEVICES)
        stride = int(np.argmax(part != part[0]))
        parts = self._product(names)
        if np.array_equal(part, np.arange(len(part)) // stride % parts):
            return here // stride % parts
        return lax.dynamic_index_in_dim(jnp.asarray(part, jnp.int32), here, keepdims=False)

    def total(self, a, names: Sequence[str]):
        """The sum over the devices that have the parts of these names, and all else alike."""
        return lax.psum(a, _DEVICES, axis_index_groups=self._alike(names))

    def largest(self, a, names: Sequence[str]):
        """The largest of them."""
        return lax.pmax(a, _DEVICES, axis_index_groups=self._alike(names))

    def _alike(self, names: Sequence[str]) -> list[list[int]] | None:
        """Groups of devices, by number; None where all are one."""
        others = [name for name in self._used if name not in names]
        alike = self._group * self._product(others) + self._combined(others)[self._local]
        part = self._combined(names)[self._local]
        order = np.lexsort((np.arange(len(part)), part, alike))
        # Devices that are alike stand together, by their parts, as many of each.
        copies = self.count // self._product(self._used)
        groups = order.reshape(-1, self._product(names), copies).swapaxes(1, 2)
        groups = groups.reshape(-1, self._product(names)).tolist()
        return None if len(groups) == 1 else groups

    def _combined(self, names: Sequence[str]) -> np.ndarray:
        """One number for each combination of parts, by local number."""
        out = np.zeros(self.count, np.int64)
        for name in names:
            out = out * self.shape[name] + self._parts[int(name)]
        return out

    def _product(self, names: Sequence[str]) -> int:
        return math.prod(self.shape[name] for name in names)


def _devices(config: dict[str, Any], anchor) -> Devices:
    """``anchor``: the sharding of the operand that shows the order of the devices."""
    count, mesh = config["devices"], config["mesh"]
    if mesh is None:
        return Devices(np.arange(count), np.zeros(count, np.int64))
    names, sizes, manual = mesh
    numbers = np.arange(count).reshape(sizes)
    mapped = [i for i, name in enumerate(names) if name in manual]
    left = [i for i, name in enumerate(names) if name not in manual]
    groups = numbers.transpose(*mapped, *left).reshape(-1, math.prod(sizes[i] for i in left))
    if (
        anchor is None
        or not anchor.is_tiled()
        or len(anchor.tile_assignment_devices()) != groups.shape[1]
    ):
        raise ValueError(
            "jgg: XLA's partitioner does not show the order of the devices that shard_map over "
            f"{[*manual]} leaves. Map every mesh axis, or use Explicit sharding."
        )
    order = anchor.tile_assignment_devices()
    local, group = np.empty(count, np.int64), np.empty(count, np.int64)
    local[groups], group[groups] = order, np.arange(len(groups))[:, None]
    return Devices(local, group)


# ---- a product in writing --------------------------------------------------------------------

#: The classes that may be a part of a product's description, by name.
_CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (Mm, Wgrad, Metadata, Form, lax.Precision, lax.DotAlgorithmPreset)
}
#: What makes a call of an operation's record, where that is no product.
CALLS: dict[type, Callable] = {}


def describe(cls: type) -> None:
    """Operations may have one of these as an operand, or be described by one."""
    _CLASSES[cls.__name__] = cls


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Stands for an array."""


def _encoded(value):
    if isinstance(value, _Operand):
        return {"": "operand"}
    if isinstance(value, enum.Enum):
        return {"": type(value).__name__, "name": value.name}
    if isinstance(value, np.dtype):
        return {"": "dtype", "name": value.name}
    if dataclasses.is_dataclass(value):
        # What is for messages alone is left out.
        fields = [f for f in dataclasses.fields(value) if f.compare]
        fields = {f.name: _encoded(getattr(value, f.name)) for f in fields}
        return {"": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [*map(_encoded, value)]
    return value


def _decoded(value) -> Any:
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("")
    if name == "operand":
        return _Operand()
    if name == "dtype":
        return jnp.dtype(fields["name"])
    cls = _CLASSES[name]
    if issubclass(cls, enum.Enum):
        return cls[fields["name"]]
    return cls(**{key: _decoded(field) for key, field in fields.items()})


def _written(call: Any, platform: str, devices: int, mesh) -> str:
    operands = call.tree.unflatten([_Operand()] * call.tree.num_leaves)
    return json.dumps(
        {
            "format": FORMAT,
            "name": call.name,
            "product": _encoded(call.product),
            "operands": [*map(_encoded, operands)],
            "platform": platform,
            # Settings of JAX that are in force where it is lowered.
            "x64": jax.config.jax_enable_x64,
            "precision": jax.config.jax_default_matmul_precision,
            "devices": devices,
            "mesh": mesh,
            # What one device runs depends on this, and so does whether a compiled program that is
            # in the persistent cache is this one. Who loads an exported one does not look at it.
            "kernels": tuned.fingerprint(platform),
            "proven": sorted(proven.proven()) if platform == "cuda" else [],
        },
        sort_keys=True,
    )


def _read(config: bytes) -> tuple[Any, dict[str, Any]]:
    """The inverse of :func:`_written`."""
    given = json.loads(config)
    if given["format"] != FORMAT:
        raise ValueError(
            f"jgg: this module was exported by another version of jax_groupgemm: its products are "
            f"described in format {given['format']}, expected {FORMAT}. Export it again."
        )
    operands = tuple(map(_decoded, given["operands"]))
    product = _decoded(given["product"])
    made = CALLS.get(type(product), Call)
    return made(given["name"], jax.tree.structure(operands), product), given


# ---- what XLA asks ---------------------------------------------------------------------------

#: The product of one device, by its name: ``bind(a, b, metadata, product)``.
PER_DEVICE: dict[str, Callable] = {}


def _planned(config: bytes, shapes, shardings, result_shardings=()):
    """The plan of a call; its devices and operands, and what its configuration says."""
    call, given = _read(config)
    devices = _devices(given, shardings[-1])
    operands = [jax.ShapeDtypeStruct(s.dimensions(), s.numpy_dtype()) for s in _own(call, shapes)]
    words, outs = call.letters(operands), call.out_shapes(operands)
    count = len(words) - len(outs)
    all_shapes = [*(v.shape for v in operands[:count]), *outs]
    given_shardings = [*shardings[:count], *(result_shardings or [None] * len(outs))]
    specs = [
        devices.entries(sharding, len(shape))
        for sharding, shape in zip(given_shardings, all_shapes, strict=True)
    ]
    return plan_by(call, devices, specs, all_shapes, operands), devices, operands, given


def _partition(shapes, shardings, result, result_sharding, config: bytes):
    """The program of one device, and the shardings of its operands and its results."""
    results = result_sharding.tuple_elements() if result.is_tuple() else [result_sharding]
    plan, devices, operands, given = _planned(config, shapes, shardings, results)
    wanted = [devices.sharding(spec) for spec in plan.in_specs(operands)]
    if given["mesh"] is not None:
        wanted.append(shardings[-1])

    def run(*operands):
        return plan.per_device(PER_DEVICE[plan.call.name], *_own(plan.call, operands))

    parts = [
        jax.ShapeDtypeStruct(sharding.tile(s).dimensions(), s.numpy_dtype())
        for sharding, s in zip(wanted, shapes, strict=True)
    ]
    with (
        jax.enable_x64(given["x64"]),
        jax.default_matmul_precision(given["precision"]),
        # No mesh that the user has set: this is one device's part.
        jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
    ):
        jaxpr = jax.make_jaxpr(run, axis_env=[(_DEVICES, given["devices"])])(*parts)
        module = _module(jaxpr, given["platform"], given["devices"])
    return module, wanted, _together(result, [*map(devices.sharding, plan.out_specs(operands))])


def _together(result, shardings: list):
    """Those of all results, as XLA has them."""
    import jaxlib.xla_client as xc

    return xc.HloSharding.tuple_sharding(result, shardings) if result.is_tuple() else shardings[0]


def _module(jaxpr, platform: str, devices: int) -> bytes:
    mesh: Any = AbstractMesh((devices,), (_DEVICES,))
    lowered = mlir.lower_jaxpr_to_module(
        "jgg_product", jaxpr, num_const_args=0, in_avals=jaxpr.in_avals,
        out_avals=jaxpr.out_avals, ordered_effects=[], platforms=(platform,), backend=None,
        axis_context=mlir.SPMDAxisContext(mesh, frozenset(mesh.axis_names)),
        donated_args=[False] * len(jaxpr.in_avals), lowering_parameters=mlir.LoweringParameters(),
    )  # fmt: skip
    return mlir.module_to_bytecode(lowered.module)


def _propagate(sharding, _, config: bytes):
    del config
    return sharding


def _infer(shapes, shardings, result, config: bytes):
    """The sharding of the result by those of the operands: asked where Shardy is switched off."""
    plan, devices, operands, _ = _planned(config, shapes, shardings)
    return _together(result, [*map(devices.sharding, plan.out_specs(operands))])


def _registered() -> bool:
    """Whether XLA can ask us.

    There is no public way to offer it that; where the private one is gone, operands that are not in
    a ``shard_map`` over every mesh axis are gathered for a kernel.
    """
    try:
        import jaxlib.xla_client as xc
        from jax._src import xla_bridge

        offer = functools.partial(
            xc.register_custom_call_partitioner, name=extension.DIVIDED, partition=_partition,
            prop_user_sharding=_propagate, infer_sharding_from_operands=_infer,
            can_side_effecting_have_replicated_sharding=True,
        )  # fmt: skip
        offer()
        xla_bridge.register_plugin_callbacks(offer)
    except (ImportError, AttributeError):  # pragma: no cover
        return False
    return True


_CAN_ASK = _registered()


# ---- the call --------------------------------------------------------------------------------


def may_be_partitioned(ctx) -> bool:
    """Whether XLA's partitioner will see this module, and may ask us.

    Where a mesh with Explicit axes is set, operands of no mesh are whole on every device.
    """
    whole = jax.sharding.get_abstract_mesh().explicit_axes and not explicit_mesh_of(ctx.avals_in)
    return _CAN_ASK and not whole and _divisible(ctx.module_context.axis_context) > 1


def _divisible(context) -> int:
    """Among how many devices XLA may divide operands."""
    if isinstance(context, mlir.SPMDAxisContext):
        return math.prod(size for _, size in _left(context))
    return getattr(context, "num_devices", 1)


def _left(context) -> list[tuple[str, int]]:
    """The mesh axes that a ``shard_map`` leaves, and their sizes."""
    mapped = context.manual_axes
    return [(name, size) for name, size in context.mesh.shape.items() if name not in mapped]


def _whole(*operands, call: Any, **_):
    return call.alone(PER_DEVICE[call.name], _own(call, operands))


def _own(call: Any, operands):
    """Those of the product, without the one that shows the order of devices."""
    return operands[: call.tree.num_leaves]


def _call_lowering(platform: str, ctx, *values, call: Any, devices: int, mesh, **_):
    attributes = {}
    if jax.config.jax_use_shardy_partitioner:
        attributes["sdy.sharding_rule"] = mlir.ir.Attribute.parse(_rule(call, ctx.avals_in))
    emit = jax.ffi.ffi_lowering(
        extension.DIVIDED, api_version=2, extra_attributes=attributes,
        skip_ffi_layout_processing=True, backend_config=_written(call, platform, devices, mesh),
    )  # fmt: skip
    return emit(ctx, *values)


def _rule(call: Any, types) -> str:
    """Which axes of operands and results are the same factor, as Shardy writes it. A letter of
    several sizes is a factor of all: of an axis in quantization groups, their number, or that of
    their pairs where two share a word. An axis that is whole has a factor of its own."""
    own = _own(call, types)
    shapes = call.out_shapes(own)
    words = [
        [f"w{i}_{j}" if letter == WHOLE else letter for j, letter in enumerate(word)]
        for i, word in enumerate(call.letters(own))
    ]
    operands, outs = words[: -len(shapes)], words[-len(shapes) :]
    metadata = [[f"m{i}_{j}" for j in range(t.ndim)] for i, t in enumerate(own[len(operands) :])]
    anchor = [["anchor"]] * (len(types) - len(own))
    given = [*operands, *metadata, *anchor]
    sizes: dict[str, int] = {}
    of_each = [*(t.shape for t in types), *shapes]
    for names, shape in zip([*given, *outs], of_each, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = math.gcd(sizes.get(name, 0), size)
    written = {name: chr(ord("i") + i) if i < 18 else f"z_{i - 17}" for i, name in enumerate(sizes)}
    listed = lambda names: ", ".join(written[name] for name in names)
    mapped = ", ".join(f"[{listed(names)}]" for names in given)
    factors = ", ".join(f"{written[name]}={size}" for name, size in sizes.items())
    made = {name for names in outs for name in names}
    summed = [name for name in sizes if len(name) == 1 and name not in made]
    whole = [name for name in sizes if name[0] in "mw" and len(name) > 1]
    kinds = ""
    if summed:
        kinds += f" reduction={{{listed(summed)}}}"
    if whole:
        kinds += f" need_replication={{{listed(whole)}}}"
    results = ", ".join(f"[{listed(names)}]" for names in outs)
    return f"#sdy.op_sharding_rule<({mapped})->({results}) {{{factors}}}{kinds}, custom>"


_PRODUCT = Primitive(extension.DIVIDED)
_PRODUCT.multiple_results = True
_PRODUCT.def_abstract_eval(lambda *_, outs, **__: list(outs))
mlir.register_lowering(_PRODUCT, mlir.lower_fun(_whole, multiple_results=True))
for _platform in _PLATFORMS:
    mlir.register_lowering(
        _PRODUCT, functools.partial(_call_lowering, _platform), platform=_platform
    )


def anchored(context, leaves: Sequence) -> list:
    """Operands of a product, with the one that shows the order of devices where it is needed."""
    if not isinstance(context, mlir.SPMDAxisContext):
        return [*leaves]
    left = _left(context)
    # In the mesh of the context, which knows what is mapped.
    over_all = NamedSharding(jax.sharding.get_abstract_mesh(), P(tuple(name for name, _ in left)))
    anchor = lax.iota(jnp.int32, math.prod(size for _, size in left))
    return [*leaves, lax.with_sharding_constraint(anchor, over_all)]


def divided(call: Any, context, operands: Sequence, outs: Sequence[ShapedArray]) -> list:
    """The results of an operation whose operands XLA may divide, in a module that is lowered in
    that context; ``operands`` are :func:`anchored`."""
    bind = functools.partial(_PRODUCT.bind, *operands, call=call, outs=tuple(outs))
    if not isinstance(context, mlir.SPMDAxisContext):
        return bind(devices=context.num_devices, mesh=None)
    if not jax.config.jax_use_shardy_partitioner:
        # GSPMD would have us say what is mapped, and ends the process at any other custom call.
        if call.product.implementation == "reference":
            return _whole(*operands, call=call)
        raise NotImplementedError(
            f"jgg {call.name}: shard_map over {sorted(context.manual_axes)} leaves other mesh axes "
            "automatic, which needs Shardy. Set jax_use_shardy_partitioner=True (JAX's default), "
            "map every mesh axis, or name implementation='reference'."
        )
    names, sizes = zip(*context.mesh.shape.items(), strict=True)
    mesh = names, sizes, tuple(sorted(context.manual_axes))
    return bind(devices=context.mesh.size, mesh=mesh)
