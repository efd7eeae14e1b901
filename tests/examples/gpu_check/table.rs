//! One table of all parts, for `docs/performance.md`.

use anyhow::{Context, bail};
use serde_json::Value;
use std::path::Path;

/// Files of the parts, as `tests/gpu/check` names them.
const PARTS: [&str; 5] = ["correct", "sanitizers", "invariance", "clusters", "bench"];

/// A measured ratio, what it should be, and whether it may not be larger.
struct Target {
    what: &'static str,
    ratio: Option<f64>,
    bound: f64,
    is_upper: bool,
}

fn read(results: &Path, name: &str) -> anyhow::Result<Option<Value>> {
    let path = results.join(format!("{name}.json"));
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// An entry of an array whose fields have these values.
fn entry<'a>(of: &'a Value, wanted: &[(&str, Value)]) -> Option<&'a Value> {
    of.as_array()?.iter().find(|entry| wanted.iter().all(|(key, value)| &entry[*key] == value))
}

/// `b / a` of two times or rates.
fn over(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    Some(b? / a?).filter(|ratio| ratio.is_finite())
}

/// What is promised, as ratios to what the same run measured beside it.
fn targets(bench: &Value, roofs: &Value) -> Vec<Target> {
    let copy = roofs["copy_bytes_per_second"].as_f64();
    let decode = |rows: u64| bench["decode"].as_array().and_then(|all| all.iter().find(|entry| entry["rows"] == rows));
    let rate = |entry: Option<&Value>| Some(entry?["bytes"].as_f64()? / entry?["seconds"].as_f64()?);
    let prefill = &bench["prefill"];
    let attention =
        |of: &str| bench["attention"].as_array().and_then(|all| all.iter().rfind(|entry| entry["of"] == of));
    let flops = over(prefill["seconds"].as_f64(), prefill["flops"].as_f64());
    // The worst product of few rows, by the bytes of its matrix; the worst of all against the library's.
    let (mut few, mut exact) = (None::<f64>, None::<f64>);
    for product in bench["gemm"].as_array().into_iter().flatten() {
        let number = |key: &str| product[key].as_f64();
        let (Some(m), Some(n), Some(k), Some(seconds)) = (number("m"), number("n"), number("k"), number("seconds"))
        else {
            continue;
        };
        if let Some(ratio) = over(copy, Some(2.0 * n * k / seconds)).filter(|_| m <= 64.0) {
            few = Some(few.map_or(ratio, |few| few.min(ratio)));
        }
        let same = ["m", "n", "k"].map(|key| (key, product[key].clone()));
        let theirs = entry(&roofs["gemm"], &same).and_then(|entry| entry["seconds"].as_f64());
        if let Some(ratio) = over(theirs, Some(seconds)) {
            exact = Some(exact.map_or(ratio, |exact| exact.max(ratio)));
        }
    }
    let sdpa = roofs["sdpa_prefill_seconds"].as_f64();
    let ours = attention("prefill").and_then(|entry| entry["seconds"].as_f64());
    let gap = |entry: Option<&Value>| {
        let (step, graph) = (entry?["seconds"].as_f64()?, entry?["graph_seconds"].as_f64()?);
        Some(((step - graph) / step).max(0.0))
    };
    let least = |what, ratio, bound| Target { what, ratio, bound, is_upper: false };
    let most = |what, ratio, bound| Target { what, ratio, bound, is_upper: true };
    vec![
        least("prefill of 8,192 tokens / bf16 GEMM rate", over(roofs["gemm_flops_per_second"].as_f64(), flops), 0.65),
        least("decode, batch 64 at 4,096 / copy bandwidth", over(copy, rate(decode(64))), 0.75),
        least("decode, batch 1 at 4,096 / copy bandwidth", over(copy, rate(decode(1))), 0.70),
        least("decode attention / copy bandwidth", over(copy, rate(attention("decode"))), 0.85),
        least("prefill attention / SDPA of torch", over(ours, sdpa), 0.7),
        least("worst product of up to 64 rows / copy bandwidth", few, 0.80),
        most("slowest product / unrestricted cuBLASLt, time", exact, 1.05),
        most("host gap / decode step, batch 1", gap(decode(1)), 0.03),
        most("host gap / decode step, batch 64", gap(decode(64)), 0.03),
        most(
            "KV read after the last chunk / prefill time",
            over(prefill["seconds_while_kv_is_read"].as_f64(), prefill["kv_read_behind_seconds"].as_f64()),
            0.05,
        ),
    ]
}

pub(crate) fn run(results: &Path, out: &Path) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    let mut text = String::from("| Part | Outcome |\n|---|---|\n");
    let (mut gpu, mut runs) = (String::new(), Vec::new());
    for part in PARTS {
        let Some(outcome) = read(results, part)? else {
            text += &format!("| {part} | not run |\n");
            continue;
        };
        if !runs.contains(&outcome["run"]) {
            runs.push(outcome["run"].clone());
        }
        if let Some(name) = outcome["gpu"].as_str() {
            gpu = name.to_owned();
        }
        let failed: Vec<&str> = outcome["failed"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let said = if failed.is_empty() {
            "passed".to_owned()
        } else {
            format!("FAILED: {}", failed.join("; ").replace('\n', "; "))
        };
        text += &format!("| {part} | {said} |\n");
        wrong.extend(failed.into_iter().map(|failed| format!("{part}: {failed}")));
    }
    if let Some(bench) = read(results, "bench")? {
        let roofs = read(results, "roofs")?.unwrap_or_default();
        text += "\n| Ratio of the same run | Measured | Target |\n|---|---:|---:|\n";
        for Target { what, ratio, bound, is_upper } in targets(&bench, &roofs) {
            let bound_text = format!("{} {bound:.2}", if is_upper { "at most" } else { "at least" });
            let met = |ratio: f64| if (ratio > bound) == is_upper { " (missed)" } else { "" };
            // Of a recorded GPU, times say nothing.
            let ratio = ratio.filter(|_| bench["recorded"] == false);
            let measured = ratio.map_or("skipped".to_owned(), |ratio| format!("{ratio:.3}{}", met(ratio)));
            text += &format!("| {what} | {measured} | {bound_text} |\n");
        }
        for skipped in roofs["skipped"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            text += &format!("\nSkipped: {skipped}\n");
        }
    }
    let title = if gpu == "recorder" {
        "Dry run on a recorded GPU: no figure says anything of a GPU.".to_owned()
    } else {
        format!("Measured by `tests/gpu/check` on one {gpu}.")
    };
    let [run] = &runs[..] else {
        bail!("{} has results of different runs, remove them: {}", results.display(), serde_json::to_string(&runs)?)
    };
    let quick = if run["quick"] == true { " Small shapes (QUICK=1): no figure is one of the targets'." } else { "" };
    let text = format!("{title} Commit {}, {}.{quick}\n\n{text}", run["commit"], run["device"]);
    std::fs::write(out, &text).with_context(|| out.display().to_string())?;
    print!("{text}");
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ratio(of: &[Target], what: &str) -> Option<f64> {
        of.iter().find(|target| target.what.starts_with(what)).unwrap().ratio
    }

    /// No dry run sees these: on a recorded GPU every ratio is skipped.
    #[test]
    fn ratios_are_of_the_worst() {
        let gemm = |m: u64, seconds: f64| json!({"m": m, "n": 1000, "k": 1000, "seconds": seconds});
        let attend = |of: &str, seconds: f64| json!({"of": of, "seconds": seconds, "bytes": 1e6});
        let decode = |rows: u64| json!({"rows": rows, "seconds": 2e-3, "graph_seconds": 1.5e-3, "bytes": 1e9});
        let bench = json!({
            "gemm": [gemm(1, 1e-6), gemm(8, 2e-6), gemm(64, 1e-6), gemm(256, 9e-6)],
            "attention": [attend("decode", 1e-6), attend("prefill", 4e-3)],
            "decode": [decode(1), decode(64)],
            "prefill": {"seconds": 2.0, "flops": 1e15, "seconds_while_kv_is_read": 2.0, "kv_read_behind_seconds": 0.1},
        });
        let roofs = json!({
            "copy_bytes_per_second": 2e12,
            "gemm_flops_per_second": 1e15,
            "sdpa_prefill_seconds": 3e-3,
            "gemm": [gemm(1, 1e-6), gemm(8, 1.6e-6), gemm(64, 1e-6), gemm(256, 6e-6)],
        });
        let all = targets(&bench, &roofs);
        for (what, expected) in [
            ("prefill of", 0.5),
            ("decode, batch 64", 0.25),
            ("decode, batch 1 ", 0.25),
            ("decode attention", 0.5),
            ("prefill attention", 0.75),
            ("worst product", 0.5),
            ("slowest product", 1.5),
            ("host gap / decode step, batch 1", 0.25),
            ("KV read after", 0.05),
        ] {
            let found = ratio(&all, what).unwrap();
            assert!((found - expected).abs() < 1e-9, "{what}: {found}, not {expected}");
        }
    }
}
