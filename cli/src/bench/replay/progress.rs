//! Progress of a load: a bar on a terminal, otherwise a line at intervals.

use crate::bench::report::{Ending, Outcome};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

/// Time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Time between two updates of the bar.
const TICK: Duration = Duration::from_millis(500);

/// Progress on standard error.
pub(super) struct Progress {
    total: usize,
    ended: usize,
    failed: usize,
    shed: usize,
    /// Absent if standard error is not a terminal.
    bar: Option<ProgressBar>,
    told: Instant,
}

impl Progress {
    pub(super) fn new(total: usize) -> Self {
        let bar = || {
            let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}");
            ProgressBar::new(total as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        };
        let bar = std::io::stderr().is_terminal().then(bar);
        // The elapsed time changes even if no request ends.
        bar.iter().for_each(|bar| bar.enable_steady_tick(TICK));
        Self { total, ended: 0, failed: 0, shed: 0, bar, told: Instant::now() }
    }

    /// One more request has ended; this many are in flight.
    pub(super) fn ended(&mut self, outcome: &Outcome, in_flight: usize) {
        self.ended += 1;
        self.failed += usize::from(matches!(outcome.result, Ending::Failed(_)));
        self.shed += usize::from(outcome.result == Ending::Shed);
        match &self.bar {
            Some(bar) => {
                bar.set_message(self.aside(in_flight));
                bar.set_position(self.ended as u64);
            }
            None if self.told.elapsed() >= LINE_EVERY => {
                self.told = Instant::now();
                eprintln!("{}", self.line(in_flight));
            }
            None => {}
        }
    }

    /// Removes the bar from the terminal.
    pub(super) fn finish(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }

    fn aside(&self, in_flight: usize) -> String {
        let mut parts = vec![format!("{in_flight} under way")];
        let others = [(self.failed, "failed"), (self.shed, "shed")];
        parts.extend(others.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")));
        parts.join(", ")
    }

    fn line(&self, in_flight: usize) -> String {
        format!("{} of {} requests ended, {}", self.ended, self.total, self.aside(in_flight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_what_ended_and_how() {
        let mut progress = Progress { total: 9, ended: 0, failed: 0, shed: 0, bar: None, told: Instant::now() };
        let outcome = Outcome::shed(Duration::ZERO, 1, 0);
        progress.ended(&Outcome { result: Ending::Ok, ..outcome.clone() }, 4);
        assert_eq!(progress.line(4), "1 of 9 requests ended, 4 under way");
        progress.ended(&outcome, 4);
        progress.ended(&Outcome { result: Ending::Failed("overloaded".into()), ..outcome }, 3);
        assert_eq!(progress.line(3), "3 of 9 requests ended, 3 under way, 1 failed, 1 shed");
    }
}
