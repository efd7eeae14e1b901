"""The published chat templates that tests use, what stands around them in a model's folder, and what is known to differ."""

import dataclasses

EOT, IM_END, EOS_DEEPSEEK = "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>"
LLAMA = ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
MISTRAL_ARGS = [*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[IMG]"]
DEEPSEEK = [f"<｜{word}｜>" for word in (
    "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin",
    "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end",
)]  # fmt: skip
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]


@dataclasses.dataclass
class Published:
    """A template, and what the tokenizer of its model has."""

    file: str
    calls: str
    bos: str | None
    eos: str
    controls: list[str]
    # Further tokens that end an answer.
    ends: list[str] = dataclasses.field(default_factory=list)
    # Whether it has a variable `tools`. Where it has none, Baton adds a message that describes the tools, which transformers does not: only
    # conversations without tools are compared, whose earlier calls are the template's to show.
    shows_tools: bool = True


TEMPLATES = {
    "llama-3.1": Published("meta-llama-Llama-3.1-8B-Instruct", "llama", "<|begin_of_text|>", EOT, LLAMA, ["<|eom_id|>"]),
    "llama-3.3": Published("meta-llama-Llama-3.3-70B-Instruct", "llama", "<|begin_of_text|>", EOT, LLAMA, ["<|eom_id|>"]),
    "hermes-2": Published("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", "<|begin_of_text|>", IM_END, ["<|im_start|>"]),
    "hermes-3": Published("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "<|begin_of_text|>", IM_END, ["<|im_start|>"]),
    "qwen-2.5": Published("Qwen-Qwen2.5-7B-Instruct", "hermes", None, IM_END, ["<|im_start|>"]),
    "qwen-3": Published("Qwen-Qwen3-0.6B", "hermes", None, IM_END, ["<|im_start|>"]),
    "mistral-nemo": Published("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "<s>", "</s>", MISTRAL),
    "mistral-small-3.2": Published("Mistral-Small-3.2-24B-Instruct-2506", "mistral-args", "<s>", "</s>", MISTRAL_ARGS),
    "gpt-oss": Published("openai-gpt-oss-120b", "harmony", "<|startoftext|>", "<|return|>", HARMONY, ["<|call|>"]),
    "deepseek-r1": Published(
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek", "<｜begin▁of▁sentence｜>", EOS_DEEPSEEK, DEEPSEEK, shows_tools=False
    ),
    "deepseek-v3.1": Published(
        "deepseek-ai-DeepSeek-V3.1", "deepseek-bare", "<｜begin▁of▁sentence｜>", EOS_DEEPSEEK, DEEPSEEK, shows_tools=False
    ),
    "gemma-2": Published("google-gemma-2-2b-it", "hermes", "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], shows_tools=False),
    "granite-3.3": Published(
        "ibm-granite-granite-3.3-2B-Instruct", "granite", None, "<|end_of_text|>", ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"]
    ),
}  # fmt: skip
# What is a token in models with these notations, and no control token.
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
