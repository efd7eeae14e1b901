//! The pre-tokenizers that GGUF files name, as parts of a `tokenizer.json`. A name is listed only if the model's own
//! `tokenizer.json` is known to have the same split: a nearly right split gives plausible but wrong tokens.

use serde_json::{Value, json};

use crate::TextError;

/// The settings that a name means.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// Whether a word that is a token is used whole, without applying merges.
    pub(super) ignore_merges: bool,
    /// Whether the begin token is added if the file does not say.
    pub(super) add_bos: bool,
}

/// The split of Llama 3: words, digits by up to three, punctuation with its line ends, white space.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The split of Qwen 2 and 2.5: as Llama 3, digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The split of Qwen 3.5 (`tokenization_qwen3_5.py` of transformers 5.24): as Qwen 2, combining marks with their letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The split of Mistral's Tekken: words by their case, digits one by one, line ends also with slashes.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// OpenAI's `o200k`: as Tekken, with English contractions, digits by up to three.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of Chinese, Japanese and Korean in the older splits of DeepSeek. The ranges are theirs.
const DEEPSEEK_CJK: &str = "[一-龥\u{800}-一가-\u{d7ff}]+";
/// Words of letters with cases in DeepSeek LLM's split. The ranges are its own; those that normalization would change are numbers.
const CASED: &str = "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
/// The last of DeepSeek V3's three splits.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// Finds a pre-tokenizer by the file's `tokenizer.ggml.pre`.
pub(super) fn named(name: &str) -> Result<PreTokenizer, TextError> {
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "pretokenizers": steps});
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let by = |regex: &str| sequence(vec![split(regex), byte_level(false)]);
    let plain = |pre_tokenizer: Value| PreTokenizer {
        normalizer: Value::Null,
        pre_tokenizer,
        ignore_merges: false,
        add_bos: false,
    };
    let whole_words =
        |pre_tokenizer: Value| PreTokenizer { ignore_merges: true, add_bos: true, ..plain(pre_tokenizer) };
    Ok(match name {
        "gpt-2" | "gpt2" => plain(byte_level(true)),
        // Granite's files say `refact`.
        "smollm" | "starcoder" | "refact" => {
            plain(sequence(vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)]))
        }
        "llama-bpe" | "llama3" | "llama-v3" => whole_words(by(LLAMA3)),
        // Llama 3's without a begin token: SmolLM3's.
        "smaug-bpe" => PreTokenizer { ignore_merges: true, ..plain(by(LLAMA3)) },
        // OLMo 2's files say `dbrx`.
        "dbrx" => plain(by(LLAMA3)),
        "qwen2" => PreTokenizer { normalizer: json!({"type": "NFC"}), ..plain(by(QWEN2)) },
        "qwen35" => PreTokenizer { normalizer: json!({"type": "NFC"}), ..plain(by(QWEN35)) },
        "tekken" => whole_words(by(TEKKEN)),
        "gpt-4o" => plain(by(O200K)),
        "deepseek-coder" => {
            let splits = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK];
            let digits = json!({"type": "Digits", "individual_digits": true});
            plain(sequence(splits.into_iter().map(split).chain([digits, byte_level(false)]).collect()))
        }
        // DeepSeek V2's files, too.
        "deepseek-llm" => {
            let marks = "\\s?[!-/:-~！-／：-～\u{2018}-\u{201f}\u{3000}-。]+";
            let splits = [r"[\r\n]", CASED, marks, r"\s+$", DEEPSEEK_CJK, r"\p{N}+"];
            plain(sequence(splits.into_iter().map(split).chain([byte_level(false)]).collect()))
        }
        "deepseek-v3" => {
            let kana = "[一-龥\u{3040}-ゟ゠-ヿ]+";
            plain(sequence(vec![split(r"\p{N}{1,3}"), split(kana), split(DEEPSEEK3), byte_level(false)]))
        }
        _ => {
            return Err(TextError::Unsupported {
                what: "pre-tokenizer",
                name: name.to_owned(),
                supported: "gpt-2, smollm, starcoder, refact, llama-bpe, smaug-bpe, dbrx, qwen2, qwen35, tekken, gpt-4o, deepseek-coder, deepseek-llm, deepseek-v3",
            });
        }
    })
}
