//! Which ranges of the local region a peer may write, by ticket. For transports that store a peer's writes themselves.

use crate::window::Window;
use baton_types::TicketId;
use std::collections::BTreeMap;
use std::ops::Range;

/// The open windows of one connection.
#[derive(Debug, Default)]
pub(super) struct Windows(BTreeMap<TicketId, Window>);

impl Windows {
    pub(super) fn open(&mut self, ticket: TicketId, window: Window) {
        self.0.insert(ticket, window);
    }

    pub(super) fn close(&mut self, ticket: TicketId) {
        self.0.remove(&ticket);
    }

    /// Whether an open window of this ticket contains `range`.
    pub(super) fn allow(&self, ticket: TicketId, range: &Range<usize>) -> bool {
        self.0.get(&ticket).is_some_and(|window| window.allows(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_one_open_range_contains_is_allowed() {
        let (mine, other) = (TicketId(1), TicketId(2));
        let mut windows = Windows::default();
        windows.open(mine, Window::of(vec![10..20, 30..40]));
        let cases = [(10..20, true), (12..12, true), (9..11, false), (19..31, false), (30..40, true), (39..41, false)];
        for (range, allowed) in cases {
            assert_eq!(windows.allow(mine, &range), allowed, "{range:?}");
            assert!(!windows.allow(other, &range));
        }
        windows.close(mine);
        assert!(!windows.allow(mine, &(10..20)));
    }
}
