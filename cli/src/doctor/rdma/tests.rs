use super::*;
use crate::doctor::sysfs::tests::root;
use Verdict::{Absent, Failure, Ok, Warning};

/// A host with two devices of one port each, in these states, and these nodes of `/dev`.
fn host(states: [&str; 2], nodes: &[&str]) -> tempfile::TempDir {
    let states = states.map(|state| format!("{state}\n"));
    let nodes: Vec<String> = nodes.iter().map(|node| format!("dev/infiniband/{node}")).collect();
    let mut files = vec![
        ("sys/class/infiniband/mlx5_0/ports/1/state", states[0].as_str()),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n"),
        ("sys/class/infiniband/mlx5_1/ports/1/state", states[1].as_str()),
        // Numbers of nodes may differ from those of devices.
        ("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_1\n"),
        ("sys/class/infiniband_verbs/uverbs1/ibdev", "mlx5_0\n"),
        ("sys/class/infiniband_verbs/abi_version", "6\n"),
        ("sys/class/net/eth0/operstate", "up\n"),
        ("sys/class/net/eth1/operstate", "down\n"),
    ];
    files.extend(nodes.iter().map(|node| (node.as_str(), "")));
    root(&files)
}

fn verdicts(root: &tempfile::TempDir, wanted: bool, devices: &str) -> Vec<(String, Verdict)> {
    let (findings, _) = look(root.path(), wanted, &devices.parse().unwrap());
    findings.into_iter().map(|f| (f.check, f.verdict)).collect()
}

fn check(root: &tempfile::TempDir, wanted: bool, devices: &str, expected: &[(&str, Verdict)]) {
    let expected: Vec<_> = expected.iter().map(|(check, verdict)| ((*check).to_owned(), *verdict)).collect();
    assert_eq!(verdicts(root, wanted, devices), expected, "wanted {wanted}, {devices:?}");
}

const FIRST: &str = "rdma mlx5_0:1";
const SECOND: &str = "rdma mlx5_1:1";
const BOTH: [&str; 2] = ["uverbs0", "uverbs1"];

#[test]
fn an_idle_port_fails_only_where_it_is_named() {
    let host = host(["4: ACTIVE", "1: DOWN"], &BOTH);
    check(&host, true, "", &[(FIRST, Ok), (SECOND, Warning), ("rdma", Warning)]);
    check(&host, true, "mlx5_0:1", &[(FIRST, Ok), (SECOND, Absent)]);
    check(&host, true, "mlx5_0:1,mlx5_1:1", &[(FIRST, Ok), (SECOND, Failure)]);
    check(&host, true, "mlx5_1", &[(FIRST, Ok), (SECOND, Failure)]);
    check(&host, true, "^mlx5_1", &[(FIRST, Ok), (SECOND, Absent)]);
    check(&host, true, "all", &[(FIRST, Ok), (SECOND, Warning)]);
    check(&host, false, "", &[(FIRST, Ok), (SECOND, Warning)]);
    let (findings, usable) = look(host.path(), true, &"mlx5_0:1".parse().unwrap());
    assert_eq!(findings[0], Finding::ok(FIRST, "4: ACTIVE, 200 Gb/sec (4X HDR), InfiniBand"));
    assert!(usable && !look(host.path(), true, &"mlx5_1:1".parse().unwrap()).1);
    let among = |list: &str| is_among(host.path(), &list.parse().unwrap());
    assert!(among("mlx5_1:1") && among("eth0,mlx5_1") && !among("eth0") && !among(""));
}

#[test]
fn with_no_port_up_all_fail_where_rdma_is_wanted() {
    let host = host(["2: INIT", "1: DOWN"], &BOTH);
    check(&host, true, "", &[(FIRST, Failure), (SECOND, Failure)]);
    check(&host, true, "^mlx5_0", &[(FIRST, Absent), (SECOND, Failure)]);
    check(&host, false, "", &[(FIRST, Warning), (SECOND, Warning)]);
}

#[test]
fn what_a_container_was_not_given_is_told_as_that() {
    let host = host(["4: ACTIVE", "4: ACTIVE"], &["uverbs1"]);
    check(&host, true, "", &[(FIRST, Ok), (SECOND, Absent), ("rdma", Warning)]);
    check(&host, true, "mlx5_1:1", &[(FIRST, Ok), (SECOND, Failure)]);
    let told = &look(host.path(), true, &"mlx5_1:1".parse().unwrap()).0[1];
    assert!(told.found.ends_with("; no /dev/infiniband/uverbs0"), "{told:?}");
    assert!(told.remedy.as_ref().is_some_and(|remedy| remedy.contains("device plugin")), "{told:?}");

    let none = self::host(["4: ACTIVE", "4: ACTIVE"], &[]);
    check(&none, true, "", &[(FIRST, Failure), (SECOND, Failure)]);
    check(&none, false, "", &[(FIRST, Absent), (SECOND, Absent)]);
}

#[test]
fn a_node_that_may_not_be_opened_and_a_kernel_without_verbs_have_remedies_of_their_own() {
    let closed = host(["4: ACTIVE", "4: ACTIVE"], &["uverbs1/", "uverbs0"]);
    let told = look(closed.path(), true, &"mlx5_0:1".parse().unwrap()).0.remove(0);
    assert_eq!(told.verdict, Failure);
    assert!(told.remedy.is_some_and(|remedy| remedy.contains("may not be opened")));

    let bare = root(&[("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")]);
    let told = look(bare.path(), true, &NetDevices::default()).0.remove(0);
    assert!(told.verdict == Failure && told.remedy.is_some_and(|remedy| remedy.contains("ib_uverbs")));
}

#[test]
fn names_that_are_no_port_are_told() {
    let host = host(["4: ACTIVE", "4: ACTIVE"], &BOTH);
    check(&host, false, "mlx5_7:1,eth0", &[(FIRST, Ok), (SECOND, Ok), ("device mlx5_7:1", Failure)]);
    check(&host, false, "eth1", &[(FIRST, Ok), (SECOND, Ok), ("device eth1", Failure)]);
    check(&host, true, "eth0", &[(FIRST, Ok), (SECOND, Ok), ("rdma", Failure)]);
    let told = look(host.path(), false, &"mlx5_7:1".parse().unwrap()).0.remove(2);
    assert!(told.remedy.is_some_and(|remedy| remedy.ends_with("mlx5_0:1 mlx5_1:1 eth0 eth1")));
}

#[test]
fn without_a_device_it_fails_where_it_is_wanted() {
    let bare = root(&[]);
    check(&bare, false, "", &[("rdma", Absent)]);
    check(&bare, true, "", &[("rdma", Failure)]);
    check(&bare, true, "mlx5_0:1", &[("device mlx5_0:1", Failure), ("rdma", Failure)]);
}
