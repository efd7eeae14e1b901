//! Asking workers directly.

use crate::grpc;
use crate::grpc::WatchProbe;
use crate::identity::Identity;
use crate::listen::Callers;
use crate::membership::conformance::record;
use crate::membership::etcd::{Probe as _, Verdict};
use baton_proto::v1::{self, worker_server, worker_server::WorkerServer};
use baton_types::Party;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::Empty;
use tonic::{Request, Response, Status};

struct Reporter(v1::LoadReport);

#[tonic::async_trait]
impl worker_server::Worker for Reporter {
    type BundleStream = Empty<Result<v1::BundleChunk, Status>>;
    type WatchStream = tokio_stream::Once<Result<v1::LoadReport, Status>>;
    type DrainStream = Empty<Result<v1::DrainEvent, Status>>;

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(tokio_stream::once(Ok(self.0.clone()))))
    }
    async fn bundle(&self, _: Request<v1::BundleRequest>) -> Result<Response<Self::BundleStream>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }
    async fn record(&self, _: Request<v1::RecordRequest>) -> Result<Response<v1::InstanceRecord>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }
    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }
}

/// Asks for the first incarnation of `d-0`; the process there sends this report.
async fn asked(report: v1::LoadReport) -> Verdict {
    let config = grpc::GrpcConfig::default();
    let listener = grpc::bind(&config).await.unwrap();
    let endpoint = listener.address().to_string();
    let server = grpc::server(&config).add_service(WorkerServer::new(Reporter(report)));
    let stop = tokio_util::sync::CancellationToken::new();
    let _stops = stop.clone().drop_guard();
    tokio::spawn(grpc::serve(server, listener, Callers::default(), stop));
    let probe = WatchProbe { max: Duration::from_secs(20), identity: Identity::default() };
    probe.ask(Arc::new(baton_types::InstanceRecord { endpoint, ..record("d-0", 1) })).await
}

#[tokio::test]
async fn only_the_start_that_is_meant_is_alive_and_only_while_it_takes_work() {
    let of = |instance: &str, incarnation: u64| -> Option<v1::Party> {
        let party: Party = record(instance, incarnation).party;
        Some(party.into())
    };
    let report = |party| v1::LoadReport { party, healthy: true, ..Default::default() };
    assert_eq!(asked(report(of("d-0", 1))).await, Verdict::Alive);
    for gone in [
        report(of("d-0", 2)),
        report(of("d-1", 1)),
        report(None),
        v1::LoadReport { draining: true, ..report(of("d-0", 1)) },
        v1::LoadReport { healthy: false, ..report(of("d-0", 1)) },
    ] {
        assert_eq!(asked(gone.clone()).await, Verdict::Gone, "{gone:?}");
    }
}
