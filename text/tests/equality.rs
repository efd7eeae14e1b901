//! The fast way through byte-level models gives the ids that the tokenizers crate gives, on text of every kind.

mod common;

use baton_text::Specials;
use common::corpus::Corpus;
use common::families::{self, Family};
use proptest::prelude::*;
use std::sync::LazyLock;

static FAST: LazyLock<Vec<Family>> = LazyLock::new(families::fast);

fn check_lines(families: &[Family], seed: u64, lines: usize) {
    for line in Corpus::new(seed).take(lines) {
        families.iter().for_each(|family| family.check(&line));
    }
}

/// Every character in turn: after a letter, a space, a mark, a digit, and its like.
fn check_characters(families: &[Family], step: usize) {
    let characters: Vec<char> = ('\0'..=char::MAX).step_by(step).collect();
    for some in characters.chunks(64) {
        let text: String = some.iter().map(|c| format!("a{c} {c}\u{301}{c}1{c}{c}  {c}\n")).collect();
        families.iter().for_each(|family| family.check(&text));
    }
}

#[test]
fn mixed_lines() {
    check_lines(&FAST, 1, 3_000);
    check_characters(&FAST, 41);
}

#[test]
fn mixed_lines_of_families_that_are_left_to_the_library() {
    check_lines(&families::others(), 2, 500);
}

#[test]
#[ignore = "minutes; `make test-full` runs it"]
fn a_million_mixed_lines() {
    let (first, others) = FAST.split_first().unwrap();
    check_lines(std::slice::from_ref(first), 3, 1_000_000);
    check_lines(others, 4, 200_000);
    check_characters(&FAST, 1);
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

/// Why the library's own split is no oracle for the longest texts: its regular expressions give up on a run of a million spaces, and
/// it takes the rest of the text for one word.
#[test]
fn the_library_stops_splitting_behind_a_million_spaces() {
    let family = &FAST[1];
    let text = format!("{}word, word", " ".repeat(1 << 20));
    let end = family.ours.encode(" word, word", Specials::AsText).unwrap();
    assert!(family.ours.encode(&text, Specials::AsText).unwrap().ends_with(&end));
    let theirs = family.theirs(&text, Specials::AsText);
    assert!(!theirs.ends_with(&end), "{:?}", &theirs[theirs.len() - 8..]);
}
