//! Legs of one handoff: several shards of the source write into the blocks of one reservation here, and all of them arrive or none.
//!
//! Each leg has a connection, a ticket, checksums and fences of its own. What they share is the blocks, which go back once every leg has
//! let go of them, and stay quarantined until every leg that could still write is fenced.

use super::progress::Progress;
use crate::message::Commit;
use crate::{BlockHold, HandoffFailure, Party, QuarantinedBlocks, RefuseReason};
use baton_types::{GroupBlocks, RequestId, TokenId};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What legs have in common.
pub(super) type GatheringKey = (RequestId, Party);

/// The legs of one handoff that were offered here.
pub(super) struct Gathering {
    /// How many there will be.
    legs_max: usize,
    /// The leg with which blocks were asked for.
    first: u64,
    legs: BTreeMap<u16, u64>,
    shared: Option<Arc<Shared>>,
    /// The sequence that they commit.
    tokens: Option<Vec<TokenId>>,
    /// Legs that committed and were verified.
    whole: Vec<u64>,
    failed: bool,
}

/// Blocks under several legs.
struct Shared {
    blocks: GroupBlocks,
    /// Every leg moves the positions behind these.
    cached_tokens: u32,
    state: Mutex<State>,
}

enum State {
    Held(Box<dyn BlockHold>),
    /// Some leg may still write.
    Quarantined(Box<dyn QuarantinedBlocks>),
    /// Handed on, or never to be used again.
    Gone,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let State::Quarantined(blocks) = std::mem::replace(self.state.get_mut(), State::Gone) {
            blocks.release(); // The last leg was fenced.
        }
    }
}

/// One leg's share.
struct Leg(Arc<Shared>);

impl BlockHold for Leg {
    fn blocks(&self) -> &GroupBlocks {
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
        // Never fenced: quarantined for good, whatever becomes of the other legs.
        if let Some(shared) = self.0.take() {
            std::mem::forget(shared);
        }
    }
}

impl Progress {
    /// A leg was offered, of so many; whether blocks are to be asked for.
    pub(super) fn gather(&mut self, key: u64, of: GatheringKey, shard: u16, legs_max: usize, now: Instant) -> bool {
        if legs_max == 1 {
            return true;
        }
        let begun = !self.gatherings.contains_key(&of);
        let gathering = self.gatherings.entry(of).or_insert_with(|| Gathering {
            legs_max,
            first: key,
            legs: BTreeMap::new(),
            shared: None,
            tokens: None,
            whole: Vec::new(),
            failed: false,
        });
        // An earlier attempt is not over, or has failed, or the legs do not agree how many they are.
        let late = gathering.failed || gathering.legs.contains_key(&shard) || gathering.legs_max != legs_max;
        if !late {
            gathering.legs.insert(shard, key);
        }
        let (shared, first) = (gathering.shared.clone(), gathering.first);
        if let Some(incoming) = self.incoming.get_mut(&key).filter(|_| !late) {
            incoming.first = first;
        }
        if late {
            let (reason, detail) = (RefuseReason::NoRoom, "another leg of it has failed".to_owned());
            self.leg_refused(key, reason, detail, now);
        } else if let Some(shared) = shared {
            self.leg_granted(key, Box::new(Leg(shared)), now);
        }
        begun
    }

    /// Every leg that waits gets what the worker gave to the first.
    pub(super) fn granted(&mut self, key: u64, hold: Box<dyn BlockHold>, now: Instant) {
        if let Some(detail) = self.barred_since(key) {
            drop(hold); // Nobody was told of these blocks.
            return self.refused(key, RefuseReason::Quarantine, detail, now);
        }
        let Some(gathering) = self.gathering_of(key) else { return self.leg_granted(key, hold, now) };
        let (blocks, cached_tokens) = (hold.blocks().clone(), hold.cached_tokens());
        let shared = Arc::new(Shared { blocks, cached_tokens, state: Mutex::new(State::Held(hold)) });
        gathering.shared = Some(shared.clone());
        for key in gathering.legs.values().copied().collect::<Vec<_>>() {
            self.leg_granted(key, Box::new(Leg(shared.clone())), now);
        }
    }

    pub(super) fn refused(&mut self, key: u64, reason: RefuseReason, detail: String, now: Instant) {
        let legs = match self.gathering_of(key) {
            Some(gathering) if gathering.first == key => {
                gathering.failed = true;
                gathering.legs.values().copied().collect()
            }
            _ => vec![key],
        };
        for key in legs {
            self.leg_refused(key, reason, detail.clone(), now);
        }
    }

    /// A leg committed and was verified: with the last one, the worker gets the blocks.
    pub(super) fn deliver(&mut self, key: u64, commit: Commit, now: Instant) {
        let hold = match self.gathering_of(key) {
            None => None,
            Some(gathering) => {
                if *gathering.tokens.get_or_insert_with(|| commit.tokens.clone()) != commit.tokens {
                    let failure = HandoffFailure::Protocol("its legs commit different sequences".into());
                    return self.cancel_one(key, failure, now);
                }
                gathering.whole.push(key);
                if gathering.whole.len() < gathering.legs_max {
                    return;
                }
                let shared = gathering.shared.take();
                let state = shared.map(|shared| std::mem::replace(&mut *shared.state.lock(), State::Gone));
                match state {
                    Some(State::Held(hold)) => Some(hold),
                    _ => return self.cancel_one(key, HandoffFailure::NotAdopted("a leg has let go".into()), now),
                }
            }
        };
        self.hand_on(key, commit, hold, now);
    }

    /// What the worker said to the whole.
    pub(super) fn adopted(&mut self, key: u64, answer: Result<(), String>, now: Instant) {
        let legs = self.gathering_of(key).map(|gathering| {
            gathering.failed |= answer.is_err();
            gathering.legs.values().copied().collect()
        });
        for key in legs.unwrap_or_else(|| vec![key]) {
            self.leg_adopted(key, answer.clone(), now);
        }
    }

    /// A leg failed, and with it all others; whether the worker is to be told.
    pub(super) fn leg_failed(&mut self, key: u64, failure: &HandoffFailure, now: Instant) -> bool {
        let Some(gathering) = self.gathering_of(key) else { return true };
        let first = !std::mem::replace(&mut gathering.failed, true);
        let others: Vec<u64> = gathering.legs.values().copied().filter(|leg| *leg != key).collect();
        if first {
            others.into_iter().for_each(|leg| self.cancel_one(leg, failure.clone(), now));
        }
        first
    }

    pub(super) fn leg_forgotten(&mut self, key: u64, of: &GatheringKey) {
        if let Some(gathering) = self.gatherings.get_mut(of) {
            gathering.legs.retain(|_, leg| *leg != key);
            if gathering.legs.is_empty() {
                self.gatherings.remove(of);
            }
        }
    }

    fn gathering_of(&mut self, key: u64) -> Option<&mut Gathering> {
        let of = self.incoming.get(&key)?.gathering_key();
        self.gatherings.get_mut(&of).filter(|gathering| gathering.legs.values().any(|leg| *leg == key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whether the blocks are quarantined, and whether they are back.
    #[derive(Default)]
    struct Fate(AtomicBool, AtomicBool);

    struct Noting(Arc<Fate>, GroupBlocks);

    impl BlockHold for Noting {
        fn blocks(&self) -> &GroupBlocks {
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
        let hold = Box::new(Noting(fate.clone(), GroupBlocks::default()));
        let (blocks, state) = (GroupBlocks::default(), Mutex::new(State::Held(hold)));
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
