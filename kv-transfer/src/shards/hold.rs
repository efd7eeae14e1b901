//! Blocks of one reservation that several legs share. They are released once every leg has dropped them, and stay quarantined until every
//! leg that could still write is fenced.

use crate::{BlockHold, QuarantinedBlocks};
use baton_types::BlockTables;
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;

/// Blocks under several legs.
pub(super) struct Shared {
    blocks: BlockTables,
    /// Every leg moves the positions after these.
    cached_tokens: u32,
    state: Mutex<State>,
}

enum State {
    Held(Box<dyn BlockHold>),
    /// Some leg may still write.
    Quarantined(Box<dyn QuarantinedBlocks>),
    /// Given to the worker, or leaked.
    Gone,
}

impl Shared {
    pub(super) fn new(hold: Box<dyn BlockHold>) -> Arc<Self> {
        let (blocks, cached_tokens) = (hold.blocks().clone(), hold.cached_tokens());
        Arc::new(Self { blocks, cached_tokens, state: Mutex::new(State::Held(hold)) })
    }

    pub(super) fn leg(self: &Arc<Self>) -> Box<dyn BlockHold> {
        Box::new(Leg(self.clone()))
    }

    /// The blocks themselves, once no leg writes to them any more; `None` if a leg has dropped them or may still write.
    pub(super) fn take(&self) -> Option<Box<dyn BlockHold>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Held(hold) => Some(hold),
            other => {
                *state = other;
                None
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let State::Quarantined(blocks) = std::mem::replace(self.state.get_mut(), State::Gone) {
            blocks.release(); // The last leg was fenced.
        }
    }
}

pub(super) struct Leg(Arc<Shared>);

impl BlockHold for Leg {
    fn blocks(&self) -> &BlockTables {
        &self.0.blocks
    }
    fn cached_tokens(&self) -> u32 {
        self.0.cached_tokens
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        {
            let mut state = self.0.state.lock();
            *state = match std::mem::replace(&mut *state, State::Gone) {
                State::Held(hold) => State::Quarantined(hold.quarantine()),
                other => other,
            };
        }
        Box::new(QuarantinedLeg(Some(self.0)))
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

struct QuarantinedLeg(Option<Arc<Shared>>);

impl QuarantinedBlocks for QuarantinedLeg {
    fn release(mut self: Box<Self>) {
        self.0 = None;
    }
}

impl Drop for QuarantinedLeg {
    fn drop(&mut self) {
        // Never fenced: quarantined permanently, whatever the state of the other legs.
        if let Some(shared) = self.0.take() {
            std::mem::forget(shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whether the blocks were quarantined, and whether they were released.
    #[derive(Default)]
    struct Fate(AtomicBool, AtomicBool);

    struct Noting(Arc<Fate>, BlockTables);

    impl BlockHold for Noting {
        fn blocks(&self) -> &BlockTables {
            &self.1
        }
        fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
            self.0.0.store(true, Ordering::SeqCst);
            Box::new(NotingQuarantined(self.0.clone()))
        }
        fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
            self
        }
    }

    impl Drop for Noting {
        fn drop(&mut self) {
            let back = !self.0.0.load(Ordering::SeqCst);
            self.0.1.store(back, Ordering::SeqCst);
        }
    }

    struct NotingQuarantined(Arc<Fate>);

    impl QuarantinedBlocks for NotingQuarantined {
        fn release(self: Box<Self>) {
            self.0.1.store(true, Ordering::SeqCst);
        }
    }

    fn legs() -> (Box<Leg>, Box<Leg>, impl Fn() -> (bool, bool)) {
        let fate = Arc::<Fate>::default();
        let hold = Box::new(Noting(fate.clone(), BlockTables::default()));
        let (blocks, state) = (BlockTables::default(), Mutex::new(State::Held(hold)));
        let shared = Arc::new(Shared { blocks, cached_tokens: 0, state });
        let told = move || (fate.0.load(Ordering::SeqCst), fate.1.load(Ordering::SeqCst));
        (Box::new(Leg(shared.clone())), Box::new(Leg(shared)), told)
    }

    #[test]
    fn blocks_are_back_once_every_leg_let_go() {
        let (a, b, fate) = legs();
        drop(a);
        assert_eq!(fate(), (false, false));
        drop(b);
        assert_eq!(fate(), (false, true));
    }

    #[test]
    fn a_leg_that_may_still_write_quarantines_all() {
        let (a, b, fate) = legs();
        let a = a.quarantine();
        drop(b);
        assert_eq!(fate(), (true, false));
        a.release();
        assert_eq!(fate(), (true, true));

        let (a, b, fate) = legs();
        let (a, b) = (a.quarantine(), b.quarantine());
        a.release();
        assert_eq!(fate(), (true, false));
        b.release();
        assert_eq!(fate(), (true, true));
    }

    #[test]
    fn a_leg_that_is_never_fenced_keeps_them_for_good() {
        let (a, b, fate) = legs();
        drop(a.quarantine());
        drop(b);
        assert_eq!(fate(), (true, false));
    }
}
