//! Prompts that routers took, by the names under which workers cache them.

use baton_kv_cache::PrefixHash;
use baton_router::Prepared;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Default)]
struct Known {
    all: Vec<Arc<Prepared>>,
    /// The first prompt that begins so, and how many names that takes.
    by_name: HashMap<PrefixHash, (Arc<Prepared>, usize)>,
}

/// The prompts of one schedule. Clones are the same ones.
#[derive(Clone, Default)]
pub struct Prompts(Arc<Mutex<Known>>);

impl Prompts {
    /// A router took a request.
    pub fn add(&self, request: &Arc<Prepared>) {
        let mut known = self.0.lock();
        known.all.push(request.clone());
        for (at, name) in request.hashes().iter().enumerate() {
            known.by_name.entry(*name).or_insert_with(|| (request.clone(), at + 1));
        }
    }

    /// All, in the order in which they came.
    pub fn all(&self) -> Vec<Arc<Prepared>> {
        self.0.lock().all.clone()
    }

    /// A prompt that begins with what has this name, and how many names that takes.
    pub fn named(&self, name: &PrefixHash) -> Option<(Arc<Prepared>, usize)> {
        self.0.lock().by_name.get(name).cloned()
    }
}
