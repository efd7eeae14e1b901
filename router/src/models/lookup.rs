//! Resolves the model name of a request to a model, or to an adapter and its model.

use crate::workers::ServedModel;
use baton_types::{AdapterCard, ErrorKind, RequestError, shown};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Adapters that an error names; a list of all may be long.
const ADAPTERS_NAMED_MAX: usize = 32;

/// What a name stands for.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    /// The model that computes.
    pub(crate) model: Arc<ServedModel>,
    /// The adapter, if the name is one's.
    pub(crate) adapter: Option<AdapterCard>,
}

/// What `name` stands for: a model, or else an adapter of one. An empty name means the only model. If several models share a name, ids win
/// over aliases; further ties are decided by key, so that all routers decide alike.
pub(crate) fn lookup(models: &[Arc<ServedModel>], name: &str) -> Result<Named, RequestError> {
    if models.is_empty() {
        return Err(RequestError::new(ErrorKind::Unavailable, "no decode worker is ready to serve; try again later"));
    }
    if name.is_empty() {
        // During a rolling change, workers may offer several variants of one model.
        let id = &models[0].card.id;
        if models.iter().all(|m| m.card.id == *id) {
            return lookup(models, id);
        }
        return Err(RequestError::invalid(
            "model",
            format!("several models are served, name one of {}", names(models)),
        ));
    }
    let called = models.iter().filter(|m| m.card.names().any(|n| n == name));
    let best = called.min_by_key(|m| (m.card.id != name, &m.key));
    if let Some(model) = best {
        return Ok(Named { model: model.clone(), adapter: None });
    }
    let adapted = models.iter().filter_map(|model| Some((model, *model.adapters.get(name)?)));
    match adapted.min_by_key(|(model, _)| &model.key) {
        Some((model, digest)) => {
            Ok(Named { model: model.clone(), adapter: Some(AdapterCard { name: name.to_owned(), digest }) })
        }
        None => Err(RequestError {
            param: Some("model".into()),
            ..RequestError::new(
                ErrorKind::ModelNotFound,
                format!("no model {} here; served: {}", shown(name), names(models)),
            )
        }),
    }
}

/// The public names of all models, and of adapters, without duplicates.
fn names(models: &[Arc<ServedModel>]) -> String {
    let mut names: BTreeSet<&str> = models.iter().flat_map(|m| m.card.public_names()).collect();
    let adapters: BTreeSet<&str> = models.iter().flat_map(|m| m.adapters.keys().map(String::as_str)).collect();
    names.extend(adapters.iter().copied().take(ADAPTERS_NAMED_MAX));
    let mut names = names.into_iter().collect::<Vec<_>>().join(", ");
    if let Some(more) = adapters.len().checked_sub(ADAPTERS_NAMED_MAX).filter(|more| *more > 0) {
        names += &format!(" and {more} more adapters, see /v1/models");
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use crate::workers::ModelKey;
    use baton_types::{Digest, Role};
    use std::collections::BTreeMap;

    fn model(id: &str, served: &[&str]) -> Arc<ServedModel> {
        let mut card = record(Role::Decode, "d").card;
        card.id = id.into();
        card.served_names = served.iter().map(|s| (*s).to_owned()).collect();
        Arc::new(ServedModel {
            key: ModelKey::from(&card),
            card,
            text: None,
            tokens_max: 10,
            since: std::time::Instant::now(),
            adapters: BTreeMap::new(),
        })
    }

    #[test]
    fn names_of_files_are_told_to_nobody() {
        let file = "SmolLM2-135M-Instruct.Q4_1";
        let models = vec![model(file, &[file, "smollm2", "small"]), model("org/plain", &["org/plain"])];
        let told = lookup(&models, "nobody").unwrap_err().message;
        assert!(told.ends_with("served: org/plain, small, smollm2"), "{told}");
        let told = lookup(&models, "").unwrap_err().message;
        assert!(told.ends_with("name one of org/plain, small, smollm2"), "{told}");
        assert_eq!(lookup(&models, file).unwrap().model.card.id, file, "who knows it may go on asking for it");
    }

    #[test]
    fn adapters_are_named_like_models() {
        let with = |model: Arc<ServedModel>, adapters: &[&str]| {
            let digest = |name: &&str| ((*name).to_owned(), Digest([name.as_bytes()[0]; 32]));
            Arc::new(ServedModel { adapters: adapters.iter().map(digest).collect(), ..(*model).clone() })
        };
        let models = vec![with(model("a", &["a", "chat"]), &["sql", "b"]), with(model("b", &["b"]), &["sql", "tone"])];
        let found = |name: &str| {
            let Named { model, adapter } = lookup(&models, name).unwrap();
            (model.card.id.clone(), adapter.map(|adapter| (adapter.name, adapter.digest.0[0])))
        };
        assert_eq!(found("tone"), ("b".into(), Some(("tone".into(), b't'))));
        assert_eq!(found("sql").0, "a", "decided by key");
        assert_eq!(found("b"), ("b".into(), None), "a model's name is the model's");
        let told = lookup(&models, "nobody").unwrap_err();
        assert_eq!(told.kind, ErrorKind::ModelNotFound);
        assert!(told.message.ends_with("served: b, chat, sql, tone"), "{told}");
        let many: Vec<String> = (10..50).map(|n| format!("x{n}")).collect();
        let many = vec![with(model("a", &["a"]), &many.iter().map(String::as_str).collect::<Vec<_>>())];
        let told = lookup(&many, "nobody").unwrap_err().message;
        assert!(told.ends_with("x41 and 8 more adapters, see /v1/models"), "{told}");
    }

    #[test]
    fn names_are_found() {
        let two = || vec![model("a", &["a", "chat"]), model("b", &["b", "a"])];
        let cases = [
            (two(), "a", Ok("a")),
            (two(), "b", Ok("b")),
            (two(), "chat", Ok("a")),
            (two(), "c", Err(ErrorKind::ModelNotFound)),
            (two(), "", Err(ErrorKind::InvalidRequest)),
            (vec![model("a", &[])], "", Ok("a")),
            (vec![model("a", &[]), model("a", &["b"])], "", Ok("a")),
            (vec![], "a", Err(ErrorKind::Unavailable)),
        ];
        for (models, name, expected) in cases {
            let found = lookup(&models, name).map(|m| m.model.card.id.clone()).map_err(|e| e.kind);
            assert_eq!(found.as_deref().map_err(|e| *e), expected, "{name:?}");
        }
    }
}
