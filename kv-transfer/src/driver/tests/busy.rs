//! A pool's device that has no room for checksums: what the peer and the worker are told, and when the blocks come back.

use super::*;
use crate::checksum::SumError;
use crate::message::{NackReason, SumRun, TABLES};
use crate::verify::Verifier;
use crate::verify::work::Verified;

/// Its device fails every job for the same reason.
struct Unable(SumError);

impl Verifier for Unable {
    fn submit(&mut self, job: Job) {
        job.inbox.input(job.key, Input::Verified(Verified::Failed(self.0.clone())));
    }
}

/// A peer's put whose checksums this side's device does not compute. Returns what the peer is told, and how many puts of peers failed for
/// which reason.
fn unable(error: SumError, capabilities: u64) -> (NackReason, String, Vec<(&'static str, u64)>) {
    let now = Instant::now();
    let (mut driver, notes) = Driver::noting();
    let sent = Arc::<Mutex<Vec<Message>>>::default();
    driver.transport = Box::new(Noting { notes: notes.clone(), sent: sent.clone(), ..Noting::default() });
    driver.verifier = Box::new(Unable(error));
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(Box::new(Hello { capabilities, ..*greeting() })), now);
    driver.hear(&offer(1, 16), now);
    driver.commands(now);
    let ticket = driver.ticket_of(1);
    let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
    driver.hear(&Message::Checksums { ticket, runs }, now);
    driver.commands(now);
    // The source may still write; it stops because of the answer.
    assert_eq!(*notes.lock(), [""; 0]);
    driver.hear(&Message::Aborted { handoff: 1, ticket, flushed: true, detail: String::new() }, now);
    driver.windows_close(now);
    assert_eq!(*notes.lock(), ["let go"], "nothing is quarantined");
    driver.publish();
    let failed = driver.published().lock().total.sinks.clone().into_iter().collect();
    let told = sent.lock().iter().find_map(|message| match message {
        Message::Nack { reason, detail, .. } => Some((*reason, detail.clone())),
        _ => None,
    });
    let (reason, detail) = told.expect("an answer");
    (reason, detail, failed)
}

#[test]
fn a_busy_device_is_told_as_such_and_never_as_corruption() {
    let (reason, detail, failed) = unable(SumError::Busy, u64::MAX);
    assert_eq!((reason, failed), (NackReason::DeviceBusy, vec![("device_busy", 1)]));
    assert!(detail.contains("no room for checksums"), "{detail}");
    let (reason, _, failed) = unable(SumError::Late, u64::MAX);
    assert_eq!((reason, failed), (NackReason::Device, vec![("device", 1)]));
}

#[test]
fn a_peer_that_does_not_know_the_reason_is_told_of_it_in_words() {
    let (reason, detail, failed) = unable(SumError::Busy, TABLES);
    assert_eq!((reason, failed), (NackReason::NotAdopted, vec![("device_busy", 1)]));
    assert!(detail.contains("no room for checksums"), "{detail}");
}
