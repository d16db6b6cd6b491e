"""Quantize the experts of the model that train_moe.py trained, and see what each format costs.

    python examples/train_moe.py        # first: makes the checkpoint
    python examples/quantized_moe.py    # a table of every mode, and what each writes
    python examples/quantized_moe.py --modes nvfp4 affine4 --dtype bfloat16

A ``jgg.Quantized`` is a pytree, so it takes the place of an expert's weight in the model's
parameters, and ``jgg.moe_mlp`` takes it there: nothing of the model changes. Weights are never
dequantized as a whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_groupgemm as jgg
import run_folder
import texts
import train_moe
from options import Parser

EXPERT_WEIGHTS = ("w_up", "w_down")
# Affine scales and biases have the weights' dtype, and are one each for 64 of them.
MODES = {
    "affine2": {"mode": "affine", "bits": 2},
    "affine3": {"mode": "affine", "bits": 3},
    "affine4": {"mode": "affine", "bits": 4},
    "affine5": {"mode": "affine", "bits": 5},
    "affine6": {"mode": "affine", "bits": 6},
    "affine8": {"mode": "affine", "bits": 8},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}
NVFP4_RANGE = 2688.0  # 6 * 448: the largest code times the largest scale
REPEATS = 3


def layer(x, w_up, w_down, expert, weight, key=None):
    """``jgg.moe_mlp`` for arrays, and for quantized w_up (E, 2F, D) and w_down (E, D, F)."""
    return jgg.moe_mlp(x, w_up, w_down, expert, weight)


def quantize(w, mode: str) -> jgg.Quantized:
    """(E, K, N) weights as (E, N, K), the layout of moe_mlp, in blocks along K."""
    global_scale = None
    if mode == "nvfp4":  # one for each expert, so that its scales use the whole range of e4m3
        global_scale = jnp.abs(w).max(axis=(1, 2)).astype(jnp.float32) / NVFP4_RANGE
    q = jgg.quantize(w, **MODES[mode], global_scale=global_scale, contract=-2)
    # Products in float32 read weights as they are stored.
    return jgg.prepack(q) if w.dtype == jnp.bfloat16 else q


def map_experts(change, params):
    """The parameters with ``change(path, w)`` in place of every expert weight w."""

    def new(path, param):
        if path[-1] not in EXPERT_WEIGHTS:
            return param
        return param.replace(change(".".join(map(str, path)), param.get_value()))

    return nnx.map_state(new, params)


def expert_bytes(params) -> int:
    experts = [p for path, p in nnx.to_flat_state(params) if path[-1] in EXPERT_WEIGHTS]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(experts))


def timed(function, *args):
    """The result, and the median of the seconds it takes once compiled."""
    compiled = function.lower(*args).compile()
    result, seconds = jax.block_until_ready(compiled(*args)), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - began)
    return result, statistics.median(seconds)


def measure(config: train_moe.Config, params, training, held_out) -> dict:
    trainer = train_moe.Trainer(config, layer)
    bits, reading = timed(trainer.bits_per_byte, params, held_out)
    prompt = training[-config.context :]
    # One program decodes all bytes, in a lax.scan; without a cache, each rereads its context.
    sample, writing = timed(trainer.sample, params, prompt, jax.random.key(config.seed))
    return {
        "held_out": float(bits),
        "expert_bytes": expert_bytes(params),
        "tokens_per_second": held_out.size / reading,
        "sampled_per_second": sample.size / writing,
        "sample": texts.as_text(sample),
    }


def trained(run: Path) -> tuple[train_moe.Config, Any, int]:
    """Configuration and parameters of the latest checkpoint, and its text's CRC-32."""
    checkpoints = run_folder.finished(run)
    about = checkpoints.about()["run"]
    text_crc32 = about.pop("text_crc32")
    config = train_moe.Config(**about)
    state = checkpoints.state(jax.eval_shape(train_moe.Trainer(config).new_state))
    return config, state["params"], text_crc32


def load(run: Path, text_name: str, dtype: str | None):
    """The trained model, and the text that it was trained on with the part held out."""
    config, params, text_crc32 = trained(run)
    text = texts.read(text_name, config.context)
    if zlib.crc32(text.tobytes()) != text_crc32:
        raise SystemExit(f"--text: {run} was not trained on {text_name}")
    config = dataclasses.replace(config, precision=dtype or config.dtype)
    params = map_experts(lambda _, w: w.astype(config.dtype), params)
    return config, params, *map(jnp.asarray, texts.split(text))


def main(argv=None) -> dict:
    parser = Parser(__doc__)
    parser.option("--run", Path("runs/train_moe"), "trained model", type=Path)
    parser.add_argument("--text", default=texts.DEFAULT, help="the file it was trained on, if any")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="default: all")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="to compute in (default: the model's)"
    )
    args = parser.parse_args(argv)
    with jax.numpy_dtype_promotion("standard"):  # flax does not run under "strict"
        return compare(args)


def compare(args: argparse.Namespace) -> dict:
    config, params, training, held_out = load(args.run, args.text, args.dtype)
    print(
        f"computed in {config.dtype}, but for bfloat16, on {jax.devices()[0].device_kind}, "
        f"{held_out.size:,} bytes held out\n"
    )
    print(f"{'mode':9} {'bits/byte':>9} {'expert kB':>10} {'tokens/s':>10} {'sampled/s':>10}")
    results = {}
    for mode in dict.fromkeys((config.dtype, "bfloat16", *args.modes)):
        if mode in MODES:
            computed = config
            weights = map_experts(lambda _, w, mode=mode: quantize(w, mode), params)
        else:
            computed = dataclasses.replace(config, precision=mode)
            weights = map_experts(lambda _, w, mode=mode: w.astype(mode), params)
        results[mode] = r = measure(computed, weights, training, held_out)
        print(
            f"{mode:9} {r['held_out']:9.3f} {r['expert_bytes'] / 1e3:10,.0f} "
            f"{r['tokens_per_second']:10,.0f} {r['sampled_per_second']:10,.0f}"
        )
    path = args.run / "quantized.json"
    path.write_text(json.dumps(results, indent=1))
    for mode, r in results.items():
        print(f"\n---- {mode} writes:\n{r['sample'][:200]}")
    print(f"\nall of it is in {path}")
    return results


if __name__ == "__main__":
    main()
