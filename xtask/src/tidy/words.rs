//! Words banned from product code, each with what to write instead.

use super::Source;

/// Word, where it is allowed, and what to do instead.
const BANNED: &[(&str, &[&str], &str)] = &[
    ("todo!(", &[], "finish it, or return a typed error"),
    ("unimplemented!(", &[], "finish it, or return a typed error"),
    ("FIXME", &[], "mend it"),
    ("TODO", &[], "do it, or file an issue"),
    ("unbounded_channel", &[], "every queue has a bound"),
    ("unbounded::<", &["kv-transfer/src/calls/thread.rs"], "every queue has a bound"),
    ("unbounded()", &["kv-transfer/src/calls/thread.rs"], "every queue has a bound"),
    ("#![allow(dead_code)]", &[], "delete what is dead"),
    ("std::process::exit", &["cli/", "node/"], "return from main, so that destructors run"),
];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    sources.iter().filter(|s| s.is_product_code() && !s.path.ends_with("build.rs")).flat_map(findings).collect()
}

/// Names that `std::sync::mpsc` gives to channels without a bound.
const UNBOUNDED: [&str; 2] = ["channel", "Sender"];

/// Whether a line of product code takes a channel without a bound from the standard library: rustfmt keeps such imports on one line.
fn takes_unbounded(line: &str) -> bool {
    let Some((_, names)) = line.split_once("std::sync::mpsc") else { return line.contains("mpsc::channel()") };
    names.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|name| UNBOUNDED.contains(&name))
}

fn findings(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in source.product_lines() {
        if takes_unbounded(line) {
            found.push(format!("{}:{number}: `std::sync::mpsc::channel`: every queue has a bound", source.path));
        }
        for (word, allowed, instead) in BANNED {
            if line.contains(word) && !allowed.iter().any(|a| source.path.starts_with(a)) {
                found.push(format!("{}:{number}: `{word}`: {instead}", source.path));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banned_word_is_found() {
        let found = |path: &str, text: &str| check(&[Source { path: path.into(), text: text.into() }]).len();
        assert_eq!(found("router/src/a.rs", "fn f() {\n    todo!()\n}"), 1);
        assert_eq!(found("router/src/a.rs", "// TODO: later"), 1);
        assert_eq!(
            [found("router/src/a.rs", "std::process::exit(1)"), found("cli/src/a.rs", "std::process::exit(1)")],
            [1, 0]
        );
        assert_eq!(found("router/src/tests/a.rs", "todo!()"), 0);
        let queues = ["unbounded_channel::<u8>()", "unbounded::<u8>()", "unbounded()", "mpsc::channel()"];
        let of_std = ["use std::sync::mpsc::{Receiver, channel};", "use std::sync::mpsc::Sender;"];
        for queue in queues.into_iter().chain(of_std) {
            assert_eq!(found("router/src/a.rs", queue), 1, "{queue}");
        }
        for bounded in ["use std::sync::mpsc::{Receiver, SyncSender, sync_channel};", "let (a, b) = mpsc::channel(3);"]
        {
            assert_eq!(found("router/src/a.rs", bounded), 0, "{bounded}");
        }
    }
}
