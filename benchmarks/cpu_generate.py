"""Text from a GGUF file on a CPU: tokens per second of examples/generate.py beside llama.cpp.

python -m benchmarks.cpu_generate
python -m benchmarks.cpu_generate --file model.gguf --threads 2 --json FILE

Without ``--file`` it makes one: OLMoE-1B-7B's sizes with fewer layers, in the types of Q4_K_M,
random codes. Each arm is a process on ``--threads`` cores, and arms take turns. A run reads
``--prompt`` tokens and generates ``--tokens``; the median of ``--repetitions`` counts. llama.cpp is
that of ``xllamacpp`` (pip), or of ``JGG_LIBLLAMA``; a library made for this machine is faster than
one for any.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .records import commit

ROOT = Path(__file__).parents[1]
WIDTH, HEADS, EXPERTS, CHOSEN, HIDDEN, VOCABULARY = 2048, 16, 64, 8, 1024, 50_304  # OLMoE-1B-7B
LAYERS = 4  # of its 16
ARM_DTYPES = {"ours": None, "ours bfloat16": "bfloat16"}  # None: what the program chooses
ARMS = (*ARM_DTYPES, "llama.cpp")
BLOCKS = {"Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}  # number, elements, bytes


def blocks(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Random codes of weights around zero, whose spread is that of a layer of this width."""
    *lead, k = shape
    _, elements, nbytes = BLOCKS[kind]
    count = int(np.prod(lead)) * k // elements
    out = rng.integers(0, 256, (count, nbytes), np.uint8)
    spread = k**-0.5
    if kind == "Q4_K":  # d * sc * q - dmin * m, with equal sc and m, and dmin = 7.5 d
        d = spread / (48 * 4.6)
        out[:, :4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
        scales = rng.integers(32, 64, (count, 8), np.uint8)
        low, high = scales[:, :4], scales[:, 4:]
        both = low | (high >> 4) << 6
        out[:, 4:8] = out[:, 8:12] = both
        out[:, 12:16] = high & 15 | (high & 15) << 4
    else:  # d * sc * (q - 32)
        out[:, 192:208] = rng.integers(32, 64, (count, 16), np.uint8)
        out[:, 208:] = np.array([spread / (48 * 18.5)], np.float16).view(np.uint8)
    return out.reshape(*lead, -1)


def make(path: Path, layers: int) -> None:
    """A file of random weights, with OLMoE's metadata and a tokenizer of bytes."""
    gguf = importlib.import_module("gguf")
    pre_tokenizers = importlib.import_module("tokenizers.pre_tokenizers")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_name(f"OLMoE-1B-7B's sizes, {layers} layers, random")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]  # llama.cpp wants a merge
    tokens = letters + [f"<{i}>" for i in range(len(letters), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t h"])
    writer.add_add_bos_token(False)

    def add(name: str, kind: str, *shape: int) -> None:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", blocks(rng, kind, *shape), raw_dtype=number)

    def floats(name: str, *shape: int) -> None:
        values = rng.normal(1, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.02, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", "Q4_K", VOCABULARY, WIDTH)
    add("output", "Q6_K", VOCABULARY, WIDTH)
    floats("output_norm", WIDTH)
    for i in range(layers):
        of = f"blk.{i}."
        more = "Q6_K" if i % 2 else "Q4_K"  # as Q4_K_M has it, of half of the layers
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            floats(of + norm, WIDTH)
        for name in ("attn_q", "attn_k", "attn_output"):
            add(of + name, "Q4_K", WIDTH, WIDTH)
        add(of + "attn_v", more, WIDTH, WIDTH)
        floats(of + "ffn_gate_inp", EXPERTS, WIDTH)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            add(of + name, "Q4_K", EXPERTS, HIDDEN, WIDTH)
        add(of + "ffn_down_exps", more, EXPERTS, WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The arms, each in a process of its own.


def ours(args: argparse.Namespace, dtype: str | None) -> dict[str, float]:
    sys.path.insert(0, str(ROOT / "examples"))
    generate = importlib.import_module("generate")
    prompt = "".join(chr(97 + i % 26) for i in range(args.prompt))
    options = ["--prompt", prompt, "--tokens", str(args.tokens)]
    options += ["--dtype", dtype] if dtype else []
    results = generate.main([str(args.file), *options])
    return {"prompt": args.prompt / results["first"], "decode": results["rate"]}


def llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    from . import llama_cpp

    library = llama_cpp.Library()
    model = llama_cpp.Model(library, args.file, args.prompt + args.tokens + 64, args.threads)
    model.read([0])  # what is slow once
    model.clear()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, args.prompt).tolist()
    began = time.perf_counter()
    stream = model.generate(prompt, args.tokens)
    next(stream)
    first = time.perf_counter() - began
    rest = sum(1 for _ in stream)
    seconds = time.perf_counter() - began - first
    out = {"prompt": args.prompt / first, "decode": rest / seconds, "uses": library.system()}
    model.close()
    return out


def one(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """An arm's rates, and the most memory of its process."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[: args.threads]
        os.sched_setaffinity(0, cores)
    out = llama_cpp(args) if arm == "llama.cpp" else ours(args, ARM_DTYPES[arm])
    return out | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def in_a_process(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.cpu_generate", "--arm", arm, "--file", str(args.file),
        "--threads", str(args.threads), "--prompt", str(args.prompt), "--tokens",
        str(args.tokens),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="a GGUF file (default: one that is made here)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the file that is made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="also write the record here")
    args = parser.parse_args(argv)
    if args.arm:
        print(json.dumps(one(args.arm, args)))
        return []
    if args.file is None:
        args.file = ROOT / "runs" / f"olmoe-{args.layers}-layers.gguf"
        if not args.file.exists():
            args.file.parent.mkdir(exist_ok=True)
            part = args.file.with_suffix(".part")
            make(part, args.layers)
            part.rename(args.file)
    runs: dict[str, list[dict]] = {arm: [] for arm in args.arms}
    for _ in range(args.repetitions):
        for arm in args.arms:
            runs[arm].append(in_a_process(arm, args))
    size = args.file.stat().st_size
    print(f"{args.file.name}, {size / 1e9:.2f} GB, {args.threads} threads")
    print(f"tokens/s: prompt of {args.prompt} and {args.tokens} generated; GB at most")
    rows = []
    for arm, found in runs.items():
        middle = {
            key: statistics.median(run[key] for run in found)
            for key in ("prompt", "decode", "peak_bytes")
        }
        rows.append({"arm": arm, **middle, "uses": found[0].get("uses")})
        print(
            f"{arm:14} {middle['prompt']:8.1f} {middle['decode']:8.2f} "
            f"{middle['peak_bytes'] / 1e9:6.2f}"
        )
    if args.json:
        record = {
            "date": datetime.now(UTC).date().isoformat(), "commit": commit(),
            "jax": importlib.metadata.version("jax"), "file": args.file.name, "bytes": size,
            "threads": args.threads, "prompt": args.prompt, "tokens": args.tokens, "records": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
