"""What the engine's times are compared with, on the same GPU in the same run: copies, products and attention of torch.

roofs.py BENCH OUT: reads the shapes of BENCH, as gpu_check wrote it, and writes JSON to OUT. Without torch or a GPU it writes what was skipped.
"""

import importlib.util
import json
import sys

MEASURED_MIN_SECONDS = 0.06


def timed(torch, calls):
    """Seconds of one of `calls`, which run in turn."""
    repeats = len(calls)
    while True:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(repeats):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1000
        if seconds >= MEASURED_MIN_SECONDS:
            return seconds / repeats
        repeats *= 2


def measured(torch, bench):
    device, bf16 = torch.device(bench["run"]["device"]), torch.bfloat16
    torch.cuda.set_device(device)
    roofs = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(device)}

    size = 1 << 30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roofs["copy_bytes_per_second"] = 2 * size / timed(torch, [lambda: target.copy_(source)])
    del source, target

    side = 8192
    a, b = (torch.randn(side, side, dtype=bf16, device=device) for _ in range(2))
    roofs["gemm_flops_per_second"] = 2 * side**3 / timed(torch, [lambda: torch.mm(a, b.t())])
    del a, b

    roofs["gemm"] = []
    for product in bench["gemm"]:
        m, n, k = product["m"], product["n"], product["k"]
        # As many matrices as no cache holds.
        copies = max(1, min(32, (256 << 20) // (2 * n * k))) + 1
        x = torch.randn(m, k, dtype=bf16, device=device)
        matrices = [torch.randn(n, k, dtype=bf16, device=device) for _ in range(copies)]
        seconds = timed(torch, [lambda w=w: torch.mm(x, w.t()) for w in matrices])
        roofs["gemm"].append({"m": m, "n": n, "k": k, "seconds": seconds})
        del x, matrices

    shape = bench["shape"]
    rows = max(entry["rows"] for entry in bench["attention"] if entry["of"] == "prefill")
    q, k, v = (torch.randn(1, shape["heads"], rows, shape["head_dim"], dtype=bf16, device=device) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    roofs["sdpa_prefill_seconds"] = timed(torch, [lambda: sdpa(q, k, v, is_causal=True)])
    return roofs


def main():
    bench_path, out = sys.argv[1:3]
    with open(bench_path) as file:
        bench = json.load(file)
    roofs, skipped = {}, []
    try:
        import torch

        if bench["recorded"]:
            skipped.append("torch: the engine's GPU is recorded")
        elif torch.cuda.is_available():
            roofs = measured(torch, bench)
        else:
            skipped.append("torch: it finds no GPU")
    except ImportError as error:
        skipped.append(f"torch: {error}")
    # Only looked for: importing it takes a minute.
    if importlib.util.find_spec("vllm"):
        skipped.append("vLLM: it is installed, and not measured: its engine needs a checkpoint")
    else:
        skipped.append("vLLM: it is not installed")
    roofs["skipped"] = skipped
    with open(out, "w") as file:
        json.dump(roofs, file, indent=2)
    print("roofs: " + ("; ".join(f"skipped {reason}" for reason in skipped) or "measured"))


main()
