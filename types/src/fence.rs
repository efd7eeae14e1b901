//! A completion event of a device: a point in its queue of work that others can wait for.

use std::sync::Arc;

/// State of the work before a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceStatus {
    /// Not finished; poll again.
    Pending,
    /// All work enqueued before the fence is finished and its results are visible in memory.
    Done,
    /// The device failed; nothing that the fence covers may be used.
    Failed,
}

/// Polled state of a fence. Polling never blocks.
pub trait FencePoll: Send + Sync {
    /// The current state. `Done` and `Failed` are final.
    fn poll(&self) -> FenceStatus;
}

/// A fence that several components wait for.
pub type Fence = Arc<dyn FencePoll>;

/// A fence that is done from the start, for work that was already finished.
#[derive(Clone, Copy, Debug, Default)]
pub struct AlreadyDone;

impl FencePoll for AlreadyDone {
    fn poll(&self) -> FenceStatus {
        FenceStatus::Done
    }
}
