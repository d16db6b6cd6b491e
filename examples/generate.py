"""Generate text with a mixture-of-experts model of Hugging Face, in JAX.

    python examples/generate.py                           # random weights, made here: it shows how
    python examples/generate.py CHECKPOINT --prompt "…"   # a folder that you downloaded
    python examples/generate.py model.gguf --prompt "…" --chat   # a file of llama.cpp
    python examples/generate.py CHECKPOINT --quantize nvfp4 --tokens 500 --temperature 0.7
    python examples/generate.py CHECKPOINT --devices 4    # experts and heads are divided
    python examples/generate.py CHECKPOINT --adapters runs/qlora/adapters   # of qlora_moe.py

Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss, DeepSeek-V3, GLM-4.5, MiniMax-M2, ERNIE-4.5 and
Granite run, and Llama, Qwen2 and Qwen3 without experts, with weights in bfloat16 or in any
quantized format that ``jgg.checkpoints`` reads; of GGUF files, all of them but DeepSeek-V3.
Experts run as ``jgg.moe_mlp`` takes them; ``decoder/`` is everything around them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path

import jax

from decoder import chat, config, loading, memory, peft, tiny, tokens
from decoder.errors import Refused, in_sentences, is_folder, is_gguf
from decoder.generation import Watch
from decoder.ready import ready
from decoder.sampling import Sampling
from decoder.weights import MODES
from options import Parser, count

PROMPT = "A mixture of experts is"


def fraction(value: str) -> float:
    if not 0 < float(value) <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not in (0, 1]")
    return float(value)


def not_negative(value: str) -> float:
    if not 0 <= float(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is negative, or no finite number")
    return float(value)


def whole(value: str) -> int:
    if not 0 <= int(value) < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 2^31)")
    return int(value)


def parse(argv=None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint", nargs="?", type=Path,
        help="folder of a model, or a GGUF file (default: random weights, made here)",
    )  # fmt: skip
    parser.option("--prompt", PROMPT, "text to go on from")
    parser.add_argument(
        "--chat", action="store_true",
        help="--prompt is a message, and the model's chat template puts it into its words",
    )  # fmt: skip
    parser.option("--tokens", 64, "tokens to generate, at most", type=count)
    parser.option(
        "--temperature", 0.0, "randomness; 0 takes the likeliest token", type=not_negative
    )
    parser.option("--top-k", 0, "number of the likeliest to sample from; 0: all", type=whole)
    parser.option("--top-p", 1.0, "probability of the likeliest to sample from", type=fraction)
    parser.option("--seed", 0, "seed of the samples", type=whole)
    parser.option("--chunk", 128, "tokens of the prompt that are read in one step", type=count)
    parser.option(
        "--devices", 1,
        "devices to divide experts and heads of attention among; other weights, and attention's "
        "where they are quantized, are whole on each", type=count,
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="dtype to compute in (default: float32 for checkpoints in float32 and, on a CPU, for "
        "quantized GGUF files, else bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", choices=MODES, help="format for experts that the checkpoint has unquantized"
    )
    parser.add_argument(
        "--adapters", type=Path, metavar="DIR",
        help="folder of PEFT's files: LoRA of experts or attention",
    )  # fmt: skip
    parser.add_argument(
        "--exact", action="store_true",
        help="keep affine scales as stored, where kernels would round them",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=not_negative, metavar="GB",
        help="memory of each device to plan for, in GB (default: what is free)",
    )  # fmt: skip
    parser.add_argument(
        "--unrolled", action="store_true",
        help="put layers into the program one after the other: slower to compile, and nothing is "
        "copied",
    )  # fmt: skip
    parser.add_argument(
        "--attention", choices=["xla", "cudnn"], default="xla",
        help="what computes attention (default: xla)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        parser.error("--top-k and --top-p are of samples: give a --temperature above 0, too")
    if not args.prompt:
        parser.error("--prompt is empty: there is nothing to go on from")
    return args


def main(argv=None) -> dict:
    args = parse(argv)
    folder = args.checkpoint
    if folder is None:
        folder = tiny.write(Path("runs/generate"))
        print(f"made {folder}, a model of random weights")
    if args.devices > 1:  # without GPUs, devices are made of this machine's cores
        with contextlib.suppress(RuntimeError):  # there are devices already
            jax.config.update("jax_num_cpu_devices", args.devices)
    with (
        in_sentences(folder, "--quantize, more --devices or fewer --tokens"),
        jax.numpy_dtype_promotion("standard"),
    ):
        return run(folder, args)


def dtype_for(about: config.Config) -> str:
    """The dtype to compute in without ``--dtype``. On a CPU products of codes and bfloat16 are
    slower, since each value is rounded. Nearly all weights of a GGUF file are codes, so float32
    costs little memory."""
    codes_on_cpu = about.quantization.get("gguf_has_codes") and jax.default_backend() == "cpu"
    return "float32" if about.dtype == "float32" or codes_on_cpu else "bfloat16"


def run(folder: Path, args: argparse.Namespace) -> dict:
    if not is_gguf(folder):
        is_folder(folder)
    about = dataclasses.replace(config.read(folder), attention=args.attention)
    if args.adapters is not None:
        peft.config_of(args.adapters)  # what is wrong with it is said before the model is loaded
        if args.devices > 1:
            raise Refused("--adapters are for one device")
    tokenizer = tokens.read(folder, about.vocabulary)
    text = chat.written(folder, args.prompt) if args.chat else args.prompt
    prompt = tokens.encode(tokenizer, text, tokens.begin(folder, tokenizer))
    tokens.check(tokenizer, prompt, about.vocabulary)
    if about.context is not None and len(prompt) + args.tokens > about.context:
        raise Refused(
            f"the {len(prompt)} tokens of --prompt and --tokens {args.tokens} are more than "
            f"config.json's max_position_embeddings, {about.context}"
        )
    dtype = args.dtype or dtype_for(about)
    if args.attention == "cudnn" and (jax.default_backend() != "gpu" or dtype != "bfloat16"):
        raise Refused("--attention cudnn needs an NVIDIA GPU and bfloat16")
    room = -(-(len(prompt) + args.tokens) // args.chunk) * args.chunk
    options = loading.Options(
        dtype, args.quantize, args.devices, room, args.memory, args.exact, args.unrolled,
        joined=args.adapters is None,
    )  # fmt: skip
    experts = f" of {about.router.experts} experts" if any(about.moe_layers) else ""
    print(
        f"{about.architecture}, {about.layers} layers{experts}, in {dtype} on "
        f"{jax.devices()[0].device_kind}"
    )
    if about.random:
        print("weights are random: the text means nothing")
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    weights = loading.weights_of(folder, about, options)
    generator, need = ready(about, weights, options, sampling, args.chunk, args.adapters)
    print(args.prompt, end="\n\n" if args.chat else "", flush=True)
    watch, text = Watch(generator.each), []
    generated = watch(generator(prompt, args.tokens, about.ends, args.seed))
    for part in tokens.streamed(tokenizer, generated):
        print(part, end="", flush=True)
        text.append(part)
    print(f"\n\n{watch.said(len(prompt))}")
    if (most := memory.most_held()) is not None:
        print(need.compared(most))
    return {
        "text": "".join(text), "tokens": watch.tokens, "first": watch.first, "rate": watch.rate,
    }  # fmt: skip


if __name__ == "__main__":
    main()
