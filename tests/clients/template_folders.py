"""Makes a model's folder for each published template. Arguments: the folder of templates, and the folder for the models.

A model is scripted: behind each token of a graph it goes on to one of that token's successors, as often as the chains below have it there.
The pieces of the graph are calls in the notation of the template, whole and damaged, texts, and reasoning. Behind any other token the
model closes what is open.
"""

import collections
import json
import math
import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True

import numpy  # noqa: E402
import safetensors.numpy  # noqa: E402
import transformers  # noqa: E402
from templates import MARKS, TEMPLATES  # noqa: E402

FETCH = pathlib.Path(__file__).parents[2] / "scripts/fetch-model"
HIDDEN, HEADS = 64, 2
# Logit of a successor that chains have once; all other tokens have 0. The 49,000 of them take 0.2% where a token has one successor.
LOGIT = 17.0
PLAIN, AGAIN = ["Plain ", "answer.\n"], " \n"
# Objects of all kinds of values. The last two are no objects.
VALUES = ["12", "-2.5e3", "null", '"é😀 \\" \\u00e9"', '[true, {"k": "</tool_call> [1, "}]']
ARGUMENTS = [["{}"], *[['{"p0": ', value, "}"] for value in VALUES], ["[1]"], ['{"p0": 1,}']]
# The first tool of each conversation, and none, a fourth of the time.
NAMES = ["fn_0"] * 3 + ["nobody"]


def notation(calls):
    """The pieces that open all calls, open one with its name, close one, stand between two, and close all."""
    return {
        "hermes": (["<tool_call>"], '\n{"name": "NAME", "arguments": ', ["}\n", "</tool_call>"], [AGAIN], []),
        "llama": ([], '{"name": "NAME", "parameters": ', ["} "], ["; "], []),
        "mistral": (["[TOOL_CALLS]", " ["], '{"name": "NAME", "arguments": ', ["} "], [", "], ["]"]),
        "mistral-args": (["[TOOL_CALLS]"], "NAME", [], [], []),
        "granite": (["<|tool_call|>", "["], '{"name": "NAME", "arguments": ', ["} "], [", "], ["]"]),
        "deepseek": (
            ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"],
            "NAME\n```json\n", ["\n```", "<｜tool▁call▁end｜>"], [AGAIN], ["<｜tool▁calls▁end｜>"],
        ),
        "deepseek-bare": (
            ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"], "NAME", ["<｜tool▁call▁end｜>"], [], ["<｜tool▁calls▁end｜>"],
        ),
    }[calls]  # fmt: skip


def harmony():
    """Chains of messages: reasoning, text, and calls with and without the mark before `json`."""
    chains = [["", "<|channel|>", "analysis", "<|message|>", "Hm. ", "<|end|>", "<|start|>", "assistant"]]
    chains += [["", "<|channel|>", "final", "<|message|>", *PLAIN, "<|return|>"]]
    for name in NAMES:
        chains += [["", "<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>"]]
        chains += [["", f" to=functions.{name}", "<|channel|>", "commentary json", "<|message|>"]]
    return chains + [["<|message|>", *arguments, "<|call|>"] for arguments in ARGUMENTS]


def chains(of):
    """Pieces in the order in which they follow each other; the empty one is the end of the prompt."""
    if of.calls == "harmony":
        return harmony()
    opening, head, tail, between, closing = notation(of.calls)
    heads = [[head.replace("NAME", name)] for name in NAMES]
    if of.calls == "mistral-args":
        heads = [[*name, "[ARGS]"] for name in heads]
    elif of.calls == "deepseek-bare":
        heads = [[*name, "<｜tool▁sep｜>"] for name in heads]
    # Where a call begins, again.
    anew = opening[1:] if of.calls.startswith("deepseek") else [] if of.calls in ("mistral", "granite") else opening
    # Where the prompt opens reasoning, most answers close it: what is within is no call.
    thoughts = 12 if of.calls == "deepseek" else 2
    all_of = [["<think>", of.eos]]
    for name in heads:
        calls = [*opening, *name]
        all_of += [["", *calls]] * 2 + [["</think>", *calls]] * 3 + [[*PLAIN, *calls]]
        all_of += [["", "<think>", "Hm. ", "</think>", *PLAIN], ["", *PLAIN, of.eos]] + [["", "Hm. "]] * thoughts
        for arguments in ARGUMENTS:
            all_of += [[name[-1], *arguments, *tail, *closing, of.eos]] * 3 + [[arguments[-1], *tail, *between, *anew, *name]]
    return all_of


def default_tokenizer(path):
    """That of the default model, as the folder `path`: reading it from there takes much less time."""
    model = pathlib.Path(subprocess.run([sys.executable, FETCH], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(path)


def tokenizer(base, of, template):
    """The default model's, with the control tokens of the template's, and the pieces of its answers."""
    made = transformers.AutoTokenizer.from_pretrained(base)
    controls = [of.eos, *([of.bos] if of.bos else []), *of.controls]
    special = lambda text, is_special: transformers.AddedToken(text, special=is_special, normalized=False)  # noqa: E731
    made.add_special_tokens({"additional_special_tokens": [special(text, True) for text in controls]})
    pieces = dict.fromkeys(MARKS + [piece for chain in chains(of) for piece in chain if piece and piece not in controls])
    made.add_tokens([special(text, False) for text in pieces])
    made.bos_token, made.eos_token, made.chat_template = of.bos, of.eos, template
    return made


def weights(of, tokens, size):
    """A layer that does nothing, between embeddings of one dimension a piece, and an output that goes on to its successors."""
    # Hermes' templates render no chat without tools.
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
    chat = [{"role": "user", "content": "u"}]
    prompt = tokens.apply_chat_template(chat, tools=[tool], add_generation_prompt=True, tokenize=False)
    last = tokens(prompt, add_special_tokens=False)["input_ids"][-1]
    ids = lambda piece: tokens.convert_tokens_to_ids(piece) if piece else last  # noqa: E731
    edges = collections.Counter((ids(a), ids(b)) for chain in chains(of) for a, b in zip(chain, chain[1:]))
    dimensions = {node: at for at, node in enumerate(dict.fromkeys(node for edge in edges for node in edge))}
    lost = len(dimensions)
    assert lost < HIDDEN, lost
    embeddings, output = numpy.zeros((size, HIDDEN), "float32"), numpy.zeros((size, HIDDEN), "float32")
    embeddings[:, lost] = HIDDEN**0.5
    for node, at in dimensions.items():
        embeddings[node] = 0
        embeddings[node, at] = HIDDEN**0.5
    for (before, after), times in edges.items():
        output[after, dimensions[before]] = (LOGIT + math.log(times)) / HIDDEN**0.5
    for closing in ('"', "}", of.eos):
        output[tokens.convert_tokens_to_ids(closing), lost] = LOGIT / HIDDEN**0.5
    zeros = lambda *shape: numpy.zeros(shape, "float32")  # noqa: E731
    ones, layer = numpy.ones(HIDDEN, "float32"), "model.layers.0"
    named = {"model.embed_tokens.weight": embeddings, "lm_head.weight": output, "model.norm.weight": ones}
    named |= {f"{layer}.{norm}.weight": ones.copy() for norm in ("input_layernorm", "post_attention_layernorm")}
    named |= {f"{layer}.self_attn.{part}_proj.weight": zeros(HIDDEN, HIDDEN) for part in "qkvo"}
    named |= {f"{layer}.mlp.{part}_proj.weight": zeros(HIDDEN, HIDDEN) for part in ("gate", "up", "down")}
    return named


def folder(path, base, of, template):
    tokens = tokenizer(base, of, template)
    tokens.save_pretrained(path)
    size = len(tokens)
    safetensors.numpy.save_file(weights(of, tokens, size), path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": size, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "eos_token_id": [tokens.convert_tokens_to_ids(end) for end in [of.eos, *of.ends]],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def main():
    templates, models = map(pathlib.Path, sys.argv[1:])
    default_tokenizer(models / "default")
    for name, of in TEMPLATES.items():
        folder(models / name, models / "default", of, (templates / f"{of.file}.jinja").read_text())
        print(name, flush=True)


main()
