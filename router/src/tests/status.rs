//! The status of a cluster, with workers that report what a test sets.

use crate::testing::cluster::Cluster;
use crate::testing::fake::Fake;
use crate::testing::http;
use baton_proto::v1::{self, admin_client::AdminClient};
use baton_types::Role;
use std::time::Duration;
use tonic::transport::Channel;

struct Case {
    cluster: Cluster,
    admin: AdminClient<Channel>,
}

impl Case {
    async fn start() -> Self {
        let cluster = Cluster::start(|_| ()).await;
        let admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
        Self { cluster, admin }
    }

    async fn status(&mut self) -> v1::StatusResponse {
        self.admin.status(v1::StatusRequest {}).await.unwrap().into_inner()
    }

    /// Waits for a status that satisfies `is_right`.
    async fn until_it(&mut self, is_right: impl Fn(&v1::StatusResponse) -> bool) -> v1::StatusResponse {
        let mut status = self.status().await;
        for _ in 0..500 {
            if is_right(&status) {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            status = self.status().await;
        }
        panic!("still {status:#?}");
    }

    /// Waits until the problems are these, each `worker kind: text` without the last digits.
    async fn until(&mut self, expected: &[&str]) -> v1::StatusResponse {
        let told = |p: &v1::Problem| format!("{} {}: {}", p.worker, p.kind, p.text);
        self.until_it(|status| {
            let mut pairs = status.problems.iter().map(told).zip(expected);
            status.problems.len() == expected.len() && pairs.all(|(told, e)| told.starts_with(e))
        })
        .await
    }

    async fn problems(&self, kind: &str) -> f64 {
        let metrics = http::send(self.cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
        let line = format!("baton_router_problems{{kind=\"{kind}\"}} ");
        metrics.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok()).unwrap_or_else(|| panic!("no {line}"))
    }
}

fn of<'a>(status: &'a v1::StatusResponse, worker: &Fake) -> &'a v1::WorkerStatus {
    let party = worker.record.party.clone().into();
    status.workers.iter().find(|w| w.party.as_ref() == Some(&party)).expect("it is told of")
}

#[tokio::test]
async fn a_cluster_without_problems_is_told_as_it_is() {
    let mut case = Case::start().await;
    let empty = case.until(&[" not_ready: requests are refused: no decode worker is ready"]).await;
    assert!(empty.workers.is_empty() && case.problems("not_ready").await == 1.0);
    let d = case.cluster.worker(Role::Decode, "d").await;
    let p = case.cluster.worker(Role::Prefill, "p").await;
    d.report(|load| {
        (load.running, load.waiting, load.generated_tokens) = (3, 2, Some(100));
        load.blocks = Some(v1::BlockCounts { total: 512, free: 400, referenced: 100, cached: 10, quarantined: 2 });
    });
    let known = |status: &v1::StatusResponse| {
        let of = |worker: &Fake| status.workers.iter().find(|w| w.party == Some(worker.record.party.clone().into()));
        let is_heard = of(&p).is_some_and(|p| p.heard_ms.is_some());
        status.problems.is_empty() && is_heard && of(&d).is_some_and(|d| d.running == Some(3))
    };
    let status = case.until_it(known).await;
    let worker = of(&status, &d);
    assert_eq!((worker.role(), worker.state()), (v1::Role::Decode, v1::WorkerState::Ready));
    assert_eq!((worker.model.as_str(), worker.pool.as_str(), worker.running_max), ("m", "default", 16));
    assert_eq!((worker.waiting, worker.blocks.unwrap().quarantined), (Some(2), 2));
    assert!(worker.heard_ms.unwrap() < 20_000 && worker.still_ms.is_none(), "{worker:?}");
    assert_eq!(worker.class.as_ref().unwrap().order, "test");
    let router = status.router.unwrap();
    assert_eq!((router.running, router.running_max, router.queued), (0, 1024, 0));
    assert_eq!((router.models, router.etcd_reachable, router.ttft_p50_ms), (vec!["m".to_owned()], None, None));

    // Its counter grows, so it has a rate.
    d.report(|load| load.generated_tokens = Some(300));
    case.until_it(|status| of(status, &d).tokens_per_s.is_some_and(|rate| rate > 0.0)).await;
    assert_eq!(of(&case.status().await, &p).tokens_per_s, None, "it does not count");
}

#[tokio::test]
async fn workers_that_go_stand_still_or_are_full_are_told_in_plain_words() {
    let mut case = Case::start().await;
    let d = case.cluster.worker(Role::Decode, "d").await;
    let e = case.cluster.worker(Role::Decode, "e").await;
    let p = case.cluster.worker(Role::Prefill, "p").await;
    case.until(&[]).await;
    p.report(|load| load.still_ms = Some(6_000));
    case.until(&["p stalled: engine loop has not moved for 6 s"]).await;
    d.report(|load| {
        load.waiting = 12;
        load.blocks = Some(v1::BlockCounts { total: 512, free: 1, referenced: 511, ..Default::default() });
    });
    case.until(&["p stalled: engine loop", "d pool_full: pool full, 12 wait"]).await;
    assert_eq!((case.problems("stalled").await, case.problems("pool_full").await), (1.0, 1.0));
    let gone = e.record.party.clone();
    drop(e);
    let status = case.until(&["e gone: gone ", "p stalled: ", "d pool_full: "]).await;
    let row = status.workers.iter().find(|w| w.party == Some(gone.clone().into())).unwrap();
    assert_eq!((row.state(), row.running, row.blocks), (v1::WorkerState::Gone, None, None));
    assert_eq!(case.problems("gone").await, 1.0);

    // All problems end with it.
    p.report(|load| load.still_ms = Some(0));
    d.report(|load| {
        (load.waiting, load.blocks) = (0, Some(v1::BlockCounts { total: 512, free: 512, ..Default::default() }))
    });
    let _e = case.cluster.worker_with(Role::Decode, "e", |r| r.party.incarnation.0 += 1).await;
    case.until(&[]).await;
}

#[tokio::test]
async fn workers_that_fail_drain_or_fit_nobody_are_told() {
    let mut case = Case::start().await;
    let d = case.cluster.worker(Role::Decode, "d").await;
    let p = case.cluster.worker_with(Role::Prefill, "p", |r| r.class.kernel_revision += 1).await;
    let status = case.until(&["d unpaired: no worker of the other role fits it", "p unpaired: "]).await;
    assert_eq!(of(&status, &p).state(), v1::WorkerState::Ready);
    p.report(|load| load.draining = true);
    let status = case.until(&[]).await;
    assert_eq!(of(&status, &p).state(), v1::WorkerState::Draining);
    d.report(|load| load.healthy = false);
    let status =
        case.until(&[" not_ready: requests are refused", "d failing: its engine or its data plane failed"]).await;
    assert_eq!(of(&status, &d).state(), v1::WorkerState::Failing);
}
