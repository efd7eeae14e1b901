//! Unigram tokenizers: those that transformers writes give the ids of the tokenizers crate (`data/sentencepiece/generate.py`
//! made one), but no text spells a token that is not text.

mod common;

use baton_text::grammar::GrammarCompiler;
use baton_text::{Specials, TextBundle, TextError, Tokenizer, bundle};
use baton_types::{Grammar, TokenId};
use common::corpus::Corpus;
use common::families::Family;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

const T5: &str = include_str!("data/sentencepiece/t5.tokenizer.json");

fn bundle_of(json: &Value) -> TextBundle {
    TextBundle {
        tokenizer_json: json.to_string(),
        chat_template: None,
        bos_token: None,
        eos_token: Some("</s>".to_owned()),
        add_bos: false,
    }
}

/// The file with a part of it changed.
fn t5(change: impl FnOnce(&mut Value)) -> TextBundle {
    let mut json = serde_json::from_str(T5).unwrap();
    change(&mut json);
    bundle_of(&json)
}

fn metaspace(prepend_scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split})
}

/// As `T5`, with `Metaspace` alone as pre-tokenizer and decoder.
fn with_metaspace(prepend_scheme: &str, split: bool) -> TextBundle {
    t5(|json| {
        json["pre_tokenizer"] = metaspace(prepend_scheme, split);
        json["decoder"] = metaspace(prepend_scheme, split);
    })
}

static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| {
    let families = [
        ("t5", t5(|_| ())),
        ("always", with_metaspace("always", true)),
        ("first", with_metaspace("first", true)),
        ("never", with_metaspace("never", true)),
        ("whole", with_metaspace("first", false)),
        ("tokens of words", t5(|json| ["many people", "▁▁so▁so"].iter().for_each(|token| add(json, token, false)))),
        ("no piece of a space", no_piece_of_a_space()),
        ("tokens of bytes", byte_fallback()),
    ];
    families.map(|(name, bundle)| Family::new(name, &bundle)).into()
});

/// Adds a token to the end of the vocabulary.
fn add(json: &mut Value, content: &str, special: bool) {
    let vocab = json["model"]["vocab"].as_array_mut().unwrap();
    let id = vocab.len();
    vocab.push(json!([content, 0.0]));
    json["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": special,
    }));
}

/// Unknown characters in two words are then in one run.
fn no_piece_of_a_space() -> TextBundle {
    let mut json: Value = serde_json::from_str(&with_metaspace("first", false).tokenizer_json).unwrap();
    let vocab = json["model"]["vocab"].as_array_mut().unwrap();
    vocab.iter_mut().filter(|piece| piece[0] == "▁").for_each(|piece| piece[0] = json!("§"));
    bundle_of(&json)
}

fn byte_fallback() -> TextBundle {
    t5(|json| {
        let vocab = json["model"]["vocab"].as_array_mut().unwrap();
        vocab.extend((0..=255).map(|byte| json!([format!("<0x{byte:02X}>"), 0.0])));
        json["model"]["byte_fallback"] = json!(true);
        let space = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        json["decoder"] =
            json!({"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
    })
}

/// Whether the crate may find a token in the text that only a template, or a part of a character, may yield.
fn spells_hidden(text: &str) -> bool {
    ["<pad>", "</s>", "<unk>", "<0x"].iter().any(|hidden| text.contains(hidden))
}

fn check(family: &Family, text: &str) {
    let ours = |specials| family.ours.encode(text, specials).unwrap();
    if !spells_hidden(text) {
        family.check(text);
        assert_eq!(ours(Specials::AsText), family.theirs(text, Specials::AsText), "{} {text:?}", family.name);
    }
    let ids = ours(Specials::AsText);
    assert!(ids.iter().all(|id| *id > 1), "{} {text:?} {ids:?}", family.name);
}

#[test]
fn ids_are_those_of_the_library() {
    for family in &*FAMILIES {
        assert_eq!(family.ours.slow_because(), Some("its model is Unigram"));
        Corpus::new(21).take(1_000).chain(["漢 漢 字".to_owned()]).for_each(|line| check(family, &line));
    }
}

#[test]
fn texts_are_those_of_the_library() {
    for family in &*FAMILIES {
        for id in 3..family.ours.vocab_size() as TokenId {
            let (ours, theirs) = (family.ours.decode(&[id, id], true), family.decoded(&[id, id]));
            assert!(ours == theirs || theirs.contains('\u{fffd}'), "{} {id} {ours:?} {theirs:?}", family.name);
        }
        for line in Corpus::new(22).take(300).chain(["▁▁a b".to_owned(), " many people a".to_owned()]) {
            let ids = family.ours.encode(&line, Specials::AsText).unwrap();
            // An answer may begin anywhere.
            for from in 0..ids.len().min(4) {
                let theirs = family.decoded(&ids[from..]);
                // Of a part of a character, the library breaks the other characters of bytes around it, too.
                if theirs.contains('\u{fffd}') {
                    continue;
                }
                assert_eq!(family.ours.decode(&ids[from..], true), theirs, "{} {line:?} {from}", family.name);
                let mut detokenizer = family.ours.detokenizer(true);
                let mut streamed: String = ids[from..].iter().filter_map(|&id| detokenizer.push(id)).collect();
                streamed.extend(detokenizer.finish());
                assert_eq!(streamed, theirs, "{} {line:?} {from}", family.name);
            }
        }
    }
}

#[test]
fn the_first_token_loses_its_spaces_unless_none_are_added() {
    for (scheme, text) in [("always", "many people"), ("first", "many people"), ("never", " many people")] {
        let t = Tokenizer::from_bundle(&with_metaspace(scheme, true)).unwrap();
        let ids = ["▁", "many", "▁people"].map(|token| t.token_id(token).expect(token));
        assert_eq!(t.decode(&ids, true), text, "{scheme}");
        // A special token that is shown is the first one.
        let shown = t.decode(&[&[1], &ids[..]].concat(), false);
        assert_eq!(shown, "</s> many people", "{scheme}");
        assert_eq!(t.decode(&[&[1], &ids[..]].concat(), true), text, "{scheme}");
    }
}

#[test]
fn what_is_no_text_is_not_spelled_by_one() {
    let bundle = byte_fallback();
    let family = Family::new("tokens of bytes", &bundle);
    for (text, hidden) in [("</s>", "</s>"), ("a <0x0A>", "<0x0A>"), ("<unk>", "<unk>"), ("＜/s＞", "</s>")] {
        let id = family.ours.token_id(hidden).unwrap();
        assert!(family.theirs(text, Specials::AsText).contains(&id), "the hazard: {text}");
        let ids = family.ours.encode(text, Specials::AsText).unwrap();
        assert!(!ids.contains(&id), "{text}: {ids:?}");
        assert_eq!(family.ours.decode(&ids, false), text.replace('＜', "<").replace('＞', ">"));
    }
    // A character that no piece has becomes its bytes.
    let ids = family.ours.encode("a\u{1f980}", Specials::AsText).unwrap();
    assert_eq!(family.ours.decode(&ids, false), "a\u{1f980}");
    assert!(ids.contains(&family.ours.token_id("<0xF0>").unwrap()), "{ids:?}");
}

#[test]
fn text_is_bounded_by_its_tokens_only_if_none_is_lost() {
    let bound = |bundle: &TextBundle| Tokenizer::from_bundle(bundle).unwrap().token_bytes_max();
    let plain = |json: &mut Value| {
        json["normalizer"] = Value::Null;
        json["pre_tokenizer"] = metaspace("always", true);
    };
    let mut bytes: Value = serde_json::from_str(&byte_fallback().tokenizer_json).unwrap();
    assert_eq!(bound(&bundle_of(&bytes)), None, "the normalizer drops text");
    plain(&mut bytes);
    assert!(bound(&bundle_of(&bytes)).is_some());
    bytes["model"]["vocab"].as_array_mut().unwrap().pop();
    assert_eq!(bound(&bundle_of(&bytes)), None, "a byte is missing");
    assert_eq!(bound(&t5(plain)), None, "unknown characters in a row are one token");
}

#[test]
fn grammars_see_the_text_of_tokens() {
    for (bundle, line_end) in [(with_metaspace("always", true), "<0x0A>"), (byte_fallback(), "\n")] {
        let mut json: Value = serde_json::from_str(&bundle.tokenizer_json).unwrap();
        let vocab = json["model"]["vocab"].as_array_mut().unwrap();
        if !vocab.iter().any(|piece| piece[0] == "<0x0A>") {
            vocab.push(json!(["<0x0A>", -3.0]));
        }
        let t = Tokenizer::from_bundle(&bundle_of(&json)).unwrap();
        let id = |token: &str| t.token_id(token).unwrap();
        let compiler = GrammarCompiler::new(&t, t.vocab_size(), &[1]).unwrap();
        let allowed = |regex: &str| -> Vec<TokenId> {
            let mut state = compiler.compile(&Grammar::Regex(regex.to_owned())).unwrap().start();
            let mask = state.allowed().unwrap();
            (0..t.vocab_size() as TokenId).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
        };
        assert_eq!(allowed(line_end), if line_end == "\n" { vec![id("<0x0A>")] } else { vec![id("<"), id("<0x0A>")] });
        assert_eq!(allowed(" people"), {
            let mut ids = vec![id("▁"), id("▁people")];
            ids.extend(["▁p", "▁pe", "▁peo", "▁peop", "▁peopl"].iter().filter_map(|piece| t.token_id(piece)));
            ids.extend((line_end == "\n").then(|| id("<0x20>")));
            ids.sort_unstable();
            ids
        });
        assert!(!allowed("(?s:.*)").contains(&0), "a control token");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: &dyn Fn(&mut Value), says: &str| {
        let error = Tokenizer::from_bundle(&t5(change)).unwrap_err();
        assert!(error.to_string().contains(says), "{says:?} is not in: {error}");
        error
    };
    let unsupported = |error| assert!(matches!(error, TextError::Unsupported { what: "decoder", .. }), "{error}");
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    unsupported(refused(&|json| json["decoder"] = byte_level.clone(), "ByteLevel of a Unigram model"));
    unsupported(refused(&|json| json["decoder"]["replacement"] = json!("_"), "decoder `Metaspace`"));
    unsupported(refused(&|json| json["decoder"] = json!({"type": "WordPiece"}), "WordPiece"));
    refused(&|json| json["decoder"]["prepend_scheme"] = json!("last"), "its decoder: unknown variant");
    refused(&|json| json["model"]["unk_id"] = json!(100_000), "UnkIdNotInVocabulary");
    refused(
        &|json| *json.pointer_mut("/normalizer/precompiled_charsmap").unwrap() = json!("AAAA"),
        "charsmap is damaged",
    );
    let error = bundle::check_ids(&t5(|_| ()), 100).unwrap_err();
    assert!(error.to_string().contains("tokens, but the model's vocabulary has 100 ids"), "{error}");
}

proptest! {
    #[test]
    fn arbitrary_text(text in prop_oneof![".{0,64}", any::<String>(), "[ \t\n\u{a0}▁</s>a1é\u{301}각漢]{0,32}"]) {
        FAMILIES.iter().for_each(|family| check(family, &text));
    }
}
