//! Encoding beside the tokenizers crate, in one run: of prose, code and mixed lines, and as the first text of a tokenizer just loaded.
#![allow(missing_docs, reason = "criterion's macros")]

#[path = "../tests/common/mod.rs"]
mod common;

use baton_text::{Specials, Tokenizer, bundle};
use common::corpus::Corpus;
use common::families;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::Path;

const BYTES: usize = 256 << 10;

/// The files of this repository that end so, one after the other.
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

fn texts() -> [(&'static str, String); 3] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut prose, mut code, mut mixed) = (String::new(), String::new(), String::new());
    files(&root.join("docs"), ".md", &mut prose);
    files(&root.join("text"), ".rs", &mut code);
    mixed.extend(Corpus::new(9).take(BYTES / 32).flat_map(|line| [line, "\n".to_owned()]));
    let cut = |text: String| text[..text.floor_char_boundary(BYTES)].to_owned();
    [("prose", cut(prose)), ("code", cut(code)), ("mixed", cut(mixed))]
}

fn encode(c: &mut Criterion) {
    let texts = texts();
    for pre in ["smollm", "llama-bpe"] {
        let family = families::gguf(pre);
        let mut group = c.benchmark_group(pre);
        for (name, text) in &texts {
            family.check(text);
            group.throughput(Throughput::Bytes(text.len() as u64));
            group.sample_size(10);
            group.bench_function(format!("{name}/tokenizers"), |b| {
                b.iter(|| black_box(family.theirs(text, Specials::AsText)));
            });
            group.bench_function(format!("{name}/ours"), |b| {
                b.iter(|| black_box(family.ours.encode(text, Specials::AsText)));
            });
        }
    }
    let bundle = bundle::from_gguf(&common::gguf()).unwrap();
    let mut group = c.benchmark_group("just loaded");
    for (name, text) in &texts {
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.sample_size(10);
        let theirs = || bundle.tokenizer_json.parse::<tokenizers::Tokenizer>().unwrap();
        group.bench_function(format!("{name}/tokenizers"), |b| {
            b.iter_batched(theirs, |t| (black_box(t.encode_fast(text.as_str(), false)), t), BatchSize::PerIteration);
        });
        group.bench_function(format!("{name}/ours"), |b| {
            let ours = || Tokenizer::from_bundle(&bundle).unwrap();
            b.iter_batched(ours, |t| (black_box(t.encode(text, Specials::AsText)), t), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, encode);
criterion_main!(benches);
