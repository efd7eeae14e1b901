//! Tokenizers of several families, each with the tokenizers crate's own tokenizer of the same `tokenizer.json`.

use baton_text::{Specials, TextBundle, Tokenizer, bundle};
use baton_types::{GgufTokenizer, TokenId};
use serde_json::{Value, json};

pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) ours: Tokenizer,
    as_text: tokenizers::Tokenizer,
    parse: tokenizers::Tokenizer,
}

impl Family {
    pub(crate) fn new(name: &'static str, bundle: &TextBundle) -> Self {
        let theirs = || bundle.tokenizer_json.parse::<tokenizers::Tokenizer>().unwrap();
        let mut as_text = theirs();
        as_text.set_encode_special_tokens(true);
        Self { name, ours: Tokenizer::from_bundle(bundle).unwrap(), as_text, parse: theirs() }
    }

    pub(crate) fn theirs(&self, text: &str, specials: Specials) -> Vec<TokenId> {
        let tokenizer = if specials == Specials::Parse { &self.parse } else { &self.as_text };
        tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
    }

    pub(crate) fn decoded(&self, ids: &[TokenId]) -> String {
        self.parse.decode(ids, true).unwrap()
    }

    /// Fails unless both give the same result for the text.
    pub(crate) fn check(&self, text: &str) {
        for specials in [Specials::AsText, Specials::Parse] {
            // Without one of these characters, no control token is spelled.
            if specials == Specials::AsText || text.contains(['<', '[']) {
                let (ours, theirs) = (self.ours.encode(text, specials).unwrap(), self.theirs(text, specials));
                assert!(ours == theirs, "{} {specials:?} {text:?}\n  ours {ours:?}\ntheirs {theirs:?}", self.name);
            }
        }
    }
}

/// SmolLM2's vocabulary under the pre-tokenizer that GGUF files call `pre`.
pub(crate) fn gguf(pre: &'static str) -> Family {
    Family::new(pre, &bundle::from_gguf(&GgufTokenizer { pre: pre.to_owned(), ..super::gguf() }).unwrap())
}

/// SmolLM2's vocabulary with a part of its `tokenizer.json` changed.
fn changed(name: &'static str, change: impl FnOnce(&mut Value)) -> Family {
    let mut bundle = bundle::from_gguf(&super::gguf()).unwrap();
    let mut json = serde_json::from_str(&bundle.tokenizer_json).unwrap();
    change(&mut json);
    bundle.tokenizer_json = json.to_string();
    Family::new(name, &bundle)
}

fn split(regex: &str, behavior: &str, invert: bool) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert})
}

fn byte_level(use_regex: bool, add_prefix_space: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// Families that the fast path supports; SmolLM2's own first.
pub(crate) fn fast() -> Vec<Family> {
    let mut families: Vec<Family> = [
        "smollm",
        "gpt-2",
        "llama-bpe",
        "dbrx",
        "qwen2",
        "qwen35",
        "tekken",
        "gpt-4o",
        "deepseek-coder",
        "deepseek-v3",
    ]
    .map(gguf)
    .into();
    families.push(changed("what matches alone, merges as lines", |json| {
        json["pre_tokenizer"] = sequence(vec![split(r"\p{L}+|\P{L}+", "Removed", true), byte_level(false, false)]);
        let line = |pair: &Value| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
        let lines: Vec<Value> = json["model"]["merges"].as_array().unwrap().iter().map(line).collect();
        json["model"]["merges"] = json!(lines);
    }));
    families.push(changed("words without spaces, numbers in one", |json| {
        let words = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false});
        let digits = json!({"type": "Digits", "individual_digits": false});
        json["pre_tokenizer"] = sequence(vec![words, digits, byte_level(true, false)]);
    }));
    families.push(changed("no words", |json| json["pre_tokenizer"] = byte_level(false, false)));
    families.iter().for_each(|family| assert_eq!(family.ours.slow_because(), None, "{}", family.name));
    families
}

/// Families that use the tokenizers crate, and a part of the reason.
pub(crate) fn others() -> Vec<(Family, &'static str)> {
    let splits =
        |step: Value| move |json: &mut Value| json["pre_tokenizer"] = sequence(vec![step, byte_level(false, false)]);
    let possessive = r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s+(?!\S)|\s+";
    let around = r"(?<=\p{L})\p{N}+|\s+(?!\S)|\p{L}+(?!\p{N})|.";
    vec![
        (gguf("deepseek-llm"), "matches places"),
        (changed("unknown step", splits(json!({"type": "Punctuation", "behavior": "Isolated"}))), "Punctuation"),
        (changed("unknown last step", |json| json["pre_tokenizer"] = json!({"type": "Whitespace"})), "not ByteLevel"),
        (changed("prefix space", |json| json["pre_tokenizer"] = byte_level(true, true)), "adds a space"),
        (changed("NFKC", |json| json["normalizer"] = json!({"type": "NFKC"})), "normalizer is NFKC"),
        (changed("looks around", splits(split(around, "Isolated", false))), "splits at"),
        (changed("matches places", splits(split(r"\b\p{L}+|\p{N}", "Isolated", false))), "matches places"),
        (changed("possessive", splits(split(possessive, "Isolated", false))), "possessive"),
        (
            changed("merged with the word before", splits(split(r"\s+", "MergedWithPrevious", false))),
            "MergedWithPrevious",
        ),
        (changed("unknown bytes", |json| json["model"]["unk_token"] = json!("<|endoftext|>")), "bytes that it lacks"),
    ]
}
