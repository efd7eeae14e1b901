//! The model's text bundle, checked before any weight is loaded: if a router refused it, the worker would wait forever.

use crate::error::WorkerError;
use baton_engine::formats::{ModelSource, TextSource};
use baton_text::{ChatTemplate, TextError, Tokenizer, bundle};

/// Where a kind of model stores its text data.
struct Keys {
    tokenizer: &'static str,
    template: &'static str,
}

const GGUF: Keys = Keys { tokenizer: "tokenizer.ggml", template: "tokenizer.chat_template" };
const FOLDER: Keys =
    Keys { tokenizer: "tokenizer.json", template: "chat_template (in chat_template.jinja or tokenizer_config.json)" };

/// The canonical bytes of the model's bundle, loaded once in the way routers do; `None` if the model has no text.
pub(crate) fn bundle(source: &dyn ModelSource) -> Result<Option<Vec<u8>>, WorkerError> {
    let at = |key| move |source| WorkerError::Text { key, source };
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
    match ChatTemplate::from_bundle(&bundle, &tokenizer) {
        Ok(_) | Err(TextError::NoChatTemplate) => Ok(Some(bytes)),
        Err(error) => Err(at(keys.template)(error)),
    }
}
