//! A tokenizer for random models: one token per byte of input, and meaningless words to generate.

use baton_types::{TextBundle, TokenId};
use serde_json::{Map, Value, json};

/// Special tokens follow the 256 bytes.
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// `<|im_end|>`, which ends a turn.
pub(super) const END: TokenId = 258;

/// A minimal ChatML template.
const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Byte-level BPE without merges: ids 0 to 255 are the bytes, then the special tokens, then words (` w259`, ...) that no input is tokenized
/// to, so that generated text is readable and distinguishable.
pub(super) fn bundle(vocab: usize) -> TextBundle {
    let bytes = (0..=255).map(|byte| byte_symbol(byte).to_string());
    let words = (256 + SPECIALS.len()..vocab).map(|id| format!("{}w{id}", byte_symbol(b' ')));
    let texts = bytes.chain(SPECIALS.map(str::to_owned)).chain(words);
    let entries: Map<String, Value> = texts.zip(0u32..).map(|(text, id)| (text, json!(id))).collect();
    let specials: Vec<Value> = SPECIALS
        .iter()
        .zip(256..)
        .map(|(text, id)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": specials,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": entries, "merges": [],
        },
    });
    TextBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: Some(CHAT_TEMPLATE.to_owned()),
        bos_token: None,
        eos_token: Some(SPECIALS[2].to_owned()),
        add_bos: false,
    }
}

/// GPT-2's byte alphabet: printable Latin-1 characters represent themselves, the others are mapped to U+0100 onwards in order.
fn byte_symbol(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("at most 68 characters after U+0100")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_one_text() {
        let tokenizer: Value = serde_json::from_str(&bundle(400).tokenizer_json).unwrap();
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        let mut ids: Vec<_> = vocab.values().map(|id| id.as_u64().unwrap()).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..400).collect::<Vec<_>>());
        assert_eq!(vocab["Ġ"], 32);
        assert_eq!(vocab["Ċ"], 10);
        assert_eq!(vocab["<|im_end|>"], END);
        assert_eq!(vocab["Ġw399"], 399);
    }
}
