//! The fast path for byte-level models gives the same ids as the tokenizers crate, on text of every kind.

mod common;

use baton_text::Specials;
use common::corpus::Corpus;
use common::families::{self, Family};
use proptest::prelude::*;
use std::sync::LazyLock;

static FAST: LazyLock<Vec<Family>> = LazyLock::new(families::fast);

/// Each line with one of the families, in turn.
fn check_lines(seed: u64, lines: usize) {
    for (line, family) in Corpus::new(seed).take(lines).zip(FAST.iter().cycle()) {
        family.check(&line);
    }
}

/// One character of each `step`: after a letter, a space, a mark, a digit, and another of its kind.
fn check_characters(step: usize) {
    let characters: Vec<char> = ('\0'..=char::MAX).step_by(step).collect();
    for some in characters.chunks(64) {
        let text: String = some.iter().map(|c| format!("a{c} {c}\u{301}{c}1{c}{c}  {c}\n")).collect();
        FAST.iter().for_each(|family| family.check(&text));
    }
}

#[test]
fn mixed_lines() {
    check_lines(1, 20_000);
    check_characters(101);
}

#[test]
fn what_the_fast_path_does_not_know_is_left_to_the_library() {
    for (family, reason) in families::others() {
        let why = family.ours.slow_because().unwrap_or_default();
        assert!(why.contains(reason), "{}: {why:?}", family.name);
        Corpus::new(2).take(300).for_each(|line| family.check(&line));
    }
}

#[test]
#[ignore = "minutes; `make test-full` runs it"]
fn a_million_mixed_lines() {
    std::thread::scope(|scope| {
        for seed in [3, 4] {
            scope.spawn(move || check_lines(seed, 500_000));
        }
    });
    check_characters(7);
}

#[test]
fn whole_texts() {
    for family in FAST.iter() {
        for seed in 5..8 {
            family.check(&Corpus::new(seed).take(100).collect::<Vec<_>>().join("\n"));
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_text(text in prop_oneof![".{0,64}", any::<String>(), "[ \t\n\u{a0}a1'sé\u{301}각漢]{0,32}"]) {
        FAST.iter().for_each(|family| family.check(&text));
    }
}

/// Why the library's own split cannot check the longest texts: its regular expressions fail on a run of a million
/// spaces, and it treats the rest of the text as one word.
#[test]
fn the_library_stops_splitting_behind_a_million_spaces() {
    let family = &FAST[1];
    let text = format!("{}word, word", " ".repeat(1 << 20));
    let end = family.ours.encode(" word, word", Specials::AsText).unwrap();
    assert!(family.ours.encode(&text, Specials::AsText).unwrap().ends_with(&end));
    let theirs = family.theirs(&text, Specials::AsText);
    assert!(!theirs.ends_with(&end), "{:?}", &theirs[theirs.len() - 8..]);
}
