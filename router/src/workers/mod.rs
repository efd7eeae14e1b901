//! The workers that this router knows: a link, a load and a text each.
//!
//! A worker is *admitted* once it has answered on its own address and the text of its model is loaded. Requests are
//! placed only on admitted workers with a fresh, healthy load.

mod adapters;
mod load;
mod set;
mod supervise;

pub(crate) use adapters::AnnouncedAdapters;
pub(crate) use load::{LastReport, Load, Placed};
pub(crate) use set::{Candidates, ModelKey, NotNamed, ServedModel, WorkerSet};
pub(crate) use supervise::{Supervisor, supervise};

use crate::models::ModelText;
use crate::port::Link;
use crate::recovery::Probation;
use arc_swap::ArcSwap;
use baton_types::{AdapterCard, InstanceRecord, Party};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Longest reason that is stored; a part of it comes from the process that answers at the worker's address.
const TROUBLE_CHARS_MAX: usize = 256;

/// One worker in one incarnation.
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    pub(crate) record: Arc<InstanceRecord>,
    /// Its model, of that record.
    key: ModelKey,
    pub(crate) load: Load,
    /// Whether it failed recently.
    pub(crate) probation: Probation,
    link: Box<dyn Link>,
    text: OnceLock<Option<Arc<ModelText>>>,
    admitted: AtomicBool,
    draining: Arc<AtomicBool>,
    trouble: Mutex<Option<String>>,
    adapters: ArcSwap<AnnouncedAdapters>,
}

impl WorkerHandle {
    /// A worker that has not reported yet.
    pub(crate) fn new(record: Arc<InstanceRecord>, link: Box<dyn Link>) -> Self {
        let (load, probation) = (Load::default(), Probation::default());
        let key = ModelKey::from(&record.card);
        let (admitted, draining) = (AtomicBool::new(false), Arc::default());
        let (text, trouble) = (OnceLock::new(), Mutex::default());
        let adapters = ArcSwap::default();
        Self { record, key, load, probation, link, text, admitted, draining, trouble, adapters }
    }

    /// The link for calls to it.
    pub(crate) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// Its instance and incarnation.
    pub(crate) fn party(&self) -> &Party {
        &self.record.party
    }

    /// The text of its model once loaded: outer `None` before, inner `None` where the model has none.
    pub(crate) fn text(&self) -> Option<&Option<Arc<ModelText>>> {
        self.text.get()
    }

    /// Whether the worker is admitted and was not evicted since.
    pub(crate) fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Acquire)
    }

    fn set_admitted(&self, admitted: bool) -> bool {
        self.admitted.swap(admitted, Ordering::AcqRel)
    }

    /// Whether it announced that it drains; an incarnation never takes that back.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The same flag, for readers that outlive the worker.
    pub(crate) fn drains(&self) -> Arc<AtomicBool> {
        self.draining.clone()
    }

    fn set_draining(&self) {
        if !self.draining.swap(true, Ordering::AcqRel) {
            tracing::info!(worker = %self.party(), "places nothing more on a worker that drains");
        }
    }

    /// Why its reports do not arrive; `None` while they do.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    fn set_trouble(&self, trouble: Option<&str>) {
        *self.trouble.lock() = trouble.map(|text| text.chars().take(TROUBLE_CHARS_MAX).collect());
    }

    /// The adapters that it announced last.
    pub(crate) fn adapters(&self) -> Arc<AnnouncedAdapters> {
        self.adapters.load_full()
    }

    pub(crate) fn set_adapters(&self, cards: Vec<AdapterCard>) {
        self.adapters.store(Arc::new(cards.into()));
    }

    /// Sets the text, once.
    pub(crate) fn set_text(&self, text: Option<Arc<ModelText>>) {
        let _ = self.text.set(text);
    }
}
