//! Handoffs in TLS: whom a source hands to, and why not to others.

mod common;

use baton_kv_transfer::*;
use common::authority::{Authority, ROUTER};
use common::*;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

fn with(name: &'static str, credentials: Option<Arc<dyn Credentials>>, choice: &TransportChoice) -> Node {
    let mut config = NodeConfig::new(name, small(16), 24);
    (config.credentials, config.limits.connect_ms) = (credentials, 1_000);
    config.start(choice.clone())
}

fn choices() -> [TransportChoice; 2] {
    let loopback = [127, 0, 0, 1].into();
    [TransportChoice::tcp(loopback), TransportChoice::ucx(UcxLanes::SharedMemory, loopback)]
}

#[test]
fn a_peer_that_is_no_worker_of_the_cluster_is_given_nothing_and_the_reason_says_so() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let sinks: [Option<Arc<dyn Credentials>>; 2] = [Some(theirs.worker()), Some(ours.issue(ROUTER))];
    for choice in choices() {
        for credentials in &sinks {
            let (source, sink) =
                (with("source", Some(ours.worker()), &choice), with("sink", credentials.clone(), &choice));
            let (put, _) = source.offer(&sink.peer(), "r", 70, 1);
            source.send_all(&put, 70);
            let failure = put.wait().unwrap_err();
            assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Unproven, .. }), "{failure}");
            assert!(sink.sink.failures().is_empty());
            let (get, _) = source.get(&sink.peer(), "n", 70, std::time::Instant::now() + PATIENCE);
            let failure = get.wait().unwrap_err();
            assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Unproven, .. }), "{failure}");
            eventually("its blocks are back", || source.is_quiet() && sink.is_quiet());
        }
        let (source, sink) = (with("source", Some(ours.worker()), &choice), with("sink", Some(ours.worker()), &choice));
        let (put, blocks) = source.offer(&sink.peer(), "r", 70, 1);
        source.send_all(&put, 70);
        put.wait().unwrap();
        sink.check_adopted("r", &source, &blocks, 70);
    }
}

/// Strangers who send half of a handshake's message, and then what cannot follow.
#[test]
fn a_broken_handshake_ends_its_connection_and_nothing_else() {
    let ours = Authority::new();
    let half_of_a_hello = [22, 3, 1, 0, 6, 1, 0, 1, 0, 3, 3];
    let follow: [&[u8]; 5] =
        [&[23, 3, 3, 0, 1, 0], &[21, 3, 3, 0, 2, 2, 40], &[0xff; 64], &[22, 3, 1, 0, 4, 1, 0, 1, 0], &[]];
    for choice in choices() {
        let (source, sink) = (with("source", Some(ours.worker()), &choice), with("sink", Some(ours.worker()), &choice));
        for rest in follow {
            let (TransferAddress::Tcp(at) | TransferAddress::Ucx(at)) = sink.transfer.address();
            let mut stranger = TcpStream::connect(at).unwrap();
            stranger.set_read_timeout(Some(PATIENCE)).unwrap();
            stranger.write_all(&half_of_a_hello).unwrap();
            // In a read of its own, so that the first half is remembered.
            std::thread::sleep(std::time::Duration::from_millis(20));
            stranger.write_all(rest).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            // An alert, an end, or a reset: over in any case.
            let _ = stranger.read_to_end(&mut Vec::new());
        }
        assert!(sink.transfer.healthy(), "a stranger ended the data plane");
        let (put, blocks) = source.offer(&sink.peer(), "r", 70, 1);
        source.send_all(&put, 70);
        put.wait().unwrap();
        sink.check_adopted("r", &source, &blocks, 70);
    }
}
