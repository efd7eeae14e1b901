//! Log rate limit: a callsite may log [`LINES_MAX`] lines in a [`WINDOW`]. Further lines are counted, and one line at
//! the end of the window reports how many were suppressed.
//!
//! [`Limiter`] decides, with the time as an input. [`RateLimit`] is the filter in front of the log. A thread logs how many
//! lines were suppressed.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

/// Lines of one callsite within a window. It is high enough that hundreds of workers that register at once are all
/// logged.
const LINES_MAX: u32 = 200;
const WINDOW: Duration = Duration::from_secs(10);

/// The number of lines per callsite, and the limit.
#[derive(Debug)]
struct Limiter {
    lines_max: u32,
    window: Duration,
    /// Bounded by the number of callsites in the code.
    places: HashMap<Identifier, CallsiteLines>,
}

#[derive(Debug)]
struct CallsiteLines {
    metadata: &'static Metadata<'static>,
    since: Instant,
    lines: u32,
    left_out: u64,
}

/// A callsite whose lines were suppressed.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    /// File and line of the callsite.
    at: String,
    lines: u64,
}

impl Limiter {
    fn new(lines_max: u32, window: Duration) -> Self {
        Self { lines_max, window, places: HashMap::new() }
    }

    /// Whether the callsite may log another line at `now`.
    fn admits(&mut self, metadata: &'static Metadata<'static>, now: Instant) -> bool {
        let fresh = CallsiteLines { metadata, since: now, lines: 0, left_out: 0 };
        let place = self.places.entry(metadata.callsite()).or_insert(fresh);
        // Suppressed lines are reported before a new window begins.
        if place.left_out == 0 && now.saturating_duration_since(place.since) >= self.window {
            (place.since, place.lines) = (now, 0);
        }
        let may = place.lines < self.lines_max;
        if may {
            place.lines += 1;
        } else {
            place.left_out += 1;
        }
        may
    }

    /// Callsites whose window has ended, with their suppressed lines; they may log again.
    fn over(&mut self, now: Instant) -> Vec<LeftOut> {
        let mut over = Vec::new();
        for place in self.places.values_mut() {
            if place.left_out > 0 && now.saturating_duration_since(place.since) >= self.window {
                let of = place.metadata;
                let at = format!("{}:{}", of.file().unwrap_or_else(|| of.target()), of.line().unwrap_or(0));
                over.push(LeftOut { at, lines: std::mem::take(&mut place.left_out) });
                (place.since, place.lines) = (now, 0);
            }
        }
        over
    }
}

/// The filter; clones share it.
#[derive(Clone, Debug)]
pub(super) struct RateLimit(Arc<Mutex<Limiter>>);

impl RateLimit {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Limiter::new(LINES_MAX, WINDOW))))
    }

    /// Reports suppressed lines through `to`, while the watch lives.
    pub(super) fn watch(&self, to: &Dispatch) -> std::io::Result<RateLimitWatch> {
        let (stop, stopped) = sync_channel::<()>(0);
        let (limiter, to) = (self.0.clone(), to.downgrade());
        let look = move || {
            // The thread sleeps here; `stop` is never sent to, only dropped.
            while stopped.recv_timeout(WINDOW / 5) == Err(RecvTimeoutError::Timeout) {
                let Some(to) = to.upgrade() else { return };
                let over = limiter.lock().over(Instant::now());
                tracing::dispatcher::with_default(&to, || over.iter().for_each(tell));
            }
        };
        std::thread::Builder::new().name("baton-log".into()).spawn(look)?;
        Ok(RateLimitWatch { _stop: stop })
    }
}

fn tell(left_out: &LeftOut) {
    let LeftOut { at, lines } = left_out;
    tracing::warn!(at, lines, "left lines of one place out of the log, which repeated itself too often");
}

/// Ends the thread when dropped.
pub(super) struct RateLimitWatch {
    _stop: SyncSender<()>,
}

impl fmt::Debug for RateLimitWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RateLimitWatch")
    }
}

impl<S> Filter<S> for RateLimit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn callsite_enabled(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::always()
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        // An operator who enables more than the default level wants all lines.
        *event.metadata().level() > Level::INFO || self.0.lock().admits(event.metadata(), Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::{Layer, SubscriberExt as _};

    /// Counts the lines that passed.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<u32>>);

    impl<S: tracing::Subscriber> Layer<S> for Lines {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            *self.0.lock() += 1;
        }
    }

    fn places() -> (&'static Metadata<'static>, &'static Metadata<'static>) {
        use tracing::Callsite as _;
        let one = tracing::callsite! { name: "one", kind: tracing::metadata::Kind::EVENT, fields: message };
        let two = tracing::callsite! { name: "two", kind: tracing::metadata::Kind::EVENT, fields: message };
        (one.metadata(), two.metadata())
    }

    #[test]
    fn a_place_says_so_much_in_a_while_and_the_rest_is_counted() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let (one, two) = places();
        let mut limiter = Limiter::new(3, Duration::from_secs(1));
        let said = (0..10).filter(|_| limiter.admits(one, start)).count();
        assert_eq!(said, 3);
        assert!(limiter.admits(two, start), "others are heard");
        assert_eq!(limiter.over(at(999)), []);
        assert!(!limiter.admits(one, at(1_500)), "what was left out is told first");
        let over = limiter.over(at(1_500));
        assert_eq!((over.len(), over[0].lines), (1, 8));
        assert!(over[0].at.contains("rate_limit.rs:"), "{over:?}");
        assert!(limiter.admits(one, at(1_600)));
        assert_eq!(limiter.over(at(9_000)), []);
    }

    #[test]
    fn a_flood_is_cut_and_told() {
        let (rate_limit, lines) = (RateLimit::new(), Lines::default());
        *rate_limit.0.lock() = Limiter::new(5, Duration::from_secs(3));
        let to = Dispatch::new(tracing_subscriber::registry().with(lines.clone().with_filter(rate_limit.clone())));
        let watch = rate_limit.watch(&to).unwrap();
        tracing::dispatcher::with_default(&to, || (0..1_000).for_each(|i| tracing::warn!(i, "again")));
        assert_eq!(*lines.0.lock(), 5);
        let until = Instant::now() + Duration::from_secs(30);
        while *lines.0.lock() < 6 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(*lines.0.lock(), 6, "one line tells of 995");
        drop(watch);
    }
}
