"""What an IDE and a type checker see of the public surface."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import types
from jax_groupgemm._core.operations import OPERATIONS
from jax_groupgemm._grouped.activations import ACTIVATIONS
from jax_groupgemm._kernels import choose
from jax_groupgemm._quantized.format import FORMATS
from jax_groupgemm._quantized.layouts import LAYOUTS
from jax_groupgemm.checkpoints import formats

PUBLIC_MODULES = {"checkpoint_policies", "checkpoints", "cost", "router"}
FUNCTIONS = {
    **OPERATIONS,
    **{name: getattr(jgg.checkpoints, name) for name in dir(jgg.checkpoints)},
    **{name: getattr(jgg.router, name) for name in dir(jgg.router) if name[0].islower()},
    "replace_ragged_dot": jgg.replace_ragged_dot,
}


NAMES = {
    "activation", "format", "implementation", "layout", "mode", "scale_format", "scores",
    "transport",
}  # fmt: skip


def test_all_is_what_there_is():
    public = {name for name in vars(jgg) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jgg, name))}
    assert set(jgg.__all__) == public - (modules - PUBLIC_MODULES) | {"__version__"}
    assert set(OPERATIONS) <= set(jgg.__all__)


def test_what_dir_shows():
    assert set(dir(jgg.cost)) == {"Cost", "of", *OPERATIONS}
    functions = {"act_order", "experts", "linear", "open", "read_json"}
    assert set(dir(jgg.checkpoints)) == functions | {"Blocks", "Header", "Tensors"}
    assert set(dir(jgg.router)) == set(jgg.router.__all__)
    assert all(callable(getattr(jgg.cost, name)) for name in dir(jgg.cost))
    with pytest.raises(AttributeError, match="no attribute 'grouped_m'"):
        jgg.cost.grouped_m  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_type(name):
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
        if parameter.name in NAMES:  # a type checker knows which there are
            assert "Literal" in str(get_type_hints(FUNCTIONS[name])[parameter.name]), parameter
    assert inspect.signature(FUNCTIONS[name]).return_annotation is not inspect.Signature.empty


def test_literals_are_what_the_code_takes():
    assert set(get_args(types.Implementation)) == set(choose.IMPLEMENTATIONS)
    assert set(get_args(types.Activation)) == set(ACTIVATIONS)
    assert set(get_args(types.Mode)) == set(FORMATS)
    assert set(get_args(types.LayoutName)) == set(LAYOUTS)
    assert set(get_args(types.CheckpointFormat)) == set(formats.FORMATS)


MISTAKES = {
    'jgg.grouped_mm(x, x, [1], activation="swiglue")': "activation",
    'jgg.grouped_mm(x, x, [1], implementation="sm70")': "implementation",
    'jgg.quantize(x, mode="int4")': "mode",
    "jgg.grouped_qmm(x, x, [1])": "w",
    'jgg.moe_mlp(x, x, x, x, x, implementation="gpu")': "implementation",
    'jgg.moe_mlp(x, x, x, x, x, transport="gathered")': "transport",
    'jgg.NVFP4Recipe(high_precision=("forward",))': "high_precision",
    'jgg.Quantized(x, x, mode="int4", bits=4, group_size=64)': "mode",
    'jgg.checkpoints.linear({}, "up", format="ggml")': "format",
}
RIGHT = [
    'jgg.grouped_mm(x, x, np.array([1]), activation="swiglu", precision="tensorfloat32")',
    "jgg.grouped_mm(x, x, [1, 2], preferred_element_type=jnp.float32).shape",
    "jgg.grouped_qmm(x, jgg.prepack(jgg.quantize(x)), [1])[0]",
    "jgg.cost.grouped_mm(x, x, [1]).flops + 1",
    "jgg.quantize(x)[0].nbytes",
    'jgg.moe_mlp(x, x, x, x, x, implementation="composed")',
    'jgg.NVFP4Recipe(high_precision=("fprop", "wgrad")), jgg.NVFP4Recipe(high_precision="dgrad")',
]


@pytest.mark.weekly
def test_a_type_checker_finds_mistakes(tmp_path):
    """Those lines, and no others."""
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("needs pyright")
    head = ["import jax.numpy as jnp", "import numpy as np", "import jax_groupgemm as jgg"]
    lines = [*head, "x = jnp.ones((4, 4))", *MISTAKES, *RIGHT]
    (tmp_path / "use.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "pyrightconfig.json").write_text("{}")  # none of a folder above
    command = [pyright, "--pythonpath", sys.executable, "use.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    found = {int(line.split(":")[1]) for line in out.splitlines() if " error: " in line}
    assert found == {lines.index(line) + 1 for line in MISTAKES}, out
