#!/usr/bin/env python3
"""Writes the fixtures of SentencePiece tokenizers with the reference implementations:
`pip install sentencepiece==0.2.3 transformers==5.24.0 protobuf gguf==0.19.0 numpy==2.4.6`.

llama.json, gemma.json     the GGUF metadata of two small models, as llama.cpp's converter writes it
llama.jsonl, gemma.jsonl   texts, and their ids and text by SentencePiece
llama.gguf, gemma.gguf     the metadata in the smallest models that can be opened

The first is as Llama 2's tokenizer (a space in front, tokens of bytes), the second as Gemma's (no space in front, symbols of the user's own:
runs of spaces and of line ends, tags). For the first it prints how many texts transformers' tokenizer of the same model encodes otherwise:
those with a literal ▁ in front. Run in this folder. The output depends on nothing but the seeds below and the versions above.
"""

import json
import os
import random
import tempfile

import gguf
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto
from transformers import LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

WORDS = """the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these so some her
would make like him into time has look two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part antidisestablishmentarianism Tokenizer naïve café Straße Ångström façade größer Привет
мир как дела 你好 世界 東京 こんにちは 안녕하세요 fn let mut self impl struct return == != <= >= && || {} () [] ;; ... // /* */""".split()
ODD = """<s> </s> <unk> <pad> <bos> <eos> <start_of_turn> <end_of_turn> <table> </table> <0x0A> <0x41> <|im_end|> [INST] [/INST] ▁ ▁▁ ▁a
👩‍👩‍👧‍👦 👍🏽 🇫🇷 é ñ 각 ﬁ ½ ² ﷺ 𝔘 \u0000 \u200b \ufeff \ufffd 12 345 6789 1.5e-9 don't I'll we've""".split(" ")
SPACES = [" ", "  ", "   ", " " * 5, " " * 13, "\n", "\n\n", "\n\n\n", "\t", "\r\n", "\u00a0", "\u3000", ""]
CASES = 500


def corpus(rng):
    lines = []
    for _ in range(4000):
        words = rng.choices(WORDS, k=rng.randint(3, 12)) + [str(rng.randint(0, 5000))]
        rng.shuffle(words)
        lines.append(rng.choice([" ", " ", " ", "  "]).join(words))
    return lines


def text(rng):
    parts = []
    for _ in range(rng.randint(0, 12)):
        parts.append(rng.choice(WORDS if rng.random() < 0.6 else ODD))
        parts.append(rng.choice(SPACES if rng.random() < 0.4 else [" "]))
    if rng.random() < 0.9:
        return "".join(parts)
    ranges = [(1, 0x2FF), (0x2E80, 0xD7FF), (0xE000, 0x1FAFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(20))


def train(rng, **options):
    with tempfile.TemporaryDirectory() as folder:
        lines = os.path.join(folder, "lines")
        with open(lines, "w") as out:
            out.write("\n".join(corpus(rng)))
        sentencepiece.SentencePieceTrainer.train(
            input=lines, model_prefix=os.path.join(folder, "m"), model_type="bpe", byte_fallback=True, split_digits=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            character_coverage=0.995, num_threads=1, minloglevel=2, **options,
        )
        with open(os.path.join(folder, "m.model"), "rb") as model:
            return model.read()


def metadata(model, user_text, **keys):
    """What llama.cpp's `_create_vocab_sentencepiece` makes of the pieces; it spells symbols of the user's own with spaces."""
    pieces = proto.ModelProto.FromString(model).pieces
    spell = lambda p: p.piece.replace("▁", " ") if p.type == p.USER_DEFINED else p.piece
    kinds = [3 if p.piece in user_text else p.type for p in pieces]
    return dict(tokens=[spell(p) for p in pieces], token_types=kinds, scores=[p.score for p in pieces], **keys)


def fast(model):
    pieces = proto.ModelProto.FromString(model).pieces
    vocab = {p.piece: i for i, p in enumerate(pieces)}
    skip = [p.piece for p in pieces if p.type != p.NORMAL]
    return LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, {p.piece: p.score for p in pieces}, skip_tokens=skip))


def record(name, model, keys, rng, reference=None):
    spm = sentencepiece.SentencePieceProcessor(model_proto=model)
    other = 0
    with open(f"{name}.jsonl", "w") as out:
        for _ in range(CASES):
            some = text(rng)
            ids = spm.encode(some)
            # transformers takes spellings of control tokens for these; SentencePiece never does.
            if reference and not any(control in some for control in ["<s>", "</s>", "<unk>"]):
                other += reference.encode(some, add_special_tokens=False) != ids
            json.dump(dict(text=some, ids=ids, decoded=spm.decode(ids)), out)
            out.write("\n")
    print(name, "differs in", other)
    with open(f"{name}.json", "w") as out:
        json.dump(keys, out, ensure_ascii=False)
        out.write("\n")
    write_gguf(name, keys)


def write_gguf(name, keys):
    writer = gguf.GGUFWriter(f"{name}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(keys["tokens"])
    writer.add_token_scores(keys["scores"])
    writer.add_token_types(keys["token_types"])
    writer.add_bos_token_id(keys["bos"])
    writer.add_eos_token_id(keys["eos"])
    writer.add_add_bos_token(True)
    if "add_space_prefix" in keys:
        writer.add_add_space_prefix(keys["add_space_prefix"])
    shapes = {"token_embd": (len(keys["tokens"]), 4), "output_norm": (4,), "blk.0.attn_norm": (4,), "blk.0.ffn_norm": (4,)}
    shapes |= {f"blk.0.{matrix}": (4, 4) for matrix in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", np.zeros(shape, np.float16 if len(shape) == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama():
    rng = random.Random(1)
    model = train(rng, vocab_size=900)
    keys = metadata(model, [], bos=1, eos=2)
    record("llama", model, keys, rng, fast(model))


def gemma():
    rng = random.Random(2)
    own = ["<mask>", "<start_of_turn>", "<end_of_turn>", "<table>", "</table>"]
    own += ["\n" * n for n in range(2, 6)] + ["▁" * n for n in range(2, 9)]
    model = train(
        rng, vocab_size=900, add_dummy_prefix=False, user_defined_symbols=own,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
    )
    turns = ["<start_of_turn>", "<end_of_turn>"]
    keys = metadata(model, turns[:1], bos=2, eos=1, add_space_prefix=False)
    record("gemma", model, keys, rng)


llama()
gemma()
