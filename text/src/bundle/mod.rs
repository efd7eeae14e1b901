//! Text bundles: made from model files, sent as canonical bytes, named by their digest.

mod gguf;
mod ids;

use baton_types::{Digest, TextBundle};

use crate::TextError;
pub use gguf::from_gguf;
pub use ids::{ADDED_BYTES_MAX, ADDED_BYTES_SUM_MAX, ADDED_TOKENS_MAX, VOCAB_MAX, check_ids};

/// Largest bundle that is decoded, in bytes; vocabularies of 256,000 tokens stay under 40 MB.
pub const BYTES_MAX: usize = 128 << 20;

/// The canonical bytes of a bundle: its JSON, fields in the order of the type, without white space.
pub fn encode(bundle: &TextBundle) -> Vec<u8> {
    serde_json::to_vec(bundle).expect("strings and booleans always serialize")
}

/// Decodes canonical bytes. The caller must have checked them against the requested digest.
pub fn decode(bytes: &[u8]) -> Result<TextBundle, TextError> {
    if bytes.len() > BYTES_MAX {
        return Err(TextError::Broken(format!("a bundle of {} bytes is over the limit of {BYTES_MAX}", bytes.len())));
    }
    serde_json::from_slice(bytes).map_err(|e| TextError::Broken(format!("the bundle cannot be read: {e}")))
}

/// The name of a bundle: BLAKE3 of its canonical bytes.
pub fn digest(bytes: &[u8]) -> Digest {
    Digest(*blake3::hash(bytes).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_and_have_one_digest() {
        let bundle = TextBundle {
            tokenizer_json: "{\"a\": \"é\"}".to_owned(),
            chat_template: None,
            bos_token: Some("<s>".to_owned()),
            eos_token: None,
            add_bos: true,
        };
        let bytes = encode(&bundle);
        assert_eq!(decode(&bytes).unwrap(), bundle);
        assert_eq!(digest(&bytes), digest(&encode(&decode(&bytes).unwrap())));
        assert_ne!(digest(&bytes), digest(&encode(&TextBundle { add_bos: false, ..bundle })));
        assert!(decode(b"{\"tokenizer_json\": \"\", \"other\": 1}").is_err());
    }
}
