//! Memory for encoding a long text: a hazard of the tokenizers crate, the bound of the fast path, and that of unigrams.

mod common;

use baton_text::{Specials, TextBundle, Tokenizer};
use common::corpus::Corpus;
use common::families;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Most bytes of peak memory per byte of a text: 12 for ids while their vector doubles, 3 for the text in composed
/// form, and 20 for symbols and pairs if the whole text is one word.
const TIMES_MAX: f64 = 40.0;
/// The same of unigrams: up to 100 for a space, which becomes three bytes with a state of 32 each, and 130 where it becomes
/// a token.
const UNIGRAM_TIMES_MAX: f64 = 240.0;

/// Bytes of peak memory per byte of the text.
fn taken<T>(text: &str, work: impl FnOnce(&str) -> T) -> f64 {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    work(text);
    (MEMORY.peak_usage() - before) as f64 / text.len() as f64
}

#[test]
fn encoding_takes_a_few_bytes_for_each_of_the_text() {
    let mixed: String = Corpus::new(10).take(4_000).flat_map(|line| [line, "\n".to_owned()]).collect();
    let long = mixed.repeat((16 << 20) / mixed.len() + 1);
    let letters: String = Corpus::new(11)
        .flat_map(|line| line.into_bytes())
        .filter(u8::is_ascii_lowercase)
        .take(1_200_000)
        .map(char::from)
        .collect();
    let texts = [
        ("16 MiB, mixed", long),
        ("one letter", "a".repeat(1_200_000)),
        ("one word", letters),
        ("spaces", " ".repeat(1_200_000)),
        ("a token for each byte", "\u{1}".repeat(1_200_000)),
        ("decomposed", "e\u{301}".repeat(600_000)),
    ];
    let family = families::gguf("qwen2");
    assert_eq!(family.ours.memory_per_byte() as f64, TIMES_MAX);
    for (name, text) in &texts {
        let times = taken(text, |text| family.ours.encode(text, Specials::AsText).unwrap());
        println!("{name}: {times:.1} bytes a byte of text");
        assert!(times < TIMES_MAX, "{name}: {times}");
    }
    let library = taken(&mixed, |text| family.theirs(text, Specials::AsText));
    println!("the library, mixed: {library:.1}");
    assert!(library > 2.0 * TIMES_MAX, "the hazard is gone: {library}");
    let unigram = unigram();
    assert_eq!(unigram.memory_per_byte() as f64, UNIGRAM_TIMES_MAX);
    for (name, text) in texts.iter().skip(1) {
        let times = taken(&text[..120_000], |text| unigram.encode(text, Specials::AsText).unwrap());
        println!("unigrams, {name}: {times:.1}");
        assert!(times < UNIGRAM_TIMES_MAX, "{name}: {times}");
    }
    let times = taken(&mixed, |text| unigram.encode(text, Specials::AsText).unwrap());
    println!("unigrams, mixed: {times:.1}");
}

/// Of few pieces, so that each character becomes a token, without steps that divide a text into words.
fn unigram() -> Tokenizer {
    let mut json: serde_json::Value =
        serde_json::from_str(include_str!("data/sentencepiece/t5.tokenizer.json")).unwrap();
    json["pre_tokenizer"] = serde_json::Value::Null;
    json["normalizer"] = serde_json::json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let tokenizer_json = json.to_string();
    let bundle = TextBundle { tokenizer_json, chat_template: None, bos_token: None, eos_token: None, add_bos: false };
    Tokenizer::from_bundle(&bundle).unwrap()
}
