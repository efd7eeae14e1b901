//! Turns to load bundles. A load cannot be cancelled: one that is late gives its turn to another, and goes on in one of a
//! few places for late ones.

use baton_types::Runtime;
use futures::FutureExt as _;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

#[derive(Debug)]
pub(super) struct Turns {
    turns: Arc<Semaphore>,
    late: Arc<Semaphore>,
}

/// What a load keeps until its end: its turn, and once it is late, a place.
pub(super) struct Held {
    _permit: Arc<Mutex<OwnedSemaphorePermit>>,
    /// Tells the timer when it is dropped.
    _ends: oneshot::Sender<()>,
}

impl Turns {
    pub(super) fn new(at_once: usize, late_max: usize) -> Self {
        Self { turns: Arc::new(Semaphore::new(at_once)), late: Arc::new(Semaphore::new(late_max)) }
    }

    /// The next turn, in the order of the calls.
    pub(super) async fn take(&self) -> OwnedSemaphorePermit {
        self.turns.clone().acquire_owned().await.expect("nothing closes it")
    }

    /// Gives the turn back after `time`, or later, as soon as there is a place for the load among the late ones.
    pub(super) fn limit(&self, turn: OwnedSemaphorePermit, time: Duration, runtime: &dyn Runtime) -> Held {
        let permit = Arc::new(Mutex::new(turn));
        let (ends, ended) = oneshot::channel();
        let (held, late, is_late) = (Arc::downgrade(&permit), self.late.clone(), runtime.sleep(time));
        let place = async move {
            is_late.await;
            late.acquire_owned().await
        };
        let timer = async move {
            tokio::select! {
                biased;
                _ = ended => {}
                place = place => if let (Ok(place), Some(held)) = (place, held.upgrade()) {
                    *held.lock() = place;
                }
            }
        };
        runtime.spawn(timer.boxed());
        Held { _permit: permit, _ends: ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::clock::ByHand;

    const TIME: Duration = Duration::from_secs(60);
    const BEFORE: Duration = Duration::from_secs(59);

    #[tokio::test]
    async fn late_loads_give_their_turns_back_while_there_are_places() {
        let (turns, runtime) = (Turns::new(2, 3), ByHand::new());
        let take = || turns.take().now_or_never();
        let mut loads = Vec::new();
        // Four loads that do not end: three are late, and the last of them keeps its turn.
        for _ in 0..2 {
            loads.extend([take(), take()].map(|turn| turns.limit(turn.expect("a turn"), TIME, &runtime)));
            runtime.advance(BEFORE).await;
            assert!(take().is_none(), "two at once, of which none is late");
            runtime.advance(TIME - BEFORE).await;
        }
        let fifth = turns.limit(take().expect("one of two is late"), TIME, &runtime);
        runtime.advance(10 * TIME).await;
        assert!(take().is_none(), "no place is free");
        drop(loads.remove(0));
        runtime.advance(Duration::ZERO).await;
        let turn = take();
        assert!(turn.is_some() && take().is_none(), "the place goes to one that waits for it");
        drop((turn, fifth, loads));
        runtime.advance(Duration::ZERO).await;
        assert_eq!((turns.turns.available_permits(), turns.late.available_permits()), (2, 3));
        drop(turns.limit(take().expect("a turn"), TIME, &runtime));
        runtime.advance(2 * TIME).await;
        assert_eq!((turns.turns.available_permits(), turns.late.available_permits()), (2, 3), "it ended in time");
    }
}
