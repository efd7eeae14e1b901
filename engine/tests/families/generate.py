#!/usr/bin/env python3
"""Writes the fixtures of the model families with the reference implementation:
`pip install torch==2.15.0 transformers==5.24.0 gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0`.

FAMILY/            a small random checkpoint in float32, as transformers saves it
FAMILY/tokens.json the prompt
FAMILY/logits.f32  transformers' logits of every position, float32, little endian, [tokens, vocab]
FAMILY.gguf        the same tensors as llama.cpp's converter stores them: of some it reorders the rows of queries and keys, it adds 1 to
                   the gains of Gemma and Qwen3.5, and of Qwen3.5 it reorders value heads and stores the factor of the decay; the divisors
                   of LongRoPE and of Llama 3 are tensors

Run in this folder. The output depends on nothing but the seeds below and the versions above.
"""

import json
import math
import os

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOKENS = 40
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)


def randomize(model, seed):
    """Every tensor gets values that matter: gains around 1, biases around 0, matrices that keep activations at their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        for name, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Some families add 1 to stored gains, Qwen3.5 not to those of its gated delta rules.
                centred = type(model).__name__.startswith(("Gemma", "Qwen3_5")) and "linear_attn" not in name
                values = (0 if centred else 1) + 0.3 * values
            elif name.endswith(".A_log"):
                # Of some heads a state stays for long, of others it does not.
                values = -1.5 + values
            elif name.endswith(".dt_bias"):
                values = 0.5 * values
            elif name.endswith("conv1d.weight"):
                values = values / tensor.shape[2] ** 0.5
            elif name.endswith(("_proj_bias", ".bias")):
                values = 0.5 * values
            elif name.endswith(".sinks"):
                values = 2 * values
            elif name.endswith("embed_tokens.weight") or ".visual." in name:
                pass
            else:
                # Queries and keys twice as large, so that attention prefers some tokens to others.
                gain = 2 if any(part in name for part in ["q_proj", "k_proj", "qkv_proj", "q_b_proj"]) else 1
                values = gain * values / tensor.shape[1] ** 0.5
            tensor.copy_(values)


def record(folder, model, seed):
    randomize(model, seed)
    return save(folder, model)


def save(folder, model):
    model = model.float().eval()
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "generation_config.json"))
    tokens = [(37 * i + i // 5) % COMMON["vocab_size"] for i in range(TOKENS)]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    logits.numpy().astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    with open(os.path.join(folder, "tokens.json"), "w") as out:
        json.dump(tokens, out)
        out.write("\n")
    return model


def of_gpt_oss(tensors):
    """Its experts as converters write them: rows of the parts apart, and matrices `[experts, out, in]`."""
    split = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            split[f"{name}.weight" if name.endswith(".sinks") else name] = tensor
            continue
        layer, matrix = name.split(".experts.")
        suffix = "bias" if matrix.endswith("_bias") else "weight"
        tensor = tensor if suffix == "bias" else tensor.transpose(1, 2)
        if matrix.startswith("gate_up"):
            split[f"{layer}.experts.gate_proj.{suffix}"] = tensor[:, ::2]
            split[f"{layer}.experts.up_proj.{suffix}"] = tensor[:, 1::2]
        else:
            split[f"{layer}.experts.down_proj.{suffix}"] = tensor
    return split


def stacked(folder, model):
    """Tensors by name; those of experts one behind another, as converters write them, from the names in the file."""
    if folder == "gpt_oss":
        return of_gpt_oss(model.state_dict())
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".experts." not in name}
    experts = {}
    for name, tensor in safetensors.torch.load_file(os.path.join(folder, "model.safetensors")).items():
        if ".experts." in name:
            layer, rest = name.split(".experts.")
            expert, matrix = rest.split(".", 1)
            experts.setdefault(f"{layer}.experts.{matrix}", {})[int(expert)] = tensor
    for name, by_expert in experts.items():
        tensors[name] = torch.stack([by_expert[i] for i in range(len(by_expert))])
    return tensors


def in_turns(data, axis, key_heads, value_heads, of_head):
    """Value heads behind one another (of each key head all) as llama.cpp broadcasts keys: of each key head the first, then of each the second."""
    before = data.shape[axis] - value_heads * of_head
    stays, heads = np.split(data, [before], axis=axis)
    shape = heads.shape
    heads = heads.reshape(shape[:axis] + (key_heads, value_heads // key_heads, of_head) + shape[axis + 1 :])
    return np.concatenate([stays, heads.swapaxes(axis, axis + 1).reshape(shape)], axis=axis)


def of_delta(name, data, config):
    """Name and values of a tensor of a gated delta rule as converters write them."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("A_log"):
        data = -np.exp(data)
    if name.endswith("conv1d.weight"):
        data = data.squeeze(1)
    if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")):
        data = in_turns(data, 0, *heads, config.linear_value_head_dim)
    elif name.endswith("out_proj.weight"):
        data = in_turns(data, 1, *heads, config.linear_value_head_dim)
    elif not name.endswith("norm.weight"):
        data = in_turns(data, 0, *heads, 1)
    return name.replace("dt_bias", "dt_proj.bias"), data


def write_gguf(name, model, arch=None):
    arch = arch or name
    config = model.config
    writer = gguf.GGUFWriter(f"{name}.gguf", arch)
    # One more layer, which predicts tokens after the next.
    extra_layers = 1 if arch == "qwen35" else 0
    writer.add_block_count(config.num_hidden_layers + extra_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for add, key in [
        (writer.add_attention_scale, "attention_multiplier"),
        (writer.add_embedding_scale, "embedding_multiplier"),
        (writer.add_residual_scale, "residual_multiplier"),
        (writer.add_logit_scale, "logits_scaling"),
        (writer.add_attn_logit_softcapping, "attn_logit_softcapping"),
        (writer.add_final_logit_softcapping, "final_logit_softcapping"),
        (writer.add_sliding_window, "sliding_window"),
    ]:
        # Converters write the window of these architectures alone, of Phi-3 also where there is none.
        if key == "sliding_window" and arch == "phi3":
            add(config.sliding_window or 0)
        elif getattr(config, key, None) is not None and (key != "sliding_window" or arch.startswith(("gemma", "gpt"))):
            add(getattr(config, key))
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope.get("rope_type") == "longrope":
        factor = config.max_position_embeddings / rope["original_max_position_embeddings"]
        amplitude = math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(amplitude)
        for length in ["long", "short"]:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if rope.get("rope_type") == "llama3":
        trained = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        scaled = model.model.rotary_emb.inv_freq.double()
        writer.add_tensor("rope_freqs.weight", (trained / scaled).numpy().astype(np.float32))
    if arch in ["gpt-oss", "qwen3moe"] or name == "mixtral":
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if arch == "qwen35":
        writer.add_nextn_predict_layers(extra_layers)
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_dimension_sections(rope["mrope_section"] + [0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        for tensor_name in ["attn_norm", "nextn.enorm"]:
            writer.add_tensor(f"blk.{config.num_hidden_layers}.{tensor_name}.weight", np.ones(config.hidden_size, np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper().replace("-", "_")], config.num_hidden_layers)
    for tensor_name, tensor in stacked(name, model).items():
        if tensor_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if "linear_attn" in tensor_name:
            tensor_name, data = of_delta(tensor_name, data, config)
        elif arch.startswith(("gemma", "qwen35")) and tensor_name.endswith("norm.weight"):
            data = data + 1
        stored = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if arch in ["granite", "llama"] and ("q_proj" in tensor_name or "k_proj" in tensor_name):
            heads = config.num_attention_heads if "q_proj" in tensor_name else config.num_key_value_heads
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, data.shape[1])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(stored, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mistral():
    config = transformers.MistralConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=2, sliding_window=7, tie_word_embeddings=False
    )
    record("mistral", transformers.MistralForCausalLM(config), 1)


def qwen2():
    """The first layer attends to every token, the others to 7."""
    config = transformers.Qwen2Config(
        **COMMON,
        intermediate_size=40,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    write_gguf("qwen2", record("qwen2", transformers.Qwen2ForCausalLM(config), 2))


def qwen3():
    """Heads of 16, though hidden_size / num_attention_heads is 8."""
    config = transformers.Qwen3Config(
        **COMMON,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    write_gguf("qwen3", record("qwen3", transformers.Qwen3ForCausalLM(config), 3))


def qwen3_5_config(**more):
    """Twice three layers with a gated delta rule and one that attends, with heads of 12 of which 6 elements are rotated."""
    return transformers.Qwen3_5TextConfig(
        **(COMMON | dict(num_hidden_layers=8) | more),
        intermediate_size=20,
        head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
        pad_token_id=0,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 1],
        },
    )


def qwen3_5():
    write_gguf("qwen3_5", record("qwen3_5", transformers.Qwen3_5ForCausalLM(qwen3_5_config()), 19), arch="qwen35")


def qwen3_5_images():
    """As published: with a model of images, whose tensors are not read, around one of text, and with tensors that predict tokens after the next."""
    text = qwen3_5_config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    vision = dict(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=4, patch_size=2
    )
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    folder = "qwen3_5_images"
    record(folder, transformers.Qwen3_5ForConditionalGeneration(config), 20)
    path = os.path.join(folder, "model.safetensors")
    tensors = safetensors.torch.load_file(path)
    tensors["mtp.norm.weight"] = torch.zeros(COMMON["hidden_size"])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def smollm3():
    """Every second layer without rotary embedding, the others scaled by YaRN."""
    config = transformers.SmolLM3Config(
        **COMMON,
        intermediate_size=40,
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    record("smollm3", transformers.SmolLM3ForCausalLM(config), 4)


def phi3():
    config = transformers.Phi3Config(
        **COMMON, intermediate_size=48, num_hidden_layers=2, sliding_window=9, pad_token_id=0, tie_word_embeddings=False
    )
    write_gguf("phi3", record("phi3", transformers.Phi3ForCausalLM(config), 5))


def mixtral():
    config = transformers.MixtralConfig(
        **COMMON,
        intermediate_size=24,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    write_gguf("mixtral", record("mixtral", transformers.MixtralForCausalLM(config), 11), arch="llama")


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    write_gguf("qwen3_moe", record("qwen3_moe", transformers.Qwen3MoeForCausalLM(config), 12), arch="qwen3moe")


def gpt_oss_config():
    """A limit that gates reach."""
    return transformers.GptOssConfig(
        **COMMON,
        intermediate_size=32,
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=2.0,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 15e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )


def gpt_oss():
    write_gguf("gpt_oss", record("gpt_oss", transformers.GptOssForCausalLM(gpt_oss_config()), 13), arch="gpt-oss")


def gpt_oss_mxfp4():
    """Experts of 4 bits, the rest in bf16, as published. The logits are those of the values that transformers makes of them."""
    folder, config = "gpt_oss_mxfp4", gpt_oss_config()
    model = transformers.GptOssForCausalLM(config)
    randomize(model, 14)
    generator = torch.Generator().manual_seed(15)
    packed = {}
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
        for name, tensor in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = tensor.shape
                blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
                scales = torch.randint(122, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
                tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(folder, model)
    path = os.path.join(folder, "model.safetensors")
    plain = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(path).items()}
    kept = {name: tensor for name, tensor in plain.items() if f"{name}_blocks" not in packed}
    safetensors.torch.save_file(kept | packed, path, metadata={"format": "pt"})
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    config["quantization_config"] = {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}
    with open(path, "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")


def phi4(rope, **more):
    """Three quarters of a head are rotated."""
    config = transformers.Phi3Config(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        rope_parameters=rope | {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
        **more,
    )
    return transformers.Phi3ForCausalLM(config)


def phi4_mini():
    write_gguf("phi4_mini", record("phi4_mini", phi4({"rope_type": "default"}), 6), arch="phi3")


def long_rope(original):
    """With 40 tokens, more or fewer than the original context."""
    divisors = [1.0, 1.25, 2.0]
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": divisors,
        "long_factor": [4 * divisor for divisor in divisors],
    }
    return phi4(rope, original_max_position_embeddings=original)


def phi4_long():
    write_gguf("phi4_long", record("phi4_long", long_rope(24), 16), arch="phi3")


def phi4_short():
    record("phi4_short", long_rope(64), 17)


def llama_dynamic():
    """A base for 40 tokens, of a model that was trained for 32."""
    config = transformers.LlamaConfig(
        **(COMMON | dict(max_position_embeddings=32)),
        intermediate_size=48,
        num_hidden_layers=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    )
    record("llama_dynamic", transformers.LlamaForCausalLM(config), 18)


def llama3():
    """As Llama 3.1 to 3.3: of the frequencies of a head some stay, some are between, and some are divided."""
    config = transformers.LlamaConfig(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=16,
        pad_token_id=0,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e3,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    write_gguf("llama3", record("llama3", transformers.LlamaForCausalLM(config), 21), arch="llama")


def deepseek(config, **more):
    """Latents of 24 and 8 rotated elements, an MLP in the first layer, and YaRN with a temperature of scores."""
    return config(
        **(COMMON | {"num_key_value_heads": 4}),
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        pad_token_id=0,
        tie_word_embeddings=False,
        **more,
    )


def yarn(mscale, mscale_all_dim):
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 64,
    }


def deepseek_v2():
    """As V2-Lite: queries are not compressed, and all experts are in one group. YaRN has an amplitude, which no GGUF file says."""
    config = deepseek(
        transformers.DeepseekV2Config,
        q_lora_rank=None,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=3,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_parameters=yarn(1.0, 0.707),
    )
    record("deepseek_v2", transformers.DeepseekV2ForCausalLM(config), 16)


def deepseek_v2_groups():
    """As V2: queries are compressed, and experts are chosen in groups."""
    config = deepseek(
        transformers.DeepseekV2Config,
        q_lora_rank=20,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=4.0,
        rope_parameters=yarn(0.707, 0.707),
    )
    write_latent_gguf("deepseek_v2_groups", record("deepseek_v2_groups", transformers.DeepseekV2ForCausalLM(config), 17))


def deepseek_v3():
    """Groups are chosen by their two best experts and a bias."""
    config = deepseek(
        transformers.DeepseekV3Config,
        q_lora_rank=20,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters=yarn(1.0, 1.0),
    )
    write_latent_gguf("deepseek_v3", record("deepseek_v3", transformers.DeepseekV3ForCausalLM(config), 18))


def write_latent_gguf(folder, model):
    """FOLDER.gguf has keys and values out of latents as two tensors, as converters write them now, and FOLDER_joined.gguf as one, as before."""
    config = model.config
    is_sigmoid = folder == "deepseek_v3"
    for joined in [False, True]:
        name = folder + ("_joined" if joined else "")
        writer = gguf.GGUFWriter(f"{name}.gguf", "deepseek2")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_head_count(config.num_attention_heads)
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if joined:
            writer.add_head_count_kv(config.num_key_value_heads)
            writer.add_key_length(head_dim)
            writer.add_value_length(config.v_head_dim)
        else:
            writer.add_head_count_kv(1)
            writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
            writer.add_value_length(config.kv_lora_rank)
            writer.add_key_length_mla(head_dim)
            writer.add_value_length_mla(config.v_head_dim)
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        gating = gguf.ExpertGatingFuncType.SIGMOID if is_sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
        writer.add_expert_gating_func(gating)
        rope = config.rope_parameters
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.num_hidden_layers)
        for tensor_name, tensor in stacked(folder, model).items():
            data = tensor.numpy()
            if "kv_b_proj" in tensor_name and not joined:
                heads, rank = config.num_attention_heads, config.kv_lora_rank
                data = data.reshape(heads, config.qk_nope_head_dim + config.v_head_dim, rank)
                keys = data[:, : config.qk_nope_head_dim].swapaxes(1, 2)
                values = data[:, config.qk_nope_head_dim :]
                parts = [("k_b_proj", keys), ("v_b_proj", values)]
            else:
                parts = [("kv_b_proj", data)]
            for part, data in parts:
                of = tensor_name.replace("kv_b_proj", part).replace("e_score_correction_bias", "e_score_correction.bias")
                stored = names.get_name(of, try_suffixes=(".weight", ".bias"))
                writer.add_tensor(stored, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def granite():
    config = transformers.GraniteConfig(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    )
    write_gguf("granite", record("granite", transformers.GraniteForCausalLM(config), 7))


def ernie4_5():
    config = transformers.Ernie4_5Config(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        pad_token_id=0,
        tie_word_embeddings=True,
        use_bias=False,
    )
    write_gguf("ernie4_5", record("ernie4_5", transformers.Ernie4_5ForCausalLM(config), 22))


def olmo2():
    config = transformers.Olmo2Config(
        **COMMON, intermediate_size=48, num_hidden_layers=2, pad_token_id=0, tie_word_embeddings=False
    )
    write_gguf("olmo2", record("olmo2", transformers.Olmo2ForCausalLM(config), 8))


def gemma2():
    """Caps that scores and logits come close to. A head's score has the factor that a GGUF file implies."""
    config = transformers.Gemma2Config(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=4,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=7,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
        pad_token_id=0,
    )
    write_gguf("gemma2", record("gemma2", transformers.Gemma2ForCausalLM(config), 9))


def gemma3():
    config = transformers.Gemma3TextConfig(
        **COMMON,
        intermediate_size=48,
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=7,
        pad_token_id=0,
    )
    write_gguf("gemma3", record("gemma3", transformers.Gemma3ForCausalLM(config), 10))


deepseek_v2()
deepseek_v2_groups()
deepseek_v3()
ernie4_5()
gemma2()
gemma3()
gpt_oss()
gpt_oss_mxfp4()
granite()
llama3()
llama_dynamic()
mistral()
mixtral()
olmo2()
phi3()
phi4_long()
phi4_mini()
phi4_short()
qwen2()
qwen3()
qwen3_moe()
qwen3_5()
qwen3_5_images()
smollm3()
