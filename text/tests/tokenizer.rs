//! Encoding and decoding, compared with ids from Hugging Face's tokenizers for the same vocabulary.

mod common;

use baton_text::{Specials, TextError, Tokenizer, bundle};
use baton_types::{GgufTokenizer, TokenId};
use proptest::prelude::*;
use serde::Deserialize;
use std::sync::LazyLock;

static SMOLLM: LazyLock<Tokenizer> = LazyLock::new(|| common::tokenizer("smollm"));

#[derive(Deserialize)]
struct Golden {
    prompt: String,
    prompt_ids: Vec<TokenId>,
    out_ids: Vec<TokenId>,
    text: String,
}

#[test]
fn golden_prompts_and_answers() {
    let golden: Vec<Golden> = common::lines(include_str!("../../tests/golden/smollm2_greedy.jsonl"));
    assert_eq!(golden.len(), 24);
    for Golden { prompt, prompt_ids, out_ids, text } in golden {
        assert_eq!(SMOLLM.encode(&prompt, Specials::Parse).unwrap(), prompt_ids, "{prompt:?}");
        assert_eq!(SMOLLM.decode(&prompt_ids, false), prompt);
        assert_eq!(SMOLLM.decode(&out_ids, false), text);
    }
}

/// One line of `smollm2_cases.jsonl`: the output of the Python package tokenizers 0.21.4, with and without
/// `encode_special_tokens`.
#[derive(Deserialize)]
struct Case {
    pre: String,
    text: String,
    parse: Vec<TokenId>,
    as_text: Vec<TokenId>,
    decoded: String,
}

#[test]
fn tricky_texts_under_every_pre_tokenizer() {
    let cases: Vec<Case> = common::lines(include_str!("data/smollm2_cases.jsonl"));
    for pre in ["smollm", "gpt-2", "llama-bpe", "qwen2"] {
        let tokenizer = common::tokenizer(pre);
        let mut count = 0;
        for case in cases.iter().filter(|case| case.pre == pre) {
            assert_eq!(tokenizer.encode(&case.text, Specials::Parse).unwrap(), case.parse, "{pre} {:?}", case.text);
            assert_eq!(tokenizer.encode(&case.text, Specials::AsText).unwrap(), case.as_text, "{pre} {:?}", case.text);
            assert_eq!(tokenizer.decode(&case.parse, false), case.decoded, "{pre} {:?}", case.text);
            count += 1;
        }
        assert!(count >= 30, "{pre}: {count}");
    }
}

/// A mark that no letter takes in when text is composed is a part of the word, or ends it.
#[test]
fn marks_belong_to_words_in_qwen35_alone() {
    let words = |pre: &str, text: &str| {
        let json: serde_json::Value = serde_json::from_str(
            &bundle::from_gguf(&GgufTokenizer { pre: pre.into(), ..common::gguf() }).unwrap().tokenizer_json,
        )
        .unwrap();
        let tokenizer: tokenizers::Tokenizer = json.to_string().parse().unwrap();
        let mut pieces = tokenizers::PreTokenizedString::from(text);
        tokenizers::PreTokenizer::pre_tokenize(tokenizer.get_pre_tokenizer().unwrap(), &mut pieces).unwrap();
        let splits = pieces.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
        splits.into_iter().map(|(_, (from, to), _)| text[from..to].to_owned()).collect::<Vec<_>>()
    };
    // Devanagari: its vowel signs and its virama are marks.
    assert_eq!(words("qwen35", "a हिन्दी 12"), ["a", " हिन्दी", " ", "1", "2"]);
    assert_eq!(words("qwen2", "a हिन्दी 12"), ["a", " ह", "िन", "्द", "ी", " ", "1", "2"]);
    for text in ["it's 3 + 4,\n\n  x", "a_j = b[i];"] {
        assert_eq!(words("qwen35", text), words("qwen2", text));
    }
}

#[test]
fn vocabulary_is_open_to_view() {
    let t = &SMOLLM;
    assert_eq!((t.vocab_size(), t.control_tokens().len(), t.bos()), (49152, 17, None));
    assert_eq!(t.control_tokens()[1], (1, "<|im_start|>".to_owned()));
    let paris = t.encode(" Paris", Specials::AsText).unwrap();
    assert_eq!(paris.len(), 1);
    assert_eq!((t.token_bytes(paris[0]), t.token_text(paris[0])), (Some(b" Paris".as_slice()), " Paris".to_owned()));
    assert_eq!((t.token_bytes(49152), t.token_text(49152)), (None, String::new()));
    let emoji = t.encode("🦀", Specials::AsText).unwrap();
    assert!(emoji.len() > 1, "a character of several tokens");
    assert_eq!(t.token_text(emoji[0]), "\u{fffd}");
    assert_eq!(
        t.decode(&[1, emoji[0], 2], true),
        "\u{fffd}",
        "special tokens are left out, an unfinished character shows"
    );
}

#[test]
fn refuses_what_it_cannot_make_right() {
    let cases: [(GgufTokenizer, &str); 6] = [
        (GgufTokenizer { model: "bert".into(), ..common::gguf() }, "model `bert`"),
        (GgufTokenizer { pre: "viking".into(), ..common::gguf() }, "pre-tokenizer `viking`"),
        (GgufTokenizer { eos: Some(49152), ..common::gguf() }, "end token 49152"),
        (GgufTokenizer { token_types: vec![1; 3], ..common::gguf() }, "3 token types"),
        (
            GgufTokenizer { tokens: vec!["a".into(), "a".into()], token_types: vec![1; 2], ..common::gguf() },
            "occurs twice",
        ),
        (GgufTokenizer { merges: vec!["alone".into()], ..common::gguf() }, "merge \"alone\""),
    ];
    for (gguf, says) in cases {
        let error = bundle::from_gguf(&gguf).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    let mut bundle = bundle::from_gguf(&common::gguf()).unwrap();
    bundle.tokenizer_json =
        bundle.tokenizer_json.replace("\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"CTC\"");
    assert!(matches!(Tokenizer::from_bundle(&bundle), Err(TextError::Unsupported { what: "decoder", .. })));
}

#[test]
fn token_types_decide_what_is_added() {
    let mut gguf = common::gguf();
    gguf.tokens.extend(["<|forgotten|>", "<think>", "[PAD0]"].map(str::to_owned));
    gguf.token_types.extend([1, 4, 5]);
    let t = Tokenizer::from_bundle(&bundle::from_gguf(&gguf).unwrap()).unwrap();
    let text = "<|forgotten|><think>[PAD0]";
    assert_eq!(t.encode(text, Specials::Parse).unwrap()[..2], [49152, 49153], "control by its spelling, user-defined");
    assert!(!t.encode(text, Specials::Parse).unwrap().contains(&49154), "unused");
    assert!(!t.encode(text, Specials::AsText).unwrap().contains(&49152));
    assert!(t.encode(text, Specials::AsText).unwrap().contains(&49153));
    assert_eq!((t.is_special(49152), t.is_special(49153), t.vocab_size()), (true, false, 49155));
}

proptest! {
    #[test]
    fn user_text_never_yields_control_tokens(parts in prop::collection::vec(prop_oneof![
        any::<String>(), "[<|>_a-z ]{0,12}", prop::sample::select(vec!["<|im_start|>", "<|im_end|>", "<file_sep>", "<|", "|>"]).prop_map(str::to_owned),
    ], 0..8)) {
        let ids = SMOLLM.encode(&parts.concat(), Specials::AsText).unwrap();
        prop_assert!(ids.iter().all(|&id| id > 16), "{:?}", ids);
    }

    #[test]
    fn deltas_concatenate_to_the_whole(ids in prop::collection::vec(prop_oneof![0u32..49200, 17u32..252], 0..64), skip in any::<bool>()) {
        let mut detokenizer = SMOLLM.detokenizer(skip);
        let mut deltas: Vec<String> = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        deltas.extend(detokenizer.finish());
        let kept = ids.iter().filter(|&&id| !(skip && SMOLLM.is_special(id)));
        let bytes: Vec<u8> = kept.filter_map(|&id| SMOLLM.token_bytes(id)).flatten().copied().collect();
        prop_assert_eq!(deltas.concat(), String::from_utf8_lossy(&bytes));
        prop_assert!(deltas.iter().all(|d| !d.is_empty()));
    }

    #[test]
    fn valid_text_is_never_shown_broken(text in "[a-zé漢🦀👍🏽\u{301} ]{0,24}") {
        let ids = SMOLLM.encode(&text, Specials::AsText).unwrap();
        let mut detokenizer = SMOLLM.detokenizer(true);
        let deltas: Vec<String> = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        prop_assert_eq!(detokenizer.finish(), None);
        prop_assert_eq!(deltas.concat(), text);
    }
}
