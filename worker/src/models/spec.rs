//! The values of `--model`.

use super::ModelsError;
use super::hub::HubId;
use baton_engine::formats::RandomModel;
use std::path::{Path, PathBuf};

/// The model that is served if none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// A parsed model name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSpec {
    /// `random:...`, weights from a seed, see [`RandomModel`].
    Random(String),
    /// The model named [`DEFAULT_MODEL`].
    Default,
    /// An existing file or folder.
    Path(PathBuf),
    /// A repository of the hub: `org/name[@revision]`.
    Hub(HubId),
}

impl ModelSpec {
    /// Parses a spec. An existing path takes precedence over a hub id.
    pub fn parse(model: &str) -> Result<Self, ModelsError> {
        let refuse = |problem| Err(ModelsError::Spec { model: model.to_owned(), problem });
        if model.starts_with(RandomModel::PREFIX) {
            return Ok(Self::Random(model.to_owned()));
        }
        let path = Path::new(model);
        if path.exists() {
            return Ok(Self::Path(path.to_owned()));
        }
        if model == DEFAULT_MODEL {
            return Ok(Self::Default);
        }
        let names_a_path = model.starts_with(['/', '.', '~']) || model.ends_with(".gguf");
        if names_a_path {
            return refuse("there is no such file or folder");
        }
        match HubId::parse(model) {
            Some(id) => Ok(Self::Hub(id)),
            None => refuse("this is no model"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs() {
        let hub = |model: &str| match ModelSpec::parse(model).unwrap() {
            ModelSpec::Hub(id) => (id.repository(), id.revision().to_owned()),
            other => panic!("{model} is {other:?}"),
        };
        assert_eq!(hub("org/name"), ("org/name".into(), "main".into()));
        assert_eq!(hub("org/na.me-2@refs/pr/1"), ("org/na.me-2".into(), "refs/pr/1".into()));
        assert_eq!(ModelSpec::parse("smollm2-135m-instruct").unwrap(), ModelSpec::Default);
        assert_eq!(ModelSpec::parse("random:seed=1").unwrap(), ModelSpec::Random("random:seed=1".into()));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            ModelSpec::parse(folder.path().to_str().unwrap()).unwrap(),
            ModelSpec::Path(folder.path().to_owned())
        );
        for bad in [
            "",
            "llama",
            "a/b/c",
            "./none",
            "/none",
            "none.gguf",
            "org/name.gguf",
            "../x/y",
            "org/..",
            "a b/c",
            "org/name@",
        ] {
            let message = ModelSpec::parse(bad).unwrap_err().to_string();
            assert!(message.contains(bad) && message.contains("org/name[@revision]"), "{message}");
        }
    }
}
