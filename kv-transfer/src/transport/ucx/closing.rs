//! How connections end: the channel closes, everything on the lanes is cancelled, then the worker is destroyed, which fences the peer.
//! Where reads of this side outlast their endpoint, the worker lives until they have ended.

use super::connection::{Ending, Lanes};
use super::{Purpose, Ucx};
use crate::hazards::hazard;
use crate::transport::{ConnId, Event, Transport as _};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a closing connection may take to cancel its operations.
const CLOSE_WAIT: Duration = Duration::from_millis(500);

/// How long a channel is read after its lanes have failed: a peer that closes a connection sends the reason on the channel and resets the
/// lanes.
const LAST_WORDS_WAIT: Duration = Duration::from_millis(100);

impl Ucx {
    /// The lanes of a connection no longer work.
    pub(super) fn lanes_failed(&mut self, conn: ConnId, reason: &str, now: Instant) {
        if let Some(connection) = self.connections.live_mut(conn) {
            connection.failed.get_or_insert_with(|| (reason.to_owned(), now + LAST_WORDS_WAIT));
        }
    }

    /// Ends a connection and cancels the operations on its lanes. Makes one attempt to send what is queued on its channel.
    pub(super) fn force_close(&mut self, conn: ConnId, reason: &str, now: Instant) {
        let pretends = hazard!(self, PretendedFences);
        let Some(connection) = self.connections.live_mut(conn) else { return };
        connection.ending = Some(Ending { reason: reason.to_owned(), force_at: now + CLOSE_WAIT });
        // Messages that wait for the lanes to be connected, such as a refusal.
        for message in connection.waiting.take().unwrap_or_default().into_messages() {
            self.channel.send(conn, message);
        }
        if let Some(writing) = connection.writing_mut().filter(|_| !pretends) {
            let unsent = writing.shut();
            connection.outstanding -= unsent.len();
            for token in &unsent {
                self.operations.remove(token);
            }
        }
        self.channel.close(conn, reason);
        if !pretends {
            // Its key stays until closing has ended every write that uses it.
            self.on_endpoint(conn, Purpose::Close, |endpoint, token| endpoint.close(token));
        }
    }

    /// Closes what has failed, and removes connections that have ended completely.
    pub(super) fn forget_ended(&mut self, now: Instant, events: &mut Vec<Event>) {
        let failed = self
            .connections
            .iter_mut()
            .filter_map(|(&conn, connection)| Some((conn, connection.failed.take_if(|(_, until)| now >= *until)?.0)));
        for (conn, reason) in failed.collect::<Vec<_>>() {
            self.force_close(conn, &reason, now);
        }
        let ended = self.connections.iter_mut().filter_map(|(&conn, c)| c.has_ended(now).then_some(conn));
        let ended: Vec<_> = ended.collect();
        ended.into_iter().for_each(|conn| self.forget(conn, events));
    }

    /// Destroys the rest of a connection, which ends every operation on it, and reports its end. Where reads run on, the rest waits for them.
    pub(super) fn forget(&mut self, conn: ConnId, events: &mut Vec<Event>) {
        if let Some(connection) = self.connections.get_mut(&conn).filter(|c| self.copies_run_on && c.reading > 0) {
            if !std::mem::replace(&mut connection.reads_on, true) {
                let (reason, unproven) = (connection.end_reason(), connection.unproven);
                events.push(Event::Closed { conn, reason, fenced: false, draining: true, unproven });
            }
            return;
        }
        let Some(mut connection) = self.connections.remove(&conn) else { return };
        if connection.outstanding > 0 {
            self.operations.retain(|_, (of, _)| *of != conn);
        }
        let reason = connection.end_reason();
        let (unproven, draining, was_reported) = (connection.unproven, connection.is_draining(), connection.reads_on);
        let fenced = match connection.lanes.take() {
            lanes @ Some(_) if hazard!(self, PretendedFences) => {
                connection.lanes = lanes;
                self.unfenced.push(connection);
                true
            }
            Some(Lanes { endpoint, mut writing, worker, events: _ }) => {
                let operations = draining.then(|| writing.take_operations());
                drop((endpoint, writing));
                // The last reference: this destroys the worker.
                let fenced = Rc::into_inner(worker).is_some() && self.fences;
                self.draining.extend(operations.map(|operations| (conn, fenced, operations)));
                fenced
            }
            // Without a worker there was no way to write.
            None => true,
        };
        let draining = self.draining.last().is_some_and(|(last, ..)| *last == conn);
        match (was_reported, draining) {
            (false, _) => events.push(Event::Closed { conn, reason, fenced: fenced && !draining, draining, unproven }),
            (true, false) => events.push(Event::Drained { conn, fenced }),
            (true, true) => {}
        }
    }

    /// Reports the connections for which the pool's device works no more.
    pub(super) fn drain(&mut self, events: &mut Vec<Event>) {
        self.draining.retain_mut(|(conn, fenced, operations)| {
            let ended = operations.have_ended();
            if ended {
                events.push(Event::Drained { conn: *conn, fenced: *fenced });
            }
            !ended
        });
    }
}
