"""Make tests/decoder/fixtures_gguf: tiny GGUF files, and the logits that transformers computes.

    JGG_LIBLLAMA=libllama.so python tools/make_gguf_fixtures.py

It needs torch, transformers, gguf and llama.cpp's library; the tests need none of them. Each model
is one of transformers with random weights, written as convert_hf_to_gguf.py writes it and quantized
by the package gguf, or by llama.cpp. ``*.npz`` has a prompt and the float32 logits of its tokens,
computed with the values of the file's codes. What transformers makes of the file itself is compared
with that, where it reads the architecture (5.24: llama, qwen2, qwen3, qwen2moe, qwen3moe).

``tokens.json`` has two vocabularies, texts, and the tokens that llama.cpp makes of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tools"), str(ROOT / "examples")]

from make_decoder_fixtures import fill  # noqa: E402

from benchmarks import llama_cpp  # noqa: E402
from decoder.gguf_tokens import SPLITS  # noqa: E402

FIXTURES = ROOT / "tests" / "decoder" / "fixtures_gguf"
PROMPT = 13
COMMON = {
    "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "rms_norm_eps": 1e-5,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
#: Class of transformers, architecture, type of tensors, and what the config has besides.
MODELS = {
    "llama": ("Llama", "llama", "Q8_0", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama3": ("Llama", "llama", "Q4_0", {
        "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3,
    }),
    "qwen2": ("Qwen2", "qwen2", "F16", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", "Q5_1", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2moe": ("Qwen2Moe", "qwen2moe", "Q4_1", MOE | {
        "shared_expert_intermediate_size": 64, "norm_topk_prob": False,
    }),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", "Q4_K_M", MOE | {
        "hidden_size": 256, "num_hidden_layers": 1, "moe_intermediate_size": 256, "head_dim": 32,
        "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
    }),
}  # fmt: skip
#: What transformers does not read of a file's metadata, but takes as its models have it.
UNREAD = {
    "qwen3": ("head_dim",), "qwen3moe": ("moe_intermediate_size",),
    "qwen2moe": ("moe_intermediate_size", "shared_expert_intermediate_size"),
}  # fmt: skip
LEFT_OUT = ("llama3",)  # transformers does not read its tensor rope_freqs.weight
MOST = 1e-5  # of the largest logit, between what transformers reads and what it is made of


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tensors_of(model, arch: str) -> dict[str, tuple[str, np.ndarray]]:
    """By names of the file: names of the model, with which part of it, and values."""
    config = model.config
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[arch.upper().replace("-", "_")], config.num_hidden_layers
    )
    out = {}
    for name, w in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w, base, leaf = w.float().numpy(), *name.rpartition(".")[::2]
        if base.endswith("experts"):  # (E, 2F, D) and (E, D, F)
            halves = np.split(w, 2, axis=1) if leaf == "gate_up_proj" else [w]
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for part, value in zip(parts, halves, strict=True):
                out[f"{names.get_name(f'{base}.{part}')}.weight"] = f"{name}/{part}", value
            continue
        if arch == "llama" and base.endswith(("q_proj", "k_proj")):
            is_query = base.endswith("q_proj")
            w = permuted(w, config.num_attention_heads if is_query else config.num_key_value_heads)
        if base.endswith("shared_expert_gate"):
            w = w[0]
        out[f"{names.get_name(base)}.{leaf}"] = name, w
    return out


def about(writer: gguf.GGUFWriter, config, arch: str) -> None:
    writer.add_name("a tiny model of random weights")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = getattr(config, "head_dim", None)
    if head and arch != "qwen2":
        writer.add_key_length(head)
        writer.add_value_length(head)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]  # llama.cpp wants a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if arch.startswith("qwen") else "llama-bpe")
    writer.add_token_list(letters)
    writer.add_token_types([1] * len(letters))
    writer.add_token_merges(["t h"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


def factors(config) -> np.ndarray:
    """The tensor rope_freqs.weight as convert_hf_to_gguf.py writes it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = config.head_dim
    base = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
    return (base / scaled.double()).float().numpy()


def write(path: Path, model, arch: str, kind: str) -> None:
    writer = gguf.GGUFWriter(path, arch)
    about(writer, model.config, arch)
    if model.config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", factors(model.config))
    for name, (_, w) in tensors_of(model, arch).items():
        number = gguf.GGMLQuantizationType[kind]
        if w.ndim < 2 or "ffn_gate_inp" in name or kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(w))
        else:
            writer.add_tensor(name, gguf.quants.quantize(w, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put_values(model, path: Path, arch: str) -> None:
    """The values of a file's codes, instead of the model's weights."""
    source, config = tensors_of(model, arch), model.config
    state = {name: torch.zeros_like(w) for name, w in model.state_dict().items()}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name, was = source[tensor.name]
        value = torch.from_numpy(np.array(value, np.float32)).reshape(was.shape)
        name, _, part = name.partition("/")
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            value = value.reshape(heads, -1, 2, was.shape[1]).swapaxes(1, 2).reshape(was.shape)
        if part in ("gate_proj", "up_proj"):
            rows = value.shape[1]
            begin = 0 if part == "gate_proj" else rows
            state[name][:, begin : begin + rows] = value
        else:
            state[name] = value.reshape(state[name].shape)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)


def models(library: llama_cpp.Library, chosen: list[str]) -> None:
    for name in chosen:
        kind, arch, type_, own = MODELS[name]
        config = getattr(transformers, f"{kind}Config")(**(COMMON | own))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
        fill(model)
        path = FIXTURES / f"{name}-{type_}.gguf"
        if type_ == "Q4_K_M":
            with tempfile.TemporaryDirectory() as folder:
                plain = Path(folder) / "plain.gguf"
                write(plain, model, arch, "F32")
                library.quantize(plain, path, type_)
        else:
            write(path, model, arch, type_)
        put_values(model, path, arch)
        prompt = torch.randint(257, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        want = model(prompt).logits[0].numpy()
        np.savez_compressed(path.with_suffix(".npz"), prompt=prompt[0].numpy().astype(np.int32),
                            logits=want)  # fmt: skip
        said = f"{path.name}: {path.stat().st_size / 1e3:.0f} kB"
        scale = np.abs(want).max()
        if name not in LEFT_OUT:
            of_file = {"gguf_file": path.name}
            theirs = transformers.AutoConfig.from_pretrained(FIXTURES, **of_file)
            for key in UNREAD.get(name, ()):
                setattr(theirs, key, getattr(config, key))
            load = transformers.AutoModelForCausalLM.from_pretrained
            read = load(FIXTURES, **of_file, config=theirs, dtype=torch.float32,
                        attn_implementation="eager").eval()  # fmt: skip
            theirs = np.abs(read(prompt).logits[0].numpy() - want).max() / scale
            said += f", transformers' own reading differs by {theirs:.1e}"
            assert theirs < MOST, (name, theirs)
        llama = llama_cpp.Model(library, path, 64, 1)
        differs = np.abs(llama.each(prompt[0].tolist()) - want).max() / scale
        llama.close()
        print(f"{said}, llama.cpp's by {differs:.1e}")


TEXTS = [
    "", " ", "a", "Hello world", "A mixture of experts is",
    "It's what they've said: I'll go, won't I?", "IT'S WHAT THEY'VE SAID", "don't  stop",
    "one  two   three    four", "  leading", "trailing  ", "tabs\tand\nlines\r\n\n\nmore\n", " \n ",
    "1 12 123 1234 12345 1234567890", "3.14159, 2^31", "x1y22z333", "½ ² ٣٤٥ Ⅷ",
    "Grüße aus Köln", "naïve café", "Привет, мир!", "γειά σου Κόσμε", "你好，世界。",
    "こんにちは世界", "안녕하세요", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดี",
    "🙂🙃 👩\u200d👩\u200d👧 ✨", "if (a == b && c != d) { return x[i++] -> y; }",
    "def f(x):\n    return x ** 2\n", "https://example.org/a?b=c&d=e#f", "a/b\\c\n/\n",
    "!!!???...", "======", "aaaaaaa", "ababab abab", "        eight", "<|end|>",
    "text<|end|>more <|end|> more", "<tool>x</tool>", "< |end|>", "\u00a0x\u2003y",
    "CamelCaseWords HTTPServer iPhone", "ǅ ﬁ ß ẞ", "\u200bzero\u200bwidth", "\x01\x7f",
]  # fmt: skip
BYTES = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{i:02X}>": 6 for i in range(256)}
ADDED = {"<|end|>": 3, "<tool>": 4}
LEARNED = [text for text in TEXTS if not any(token in text for token in ADDED)]


def byte_pairs() -> dict:
    """Tokens, merges and types of a vocabulary of kind gpt2, learned from the texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        LEARNED * 2,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, show_progress=False),
    )
    said = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(said["vocab"], key=said["vocab"].get), *ADDED]
    types = [1] * (len(tokens) - len(ADDED)) + [*ADDED.values()]
    return {"tokens": tokens, "types": types, "merges": [" ".join(pair) for pair in said["merges"]]}


def pieces() -> dict:
    """The same of kind llama, with scores."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator([text for text in LEARNED if text.isascii()] * 2, trainer)
    said = json.loads(tokenizer.to_str())["model"]["vocab"]
    learned = [token for token in sorted(said, key=said.get) if token not in BYTES]
    tokens = [*BYTES, *learned, *ADDED]
    types = [*BYTES.values(), *[1] * len(learned), *ADDED.values()]
    scores = [0.0] * len(BYTES) + [float(-i) for i in range(len(learned))] + [0.0] * len(ADDED)
    scores = [s + len(learned) * (len(t) == 1) * -1.0 for s, t in zip(scores, tokens, strict=True)]
    return {"tokens": tokens, "types": types, "scores": scores}


def with_tokens(path: Path, kind: str, pre: str, said: dict) -> None:
    """The smallest model that llama.cpp loads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(said["tokens"])
    writer.add_token_types(said["types"])
    if kind == "llama":
        writer.add_token_scores(said["scores"])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(said["merges"])
    shapes = {"token_embd": (len(said["tokens"]), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in names}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens(library: llama_cpp.Library) -> None:
    out: dict = {"texts": TEXTS, "gpt2": byte_pairs(), "llama": pieces(), "ids": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for pre in [*SPLITS, "llama"]:
            kind = "llama" if pre == "llama" else "gpt2"
            with_tokens(path, kind, pre, out[kind])
            model = llama_cpp.Model(library, path, 64, 1)
            out["ids"][pre] = [model.tokenize(text, begin=False) for text in TEXTS]
            model.close()
    path = FIXTURES / "tokens.json"
    path.write_text(json.dumps(out, ensure_ascii=True) + "\n")
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def main(chosen: list[str]) -> None:
    torch.set_grad_enabled(False)
    FIXTURES.mkdir(exist_ok=True)
    library = llama_cpp.Library()
    models(library, [name for name in chosen or MODELS if name in MODELS])
    if not chosen or "tokens" in chosen:
        tokens(library)


if __name__ == "__main__":
    main(sys.argv[1:])
