//! SmolLM2's tokenizer as in its GGUF file, from a compact form: 17 control tokens, the byte alphabet that the
//! vocabulary has (235 of 256), and the merges, each of which adds one token.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod corpus;
pub(crate) mod families;

use baton_text::{TextBundle, Tokenizer, bundle};
use baton_types::GgufTokenizer;
use serde::Deserialize;

const VOCAB: &str = include_str!("../data/smollm2.txt");
pub(crate) const TEMPLATE: &str = include_str!("../data/smollm2.jinja");

pub(crate) fn gguf() -> GgufTokenizer {
    let (controls, rest) = VOCAB.split_once("\n\n").expect("three parts");
    let (alphabet, merges) = rest.split_once('\n').expect("three parts");
    let controls: Vec<String> = controls.lines().map(str::to_owned).collect();
    let merges: Vec<String> = merges.lines().map(str::to_owned).collect();
    let mut tokens = controls.clone();
    tokens.extend(alphabet.chars().map(String::from));
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    assert_eq!((tokens.len(), merges.len()), (49152, 48900));
    let token_types = (0..tokens.len()).map(|id| if id < controls.len() { 3 } else { 1 }).collect();
    GgufTokenizer {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens,
        token_types,
        merges,
        bos: Some(1),
        eos: Some(2),
        add_bos: Some(false),
        chat_template: Some(TEMPLATE.to_owned()),
        ..GgufTokenizer::default()
    }
}

pub(crate) fn bundle_with(template: &str) -> TextBundle {
    bundle::from_gguf(&GgufTokenizer { chat_template: Some(template.to_owned()), ..gguf() }).unwrap()
}

pub(crate) fn tokenizer(pre: &str) -> Tokenizer {
    Tokenizer::from_bundle(&bundle::from_gguf(&GgufTokenizer { pre: pre.to_owned(), ..gguf() }).unwrap()).unwrap()
}

pub(crate) fn lines<T: for<'a> Deserialize<'a>>(jsonl: &str) -> Vec<T> {
    jsonl.lines().map(|line| serde_json::from_str(line).expect("one object a line")).collect()
}
