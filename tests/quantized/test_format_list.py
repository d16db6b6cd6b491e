"""The list of formats in ffi/quantized/formats.h is that of Python, and CMake reads all of it."""

import ctypes
import re

import host_program
import jax
import jax.numpy as jnp
import pytest

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler


def listed():
    program = host_program.build("formats")
    program.formats.restype = ctypes.c_char_p
    for line in program.formats().decode().splitlines():
        name, *numbers = line.split()
        number, bits, biases, global_scale, linear, *sizes = map(int, numbers)
        yield name, number, bits, (bool(biases), bool(global_scale), bool(linear)), sizes


def quantized(mode, bits, group_size, **more):
    w = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    how = {"mode": mode, "bits": bits, "group_size": group_size} | more
    return jax.eval_shape(lambda w: jgg.quantize(w, **how), w)


def test_modes_have_their_numbers():
    assert {name: number for name, number, *_ in listed()} == {
        mode: number for number, mode in enumerate(host_program.MODES)
    }


def test_python_quantizes_what_is_listed():
    formats = {(name, bits, size) for name, _, bits, _, sizes in listed() for size in sizes}
    for mode in host_program.MODES:
        if mode == "fp8":  # in blocks
            assert {of for of in formats if of[0] == mode} == {(mode, 8, 128)}
            continue
        for bits in range(1, 10):
            for size in (8, 16, 32, 64, 128, 256):
                if (mode, bits, size) in formats:
                    q = quantized(mode, bits, size)
                    assert (q.mode, q.bits, q.group_size) == (mode, bits, size)
                else:
                    with pytest.raises(ValueError, match="expected"):
                        quantized(mode, bits, size)


def test_biases_and_global_scales():
    one = jnp.float32(1)
    for mode, _, bits, (biases, global_scale, linear), sizes in listed():
        if linear:
            assert (quantized(mode, bits, sizes[0]).biases is not None) == biases
            if global_scale:
                assert quantized(mode, bits, sizes[0], global_scale=one).global_scale is not None
            else:
                with pytest.raises(ValueError, match="global_scale"):
                    quantized(mode, bits, sizes[0], global_scale=one)


def test_cmake_reads_every_format():
    """By the patterns that CMakeLists.txt has, of lines and of what is in them."""
    header = (host_program.ROOT / "ffi/quantized/formats.h").read_text()
    cmake = (host_program.ROOT / "CMakeLists.txt").read_text()
    line = re.search(r'JGG_WEIGHTS REGEX "(.*)"\)', cmake)[1]
    inside = re.search(r'REGEX MATCH "(Mode::.*)" found', cmake)[1]
    found = [re.search(inside, text) for text in header.splitlines() if re.match(line, text)]
    want = [(name, str(bits)) for name, _, bits, _, _ in listed()]
    assert [(match[1][1:].lower(), match[2]) for match in found] == want
