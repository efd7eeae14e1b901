//! Resolves the model name of a request to a model.

use crate::workers::ServedModel;
use baton_types::{ErrorKind, RequestError};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The model behind `name`; an empty name means the only model. If several share a name, ids win over aliases; further
/// ties are decided by key, so that all routers decide alike.
pub(crate) fn lookup(models: &[Arc<ServedModel>], name: &str) -> Result<Arc<ServedModel>, RequestError> {
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
    best.cloned().ok_or_else(|| RequestError {
        param: Some("model".into()),
        ..RequestError::new(ErrorKind::ModelNotFound, format!("no model {name:.256?} here; served: {}", names(models)))
    })
}

/// The public names of all models, without duplicates.
fn names(models: &[Arc<ServedModel>]) -> String {
    let names: BTreeSet<&str> = models.iter().flat_map(|m| m.card.public_names()).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use crate::workers::ModelKey;
    use baton_types::Role;

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
        assert_eq!(lookup(&models, file).unwrap().card.id, file, "who knows it may go on asking for it");
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
            let found = lookup(&models, name).map(|m| m.card.id.clone()).map_err(|e| e.kind);
            assert_eq!(found.as_deref().map_err(|e| *e), expected, "{name:?}");
        }
    }
}
