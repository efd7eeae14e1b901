//! Gates that hold phases open, and bend messages.

use baton_kv_transfer::{HoldPoint, Party, TransferHooks};
use baton_types::RequestId;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// Holds phases open, and bends messages.
#[derive(Default)]
pub struct Gate {
    held: Mutex<BTreeSet<HoldPoint>>,
    bend: Mutex<Option<Bend>>,
}

pub type Bend = Box<dyn Fn(Vec<u8>) -> Vec<Vec<u8>> + Send>;

impl Gate {
    pub fn hold(&self, phase: HoldPoint) {
        self.held.lock().unwrap().insert(phase);
    }
    pub fn open(&self, phase: HoldPoint) {
        self.held.lock().unwrap().remove(&phase);
    }
    /// `bend` sees each encoded message; its kind is the fourth byte.
    pub fn bend(&self, bend: impl Fn(Vec<u8>) -> Vec<Vec<u8>> + Send + 'static) {
        *self.bend.lock().unwrap() = Some(Box::new(bend));
    }
}

impl TransferHooks for Gate {
    fn hold(&self, phase: HoldPoint, _: &RequestId) -> bool {
        self.held.lock().unwrap().contains(&phase)
    }
    fn bend_message(&self, _: Option<&Party>, message: Vec<u8>) -> Vec<Vec<u8>> {
        match &*self.bend.lock().unwrap() {
            Some(bend) => bend(message),
            None => vec![message],
        }
    }
}
