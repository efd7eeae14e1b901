//! How much shorter a text may become before it is tokenized, and whether parts of it may become no token.

use serde_json::Value;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::bytes;
use super::vocab::Decoder;

/// NFC makes 2 bytes of the 7 of U+1FBE U+0308 U+0301, and of no text less than that.
const COMPOSED: usize = 4;
/// A space in the bytes of a token may have been the 3 bytes of "▁" in the text.
const SPACE: usize = 3;

/// Most bytes of text for a byte of a token, by the `normalizer` of a `tokenizer.json`; `None` where it is not known.
pub(super) fn most(normalizer: &Value, decoder: Decoder) -> Option<usize> {
    let space = if decoder == Decoder::ByteLevel { 1 } else { SPACE };
    Some(normalized(normalizer)?.saturating_mul(space))
}

fn normalized(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Some(1),
        Some("NFC") => Some(COMPOSED),
        Some("Prepend") => Some(1),
        Some("Replace") => {
            let (pattern, content) = (normalizer["pattern"]["String"].as_str()?, normalizer["content"].as_str()?);
            (content.len() >= pattern.len()).then_some(1)
        }
        Some("SentencePiece") => {
            let unchanged = normalizer["precompiled_charsmap"] == "";
            (unchanged && normalizer["remove_extra_whitespaces"] == false).then_some(1)
        }
        Some("Sequence") => {
            let mut steps = normalizer["normalizers"].as_array()?.iter();
            steps.try_fold(1, |all: usize, step| all.checked_mul(normalized(step)?))
        }
        _ => None,
    }
}

/// Whether a `pre_tokenizer` of a `tokenizer.json` passes on all of the text; `false` where it is not known.
pub(super) fn passes_all(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split") => pre_tokenizer["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(passes_all)),
        Some(_) => false,
    }
}

/// Whether the model has a token for every byte.
pub(super) fn spells_all(model: &BPE, decoder: Decoder) -> bool {
    let mut all = 0..=u8::MAX;
    match decoder {
        Decoder::ByteLevel => all.all(|byte| model.token_to_id(bytes::char(byte).encode_utf8(&mut [0; 4])).is_some()),
        Decoder::SentencePiece { .. } | Decoder::Metaspace { .. } => {
            model.byte_fallback && all.all(|byte| model.token_to_id(&format!("<0x{byte:02X}>")).is_some())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use unicode_normalization_alignments::UnicodeNormalization as _;

    #[test]
    fn a_text_shrinks_by_what_is_known_of_its_normalizer() {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let regex = json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"});
        let sequence = |steps: &[Value]| json!({"type": "Sequence", "normalizers": steps});
        let sentencepiece = |rules: &str, removes: bool| json!({"type": "SentencePiece", "precompiled_charsmap": rules, "add_dummy_prefix": true, "remove_extra_whitespaces": removes});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        for (normalizer, times) in [
            (Value::Null, Some(1)),
            (json!({"type": "NFC"}), Some(4)),
            (json!({"type": "NFKC"}), None),
            (replace(" ", "▁"), Some(1)),
            (replace("    ", "▁"), None),
            (regex, None),
            (sequence(&[prepend.clone(), replace(" ", "▁")]), Some(1)),
            (sequence(&[json!({"type": "NFC"}), replace(" ", "▁")]), Some(4)),
            (sequence(&[prepend, json!({"type": "Strip"})]), None),
            (sequence(&[sequence(&[])]), Some(1)),
            (sentencepiece("", false), Some(1)),
            (sentencepiece("", true), None),
            (sentencepiece("AA==", false), None),
        ] {
            assert_eq!(most(&normalizer, Decoder::ByteLevel), times, "{normalizer}");
            let decoder = Decoder::SentencePiece { leading_spaces: 1 };
            assert_eq!(most(&normalizer, decoder), times.map(|times| 3 * times), "{normalizer}");
        }
    }

    #[test]
    fn pre_tokenizers_that_drop_text_are_known() {
        let split = |behavior: &str| json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": behavior});
        let sequence = |steps: &[Value]| json!({"type": "Sequence", "pretokenizers": steps});
        for (pre_tokenizer, all) in [
            (Value::Null, true),
            (json!({"type": "Metaspace"}), true),
            (split("Isolated"), true),
            (split("Removed"), false),
            (json!({"type": "Whitespace"}), false),
            (sequence(&[split("MergedWithNext"), json!({"type": "ByteLevel"})]), true),
            (sequence(&[split("Removed"), json!({"type": "ByteLevel"})]), false),
        ] {
            assert_eq!(passes_all(&pre_tokenizer), all, "{pre_tokenizer}");
        }
    }

    #[test]
    fn composition_shrinks_less_than_its_bound() {
        let composed = |text: &str| text.nfc().map(|(c, _)| c).collect::<String>();
        let text = "\u{1FBE}\u{308}\u{301}";
        assert_eq!((text.len(), composed(text).len()), (7, 2));
        // Of the characters that become a part of a composed one, the longest of each.
        let mut longest = std::collections::HashMap::new();
        for c in '\0'..=char::MAX {
            let parts: Vec<char> = c.to_string().nfd().map(|(part, _)| part).collect();
            for part in &parts {
                let bytes = longest.entry(*part).or_insert(0.0_f64);
                *bytes = bytes.max(c.len_utf8() as f64 / parts.len() as f64);
            }
        }
        for c in '\0'..=char::MAX {
            let from: f64 = c.to_string().nfd().map(|(part, _)| longest[&part]).sum();
            let is_composed = composed(&c.to_string()) == c.to_string();
            assert!(!is_composed || from <= (COMPOSED * c.len_utf8()) as f64, "{c:?} may be made of {from} bytes");
        }
    }
}
