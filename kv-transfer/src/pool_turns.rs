//! The pool's memory, which two users share: the transport, with reads and writes, and the verifier, with checksums.
//!
//! Both begin operations while the memory's device has room. Once it is full they take turns: whoever began the last operation begins no other while
//! the other user waits. So neither waits until the other needs nothing. Connections take turns among themselves for what the transport
//! gets (`transport/rotation.rs`).
//!
//! Each operation has two limits of its own: it waits for a place for at most [`PLACE_MAX`], and then runs for at most [`OPERATION_MAX`].

use baton_memory::{NoRoom, Pending, PoolMemory};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Longest wait for a place in a device that is full. Longer, and the device is busy: what waited fails, retryably.
pub(crate) const PLACE_MAX: Duration = Duration::from_secs(30);
/// Longest run of one operation: a device that takes longer has failed.
pub(crate) const OPERATION_MAX: Duration = Duration::from_secs(30);
/// How long a turn is kept for a user that waits and does not ask again. Far longer than one round of the transport; a user that has left
/// holds the other up no longer than this.
const TURN_MAX: Duration = Duration::from_millis(100);

/// The memory of the pool, with the turns of those who use it.
pub(crate) struct SharedPoolMemory {
    pub(crate) memory: Arc<dyn PoolMemory>,
    pub(crate) turns: Turns,
}

impl SharedPoolMemory {
    pub(crate) fn new(memory: Arc<dyn PoolMemory>) -> Arc<Self> {
        Arc::new(Self { memory, turns: Turns::default() })
    }
}

/// Who begins operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    Transport,
    Verifier,
}

/// The turns of both users.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<Order>);

impl Turns {
    /// Begins an operation that owns `buffer`. Gives the buffer back if the device has no room for it, or if it is the other user's turn;
    /// then `waker` is woken when the other user has begun or ended an operation. The own operations of a user wake it by themselves.
    pub(crate) fn begin<B, T>(
        &self,
        user: User,
        waker: Option<&Waker>,
        buffer: B,
        start: impl FnOnce(B) -> Result<Pending<T>, NoRoom<B>>,
    ) -> Result<Pending<T>, B> {
        // It waits before it tries: room that comes after the attempt wakes it.
        let may_begin = self.0.lock().waits(user, waker, Instant::now());
        let started = if may_begin { start(buffer).map_err(|refused| refused.buffer) } else { Err(buffer) };
        let other = started.is_ok().then(|| self.0.lock().began(user)).flatten();
        other.into_iter().for_each(Waker::wake);
        started
    }

    /// The user waits no longer, and what it began has ended.
    pub(crate) fn leave(&self, user: User) {
        let other = self.0.lock().leaves(user);
        other.into_iter().for_each(Waker::wake);
    }
}

/// Whose turn it is. Pure.
#[derive(Debug)]
struct Order {
    /// How long a turn is kept.
    turn_max: Duration,
    /// Who began the last operation.
    last: Option<User>,
    transport: Seat,
    verifier: Seat,
}

/// One user's wait.
#[derive(Debug, Default)]
struct Seat {
    /// When it last asked for a place, and got none.
    asked_at: Option<Instant>,
    waker: Option<Waker>,
}

impl Default for Order {
    fn default() -> Self {
        Self { turn_max: TURN_MAX, last: None, transport: Seat::default(), verifier: Seat::default() }
    }
}

impl Order {
    fn of(&mut self, user: User) -> (&mut Seat, &mut Seat) {
        match user {
            User::Transport => (&mut self.transport, &mut self.verifier),
            User::Verifier => (&mut self.verifier, &mut self.transport),
        }
    }

    /// The user asks for a place. Whether it is its turn.
    fn waits(&mut self, user: User, waker: Option<&Waker>, now: Instant) -> bool {
        let (is_last, turn_max) = (self.last == Some(user), self.turn_max);
        let (own, other) = self.of(user);
        (own.asked_at, own.waker) = (Some(now), waker.cloned());
        !(is_last && other.asked_at.is_some_and(|at| now.saturating_duration_since(at) < turn_max))
    }

    /// Returns the waker of the other user.
    fn began(&mut self, user: User) -> Option<Waker> {
        self.last = Some(user);
        self.leaves(user)
    }

    fn leaves(&mut self, user: User) -> Option<Waker> {
        let (own, other) = self.of(user);
        *own = Seat::default();
        other.waker.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_memory::{RemoteConfig, RemotePool, Rows};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn one_place() -> Arc<RemotePool> {
        let memory = RemotePool::new(4096, RemoteConfig { operations_max: 1, ..RemoteConfig::default() }).unwrap();
        memory.hold();
        memory
    }

    /// Turns that are kept for so long.
    fn kept(turn_max: Duration) -> Turns {
        Turns(Mutex::new(Order { turn_max, ..Order::default() }))
    }

    /// The same, however slow the test is.
    fn patient() -> Turns {
        kept(Duration::from_secs(3600))
    }

    /// The device ends what it works on, and begins nothing more.
    fn ends(memory: &RemotePool) {
        assert!(memory.end_all(Instant::now() + Duration::from_secs(20)), "never ended");
    }

    #[test]
    fn users_of_a_full_device_take_turns() {
        let (memory, turns) = (one_place(), patient());
        let begins = |user| turns.begin(user, None, Vec::new(), |into| memory.try_read(Rows::run(0, 8), into)).is_ok();
        use User::{Transport, Verifier};
        assert_eq!([begins(Transport), begins(Verifier)], [true, false]);
        // The transport is always the first to ask.
        for _ in 0..3 {
            ends(&memory);
            assert_eq!([begins(Transport), begins(Verifier)], [false, true]);
            assert!(!begins(Transport), "there is no room");
            ends(&memory);
            assert_eq!([begins(Verifier), begins(Transport)], [false, true]);
            assert!(!begins(Verifier), "there is no room");
        }
    }

    /// The hazard: a user that is always the first to ask.
    #[test]
    fn without_turns_the_other_user_gets_nothing() {
        let (memory, turns) = (one_place(), kept(Duration::ZERO));
        let begins = |user| turns.begin(user, None, Vec::new(), |into| memory.try_read(Rows::run(0, 8), into)).is_ok();
        for _ in 0..3 {
            assert_eq!([begins(User::Transport), begins(User::Verifier)], [true, false]);
            ends(&memory);
        }
    }

    #[test]
    fn a_device_with_room_knows_no_turns() {
        let memory = RemotePool::new(4096, RemoteConfig::default()).unwrap();
        let turns = Turns::default();
        for user in [User::Transport, User::Transport, User::Verifier, User::Verifier, User::Transport] {
            assert!(turns.begin(user, None, Vec::new(), |into| memory.try_read(Rows::run(0, 8), into)).is_ok());
        }
    }

    #[test]
    fn a_user_that_does_not_come_for_its_turn_loses_it() {
        let (mut order, now) = (Order::default(), Instant::now());
        order.began(User::Verifier);
        assert!(order.waits(User::Transport, None, now));
        assert!(!order.waits(User::Verifier, None, now + TURN_MAX / 2));
        assert!(order.waits(User::Verifier, None, now + TURN_MAX));
        assert!(order.waits(User::Transport, None, now));
    }

    #[test]
    fn room_that_comes_after_an_attempt_wakes_who_made_it() {
        let (memory, turns, count) = (one_place(), patient(), Arc::<Count>::default());
        let waker = Waker::from(count.clone());
        let begins = |from: &RemotePool, into| from.try_read(Rows::run(0, 8), into);
        assert!(turns.begin(User::Verifier, None, Vec::new(), |into| begins(&memory, into)).is_ok());
        let refused = turns.begin(User::Transport, Some(&waker), Vec::new(), |into| {
            let refused = begins(&memory, into);
            turns.leave(User::Verifier);
            refused
        });
        assert_eq!((refused.is_ok(), count.0.load(Ordering::SeqCst)), (false, 1));
    }

    #[test]
    fn who_waits_is_woken_by_the_other_user() {
        let (memory, turns, count) = (one_place(), patient(), Arc::<Count>::default());
        let waker = Waker::from(count.clone());
        let begins =
            |user, waker| turns.begin(user, waker, Vec::new(), |into| memory.try_read(Rows::run(0, 8), into)).is_ok();
        assert!(begins(User::Verifier, None) && !begins(User::Transport, Some(&waker)));
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        ends(&memory);
        turns.leave(User::Verifier);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        // The same where the other one begins.
        assert!(begins(User::Transport, Some(&waker)) && !begins(User::Verifier, None));
        ends(&memory);
        assert!(!begins(User::Transport, Some(&waker)) && begins(User::Verifier, None));
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
    }
}
