use super::*;
use crate::doctor::sysfs::tests::root;
use baton_kv_transfer::PutReport;
use tokio::net::TcpListener;

fn way(tls: &str, devices: Option<&str>) -> Way {
    Way {
        tls: Some(tls.to_owned()).filter(|tls| !tls.is_empty()),
        devices: devices.unwrap_or_default().parse().unwrap(),
        rdma: false,
    }
}

/// The findings of a doctor about another one that has these devices.
async fn between(way: &Way, there: Option<&str>) -> Vec<Finding> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (to, there) = (listener.local_addr().unwrap().to_string(), there.map(str::to_owned));
    let serves =
        tokio::spawn(async move { listen::serve(Line::new(listener.accept().await.unwrap().0).unwrap(), there).await });
    let findings = connect(&to, way).await;
    serves.await.unwrap().unwrap();
    findings
}

/// 100 MB within 10 ms, 10 GB/s, over these lanes.
fn moved(lanes: &str) -> Moved {
    let now = Instant::now();
    let report = PutReport {
        bytes: 100_000_000,
        tokens_moved: 100,
        puts: 1,
        granted_at: now,
        first_put_at: now,
        flushed_at: now,
        moving: Duration::from_millis(10),
        acked_at: now,
        transport: "ucx",
        lanes: lanes.into(),
    };
    Moved { report, took: Duration::from_millis(10) }
}

#[test]
fn a_clock_that_is_off_is_told_beyond_the_error_of_its_measure() {
    let ms = Duration::from_millis;
    assert_eq!(skew(9_000, ms(1)).verdict, Verdict::Ok);
    assert_eq!(skew(-30_000, ms(1)).verdict, Verdict::Warning);
    assert_eq!(skew(30_000, ms(50)).verdict, Verdict::Ok);
    assert!(skew(-30_000, ms(1)).found.contains("-30.00 ms"));
}

#[test]
fn the_rate_is_judged_by_the_device_that_carried_it() {
    let host = root(&[
        ("sys/class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n"),
        ("sys/class/infiniband/mlx5_1/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
        ("sys/class/net/eth0/speed", "200000\n"),
    ]);
    for (lanes, wants_rdma, verdict, told) in [
        ("rc_mlx5/mlx5_0:1", true, Verdict::Ok, "80% of mlx5_0:1's 12.50 GB/s"),
        ("rc_mlx5/mlx5_1:1", true, Verdict::Warning, "20% of mlx5_1:1's 50.00 GB/s"),
        ("tcp/eth0", false, Verdict::Warning, "40% of eth0's 25.00 GB/s"),
        ("tcp/eth0", true, Verdict::Failure, "over tcp/eth0"),
        ("tcp/eth1", false, Verdict::Ok, "eth1 tells no rate"),
    ] {
        let finding = judge(host.path(), &[moved(lanes)], wants_rdma);
        assert_eq!(finding.verdict, verdict, "{finding:?}");
        assert!(finding.found.ends_with(told), "{finding:?}");
    }
    let slow = judge(host.path(), &[moved("rc_mlx5/mlx5_1:1")], true).remedy.unwrap();
    assert!(slow.contains("PCIe") && !slow.contains("RDMA lanes"), "{slow}");
}

#[tokio::test]
async fn two_doctors_move_kv() {
    let findings = between(&way("", None), None).await;
    let checks: Vec<_> = findings.iter().map(|f| (f.check.as_str(), f.verdict)).collect();
    assert_eq!(checks, [("reach", Verdict::Ok), ("clock", Verdict::Ok), ("kv transfer", Verdict::Ok)], "{findings:?}");
    assert!(findings[2].found.contains("128 MiB") && findings[2].found.contains("tcp"), "{findings:?}");
}

#[tokio::test]
async fn kv_goes_over_the_lanes_that_are_named() {
    let findings = between(&way("posix,self", None), None).await;
    assert!(findings[2].verdict == Verdict::Ok && findings[2].found.contains("by ucx over posix/"), "{findings:?}");
    let findings = between(&way("tcp", None), None).await;
    assert!(findings[2].found.contains("TCP among its lanes"), "{findings:?}");
}

#[tokio::test]
async fn a_device_that_is_not_there_is_told_by_the_side_that_lacks_it() {
    let there = between(&way("ib", Some("mlx5_99:1")), Some("mlx5_99:1")).await;
    assert_eq!(there[2].verdict, Verdict::Failure);
    assert!(there[2].found.starts_with("the other side says: "), "{there:?}");
    assert!(there[2].found.contains("UCX_NET_DEVICES=mlx5_99:1"), "{there:?}");
    assert!(there[2].remedy.as_ref().is_some_and(|remedy| remedy.starts_with("the other host cannot")), "{there:?}");
}

#[tokio::test]
async fn a_port_that_is_closed_and_one_that_is_another_s_are_told() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let other = tokio::spawn(async move { drop(listener.accept().await) });
    let findings = connect(&to, &way("", None)).await;
    other.await.unwrap();
    assert_eq!(
        findings.iter().map(|f| f.verdict).collect::<Vec<_>>(),
        [Verdict::Ok, Verdict::Failure, Verdict::Failure]
    );
    let findings = connect(&to, &way("", None)).await;
    assert_eq!((findings.len(), findings[0].verdict), (1, Verdict::Failure));
}

#[tokio::test]
async fn what_the_other_side_cannot_do_is_told_in_its_words() {
    let findings = between(&way("carrier_pigeon", None), None).await;
    assert_eq!(findings[2].verdict, Verdict::Failure);
    assert!(findings[2].found.starts_with("the other side says: "), "{findings:?}");
}
