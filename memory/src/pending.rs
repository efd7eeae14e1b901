//! An operation that runs.

use crate::MemoryError;
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// The result of an operation, once it has ended. Dropping it does not end the operation, which keeps what it owns until then.
///
/// It can be polled ([`Pending::poll_now`]), awaited, or waited for with a deadline.
pub struct Pending<T>(Side<T>);

enum Side<T> {
    /// `None` once it was taken.
    Ended(Option<Result<T, MemoryError>>),
    Running(Arc<Slot<T>>),
}

struct Slot<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

struct State<T> {
    result: Option<Result<T, MemoryError>>,
    waker: Option<Waker>,
}

/// Ends an operation, once. If it is dropped before, the operation fails.
pub struct Completer<T>(Option<Arc<Slot<T>>>);

impl<T> Pending<T> {
    /// An operation that has ended.
    pub const fn ended(result: Result<T, MemoryError>) -> Self {
        Self(Side::Ended(Some(result)))
    }

    /// An operation that ends when its completer says so.
    pub fn running() -> (Self, Completer<T>) {
        let state = Mutex::new(State { result: None, waker: None });
        let slot = Arc::new(Slot { state, ended: Condvar::new() });
        (Self(Side::Running(slot.clone())), Completer(Some(slot)))
    }

    /// The result, if the operation has ended; it is given once, and `None` after that.
    pub fn poll_now(&mut self) -> Option<Result<T, MemoryError>> {
        self.take(None)
    }

    /// As [`Pending::poll_now`]. If the operation has not ended, `waker` is woken when it does.
    pub fn poll_or_wake(&mut self, waker: &Waker) -> Option<Result<T, MemoryError>> {
        self.take(Some(waker))
    }

    fn take(&mut self, waker: Option<&Waker>) -> Option<Result<T, MemoryError>> {
        let slot = match &mut self.0 {
            Side::Ended(result) => return result.take(),
            Side::Running(slot) => slot,
        };
        let mut state = slot.state.lock();
        let Some(result) = state.result.take() else {
            if let Some(waker) = waker.filter(|new| !state.waker.as_ref().is_some_and(|old| old.will_wake(new))) {
                state.waker = Some(waker.clone());
            }
            return None;
        };
        drop(state);
        self.0 = Side::Ended(None);
        Some(result)
    }

    /// Waits for the end of the operation.
    ///
    /// # Errors
    /// As the operation, and [`MemoryError::Late`] if it has not ended by `deadline`: it goes on, and its buffer is lost to the caller.
    pub fn wait(self, deadline: Instant) -> Result<T, MemoryError> {
        let late = || Err(MemoryError::Late);
        match self.0 {
            Side::Ended(result) => result.unwrap_or_else(late),
            Side::Running(slot) => {
                let mut state = slot.state.lock();
                slot.ended.wait_while_until(&mut state, |state| state.result.is_none(), deadline);
                state.result.take().unwrap_or_else(late)
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, MemoryError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut().poll_or_wake(context.waker()) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

/// It holds its result behind a lock or owns it: nothing refers into itself.
impl<T> Unpin for Pending<T> {}

impl<T> Completer<T> {
    /// Ends the operation.
    pub fn complete(mut self, result: Result<T, MemoryError>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<T, MemoryError>) {
        let Some(slot) = self.0.take() else { return };
        let waker = {
            let mut state = slot.state.lock();
            state.result = Some(result);
            state.waker.take()
        };
        slot.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        self.end(Err(MemoryError::Failed("it ended before the operation".into())));
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Side::Ended(_) => "Pending(ended)",
            Side::Running(_) => "Pending(running)",
        })
    }
}

impl<T> fmt::Debug for Completer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_result_is_given_once() {
        let mut ended = Pending::ended(Ok(1));
        assert_eq!((ended.poll_now(), ended.poll_now()), (Some(Ok(1)), None));
        let (mut running, completer) = Pending::running();
        assert_eq!(running.poll_now(), None);
        completer.complete(Ok(2));
        assert_eq!((running.poll_now(), running.poll_now()), (Some(Ok(2)), None));
    }

    #[test]
    fn the_end_wakes_who_polled() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let (mut running, completer) = Pending::running();
        assert_eq!((running.poll_or_wake(&waker), running.poll_or_wake(&waker)), (None, None));
        completer.complete(Ok(()));
        assert_eq!((count.0.load(Ordering::SeqCst), running.poll_or_wake(&waker)), (1, Some(Ok(()))));
    }

    #[test]
    fn every_wait_ends() {
        let (running, completer) = Pending::<()>::running();
        assert_eq!(running.wait(Instant::now() + Duration::from_millis(5)), Err(MemoryError::Late));
        completer.complete(Ok(()));
        let (running, completer) = Pending::<()>::running();
        let waiting = std::thread::spawn(move || running.wait(Instant::now() + Duration::from_secs(20)));
        drop(completer);
        assert!(matches!(waiting.join().unwrap(), Err(MemoryError::Failed(_))));
    }
}
