//! The KServe protocol with scripted workers: one request, streams of many, errors, and what dropping them frees.

use super::auth::KeysFile;
use crate::testing::cluster::Cluster;
use baton_proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use baton_proto::kserve::infer_parameter::ParameterChoice;
use baton_proto::kserve::model_infer_request::InferInputTensor;
use baton_proto::kserve::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse, ModelMetadataRequest,
    ModelReadyRequest, ModelStreamInferResponse, ServerLiveRequest, ServerMetadataRequest, ServerReadyRequest,
};
use baton_proto::v1::FinishReason::Length;
use baton_types::{AdapterCard, Digest, Role};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};

/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);

type Client = GrpcInferenceServiceClient<Channel>;

async fn client(cluster: &Cluster) -> Client {
    Client::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap()
}

fn input(name: &str, datatype: &str, contents: InferTensorContents) -> InferInputTensor {
    let (name, datatype) = (name.into(), datatype.into());
    InferInputTensor { name, datatype, shape: vec![1], contents: Some(contents), ..Default::default() }
}

fn text(name: &str, text: &str) -> InferInputTensor {
    let bytes_contents = vec![text.to_owned().into()];
    input(name, "BYTES", InferTensorContents { bytes_contents, ..Default::default() })
}

fn flag(name: &str, value: bool) -> InferInputTensor {
    input(name, "BOOL", InferTensorContents { bool_contents: vec![value], ..Default::default() })
}

/// A request for the model `m`.
fn ask(id: &str, inputs: Vec<InferInputTensor>) -> ModelInferRequest {
    ModelInferRequest { model_name: "m".into(), id: id.into(), inputs, ..Default::default() }
}

fn streaming(id: &str) -> ModelInferRequest {
    ask(id, vec![text("text_input", "x"), flag("stream", true)])
}

/// The texts of `text_output`.
fn texts(response: &ModelInferResponse) -> Vec<String> {
    assert_eq!((&*response.outputs[0].name, &*response.outputs[0].datatype), ("text_output", "BYTES"));
    let (mut raw, mut texts) = (&response.raw_output_contents[0][..], Vec::new());
    while let Some((length, rest)) = raw.split_first_chunk() {
        let (text, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        texts.push(String::from_utf8(text.to_vec()).unwrap());
        raw = rest;
    }
    texts
}

fn is_final(response: &ModelInferResponse) -> bool {
    response.parameters["triton_final_response"].parameter_choice == Some(ParameterChoice::BoolParam(true))
}

/// A stream that requests can be sent to.
struct Open {
    requests: mpsc::Sender<ModelInferRequest>,
    answers: Streaming<ModelStreamInferResponse>,
}

impl Open {
    async fn new(client: &mut Client, key: Option<&str>) -> Self {
        let (requests, sent) = mpsc::channel(512);
        let mut call = Request::new(ReceiverStream::new(sent));
        if let Some(key) = key {
            call.metadata_mut().insert("x-api-key", key.parse().unwrap());
        }
        let answers = client.model_stream_infer(call).await.unwrap().into_inner();
        Self { requests, answers }
    }

    async fn send(&self, request: ModelInferRequest) {
        self.requests.send(request).await.unwrap();
    }

    async fn next(&mut self) -> ModelStreamInferResponse {
        timeout(LONG, self.answers.message()).await.expect("an answer").unwrap().expect("not the end")
    }

    /// The next response, which is no error.
    async fn response(&mut self) -> ModelInferResponse {
        let ModelStreamInferResponse { error_message, infer_response } = self.next().await;
        assert_eq!(error_message, "");
        infer_response.unwrap()
    }
}

/// Waits until nothing is held for requests and answers.
async fn quiet(cluster: &Cluster) {
    let core = cluster.router.core();
    let wait = async {
        // The open call of the test's own client may be charged.
        while core.answers.used() > 0 || cluster.router.requests() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(LONG, wait).await.is_ok(), "{} bytes are held", core.answers.used());
}

#[tokio::test]
async fn servers_and_models_are_described() {
    let cluster = Cluster::start(|_| ()).await;
    let mut client = client(&cluster).await;
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(!client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let model_ready = async |client: &mut Client, name: &str, version: &str| {
        let request = ModelReadyRequest { name: name.into(), version: version.into() };
        client.model_ready(request).await.unwrap().into_inner().ready
    };
    assert!(!model_ready(&mut client, "m", "").await);
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    for (name, version, ready) in [("m", "", true), ("m", "1", true), ("m", "2", false), ("other", "", false)] {
        assert_eq!(model_ready(&mut client, name, version).await, ready, "{name} {version}");
    }
    // An adapter is a model.
    d.announce(&[AdapterCard { name: "sql".into(), digest: Digest([5; 32]) }]).await;
    let announced = async {
        while !model_ready(&mut client, "sql", "").await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(LONG, announced).await.is_ok());
    let server = client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!((&*server.name, &*server.version), ("baton", env!("CARGO_PKG_VERSION")));
    let request = ModelMetadataRequest { name: "m".into(), ..Default::default() };
    let model = client.model_metadata(request).await.unwrap().into_inner();
    assert_eq!((&*model.name, &model.versions[..]), ("m", &["1".to_owned()][..]));
    assert!(model.inputs.iter().any(|t| (&*t.name, &*t.datatype, &t.shape[..]) == ("text_input", "BYTES", &[1])));
    assert_eq!(model.outputs[0].name, "text_output");
    let unknown = ModelMetadataRequest { name: "other".into(), ..Default::default() };
    assert_eq!(client.model_metadata(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn methods_that_are_not_served_say_so() {
    let cluster = Cluster::start(|_| ()).await;
    let channel =
        Channel::from_shared(format!("http://{}", cluster.router.grpc_addr)).unwrap().connect().await.unwrap();
    let mut grpc = tonic::client::Grpc::new(channel);
    for method in ["ModelConfig", "RepositoryModelLoad", "SystemSharedMemoryRegister", "Nothing"] {
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<ServerLiveRequest, ServerLiveRequest>::default();
        let path = format!("/inference.GRPCInferenceService/{method}").parse().unwrap();
        let refused = grpc.unary(Request::new(ServerLiveRequest {}), path, codec).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
        assert!(refused.message().starts_with(method) && refused.message().contains("ModelInfer"), "{refused}");
    }
}

#[tokio::test]
async fn a_request_is_answered_whole() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut client = client(&cluster).await;
    for (excludes, expected) in [(false, "helloab"), (true, "ab")] {
        let sampling = text("sampling_parameters", r#"{"max_tokens": "2", "seed": 7, "top_q": 1}"#);
        let inputs = vec![text("text_input", "hello"), sampling, flag("exclude_input_in_output", excludes)];
        let worker = async {
            let call = d.decode().await;
            let sampling = call.sequence().sampling.as_ref().unwrap();
            assert_eq!((sampling.max_tokens, sampling.seed), (2, 7));
            call.claimed().await;
            call.token(b'a'.into()).await;
            call.last(b'b'.into(), Length).await;
        };
        let (answer, ()) = tokio::join!(client.model_infer(ask("my-id", inputs)), worker);
        let answer = answer.unwrap();
        assert_eq!(answer.metadata().get("x-request-id").unwrap(), "my-id");
        assert!(answer.metadata().contains_key("x-baton-cache-hit"));
        let answer = answer.into_inner();
        assert_eq!((&*answer.id, &*answer.model_name, texts(&answer)), ("my-id", "m", vec![expected.to_owned()]));
        let ignored = answer.parameters["x-baton-ignored-fields"].parameter_choice.clone();
        assert_eq!(ignored, Some(ParameterChoice::StringParam("top_q".into())));
    }
    quiet(&cluster).await;
}

#[tokio::test]
async fn wrong_requests_are_refused_by_name() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    let mut client = client(&cluster).await;
    let raw = |bytes: &'static [u8]| {
        let input = InferInputTensor { contents: None, ..text("text_input", "") };
        ModelInferRequest { raw_input_contents: vec![bytes.into()], ..ask("", vec![input]) }
    };
    let cases = [
        (ask("", vec![]), Code::InvalidArgument, "text_input is missing"),
        (ask("two words", vec![text("text_input", "x")]), Code::InvalidArgument, "a request id must be"),
        (ask("", vec![flag("text_input", true)]), Code::InvalidArgument, "must be BYTES"),
        (raw(b"\xff\xff\xff\xffx"), Code::InvalidArgument, "4294967295 bytes"),
        (raw(b"\x09\0\0"), Code::InvalidArgument, "cut off"),
        (streaming(""), Code::InvalidArgument, "ModelStreamInfer"),
        (ask("", vec![text("text_input", "x"); 17]), Code::InvalidArgument, "inputs takes at most 16 items"),
        (
            ModelInferRequest { model_name: "other".into(), ..ask("", vec![text("text_input", "x")]) },
            Code::NotFound,
            "other",
        ),
    ];
    for (request, code, says) in cases {
        let refused = client.model_infer(request).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(says), "{says}: {refused}");
        assert!(refused.metadata().contains_key("baton-error-kind"));
    }
    quiet(&cluster).await;
}

#[tokio::test]
async fn requests_of_a_stream_are_answered_as_their_tokens_come() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut stream = Open::new(&mut client(&cluster).await, None).await;
    stream.send(streaming("one")).await;
    let one = d.decode().await;
    one.claimed().await;
    one.token(b'a'.into()).await;
    let first = stream.response().await;
    assert_eq!((&*first.id, texts(&first), is_final(&first)), ("one", vec!["a".to_owned()], false));

    // Another one, while the first goes on. It is answered whole.
    stream.send(ask("two", vec![text("text_input", "x")])).await;
    let two = d.decode().await;
    two.claimed().await;
    two.last(b'b'.into(), Length).await;
    let whole = stream.response().await;
    assert_eq!((&*whole.id, texts(&whole), is_final(&whole)), ("two", vec!["xb".to_owned()], true));

    // Errors are of one request.
    stream.send(ModelInferRequest { model_name: "other".into(), ..streaming("three") }).await;
    let failed = stream.next().await;
    assert!(failed.error_message.contains("no model \"other\""), "{failed:?}");
    let response = failed.infer_response.unwrap();
    assert_eq!((&*response.id, is_final(&response)), ("three", true));
    let kind = response.parameters["baton-error-kind"].parameter_choice.clone();
    assert_eq!(kind, Some(ParameterChoice::StringParam("model_not_found".into())));

    one.last(b'c'.into(), Length).await;
    let more = stream.response().await;
    assert_eq!((&*more.id, texts(&more), is_final(&more)), ("one", vec!["c".to_owned()], false));
    let last = stream.response().await;
    assert_eq!((&*last.id, texts(&last), is_final(&last)), ("one", vec![String::new()], true));

    // A client that sends no more still gets its answers.
    stream.send(streaming("four")).await;
    let Open { requests, mut answers } = stream;
    drop(requests);
    let four = d.decode().await;
    four.claimed().await;
    four.last(b'd'.into(), Length).await;
    let mut got = 0;
    while answers.message().await.unwrap().is_some() {
        got += 1;
    }
    assert_eq!(got, 2);
    quiet(&cluster).await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_all_requests_of_its_stream() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut stream = Open::new(&mut client(&cluster).await, None).await;
    stream.send(streaming("one")).await;
    let one = d.decode().await;
    one.claimed().await;
    one.token(b'a'.into()).await;
    stream.response().await;
    stream.send(ask("two", vec![text("text_input", "x")])).await;
    let two = d.decode().await;
    two.claimed().await;
    drop(stream);
    one.cancelled().await;
    two.cancelled().await;
    quiet(&cluster).await;
}

#[tokio::test]
async fn a_stream_has_a_bound_of_requests_in_flight() {
    const MAX: usize = 256;
    let cluster = Cluster::start(|_| ()).await;
    let large = |record: &mut baton_types::InstanceRecord| {
        (record.running_max, record.waiting_max, record.capacity_tokens) = (1024, 1024, 1 << 20);
    };
    let d = cluster.worker_with(Role::Decode, "d", large).await;
    cluster.router.ready().await;
    let worker = tokio::spawn(async move {
        let mut calls = Vec::new();
        loop {
            let call = d.decode().await;
            call.claimed().await;
            calls.push(call);
        }
    });
    let stream = Open::new(&mut client(&cluster).await, None).await;
    for id in 0..MAX + 20 {
        stream.send(streaming(&id.to_string())).await;
    }
    let full = async {
        while cluster.router.requests() < MAX {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let taken = timeout(LONG, full).await;
    assert!(taken.is_ok(), "{} are taken", cluster.router.requests());
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(cluster.router.requests(), MAX);
    }
    drop(stream);
    quiet(&cluster).await;
    worker.abort();
}

#[tokio::test]
async fn deadlines_are_those_of_the_request_and_of_the_stream() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut stream = Open::new(&mut client(&cluster).await, None).await;
    let timeout = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(300_000)) };
    let parameters = [("timeout".to_owned(), timeout)].into();
    stream.send(ModelInferRequest { parameters, ..streaming("one") }).await;
    let one = d.decode().await;
    one.claimed().await;
    let failed = stream.next().await;
    let response = failed.infer_response.unwrap();
    let kind = response.parameters["baton-error-kind"].parameter_choice.clone();
    assert_eq!(kind, Some(ParameterChoice::StringParam("deadline_exceeded".into())), "{}", failed.error_message);
}

#[tokio::test]
async fn keys_are_asked_for() {
    let keys = KeysFile::new(&[("sk-alice", "alice requests_max=1")]);
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut client = client(&cluster).await;
    let without = client.server_live(ServerLiveRequest {}).await.unwrap_err();
    assert_eq!(without.code(), Code::Unauthenticated);
    let mut wrong = Request::new(streaming(""));
    wrong.metadata_mut().insert("authorization", "Bearer sk-mallory".parse().unwrap());
    assert_eq!(client.model_infer(wrong).await.unwrap_err().code(), Code::Unauthenticated);
    let mut stream = Open::new(&mut client, Some("sk-alice")).await;
    stream.send(streaming("one")).await;
    let one = d.decode().await;
    one.claimed().await;
    stream.send(streaming("two")).await;
    let full = stream.next().await;
    assert_eq!(full.infer_response.unwrap().id, "two", "the limit of the key: {}", full.error_message);
    one.last(b'a'.into(), Length).await;
    assert_eq!(stream.response().await.id, "one");
}

#[tokio::test]
async fn an_open_stream_holds_up_no_drain() {
    let mut cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut stream = Open::new(&mut client(&cluster).await, None).await;
    stream.send(streaming("one")).await;
    let one = d.decode().await;
    one.claimed().await;
    one.last(b'a'.into(), Length).await;
    assert_eq!(texts(&stream.response().await), ["a"]);
    assert!(is_final(&stream.response().await));
    let begun = std::time::Instant::now();
    timeout(LONG, cluster.router.drain()).await.expect("bounded");
    // A client that does not read may take eight seconds.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(stream.answers.message().await.unwrap().is_none(), "the stream ends");
}
