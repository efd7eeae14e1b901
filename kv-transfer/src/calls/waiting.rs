//! The number of calls that wait to be made, in total and by peer.
//!
//! A handoff that has ended frees its place among those that are open, but its calls wait until the worker's thread comes to them. So the
//! driver takes offers only while few calls wait ([`crate::TransferLimits::accepted_handoffs_max`]): otherwise a peer that begins and ends
//! handoffs faster than the worker answers would fill memory.

use baton_types::InstanceId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct WaitingCalls {
    by_peer: Mutex<BTreeMap<InstanceId, usize>>,
}

impl WaitingCalls {
    pub(crate) fn total(&self) -> usize {
        self.by_peer.lock().values().sum()
    }

    pub(crate) fn of(&self, peer: &InstanceId) -> usize {
        self.by_peer.lock().get(peer).copied().unwrap_or_default()
    }

    /// Counts one call until the result is dropped.
    pub(crate) fn wait(self: &Arc<Self>, peer: InstanceId) -> Waits {
        *self.by_peer.lock().entry(peer.clone()).or_default() += 1;
        Waits { among: self.clone(), peer }
    }
}

/// One call that waits.
pub(crate) struct Waits {
    among: Arc<WaitingCalls>,
    peer: InstanceId,
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut by_peer = self.among.by_peer.lock();
        if let Some(count) = by_peer.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                by_peer.remove(&self.peer);
            }
        }
    }
}
