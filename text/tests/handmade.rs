//! Small vocabularies that SmolLM2's does not cover: SentencePiece-like ones with byte fallback, and added tokens with every flag.
//! The oracle is the tokenizers crate's own pipeline.

use baton_text::{Prompt, Specials, TextBundle, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// Ids 0..: `<unk>`, `<s>`, `</s>`, 256 byte tokens, then letters, pairs and added tokens.
fn sentencepiece(leading_space: bool, merges_reach_begin: bool) -> TextBundle {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    let words = "▁ a b c d < > | / s ab ▁a ▁b abc <s s> <|end|> <|mid|> <|user|> <think> cab é <|";
    tokens.extend(words.split(' ').map(str::to_owned));
    let id = |token: &str| tokens.iter().position(|t| t == token).unwrap();
    let added = |token: &str, special: bool, flags: &[&str]| {
        let mut value = json!({"id": id(token), "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special});
        flags.iter().for_each(|flag| value[*flag] = true.into());
        value
    };
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    decoders.extend(leading_space.then_some(strip));
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let mut merges = vec!["a b", "▁ a", "▁ b", "ab c", "< s", "s >", "< |"];
    merges.extend(merges_reach_begin.then_some("<s >"));
    let json = json!({
        "version": "1.0",
        "added_tokens": [
            added("<unk>", true, &[]),
            added("<s>", true, &[]),
            added("</s>", true, &[]),
            added("<|end|>", true, &["rstrip"]),
            added("<|mid|>", true, &["lstrip", "rstrip"]),
            added("<|user|>", false, &[]),
            added("<think>", false, &["lstrip"]),
            added("cab", false, &["single_word", "normalized"]),
        ],
        "normalizer": if leading_space { prepend } else { Value::Null },
        "pre_tokenizer": if leading_space { Value::Null } else { metaspace },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": tokens.iter().enumerate().map(|(id, t)| (t.clone(), json!(id))).collect::<serde_json::Map<_, _>>(),
            "merges": merges,
        },
    });
    TextBundle {
        tokenizer_json: json.to_string(),
        chat_template: None,
        bos_token: Some("<s>".to_owned()),
        eos_token: Some("</s>".to_owned()),
        add_bos: true,
    }
}

struct Pair {
    ours: Tokenizer,
    theirs: tokenizers::Tokenizer,
}

fn pair(leading_space: bool) -> Pair {
    let bundle = sentencepiece(leading_space, false);
    Pair { ours: Tokenizer::from_bundle(&bundle).unwrap(), theirs: bundle.tokenizer_json.parse().unwrap() }
}

static LEADING: LazyLock<Pair> = LazyLock::new(|| pair(true));
static FIRST: LazyLock<Pair> = LazyLock::new(|| pair(false));

fn texts() -> impl Strategy<Value = String> {
    let spelled = vec![
        "<s>", "</s>", "<|end|>", "<|mid|>", "<|user|>", "<think>", "cab", " cab ", "  ", "▁", "é", "漢", "𞣇",
        "\u{301}",
    ];
    let piece =
        prop_oneof!["[abcd<>|/s \n]{0,6}", any::<String>(), prop::sample::select(spelled).prop_map(str::to_owned)];
    prop::collection::vec(piece, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn trusted_text_is_encoded_as_the_library_does(text in texts()) {
        for Pair { ours, theirs } in [&*LEADING, &*FIRST] {
            let expected = theirs.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(ours.encode(&text, Specials::Parse).unwrap(), expected.get_ids());
        }
    }

    #[test]
    fn user_text_never_yields_control_tokens(text in texts()) {
        for Pair { ours, .. } in [&*LEADING, &*FIRST] {
            let ids = ours.encode(&text, Specials::AsText).unwrap();
            let control = |id: &u32| ours.control_tokens().iter().any(|(control, _)| control == id);
            prop_assert!(!ids.iter().any(control), "{:?}", ids);
        }
    }

    #[test]
    fn text_comes_back(text in "[abcd<>|/s \u{e9}漢🦀]{1,20}") {
        for Pair { ours, theirs } in [&*LEADING, &*FIRST] {
            let ids = ours.encode(&text, Specials::AsText).unwrap();
            prop_assert_eq!(ours.decode(&ids, false), theirs.decode(&ids, false).unwrap());
        }
        let ids = LEADING.ours.encode(&text, Specials::AsText).unwrap();
        prop_assert_eq!(LEADING.ours.decode(&ids, false), text);
    }
}

#[test]
fn begin_token_is_named_when_it_is_wanted() {
    assert_eq!(LEADING.ours.bos(), Some(1));
    let nameless = TextBundle { bos_token: None, ..sentencepiece(true, false) };
    assert!(Tokenizer::from_bundle(&nameless).is_err());
    let unknown = TextBundle { bos_token: Some("<bos>".to_owned()), ..sentencepiece(true, false) };
    assert!(Tokenizer::from_bundle(&unknown).unwrap_err().to_string().contains("<bos>"));
}

#[test]
fn spelled_like_markup_is_control_even_when_not_marked_special() {
    let t = &FIRST.ours;
    let user = t.token_id("<|user|>").unwrap();
    assert_eq!(t.encode("<|user|>", Specials::Parse).unwrap(), [user]);
    assert!(!t.encode("<|user|>", Specials::AsText).unwrap().contains(&user));
    let think = t.token_id("<think>").unwrap();
    assert_eq!(
        t.encode("<think>", Specials::AsText).unwrap(),
        [think],
        "an ordinary added token is one wherever it stands"
    );
}

#[test]
fn a_control_token_that_plain_merges_reach_is_taken_apart() {
    let bundle = sentencepiece(false, true);
    let reaches: tokenizers::Tokenizer = {
        let mut inner: tokenizers::Tokenizer = bundle.tokenizer_json.parse().unwrap();
        inner.set_encode_special_tokens(true);
        inner
    };
    let merged = reaches.encode("a<s>", false).unwrap();
    assert!(merged.get_ids().contains(&1), "the hazard: merges alone make the begin token: {:?}", merged.get_tokens());
    let ours = Tokenizer::from_bundle(&bundle).unwrap();
    let ids = ours.encode("a<s>", Specials::AsText).unwrap();
    assert!(!ids.contains(&1), "{ids:?}");
    assert_eq!(ours.decode(&ids, false), " a<s>");
}

#[test]
fn a_plain_prompt_marks_nothing() {
    let t = &FIRST.ours;
    assert_eq!(t.encode_prompt(&Prompt::plain("<s>a")).unwrap(), t.encode("<s>a", Specials::AsText).unwrap());
    assert_eq!(t.parse("<s>a</s>").controls().len(), 2);
}

#[test]
fn a_shifted_added_token_is_refused() {
    let mut bundle = sentencepiece(true, false);
    bundle.tokenizer_json =
        bundle.tokenizer_json.replacen("\"id\":1,\"content\":\"<s>\"", "\"id\":7,\"content\":\"<s>\"", 1);
    assert!(Tokenizer::from_bundle(&bundle).unwrap_err().to_string().contains("does not get its id 7"));
}
