#!/usr/bin/env python3
"""Writes the fixtures of SentencePiece tokenizers with the reference implementations:
`pip install sentencepiece==0.2.3 transformers==5.24.0 protobuf gguf==0.19.0 numpy==2.4.6`.

NAME.json    the GGUF metadata of a small model, as llama.cpp's converter writes it
NAME.jsonl   texts, and their ids and text by SentencePiece
NAME.gguf    the metadata in the smallest model that can be opened
t5.tokenizer.json   the model `nmt` as transformers writes it

llama      BPE as Llama 2's (a space in front, tokens of bytes)
gemma      BPE as Gemma's (no space in front, symbols of the user's own: runs of spaces and of line ends, tags)
nmt        unigrams with a space in front, no further ones, and tokens of bytes. Of the rules of `nmt_nfkc` it has those for the characters
           below: all of them would make a large file
identity   unigrams without a space in front, rules or tokens of bytes, with runs of spaces and a symbol of the user's own

For llama it prints how many texts transformers' tokenizer of the same model encodes otherwise: those with a literal ▁ in front. Run in this
folder. The output depends on nothing but the seeds below and the versions above.
"""

import json
import os
import random
import tempfile

import gguf
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto
from transformers import LlamaTokenizer, T5Tokenizer
from transformers.tokenization_utils_base import generate_merges

WORDS = """the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these so some her
would make like him into time has look two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part antidisestablishmentarianism Tokenizer naïve café Straße Ångström façade größer Привет
мир как дела 你好 世界 東京 こんにちは 안녕하세요 fn let mut self impl struct return == != <= >= && || {} () [] ;; ... // /* */""".split()
ODD = """<s> </s> <unk> <pad> <bos> <eos> <start_of_turn> <end_of_turn> <table> </table> <0x0A> <0x41> <|im_end|> [INST] [/INST] ▁ ▁▁ ▁a
👩‍👩‍👧‍👦 👍🏽 🇫🇷 é ñ 각 ﬁ ½ ² ﷺ 𝔘 \u0000 \u200b \ufeff \ufffd 12 345 6789 1.5e-9 don't I'll we've""".split(" ")
SPACES = [" ", "  ", "   ", " " * 5, " " * 13, "\n", "\n\n", "\n\n\n", "\t", "\r\n", "\u00a0", "\u3000", ""]
# Words without a space between them, so that there are many ways to divide a line into pieces.
GLUED = [" ", "  ", ""]
CASES = 500
# First and last characters of the rules of `nmt`: Latin letters and marks, spaces, signs, Hangul, ligatures, and wide forms.
RULED = [(0, 0x24F), (0x300, 0x36F), (0x1100, 0x1112), (0x1161, 0x1163), (0x11A8, 0x11AB), (0x2000, 0x2070), (0x2100, 0x215F),
         (0x2460, 0x24FF), (0x3000, 0x3000), (0x3300, 0x33FF), (0xFB00, 0xFB06), (0xFDFA, 0xFDFA), (0xFEFF, 0xFEFF), (0xFF01, 0xFF5E), (0x1D400, 0x1D433)]


def corpus(rng, separators):
    lines = []
    for _ in range(4000):
        words = rng.choices(WORDS, k=rng.randint(3, 12)) + [str(rng.randint(0, 5000))]
        rng.shuffle(words)
        lines.append(rng.choice(separators).join(words))
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


def train(rng, separators=(" ", " ", " ", "  "), **options):
    with tempfile.TemporaryDirectory() as folder:
        lines = os.path.join(folder, "lines")
        with open(lines, "w") as out:
            out.write("\n".join(corpus(rng, separators)))
        common = dict(byte_fallback=True, split_digits=True, character_coverage=0.995, num_threads=1, minloglevel=2)
        common |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)
        if "rules" in options:
            common["normalization_rule_tsv"] = os.path.join(folder, "rules.tsv")
            spell = lambda some: " ".join(f"{ord(c):X}" for c in some)
            with open(common["normalization_rule_tsv"], "w") as out:
                out.writelines(f"{spell(pattern)}\t{spell(to)}\n" for pattern, to in options.pop("rules"))
            del common["normalization_rule_name"]
        options = common | dict(model_type="bpe") | options
        sentencepiece.SentencePieceTrainer.train(input=lines, model_prefix=os.path.join(folder, "m"), **options)
        with open(os.path.join(folder, "m.model"), "rb") as model:
            return model.read()


def rules(charsmap):
    """The patterns and replacements of a `precompiled_charsmap`."""
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], np.uint32).tolist()
    texts = charsmap[4 + size :]
    children = lambda unit: (unit >> 10) << ((unit & 1 << 9) >> 6)

    def below(base, pattern):
        for byte in range(1, 256):
            at = base ^ byte
            if at < len(units) and units[at] & (1 << 31 | 255) == byte:
                then = at ^ children(units[at])
                if units[at] & 1 << 8:
                    start = units[then] & ~(1 << 31)
                    yield (pattern + bytes([byte])).decode(), texts[start : texts.index(0, start)].decode()
                yield from below(then, pattern + bytes([byte]))

    return below(children(units[0]), b"")


def nmt_nfkc():
    """Those of the rules `nmt_nfkc` whose patterns have no other characters than those above."""
    model = train(random.Random(0), vocab_size=500, normalization_rule_name="nmt_nfkc")
    charsmap = proto.ModelProto.FromString(model).normalizer_spec.precompiled_charsmap
    ruled = lambda c: any(first <= ord(c) <= last for first, last in RULED)
    return [rule for rule in rules(charsmap) if all(map(ruled, rule[0]))]


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
        json.dump({key: value.hex() if isinstance(value, bytes) else value for key, value in keys.items()}, out, ensure_ascii=False)
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
    model = keys.get("model", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(keys["tokens"])
    writer.add_token_scores(keys["scores"])
    writer.add_token_types(keys["token_types"])
    writer.add_bos_token_id(keys["bos"])
    writer.add_eos_token_id(keys["eos"])
    writer.add_add_bos_token(model == "llama")
    if "add_space_prefix" in keys:
        writer.add_add_space_prefix(keys["add_space_prefix"])
    if model == "t5":
        writer.add_add_eos_token(False)
        writer.add_remove_extra_whitespaces(keys["remove_extra_whitespaces"])
        if keys["precompiled_charsmap"]:
            writer.add_precompiled_charsmap(keys["precompiled_charsmap"])
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


def unigram(model):
    """What llama.cpp's `T5Model.set_vocab` makes of it: to it, symbols of the user's own are pieces of text."""
    proto_ = proto.ModelProto.FromString(model)
    spec, pieces = proto_.normalizer_spec, proto_.pieces
    normal, own = proto.ModelProto.SentencePiece.Type.NORMAL, proto.ModelProto.SentencePiece.Type.USER_DEFINED
    return dict(
        model="t5", tokens=[p.piece for p in pieces], token_types=[normal if p.type == own else p.type for p in pieces],
        scores=[p.score for p in pieces], bos=proto_.trainer_spec.bos_id, eos=proto_.trainer_spec.eos_id, add_space_prefix=spec.add_dummy_prefix,
        remove_extra_whitespaces=spec.remove_extra_whitespaces, precompiled_charsmap=spec.precompiled_charsmap,
    )


def nmt():
    rng = random.Random(3)
    options = dict(rules=nmt_nfkc(), remove_extra_whitespaces=True, allow_whitespace_only_pieces=False)
    model = train(rng, GLUED, vocab_size=900, model_type="unigram", **options)
    keys = unigram(model)
    record("nmt", model, keys, rng)
    vocab = list(zip(keys["tokens"], keys["scores"]))
    # Its class has the unknown token third.
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, score) for piece, score in vocab if score)]
    t5 = T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=keys["precompiled_charsmap"], extra_ids=0)
    t5.backend_tokenizer.save("t5.tokenizer.json", pretty=False)


def identity():
    rng = random.Random(4)
    options = dict(byte_fallback=False, add_dummy_prefix=False, user_defined_symbols=["<table>"], split_by_whitespace=False)
    model = train(rng, GLUED, vocab_size=900, model_type="unigram", **options)
    record("identity", model, unigram(model), rng)


llama()
gemma()
nmt()
identity()
