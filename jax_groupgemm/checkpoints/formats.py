"""The formats that are read, by name, and how a layer is read.

A new format is a file with its ``FORMAT``, and a line here. A new kind is one more of its kinds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from . import awq, compressed_tensors, fp8, gguf, gpt_oss, gptq, mlx, modelopt, unread
from .layer import Format, Layer, Read
from .messages import brief

FORMATS: dict[str, Format] = {
    "mlx": mlx.FORMAT,
    "awq": awq.FORMAT,
    "gptq": gptq.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "modelopt": modelopt.FORMAT,
    "gpt-oss": gpt_oss.FORMAT,
    "fp8": fp8.FORMAT,
    "gguf": gguf.FORMAT,
}
METHODS = {method for form in FORMATS.values() for method in form.methods}


def that_are_read() -> str:
    """For messages."""
    return "; ".join(
        f"{name!r} ({', '.join(kind.name for kind in form.kinds)})"
        for name, form in FORMATS.items()
    )


def _method(t: Layer, known: tuple[str, ...]) -> None:
    """Raise where config names a format that is another's, or nobody's."""
    said = t.option("quant_method")
    if said is not None and (not isinstance(said, str) or said not in METHODS):
        name = unread.METHODS.get(said) if isinstance(said, str) else None
        raise t.error(
            f"config says quant_method={brief(said)}: {name or 'a format that'} is not read. "
            f"Formats that are read: {that_are_read()}"
        )
    t.option(("quant_method", "method"), known)


#: Of AutoRound, AutoRound and GPTQModel: inputs of layers are rotated while a model runs.
ROTATIONS = ("rotation_config", "spinquant_config", "rotation")


def _alone(t: Layer) -> None:
    """Raise where a weight is one only together with a transformation of its layer's input."""
    for key in ROTATIONS:
        if t.config.get(key):
            raise t.error(
                f"config says {key}={brief(t.config[key])}: inputs of layers are rotated, which is "
                "not read"
            )
    # compressed-tensors': those of weights have been applied (transform/transform_args.py).
    transforms = t._replace(config=t.parts("transform_config")).parts("config_groups")
    for scheme in transforms.values():
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for part in applied if isinstance(applied, list) else [None]:
            where = part.get("location") if isinstance(part, Mapping) else None
            if where not in ("weight_input", "weight_output", "q_attn", "k_cache"):
                raise t.error(
                    f"config says transform_config with location={brief(where)}: inputs or outputs "
                    "of layers are transformed, which is not read"
                )


def read(t: Layer, name: str, names: Sequence[str]) -> Read:
    """The layer, in a format; ``names``: of all tensors, in order."""
    form = FORMATS[name]
    _method(t, form.methods)
    if not any(t.stacked in kind.stacked for kind in form.kinds):
        what = "has tensors of its own for each expert: prefixes must be a sequence"
        if not t.stacked:
            what = "stacks experts in one tensor: use jgg.checkpoints.experts(tensors, prefix)"
        raise t.error(f"format {name!r} {what}")
    _alone(t)
    other = unread.found(t)
    if other is not None:
        raise t.error(f"{other} is not read. Formats that are read: {that_are_read()}")
    t, kind = form.choose(t, form.kinds)
    missing = [leaf for leaf in kind.needed if not t.has(leaf)]
    if missing:
        listed = ", ".join(brief(t.prefix + leaf) for leaf in missing)
        of = f"{name!r}" if len(form.kinds) == 1 else f"{name!r} ({kind.name})"
        raise t.error(f"no tensor {listed}, which format {of} needs{_instead(t, name)}")
    known = {t.prefix + leaf for leaf in kind.needed + kind.optional}
    for mark in dict.fromkeys(leaf[:1] for leaf in kind.needed if leaf):
        start = t.prefix + mark
        for tensor in names[bisect_left(names, start) :]:
            if not tensor.startswith(start):
                break
            if tensor not in known:
                raise t.error(f"tensor {brief(tensor)} is not known to format {name!r}")
    out = kind.read(t)
    t.check_shape(out[0].shape)
    return out


def _instead(t: Layer, name: str) -> str:
    """The format or kind that the tensors are of, where it is another one."""
    for other, form in FORMATS.items():
        for kind in form.kinds:
            if kind.fits(t):
                of = f"{other!r}" if len(form.kinds) == 1 else f"{other!r} ({kind.name})"
                return f": its tensors are those of {of}"
    return ""
