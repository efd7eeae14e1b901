//! The service over a real engine and transfer: a prompt whose KV nobody takes.

use crate::service::PrefillService;
use crate::sink::NoSink;
use baton_engine::Phase;
use baton_kv_transfer::{KvTransfer, Region, TransferConfig, TransportChoice};
use baton_proto::convert::status::to_error;
use baton_proto::v1::{self, prefill_event::Event, prefill_server::Prefill};
use baton_types::{ErrorKind, Incarnation, InstanceId, Party, RequestId, SamplingParams, SequenceSpec};
use baton_worker::bring_up;
use baton_worker::config::WorkerConfig;
use baton_worker::drain::Drain;
use baton_worker::process::Parts;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::StreamExt as _;
use tonic::Request;

/// Nothing here takes long; whoever waits this long waits for ever.
const FOREVER: Duration = Duration::from_secs(30);

/// A prefill worker, and the transfer of another instance that refuses every offer.
fn pair() -> (PrefillService, KvTransfer) {
    let mut config = WorkerConfig::default();
    config.model.model = "random:hidden=32,layers=1,heads=2,kv_heads=1,head_dim=16,ffn=64,vocab=300,context=256".into();
    config.engine.threads = 1;
    config.engine.kv_cache_bytes = baton_node::config::ByteSize(1 << 20);
    let loaded = bring_up::load(&config.model, &config.engine, &|_, _| ()).unwrap();
    let start = |name: &str, region: Arc<Region>| {
        let party = Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) };
        let transport = TransportChoice::Tcp { bind: IpAddr::V4(Ipv4Addr::LOCALHOST), port: 0 };
        let config = TransferConfig::new(party, loaded.compatibility.clone(), loaded.map.clone(), transport);
        KvTransfer::start(config, region, Arc::new(NoSink)).unwrap()
    };
    let transfer = start("p", loaded.region.clone());
    let refusing = start("d", Region::anonymous(loaded.map.bytes()).unwrap());
    let tracer = SdkTracerProvider::builder().build().tracer("baton");
    let parts = Parts {
        engine: loaded.engine,
        transfer,
        drain: Drain::default(),
        tracer,
        call_max: FOREVER,
        message_max: 1 << 20,
    };
    (PrefillService { parts }, refusing)
}

#[tokio::test]
async fn a_refused_handoff_ends_the_prefill() {
    let (service, refusing) = pair();
    // Computing the prompt would take for ever.
    service.parts.engine.set_gate(Some(Arc::new(|_: &RequestId, phase: Phase| phase != Phase::Prefill)));
    let sequence = SequenceSpec {
        request_id: RequestId::try_new("a").unwrap(),
        tokens: vec![1, 2, 3, 4, 5],
        prompt_len: 5,
        sampling: SamplingParams::default(),
        sample_index: 0,
        priority: 0,
    };
    let request = v1::PrefillRequest {
        sequence: Some(sequence.into()),
        sink: Some(refusing.party().clone().into()),
        sink_address: refusing.address().to_bytes().into(),
    };
    let mut stream = service.run(Request::new(request)).await.unwrap().into_inner();
    let mut next = async || tokio::time::timeout(FOREVER, stream.next()).await.expect("it does not wait for ever");
    let started = next().await;
    assert!(matches!(started, Some(Ok(v1::PrefillEvent { event: Some(Event::Started(_)) }))), "{started:?}");
    let error = to_error(&next().await.unwrap().expect_err("no token can come"));
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}");
    assert!(error.message.contains("the handoff failed"), "{error:?}");
    assert!(next().await.is_none());
    let quiet = async {
        while service.parts.engine.pool().counts().referenced > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(FOREVER, quiet).await.expect("its blocks are free again");
}
