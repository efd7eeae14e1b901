//! The model's text bundle, checked before any weight is loaded: if a router refused it, the worker would wait forever.

use crate::error::WorkerError;
use baton_engine::formats::{ModelSource, TextSource};
use baton_text::grammar::GrammarCompiler;
use baton_text::{ChatTemplate, TextError, Tokenizer, bundle};
use baton_types::TextBundle;

/// Where a kind of model stores its text data.
struct Keys {
    tokenizer: &'static str,
    template: &'static str,
}

const GGUF: Keys = Keys { tokenizer: "tokenizer.ggml", template: "tokenizer.chat_template" };
const FOLDER: Keys =
    Keys { tokenizer: "tokenizer.json", template: "chat_template (in chat_template.jinja or tokenizer_config.json)" };

/// What a worker keeps of its model's text.
pub(crate) struct ModelText {
    /// The canonical bytes of the bundle.
    pub(crate) bundle: Vec<u8>,
    /// `None` if the model has no end token.
    pub(crate) grammars: Option<GrammarCompiler>,
}

/// A model's text data, parsed.
struct Parsed {
    keys: Keys,
    bundle: TextBundle,
    /// Its canonical bytes.
    bytes: Vec<u8>,
    tokenizer: Tokenizer,
}

fn at(key: &'static str) -> impl Fn(TextError) -> WorkerError {
    move |source| WorkerError::Text { key, source }
}

fn parse(source: &dyn ModelSource) -> Result<Option<Parsed>, WorkerError> {
    let (keys, bundle) = match source.text() {
        TextSource::Gguf(gguf) => (GGUF, bundle::from_gguf(&gguf).map_err(at(GGUF.tokenizer))?),
        TextSource::Bundle(bundle) => (FOLDER, *bundle),
        TextSource::None => return Ok(None),
    };
    let bytes = bundle::encode(&bundle);
    let tokenizer = bundle::decode(&bytes).and_then(|bundle| {
        bundle::check_ids(&bundle, source.spec().vocab)?;
        Tokenizer::from_bundle(&bundle)
    });
    let tokenizer = tokenizer.map_err(at(keys.tokenizer))?;
    Ok(Some(Parsed { keys, bundle, bytes, tokenizer }))
}

/// The model's tokenizer; `None` if it has none.
pub(crate) fn tokenizer(source: &dyn ModelSource) -> Result<Option<Tokenizer>, WorkerError> {
    Ok(parse(source)?.map(|parsed| parsed.tokenizer))
}

/// The model's text, loaded once in the way routers do; `None` if it has none.
pub(crate) fn load(source: &dyn ModelSource) -> Result<Option<ModelText>, WorkerError> {
    let Some(Parsed { keys, bundle, bytes, tokenizer }) = parse(source)? else { return Ok(None) };
    match ChatTemplate::from_bundle(&bundle, &tokenizer) {
        Ok(_) | Err(TextError::NoChatTemplate) => {}
        Err(error) => return Err(at(keys.template)(error)),
    }
    let grammars = match GrammarCompiler::new(&tokenizer, source.spec().vocab, source.end_tokens()) {
        Ok(grammars) => Some(grammars),
        Err(TextError::Grammar(reason)) => {
            tracing::info!(reason, "serves no grammars");
            None
        }
        Err(error) => return Err(at(keys.tokenizer)(error)),
    };
    Ok(Some(ModelText { bundle: bytes, grammars }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::formats::GgufModel;
    use baton_text::Specials;
    use std::path::Path;

    #[test]
    fn tokenizers_of_sentencepiece_are_loaded_from_gguf_files() {
        for (name, bos, text, first) in [
            // It puts a space in front.
            ("llama", Some(1), " people", "  "),
            ("gemma", Some(2), " people", " people"),
            // It puts a space in front, and drops that of the text.
            ("nmt", None, "people", " people"),
            ("identity", None, " people", " people"),
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/sentencepiece");
            let model = GgufModel::open(&folder.join(name).with_extension("gguf"), None).unwrap();
            let loaded = load(&model).unwrap().expect("it has a tokenizer");
            assert!(loaded.grammars.is_some(), "{name}");
            let tokenizer = Tokenizer::from_bundle(&bundle::decode(&loaded.bundle).unwrap()).unwrap();
            assert_eq!((tokenizer.bos(), tokenizer.vocab_size()), (bos, 900), "{name}");
            let ids = tokenizer.encode(" people", Specials::AsText).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), text, "{name}");
            assert_eq!(tokenizer.token_text(ids[0]), first, "{name}");
        }
    }
}
