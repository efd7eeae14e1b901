//! Errors between text and tokens, and which side caused them.

use baton_types::{ErrorKind, RequestError};

/// Errors of this crate. Those of a bundle occur when it is made or loaded, the others belong to one request.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The model's tokenizer needs a feature that is not implemented; serving it anyway would give wrong tokens.
    #[error("the tokenizer's {what} `{name}` is not supported; supported: {supported}")]
    Unsupported {
        what: &'static str,
        /// Its name in the model's files.
        name: String,
        /// Supported alternatives, in words.
        supported: &'static str,
    },
    /// The bundle, or the files that it is made from, are broken.
    #[error("broken tokenizer: {0}")]
    Broken(String),
    /// The chat template does not compile.
    #[error("the model's chat template does not compile: {0}")]
    TemplateSyntax(String),
    /// The model has no chat template.
    #[error("this model has no chat template; send a plain prompt instead of messages")]
    NoChatTemplate,
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the model's chat template fails on these messages: {0}")]
    TemplateFailed(String),
    /// The template exceeded its limits.
    #[error("the model's chat template takes more than {0} on these messages; send fewer or shorter ones")]
    TemplateTooLong(&'static str),
    /// The last message cannot be continued.
    #[error("continue_final_message: the last message cannot be continued: {0}")]
    NotContinued(&'static str),
    /// A template argument that the server itself sets.
    #[error("`{0}` cannot be set by chat_template_kwargs")]
    ReservedArgument(String),
    /// It cannot be decided which control tokens are the template's own.
    #[error(
        "the messages spell control tokens in a way that this model's chat template makes ambiguous; leave the spellings out"
    )]
    Ambiguous,
    /// The text cannot be tokenized.
    #[error("this text cannot be tokenized: {0}")]
    Encode(String),
    /// A grammar that cannot be compiled or followed.
    #[error("the grammar of the answer is refused: {0}")]
    Grammar(String),
    /// Stop strings that are too many, too long or empty.
    #[error("{0}")]
    Stop(String),
}

impl From<TextError> for RequestError {
    fn from(error: TextError) -> Self {
        let message = error.to_string();
        match error {
            TextError::Unsupported { .. } | TextError::Broken(_) | TextError::TemplateSyntax(_) => {
                Self::new(ErrorKind::Internal, message)
            }
            TextError::NoChatTemplate
            | TextError::Refused(_)
            | TextError::TemplateFailed(_)
            | TextError::TemplateTooLong(_)
            | TextError::NotContinued(_)
            | TextError::Ambiguous => Self::invalid("messages", message),
            TextError::ReservedArgument(_) => Self::invalid("chat_template_kwargs", message),
            TextError::Encode(_) => Self::new(ErrorKind::InvalidRequest, message),
            TextError::Grammar(_) => Self::invalid("grammar", message),
            TextError::Stop(_) => Self::invalid("stop", message),
        }
    }
}
