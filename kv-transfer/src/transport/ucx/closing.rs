//! How connections end: last messages, then everything cancelled, then the worker destroyed, which is the fence.

use super::connection::Connection;
use super::header::Kind;
use super::{Purpose, Ucx};
use crate::Fencing;
use crate::transport::{ConnId, Event};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a closing connection may take to hand over its last messages, and then to cancel what is on it.
const CLOSE_WAIT: Duration = Duration::from_millis(500);

impl Ucx {
    /// Ends a connection after its last messages have left.
    pub(super) fn begin_close(&mut self, conn: ConnId, reason: &str, now: Instant) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| c.closing.is_none()) else { return };
        if connection.endpoint.is_none() || self.fencing == Fencing::Pretended {
            return self.force_close(conn, reason, now);
        }
        connection.closing = Some(reason.to_owned());
        connection.force_at = Some(now + CLOSE_WAIT);
        self.post_message(conn, Kind::Bye, Vec::new());
        self.on_endpoint(conn, Purpose::LastFlush, |endpoint, token| endpoint.flush(token));
    }

    /// Ends a connection at once, cancelling what is on it.
    pub(super) fn force_close(&mut self, conn: ConnId, reason: &str, now: Instant) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| !c.forced) else { return };
        connection.closing.get_or_insert_with(|| reason.to_owned());
        connection.forced = true;
        connection.force_at = Some(now + CLOSE_WAIT);
        // Its key stays until the close has ended every write that uses it.
        let token = self.begin(conn, Purpose::Close);
        match &self.connections[&conn].endpoint {
            Some(endpoint) if self.fencing != Fencing::Pretended => endpoint.close(token),
            _ => self.front.finish(token),
        }
    }

    /// Destroys what is left of a connection, which ends every operation on it, and reports it.
    pub(super) fn forget(&mut self, conn: ConnId, events: &mut Vec<Event>) {
        let Some(mut connection) = self.connections.remove(&conn) else { return };
        self.names.remove(&connection.name);
        if connection.outstanding > 0 {
            self.operations.retain(|_, (of, _)| *of != conn);
        }
        let reason = connection.closing.take().unwrap_or_default();
        let fenced = if self.fencing == Fencing::Pretended {
            self.unfenced.push(connection);
            true
        } else {
            let Connection { greeter, endpoint, writing, worker, .. } = connection;
            drop((greeter, endpoint, writing));
            // The last reference: the worker ends here.
            Rc::into_inner(worker).is_some() && self.fences
        };
        events.push(Event::Closed { conn, reason, fenced, unproven: false });
    }

    /// Pings, silences and closes that take too long.
    pub(super) fn watch(&mut self, now: Instant, events: &mut Vec<Event>) {
        let (mut silent, mut quiet, mut slow, mut stuck) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (&conn, connection) in &mut self.connections {
            if connection.is_silent(now, self.silent_max) {
                silent.push(conn);
            } else if connection.wants_ping(now, self.silent_max / 4) {
                quiet.push(conn);
            }
            if connection.force_at.is_some_and(|at| now >= at) {
                if connection.forced { &mut stuck } else { &mut slow }.push(conn);
            }
        }
        let reason = format!("nothing came for {} ms", self.silent_max.as_millis());
        silent.into_iter().for_each(|conn| self.force_close(conn, &reason, now));
        quiet.into_iter().for_each(|conn| self.post_message(conn, Kind::Ping, Vec::new()));
        slow.into_iter().for_each(|conn| self.force_close(conn, "closed", now));
        stuck.into_iter().for_each(|conn| self.forget(conn, events));
    }
}
