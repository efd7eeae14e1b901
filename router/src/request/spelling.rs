//! Names that a client gave to fields which have several.

use baton_types::RequestError;

/// A field under another name than that in the checks of all APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spelling {
    /// The name in checks.
    pub(crate) checked: &'static str,
    /// The name that the client gave it.
    pub(crate) given: &'static str,
}

/// The error with the client's name for the field at fault.
pub(crate) fn spelled(spellings: &[Spelling], error: RequestError) -> RequestError {
    let of = |spelling: &&Spelling| error.param.as_deref() == Some(spelling.checked);
    let Some(Spelling { checked, given }) = spellings.iter().find(of) else { return error };
    let message = match error.message.strip_prefix(checked) {
        Some(rest) => format!("{given}{rest}"),
        None => error.message,
    };
    RequestError { message, param: Some((*given).to_owned()), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_name_that_the_client_gave() {
        let spellings = [Spelling { checked: "max_tokens", given: "max_output_tokens" }];
        let error = spelled(&spellings, RequestError::invalid("max_tokens", "max_tokens must be at least 1, got 0"));
        assert_eq!(error.param.as_deref(), Some("max_output_tokens"));
        assert_eq!(error.message, "max_output_tokens must be at least 1, got 0");
        let other = || RequestError::invalid("top_p", "top_p must be over 0");
        assert_eq!(spelled(&spellings, other()), other());
    }
}
