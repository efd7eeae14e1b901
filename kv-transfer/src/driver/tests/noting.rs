//! A transport that only records calls.

use super::*;
use crate::plan::CopyRun;
use crate::window::Window;
use baton_memory::MemoryError;

#[derive(Default)]
pub(super) struct Noting {
    pub(super) notes: Notes,
    pub(super) message_bytes_max: Arc<Mutex<usize>>,
    pub(super) one_sided_gets: bool,
    /// Windows that were closed, until [`Driver::windows_close`].
    pub(super) closing: Vec<Event>,
    /// So many connections have ended, the first ones.
    pub(super) ended: Arc<Mutex<u64>>,
    pub(super) sent: Arc<Mutex<Vec<Message>>>,
    /// Why this side closed connections.
    pub(super) closed: Arc<Mutex<Vec<String>>>,
    /// The pool's device does not show what NICs stored.
    pub(super) is_blind: bool,
}

impl Transport for Noting {
    fn name(&self) -> &'static str {
        "notes"
    }
    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(([127, 0, 0, 1], 1).into())
    }
    fn region(&self) -> RemoteRegion {
        RemoteRegion::default()
    }
    fn fences(&self) -> bool {
        false
    }
    fn closing_fences(&self, _: ConnId) -> bool {
        false
    }
    fn connect(&mut self, _: &TransferAddress) -> Result<ConnId, String> {
        Ok(ConnId(CONN.0 + *self.ended.lock()))
    }
    fn greeted(&mut self, _: ConnId, _: &RemoteRegion, message_bytes_max: usize) -> Result<(), String> {
        *self.message_bytes_max.lock() = message_bytes_max;
        Ok(())
    }
    fn send(&mut self, _: ConnId, message: Vec<u8>) {
        self.sent.lock().push(Message::decode(&message).unwrap());
    }
    fn put(&mut self, _: ConnId, _: TicketId, _: CopyRun) {
        self.notes.lock().push("put");
    }
    fn flush(&mut self, _: ConnId, _: u64) {}
    fn open_window(&mut self, _: ConnId, _: TicketId, _: Window) {}
    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        self.closing.push(Event::WindowClosed(conn, ticket));
    }
    fn is_open(&self, conn: ConnId) -> bool {
        conn.0 >= CONN.0 + *self.ended.lock()
    }
    fn close(&mut self, _: ConnId, reason: &str) {
        self.closed.lock().push(reason.to_owned());
    }
    fn lanes(&self, _: ConnId) -> String {
        String::new()
    }
    fn progress(&mut self, _: Instant, events: &mut Vec<Event>) -> bool {
        events.append(&mut self.closing);
        false
    }
    fn one_sided_gets(&self, _: ConnId) -> bool {
        self.one_sided_gets
    }
    fn get(&mut self, _: ConnId, _: u64, _: CopyRun) {
        self.notes.lock().push("get");
    }
    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        if self.is_blind { Err(MemoryError::Failed("a failed device".into())) } else { Ok(()) }
    }
    fn shutdown(&mut self, _: Instant, events: &mut Vec<Event>) {
        self.notes.lock().push("shutdown");
        events.push(Event::Closed {
            conn: CONN,
            reason: "the service stops".into(),
            fenced: false,
            draining: false,
            unproven: false,
        });
    }
}
