#!/usr/bin/env python3
"""Writes the fixtures of quantized checkpoints: `pip install torch==2.15.0 transformers==5.24.0 numpy==2.4.6 safetensors==0.8.0`.

fp8_block, fp8_tensor      `quant_method` fp8, with scales of blocks and of whole weights
compressed_fp8             compressed-tensors' `float-quantized`, with a scale for each row
gptq, gptq_order           GPTQ in 4 bits: symmetric, as AutoGPTQ writes it, and with groups in an order of their own (`desc_act`), as gptq_v2
awq                        AWQ in 4 bits, in two files

Each is a small random Llama. Its linears are quantized and packed here, by the definitions of the formats, and dequantized in float32; logits are
those that transformers computes with these weights. Files are those of generate.py. Run in this folder. The output depends on nothing but the
seeds below and the versions above.
"""

import json
import os

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

TOKENS = 40
BLOCK = [32, 48]
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def fp8(weight, scale):
    """E4M3 by torch, and its value."""
    stored = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, stored.float() * scale


def fp8_block(weight, _):
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            scale[r, c] = weight[r * BLOCK[0] : (r + 1) * BLOCK[0], c * BLOCK[1] : (c + 1) * BLOCK[1]].abs().max() / 448
    wide = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    stored, value = fp8(weight, wide)
    return {"weight": stored, "weight_scale_inv": scale}, value


def fp8_tensor(weight, _):
    scale = (weight.abs().max() / 448).to(torch.float32)
    stored, value = fp8(weight, scale)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, value


def compressed_fp8(weight, _):
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    stored, value = fp8(weight, scale.float())
    return {"weight": stored, "weight_scale": scale}, value


def words(nibbles):
    """`[..., 8]` integers of 4 bits as words, the first in the lowest bits."""
    shifted = nibbles.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    return torch.from_numpy(np.bitwise_or.reduce(shifted, -1).view(np.int32).copy())


def four_bits(weight, group_of, zeros):
    """Integers `[n, k]`, scales in f16 and zero points `[groups, n]`, and the values."""
    w = weight.numpy()
    groups = group_of.max() + 1
    scales, zero = np.zeros((groups, w.shape[0]), np.float16), np.zeros((groups, w.shape[0]), np.uint8)
    for g in range(groups):
        part = w[:, group_of == g]
        if zeros is None:
            scales[g], zero[g] = np.abs(part).max(1) / 7, 8
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[g] = (high - low) / 15
            zero[g] = np.clip(np.round(-low / scales[g].astype(np.float32)), 0, zeros)
    s, z = scales.astype(np.float32)[group_of].T, zero[group_of].T.astype(np.float32)
    q = np.clip(np.round(w / s + z), 0, 15)
    return q.astype(np.uint8), scales, zero, torch.from_numpy((q - z) * s)


def gptq(weight, _):
    """Zero points are stored less one. AutoGPTQ writes a bias of zeros for linears without one."""
    n, k = weight.shape
    q, scales, zero, value = four_bits(weight, np.arange(k) // GROUP, None)
    stored = {
        "qweight": words(q.T.reshape(k // 8, 8, n).swapaxes(1, 2)),
        "qzeros": words((zero - 1).reshape(-1, n // 8, 8)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
        "bias": torch.zeros(n, dtype=torch.float16),
    }
    return stored, value


def gptq_order(weight, rng):
    n, k = weight.shape
    group_of = rng.permutation(np.arange(k) // GROUP)
    q, scales, zero, value = four_bits(weight, group_of, 15)
    stored = {
        "qweight": words(q.T.reshape(k // 8, 8, n).swapaxes(1, 2)),
        "qzeros": words(zero.reshape(-1, n // 8, 8)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return stored, value


def awq(weight, _):
    n, k = weight.shape
    q, scales, zero, value = four_bits(weight, np.arange(k) // GROUP, 15)
    stored = {
        "qweight": words(q.T.reshape(k, n // 8, 8)[..., AWQ_ORDER]),
        "qzeros": words(zero.reshape(-1, n // 8, 8)[..., AWQ_ORDER]),
        "scales": torch.from_numpy(scales),
    }
    return stored, value


def write(folder, tensors, files):
    """The tensors in so many files, a linear's in several."""
    if files == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        return
    index = {}
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        some = {name: tensors[name] for name in sorted(tensors)[part::files]}
        save_file(some, os.path.join(folder, file), {"format": "pt"})
        index.update({name: file for name in some})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {}, "weight_map": index}, out, indent=2)
        out.write("\n")


def record(name, quantize, quantization, seed, files=1):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True, attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    tensors = {}
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=generator)
            if key.endswith("norm.weight"):
                values = 1 + 0.3 * values
            elif not key.endswith("embed_tokens.weight"):
                values = (2 if "q_proj" in key or "k_proj" in key else 1) * values / tensor.shape[1] ** 0.5
            if "_proj" in key:
                stored, values = quantize(values, rng)
                base = key.removesuffix(".weight")
                tensors.update({f"{base}.{part}": value.contiguous() for part, value in stored.items()})
            else:
                tensors[key] = values
            tensor.copy_(values)
        tokens = [(37 * i + i // 5) % config.vocab_size for i in range(TOKENS)]
        logits = model(torch.tensor([tokens])).logits[0]
    os.makedirs(name, exist_ok=True)
    write(name, tensors, files)
    config = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    for key in ["_attn_implementation", "attn_implementation"]:
        config.pop(key, None)
    with open(os.path.join(name, "config.json"), "w") as out:
        json.dump(config, out, indent=2, sort_keys=True)
        out.write("\n")
    logits.numpy().astype("<f4").tofile(os.path.join(name, "logits.f32"))
    with open(os.path.join(name, "tokens.json"), "w") as out:
        json.dump(tokens, out)
        out.write("\n")


record("fp8_block", fp8_block, {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK,
    "modules_to_not_convert": ["lm_head"],
}, 21)
record("fp8_tensor", fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, 22)
record("compressed_fp8", compressed_fp8, {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
        "targets": ["Linear"],
    }},
    "ignore": ["lm_head"], "kv_cache_scheme": None,
}, 23)
record("gptq", gptq, {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "true_sequential": True,
    "damp_percent": 0.01,
}, 24)
record("gptq_order", gptq_order, {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2",
}, 25)
record("awq", awq, {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}, 26, files=2)
