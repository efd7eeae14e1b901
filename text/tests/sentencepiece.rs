//! Tokenizers of SentencePiece from GGUF metadata give the ids of SentencePiece (fixtures made by `data/sentencepiece/generate.py`).

mod common;

use baton_text::{Specials, Tokenizer, bundle};
use baton_types::{GgufTokenizer, TokenId};
use proptest::prelude::*;
use serde::Deserialize;
use std::sync::LazyLock;

#[derive(Deserialize)]
struct Metadata {
    #[serde(default = "llama")]
    model: String,
    tokens: Vec<String>,
    token_types: Vec<i32>,
    scores: Vec<f32>,
    bos: TokenId,
    eos: TokenId,
    add_space_prefix: Option<bool>,
    remove_extra_whitespaces: Option<bool>,
    /// In hexadecimal.
    #[serde(default)]
    precompiled_charsmap: String,
}

fn llama() -> String {
    "llama".to_owned()
}

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<TokenId>,
    decoded: String,
}

const LLAMA: [&str; 2] =
    [include_str!("data/sentencepiece/llama.json"), include_str!("data/sentencepiece/llama.jsonl")];
const GEMMA: [&str; 2] =
    [include_str!("data/sentencepiece/gemma.json"), include_str!("data/sentencepiece/gemma.jsonl")];

const NMT: [&str; 2] = [include_str!("data/sentencepiece/nmt.json"), include_str!("data/sentencepiece/nmt.jsonl")];
const IDENTITY: [&str; 2] =
    [include_str!("data/sentencepiece/identity.json"), include_str!("data/sentencepiece/identity.jsonl")];

fn gguf(json: &str) -> GgufTokenizer {
    let from: Metadata = serde_json::from_str(json).unwrap();
    let hex = from.precompiled_charsmap;
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    GgufTokenizer {
        model: from.model,
        tokens: from.tokens,
        token_types: from.token_types,
        scores: from.scores,
        bos: Some(from.bos),
        eos: Some(from.eos),
        add_space_prefix: from.add_space_prefix,
        remove_extra_whitespaces: from.remove_extra_whitespaces,
        precompiled_charsmap: (0..hex.len()).step_by(2).map(byte).collect(),
        ..GgufTokenizer::default()
    }
}

fn tokenizer(gguf: &GgufTokenizer) -> Tokenizer {
    Tokenizer::from_bundle(&bundle::from_gguf(gguf).unwrap()).unwrap()
}

const TURNS: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

#[test]
fn ids_and_texts_are_those_of_sentencepiece() {
    for [json, cases] in [LLAMA, GEMMA, NMT, IDENTITY] {
        let t = tokenizer(&gguf(json));
        let controls: Vec<TokenId> = t.control_tokens().iter().map(|(id, _)| *id).collect();
        let cases: Vec<Case> = common::lines(cases);
        assert_eq!(cases.len(), 500);
        for Case { text, ids, decoded } in cases {
            let ours = t.encode(&text, Specials::AsText).unwrap();
            // To SentencePiece, Gemma's tokens of turns are text like any other.
            if ids.iter().any(|id| controls.contains(id)) {
                assert!(TURNS.iter().any(|turn| text.contains(turn)), "{text:?}");
                assert!(!ours.iter().any(|id| controls.contains(id)), "{text:?}");
                continue;
            }
            assert_eq!(ours, ids, "{text:?}");
            // SentencePiece shows an unknown character so.
            assert_eq!(t.decode(&ids, false), decoded.replace(" ⁇ ", "<unk>"), "{text:?}");
        }
    }
}

#[test]
fn parts_between_control_tokens_are_texts_of_their_own() {
    for ([json, _], open, close) in
        [(LLAMA, "<s>", "</s>"), (GEMMA, TURNS[0], TURNS[1]), (NMT, "<s>", "</s>"), (IDENTITY, "<s>", "</s>")]
    {
        let t = tokenizer(&gguf(json));
        let parts = [" word\n", "many people"];
        let whole = format!("{open}{}{close}\n{open}{}", parts[0], parts[1]);
        let id = |token: &str| t.token_id(token).unwrap();
        let text = |text: &str| t.encode(text, Specials::AsText).unwrap();
        let expected =
            [vec![id(open)], text(parts[0]), vec![id(close)], text("\n"), vec![id(open)], text(parts[1])].concat();
        assert_eq!(t.encode(&whole, Specials::Parse).unwrap(), expected, "{whole:?}");
    }
}

#[test]
fn a_space_in_front_and_the_begin_token_are_as_the_file_says() {
    let ids = |change: &dyn Fn(&mut GgufTokenizer)| {
        let mut gguf = gguf(LLAMA[0]);
        change(&mut gguf);
        let t = tokenizer(&gguf);
        (t.encode("word", Specials::AsText).unwrap(), t.decode(&[t.token_id("▁word").unwrap()], false), t.bos())
    };
    let spaced = ids(&|_| ());
    assert_eq!((spaced.1.as_str(), spaced.2), ("word", Some(1)));
    assert_eq!(ids(&|gguf| gguf.add_space_prefix = Some(true)), spaced);
    let plain = ids(&|gguf| gguf.add_space_prefix = Some(false));
    assert!(plain.0 != spaced.0 && plain.1 == " word", "{plain:?}");
    assert_eq!(ids(&|gguf| gguf.add_bos = Some(false)).2, None);
}

#[test]
fn symbols_of_the_user_are_found_in_a_text_with_a_space_in_front() {
    let mut gguf = gguf(LLAMA[0]);
    gguf.tokens.extend(["<tag>", "      "].map(str::to_owned));
    gguf.token_types.extend([4, 4]);
    gguf.scores.extend([0.0, 0.0]);
    let t = tokenizer(&gguf);
    let text = |text: &str| t.encode(text, Specials::AsText).unwrap();
    let id = |token: &str| t.token_id(token).unwrap();
    // Each part is a text of its own, as in llama.cpp.
    assert_eq!(text("word<tag>people"), [text("word"), vec![id("<tag>")], text("people")].concat());
    assert_eq!(text("word      people"), [text("word"), vec![id("      ")], text("people")].concat());
    assert_eq!(t.decode(&text("word<tag>"), true), "word<tag>");
}

#[test]
fn unigrams_follow_the_settings_of_the_file() {
    let ids = |change: &dyn Fn(&mut GgufTokenizer), text: &str| {
        let mut gguf = gguf(NMT[0]);
        change(&mut gguf);
        let t = tokenizer(&gguf);
        let ids = t.encode(text, Specials::AsText).unwrap();
        (t.decode(&ids, false), ids, t.bos())
    };
    let as_is = ids(&|_| (), "  many  ﬁrst ");
    assert_eq!((as_is.0.as_str(), as_is.2), ("many first", None));
    let kept = ids(&|gguf| gguf.remove_extra_whitespaces = None, "  many  ﬁrst ");
    assert_eq!(kept.0, "  many  first ");
    let plain = ids(&|gguf| gguf.add_space_prefix = None, "  many  ﬁrst ");
    assert!(plain.0 == as_is.0 && plain.1 != as_is.1, "{plain:?}");
    let bare = |gguf: &mut GgufTokenizer| (gguf.add_space_prefix, gguf.remove_extra_whitespaces) = (None, None);
    assert_eq!(ids(&bare, " many").0, " many");
    assert_eq!(ids(&|gguf| gguf.precompiled_charsmap.clear(), "ﬁrst").0, "ﬁrst");
    assert_eq!(ids(&|gguf| gguf.add_bos = Some(true), "a").2, Some(1));
}

#[test]
fn types_of_unigram_tokens_decide_what_a_text_spells() {
    let [normal, control, user_defined, unused] = [1, 3, 4, 5];
    let with = |tokens: &[(&str, i32, f32)]| {
        let mut gguf = gguf(NMT[0]);
        for (token, kind, score) in tokens {
            gguf.tokens.push((*token).to_owned());
            gguf.token_types.push(*kind);
            gguf.scores.push(*score);
        }
        tokenizer(&gguf)
    };
    let ids = |t: &Tokenizer, text: &str| t.encode(text, Specials::AsText).unwrap();
    let other = ("y漢", normal, -12.0);
    let without = with(&[other]);
    assert!(!ids(&without, "many漢").contains(&900), "an unknown character costs less than the way with this piece");
    for (kind, score) in [(control, -1000.0), (unused, -1000.0), (user_defined, -1000.0), (normal, -100.0)] {
        let t = with(&[other, ("▁many▁people", kind, score)]);
        for text in ["so many people", "so▁many▁people", "many漢"] {
            let is_spelled = kind == user_defined && text.contains("people");
            assert_eq!(ids(&t, text).contains(&901), is_spelled, "{kind} {text}");
            // A piece of text with a lower score than all others makes unknown characters cost more.
            let same = !is_spelled && (kind != normal || text != "many漢");
            assert_eq!(ids(&t, text) == ids(&without, text), same, "{kind} {text}");
        }
        assert_eq!(t.token_text(901), if kind == unused { "" } else { " many people" });
    }
    let t = with(&[other, ("▁many▁people", normal, -1.0)]);
    assert_eq!(ids(&t, "so many people")[1..], [901], "a piece of two words");
}

fn refused(json: &str, change: fn(&mut GgufTokenizer), says: &str) {
    let mut gguf = gguf(json);
    change(&mut gguf);
    let error = bundle::from_gguf(&gguf).unwrap_err().to_string();
    assert!(error.contains(says), "{says:?} is not in: {error}");
}

#[test]
fn unigrams_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut GgufTokenizer), says: &str| refused(NMT[0], change, says);
    refused(|gguf| gguf.scores.truncate(3), "900 tokens, but 3 scores");
    refused(|gguf| gguf.scores[300] = f32::NAN, "not a number");
    refused(|gguf| gguf.scores[300] = 0.5, "is 0.5, not a log probability");
    refused(|gguf| gguf.scores[300] = f32::NEG_INFINITY, "is -inf, not a log probability");
    refused(|gguf| gguf.token_types.truncate(3), "3 token types");
    refused(|gguf| gguf.token_types[0] = 1, "0 unknown tokens");
    refused(|gguf| gguf.token_types[300] = 2, "2 unknown tokens");
    refused(|gguf| gguf.token_types[13] = 5, "tokens for 255 of 256 bytes");
    refused(|gguf| gguf.token_types[300] = 6, "of type byte, but spells none");
    refused(|gguf| gguf.tokens[300] = "▁▁a".to_owned(), "piece `▁▁a` is not supported");
    refused(|gguf| gguf.precompiled_charsmap.truncate(900), "precompiled_charsmap is damaged");
    refused(|gguf| (gguf.bos, gguf.add_bos) = (None, Some(true)), "begin token but names none");
    refused(|gguf| gguf.tokens[300] = gguf.tokens[301].clone(), "occurs twice");
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: fn(&mut GgufTokenizer), says: &str| refused(LLAMA[0], change, says);
    refused(|gguf| gguf.scores.truncate(3), "900 tokens, but 3 scores");
    refused(|gguf| gguf.scores[300] = f32::NAN, "not a number");
    refused(|gguf| gguf.token_types.truncate(3), "3 token types");
    refused(|gguf| gguf.bos = None, "begin token but names none");
    refused(|gguf| gguf.tokens[300] = gguf.tokens[301].clone(), "occurs twice");
}

static ALL: LazyLock<Vec<Tokenizer>> =
    LazyLock::new(|| [LLAMA, GEMMA, NMT, IDENTITY].map(|[json, _]| tokenizer(&gguf(json))).into());

proptest! {
    #[test]
    fn user_text_never_yields_control_tokens(parts in prop::collection::vec(prop_oneof![
        prop::sample::select(vec!["<s>", "</s>", "＜/s＞", "<unk>", "<pad>", "<bos>", "<", "s>", "▁", "<start_of_turn>", "_of_turn>", "<0x0A>"])
            .prop_map(str::to_owned),
        ".{0,8}",
    ], 0..12)) {
        for t in &*ALL {
            let text = parts.concat();
            for id in t.encode(&text, Specials::AsText).unwrap() {
                prop_assert!(!t.is_special(id), "{text:?} has {id}");
            }
        }
    }
}
