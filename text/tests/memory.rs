//! What encoding a long text takes of memory.

mod common;

use baton_text::Specials;
use common::corpus::Corpus;
use common::families;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Bytes of memory at the peak, for each byte of the text.
fn taken<T>(text: &str, work: impl FnOnce(&str) -> T) -> f64 {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    work(text);
    (MEMORY.peak_usage() - before) as f64 / text.len() as f64
}

#[test]
fn encoding_takes_a_few_bytes_for_each_of_the_text() {
    let mut text: String = Corpus::new(10).take(60_000).flat_map(|line| [line, "\n".to_owned()]).collect();
    text.truncate(text.floor_char_boundary(4 << 20));
    assert!(text.len() > 4_000_000, "{}", text.len());
    for pre in ["smollm", "llama-bpe", "qwen2"] {
        let family = families::gguf(pre);
        let encode = |text: &str| family.ours.encode(text, Specials::AsText).unwrap();
        let (ours, theirs) = (taken(&text, encode), taken(&text, |text| family.theirs(text, Specials::AsText)));
        eprintln!("{pre}: {ours:.1} bytes a byte of text, the library {theirs:.1}");
        assert!(ours < 8.0, "{pre}: {ours}");
        assert!(theirs > 10.0 * ours, "{pre}: the hazard is gone: {theirs}");
        // One word, of which every pair can be merged again and again.
        let word = taken(&"a".repeat(1 << 20), encode);
        assert!(word < 64.0, "{pre}: {word}");
        eprintln!("{pre}: {word:.1} of one word");
    }
}
