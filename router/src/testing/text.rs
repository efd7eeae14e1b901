//! A tokenizer in which every byte is a token, so that tests spell answers as text.

use baton_text::{TextBundle, bundle};
use serde_json::{Map, Value, json};

/// Bytes to the characters of the byte-level alphabet (GPT-2's table).
fn alphabet() -> impl Iterator<Item = char> {
    let printable = |b: &u32| (33..=126).contains(b) || (161..=172).contains(b) || (174..=255).contains(b);
    let mut next = 256;
    (0..256u32).map(move |b| {
        let code = if printable(&b) {
            b
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap()
    })
}

/// Bytes of a bundle with ids 0 to 255 for bytes and 256 for `<|end|>`. `name` makes it differ from others.
pub(crate) fn byte_bundle(name: &str) -> Vec<u8> {
    let template = format!("{name}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}<|end|>{{% endfor %}}");
    byte_bundle_of(template, &["<|end|>"])
}

/// The same with another template, and with these control tokens from id 256 on.
pub(crate) fn byte_bundle_of(template: String, controls: &[&str]) -> Vec<u8> {
    let bytes = alphabet().map(|c| c.to_string());
    let spellings = bytes.chain(controls.iter().map(|&control| control.to_owned()));
    let vocab: Map<String, Value> = spellings.enumerate().map(|(id, of)| (of, json!(id))).collect();
    let added = |(at, content): (usize, &&str)| json!({"id": 256 + at, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let added: Vec<Value> = controls.iter().enumerate().map(added).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    bundle::encode(&TextBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: Some(template),
        bos_token: None,
        eos_token: Some("<|end|>".into()),
        add_bos: false,
    })
}

/// Tokens of a text.
pub(crate) fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}
