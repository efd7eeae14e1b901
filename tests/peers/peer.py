"""Another engine, measured beside Baton by `make bench` (tests/benches/cluster/peers.rs).

usage: peer.py ENGINE MODEL THREADS

One line of JSON on stdout says what runs: {"name": …}, or {"missing": why}. Then each line of stdin is one measurement, and each answer is
its seconds:

    prefill TOKENS            a prompt of so many tokens, and the logits of its last
    decode SEQUENCES CONTEXT  one step of so many sequences that hold so many tokens each
    release                   gives back what sequences hold

or, of

    clients COUNT SHARED PREFIX OWN SALT LENGTH

so many requests at once, whose prompts begin with the same SHARED tokens (those of salt PREFIX) and go on with OWN tokens each (those of
SALT and the salts behind it): the seconds to the first token of each, and to the last of all LENGTH tokens of all, as {"first": …, "wall": …}.
What was computed of a prefix in the round before may be used again.
"""

import json
import os
import sys
import time

STEPS = 4
"""Decode steps of one measurement; the answer is their median."""


def tokens(count, salt=0):
    """The prompt that Baton's part of the benchmark takes, for each sequence another one."""
    return [100 + (i + 7 * salt) * 7919 % 48_000 for i in range(count)]


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


class LlamaCpp:
    """llama.cpp through its C interface: the library of xllamacpp, with the declarations of llama-cpp-py-sync."""

    def __init__(self, model, threads):
        import xllamacpp
        from llama_cpp_py_sync._cffi_bindings import ffi

        self.ffi, self.lib, self.threads, self.contexts = ffi, ffi.dlopen(xllamacpp.xllamacpp.__file__), threads, {}
        self.prefix = None
        defaults = self.lib.llama_context_default_params()
        if (defaults.n_batch, defaults.n_ubatch, defaults.n_seq_max) != (2048, 512, 1):
            raise RuntimeError("the declarations are not those of the library")
        self.silent = self.ffi.callback("ggml_log_callback", lambda *_: None)
        self.lib.llama_log_set(self.silent, self.ffi.NULL)
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(model.encode(), self.lib.llama_model_default_params())
        if self.model == self.ffi.NULL:
            raise RuntimeError(f"cannot load {model}")
        features = self.ffi.string(self.lib.llama_print_system_info()).decode().split("|")
        wide = [name for name in ("AVX2", "AVX512", "AVX512_BF16", "AMX_INT8") if f" {name} = 1 " in features]
        self.name = f"llama.cpp b{xllamacpp.__version__.rsplit('.', 1)[-1]} ({', '.join(wide)})"

    def context(self, sequences, room):
        """A context for so many sequences of so many tokens each, with KV of their own."""
        key = (sequences, room)
        if key not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.kv_unified = sequences * room, sequences, False
            params.n_batch, params.n_threads, params.n_threads_batch = 2048, self.threads, self.threads
            context = self.lib.llama_init_from_model(self.model, params)
            if context == self.ffi.NULL:
                raise RuntimeError(f"no context of {sequences} times {room} tokens")
            self.contexts[key] = (context, self.lib.llama_batch_init(2048, 0, 1))
        return self.contexts[key]

    def run(self, context, rows):
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        context, batch = context
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        begin = time.perf_counter()
        if self.lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode fails")
        self.lib.llama_synchronize(context)
        return time.perf_counter() - begin

    def best(self, context, row):
        """The most likely token of a row of the last batch."""
        import numpy

        count = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        logits = self.ffi.buffer(self.lib.llama_get_logits_ith(context[0], row), 4 * count)
        return int(numpy.frombuffer(logits, dtype=numpy.float32).argmax())

    def clients(self, prompts, shared, length):
        """Each sequence keeps its prefix. Prompts are computed one after another where they are long, together where they fit a batch."""
        context = self.context(len(prompts), len(prompts[0]) + length + 64)
        memory = self.lib.llama_get_memory(context[0])
        begin = time.perf_counter()
        kept = shared if self.prefix == prompts[0][:shared] else 0
        self.prefix = prompts[0][:shared]
        for sequence in range(len(prompts)):
            self.lib.llama_memory_seq_rm(memory, sequence, kept, -1)
        groups, room = [[]], 2048
        for sequence, prompt in enumerate(prompts):
            if room < len(prompt) - kept:
                groups.append([])
                room = 2048
            room -= len(prompt) - kept
            groups[-1].append(sequence)
        last, first = [0] * len(prompts), [0.0] * len(prompts)
        for group in groups:
            rows, ends = [], []
            for sequence in group:
                prompt = prompts[sequence]
                rows += [(prompt[i], i, sequence, int(i + 1 == len(prompt))) for i in range(kept, len(prompt))]
                ends.append(len(rows) - 1)
            self.run(context, rows)
            for sequence, end in zip(group, ends):
                last[sequence] = self.best(context, end)
                first[sequence] = time.perf_counter() - begin
        for step in range(length - 1):
            rows = [(last[s], len(prompt) + step, s, 1) for s, prompt in enumerate(prompts)]
            self.run(context, rows)
            last = [self.best(context, s) for s in range(len(prompts))]
        return first, time.perf_counter() - begin

    def release(self):
        self.prefix = None
        for context, batch in self.contexts.values():
            self.lib.llama_batch_free(batch)
            self.lib.llama_free(context)
        self.contexts = {}
        return 0.0

    def fill(self, context, count):
        rows = [(token, i, 0, int(i + 1 == count)) for i, token in enumerate(tokens(count))]
        return self.run(context, rows)

    def prefill(self, count):
        context = self.context(1, 2112)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context[0]), True)
        return self.fill(context, count)

    def decode(self, sequences, count):
        new = (sequences, count + 64) not in self.contexts
        context = self.context(sequences, count + 64)
        memory = self.lib.llama_get_memory(context[0])
        if new:
            self.fill(context, count)
            for sequence in range(1, sequences):
                self.lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        times = []
        for _ in range(STEPS):
            ids = tokens(sequences)
            times.append(self.run(context, [(ids[s], count, s, 1) for s in range(sequences)]))
            for sequence in range(sequences):
                self.lib.llama_memory_seq_rm(memory, sequence, count, -1)
        return median(times)


class OpenVino:
    """OpenVINO GenAI with continuous batching; the prompts of a batch are different ones."""

    def __init__(self, model, threads):
        import openvino_genai
        from openvino import Tensor

        self.genai, self.tensor, self.model, self.threads, self.pipelines = openvino_genai, Tensor, model, threads, {}
        self.requests, self.requests_of = 0, {}
        self.pipeline("prefill", 1, 2112)
        self.name = f"OpenVINO GenAI {openvino_genai.__version__}"

    def pipeline(self, key, sequences, room):
        if key not in self.pipelines:
            config = self.genai.SchedulerConfig()
            config.max_num_batched_tokens, config.max_num_seqs = 2048, max(sequences, 1)
            config.num_kv_blocks, config.enable_prefix_caching = sequences * (room // 32 + 2) + 8, False
            self.pipelines[key] = self.genai.ContinuousBatchingPipeline(
                self.model, config, "CPU", {"INFERENCE_NUM_THREADS": self.threads}
            )
        return self.pipelines[key]

    def clients(self, prompts, shared, length):
        key, rounds_kept = "clients", 4
        if key not in self.pipelines:
            config = self.genai.SchedulerConfig()
            config.max_num_batched_tokens, config.max_num_seqs = 2048, len(prompts)
            blocks = (len(prompts[0]) + length) // 32 + 2
            config.num_kv_blocks, config.enable_prefix_caching = rounds_kept * len(prompts) * blocks, True
            self.pipelines[key] = self.genai.ContinuousBatchingPipeline(
                self.model, config, "CPU", {"INFERENCE_NUM_THREADS": self.threads}
            )
        pipeline = self.pipelines[key]
        begin = time.perf_counter()
        requests = [self.add(pipeline, ids, length) for ids in prompts]
        first = [0.0] * len(prompts)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begin
            for i, request in enumerate(requests):
                if first[i] == 0.0 and request.can_read():
                    first[i] = now
        wall = time.perf_counter() - begin
        for request in requests:
            outputs = request.read_all()
            if sum(len(output.generated_ids) for output in outputs) != length:
                raise RuntimeError(f"an answer is not {length} tokens long")
        return first, wall

    def release(self):
        self.requests_of.clear()
        self.pipelines.clear()
        return 0.0

    def add(self, pipeline, ids, length):
        import numpy

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample, config.eos_token_id = length, True, False, -1
        self.requests += 1
        return pipeline.add_request(self.requests, self.tensor(numpy.array([ids], dtype=numpy.int64)), config)

    def prefill(self, count):
        pipeline = self.pipeline("prefill", 1, 2112)
        request = self.add(pipeline, tokens(count), 1)
        begin = time.perf_counter()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds = time.perf_counter() - begin
        request.read_all()
        return seconds

    def decode(self, sequences, count):
        """The sequences grow by a token with each step; they have room for all rounds."""
        key, rounds = (sequences, count), 16
        new = key not in self.pipelines
        pipeline = self.pipeline(key, sequences, count + rounds * STEPS + 64)
        if new:
            # Requests live as long as they are referred to.
            requests = [self.add(pipeline, tokens(count, salt), rounds * STEPS + 32) for salt in range(sequences)]
            self.requests_of[key] = requests
            # Until each has a token: all prompts are computed.
            for _ in range(4 * sequences):
                pipeline.step()
                if all(request.can_read() for request in requests):
                    break
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            pipeline.step()
            times.append(time.perf_counter() - begin)
        return median(times)


ENGINES = {"llama.cpp": LlamaCpp, "openvino": OpenVino}


def main():
    engine, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # Libraries print to stdout, which is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    try:
        peer = ENGINES[engine](model, threads)
    except Exception as error:  # Whatever an engine raises, it is not there.
        return answer({"missing": str(error)})
    answer({"name": peer.name})
    for line in sys.stdin:
        kind, *numbers = line.split()
        if kind == "clients":
            count, shared, prefix, own, salt, length = map(int, numbers)
            prompts = [tokens(shared, prefix) + tokens(own, salt + client) for client in range(count)]
            first, wall = peer.clients(prompts, shared, length)
            answer({"clients": {"first": first, "wall": wall}})
            continue
        work = {"prefill": peer.prefill, "decode": peer.decode, "release": peer.release}[kind]
        answer({"seconds": work(*map(int, numbers))})


if __name__ == "__main__":
    main()
