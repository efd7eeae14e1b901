//! A peer whose host answers no connection, as behind a cut link, holds up nobody else. A process of its own, whose threads may all hang
//! where this breaks.

mod common;

use baton_kv_transfer::*;
use common::*;
use sockets::Mute;

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, small(16), 24);
    config.limits.connect_ms = 1_000;
    config
}

/// Somebody who was there, at an address that answers no more.
fn gone(choice: &TransportChoice, mute: &Mute) -> Peer {
    let node = config("gone").start(choice.clone());
    let mut peer = node.peer();
    node.stop();
    let (TransferAddress::Tcp(socket) | TransferAddress::Ucx(socket)) = &mut peer.address;
    socket.set_port(mute.port());
    peer
}

fn holds_up_nobody_else(choice: &TransportChoice) {
    let mute = Mute::start();
    let gone = gone(choice, &mute);
    let (source, sink) = (config("source").start(choice.clone()), config("sink").start(choice.clone()));
    let (lost, _) = source.offer(&gone, "lost", 70, 1);
    let (put, blocks) = source.offer(&sink.peer(), "found", 70, 2);
    source.send_all(&put, 70);
    // Asked for, since whoever waits for a service that hangs waits for ever.
    eventually("the other handoff is adopted", || source.transfer.stats().total.sources.contains_key("adopted"));
    put.wait().unwrap();
    sink.check_adopted("found", &source, &blocks, 70);
    eventually("the lost one is given up", || source.transfer.stats().sources == 0);
    let failure = lost.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");
    eventually("everything is over", || source.is_quiet() && sink.is_quiet());
    source.stop();
    sink.stop();
}

#[test]
fn a_peer_that_answers_no_connection_holds_up_nobody_else() {
    holds_up_nobody_else(&TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 });
    holds_up_nobody_else(&TransportChoice::ucx(UcxLanes::SharedMemory, [127, 0, 0, 1].into()));
    holds_up_nobody_else(&TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into()));
}
