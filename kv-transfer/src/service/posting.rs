//! Writes on their way: queued for their connection, posted within its credit, flushed.

use super::checker::Job;
use super::progress::Progress;
use super::pump::Post;
use crate::handoff::SourceInput;
use crate::plan::{Side, copies};
use crate::transport::ConnId;
use std::ops::Range;
use std::time::Instant;

impl Progress {
    /// Queues the writes of one copy, and has its checksums computed meanwhile.
    pub(super) fn copy(&mut self, key: u64, epoch: u32, group: usize, layer: usize, tokens: Range<u32>) {
        let Some(sending) = self.sending.get(&key) else { return };
        let (Some(ticket), Some(hold)) = (sending.source.ticket(), &sending.hold) else { return };
        let Some(connection) = self.connections.get_mut(&sending.conn()) else { return };
        let (Some(sink_map), Some((cut, _))) = (&connection.map, &connection.cuts) else { return };
        let source = Side { map: &self.config.map, blocks: &sending.blocks.0[group], heads: &cut.source };
        let sink = Side { map: sink_map, blocks: &sending.remote[group], heads: &cut.sink };
        let put_max = self.config.limits.put_bytes_max;
        let pump = &mut connection.pump;
        copies(source, sink, group, layer, tokens.clone(), put_max, |run| pump.put(key, epoch, ticket, run));
        let (blocks, heads, hold) = (sending.blocks.clone(), cut.source.clone(), hold.clone());
        self.checker.submit(Job::Sum { key, epoch, group, layer, tokens, blocks, heads, hold });
    }

    /// Posts what each connection's credit allows; whether anything was.
    pub(super) fn pump(&mut self, now: Instant) -> bool {
        let mut any = false;
        for (&conn, connection) in &mut self.connections {
            while let Some(post) = connection.pump.next() {
                any = true;
                match post {
                    Post::Flush { id } => self.transport.flush(conn, id),
                    Post::Put { key, epoch, ticket, run } => {
                        self.transport.put(conn, ticket, run);
                        if let Some(sending) = self.sending.get_mut(&key) {
                            sending.report.put(epoch, run.len, now);
                        }
                        let peer = connection.party.as_ref().and_then(|party| self.stats.peers.get_mut(party));
                        for stats in peer.into_iter().chain([&mut self.stats.total]) {
                            stats.puts += 1;
                            stats.bytes_sent += run.len as u64;
                        }
                    }
                }
            }
        }
        any
    }

    pub(super) fn flushed(&mut self, conn: ConnId, id: u64, now: Instant) {
        self.count(conn, |stats| stats.flushes += 1);
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        for (key, epoch) in connection.pump.flushed(id) {
            if self.pins.contains_key(&key) {
                self.written(key, now);
            }
            if let Some(sending) = self.sending.get_mut(&key) {
                sending.report.flushed(epoch, now);
            }
            self.source_input(key, SourceInput::Flushed { epoch, ok: true }, now);
        }
    }
}
