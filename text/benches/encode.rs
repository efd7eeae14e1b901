//! Compares encoding with the tokenizers crate in one run: a short prompt, prose, code and mixed lines. Prints the
//! speedup of each, and the load times. It refuses to time an encoding with different ids.
#![allow(missing_docs, reason = "criterion's macros")]

#[path = "../tests/common/mod.rs"]
mod common;

use baton_text::{Specials, Tokenizer, bundle};
use common::corpus::Corpus;
use common::families;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use std::fmt::Write;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

const BYTES: usize = 256 << 10;

/// The files of this repository with this suffix, concatenated.
fn files(folder: &Path, end: &str, text: &mut String) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() && !path.ends_with("target") {
            files(&path, end, text);
        } else if path.to_string_lossy().ends_with(end) {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

fn texts() -> [(&'static str, String); 4] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut prose, mut code, mut mixed) = (String::new(), String::new(), String::new());
    files(&root.join("docs"), ".md", &mut prose);
    files(&root.join("text"), ".rs", &mut code);
    mixed.extend(Corpus::new(9).take(BYTES / 32).flat_map(|line| [line, "\n".to_owned()]));
    let cut = |text: &str, bytes| text[..text.floor_char_boundary(bytes)].to_owned();
    [
        ("prompt of 500 bytes", cut(&prose, 500)),
        ("prose", cut(&prose, BYTES)),
        ("code", cut(&code, BYTES)),
        ("mixed", cut(&mixed, BYTES)),
    ]
}

/// Seconds per run, in the best sample.
fn seconds(group: &mut BenchmarkGroup<'_, WallTime>, name: String, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    group.bench_function(name, |b| {
        b.iter_custom(|runs| {
            let start = Instant::now();
            (0..runs).for_each(|_| run());
            let took = start.elapsed();
            best = best.min(took.as_secs_f64() / runs as f64);
            took
        });
    });
    best
}

fn encode(c: &mut Criterion) {
    let texts = texts();
    let mut table = String::new();
    for pre in ["smollm", "llama-bpe", "qwen2"] {
        let family = families::gguf(pre);
        let mut group = c.benchmark_group(pre);
        group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        for (name, text) in &texts {
            family.check(text);
            group.throughput(Throughput::Bytes(text.len() as u64));
            let library = seconds(&mut group, format!("{name}/tokenizers"), || {
                black_box(family.theirs(text, Specials::AsText));
            });
            let ours = seconds(&mut group, format!("{name}/ours"), || {
                black_box(family.ours.encode(text, Specials::AsText).unwrap());
            });
            let mb = text.len() as f64 / 1e6;
            let (slow, fast, times) = (mb / library, mb / ours, library / ours);
            writeln!(table, "{pre:<10} {name:<20} {slow:>11.2} {fast:>11.2} {times:>7.1}").unwrap();
        }
    }
    let bundle = bundle::from_gguf(&common::gguf()).unwrap();
    let mut group = c.benchmark_group("load");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let library = seconds(&mut group, "tokenizers".to_owned(), || {
        black_box(bundle.tokenizer_json.parse::<tokenizers::Tokenizer>().unwrap());
    });
    let ours = seconds(&mut group, "ours".to_owned(), || {
        black_box(Tokenizer::from_bundle(&bundle).unwrap());
    });
    group.finish();
    println!("{:<10} {:<20} {:>11} {:>11} {:>7}", "tokenizer", "text", "crate, MB/s", "ours, MB/s", "times");
    println!(
        "{table}Loading: the crate {:.0} ms, ours (the crate's and our tables) {:.0} ms",
        library * 1e3,
        ours * 1e3
    );
}

criterion_group!(benches, encode);
criterion_main!(benches);
