//! What a transfer service listens with: one socket, where it is bound, and UCX with none, whatever its variables say. In processes of
//! their own, so that every socket there is of this test, and variables are set before UCX reads them.

mod common;

use baton_kv_transfer::*;
use common::process::{Other, say};
use common::{NodeConfig, small, sockets};
use std::net::{IpAddr, Ipv4Addr};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn ways() -> [(&'static str, TransportChoice); 3] {
    [
        ("tcp", TransportChoice::tcp(LOOPBACK)),
        ("shared memory", TransportChoice::ucx(UcxLanes::SharedMemory, LOOPBACK)),
        ("named", TransportChoice::ucx(UcxLanes::Named("posix,self".into()), LOOPBACK)),
    ]
}

/// Not a test of its own: a service, with a peer that it is connected to, that tells where its process listens.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(way) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let forced = ("forced", TransportChoice::ucx(UcxLanes::LoopbackTcp, LOOPBACK));
    let (_, choice) = ways().into_iter().chain([forced]).find(|(name, _)| *name == way).unwrap();
    let (source, sink) = (NodeConfig::new("source", small(16), 24), NodeConfig::new("sink", small(16), 24));
    let (source, sink) = (source.start(choice.clone()), sink.start(choice));
    let (put, blocks) = source.offer(&sink.peer(), "r", 70, 1);
    source.send_all(&put, 70);
    put.wait().unwrap();
    sink.check_adopted("r", &source, &blocks, 70);
    let (found, own) = (sockets::listening(), [source.peer().address, sink.peer().address]);
    let own = own.map(|address| match address {
        TransferAddress::Tcp(socket) | TransferAddress::Ucx(socket) => socket,
    });
    let others: Vec<_> = found.iter().filter(|socket| !own.contains(socket)).collect();
    say(&format!("listens: {} {others:?}", found.len()));
}

#[test]
fn only_the_control_channel_listens_whatever_variables_say() {
    let wild =
        [("UCX_TLS", "all"), ("UCX_NET_DEVICES", "all"), ("UCX_TCP_PORT_RANGE", "0"), ("UCX_SELF_DEVICES", "all")];
    for (name, _) in ways() {
        for variables in [&[][..], &wild, &[("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")]] {
            let (_, found) = Other::start_with(&[name], variables, "listens:").unwrap();
            assert_eq!(found, "2 []", "{name} with {variables:?}");
        }
    }
}

/// What that is against: two control channels, and a worker of UCX on each side of the connection.
#[test]
fn over_tcp_ucx_listens_for_everybody() {
    let (_, found) = Other::start_with(&["forced"], &[], "listens:").unwrap();
    let (count, others) = found.split_once(' ').unwrap();
    assert!(count.parse::<usize>().unwrap() >= 4 && others != "[]", "{found}");
}

#[test]
fn tcp_of_ucx_is_refused() {
    let refused = |choice: TransportChoice| {
        let error = NodeConfig::new("here", small(16), 24).try_start(choice).err().unwrap();
        assert!(matches!(error, TransferError::Config(_)), "{error}");
        error.to_string()
    };
    for tls in ["tcp", "all", "^sm", "^ib", "posix,tcp,self", "tcp,self"] {
        let told = refused(TransportChoice::ucx(UcxLanes::Named(tls.into()), LOOPBACK));
        assert!(told.contains("TCP among its lanes") && told.contains(tls), "{tls}: {told}");
    }
    for bind in ["0.0.0.0", "::", "10.0.0.1"] {
        let told = refused(TransportChoice::ucx(UcxLanes::LoopbackTcp, bind.parse().unwrap()));
        assert!(told.contains("on loopback only"), "{bind}: {told}");
    }
}

/// As where its device is down: UCX leaves that out and has a lane to itself alone. Copies between host and device memory of one process are
/// no lanes either, whether this UCX has them or not.
#[test]
fn a_service_that_reaches_nobody_does_not_start() {
    for tls in ["self", "cuda_copy", "cuda_copy,gdr_copy", "self,cuda_copy,gdr_copy", "cuda", "\\cuda_copy"] {
        let alone = TransportChoice::ucx(UcxLanes::Named(tls.into()), LOOPBACK);
        let error = NodeConfig::new("alone", small(16), 24).try_start(alone).err().unwrap();
        assert!(matches!(error, TransferError::NoLanes { .. }), "{tls}: {error}");
        let told = error.to_string();
        assert!(told.contains("no lane to any other process") && told.contains(tls), "{told}");
    }
}
