//! Long texts of a client in errors: the message has their beginning.

use crate::testing::cluster::{Cluster, ask};
use crate::testing::http::{post, send};
use baton_proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use baton_proto::kserve::model_infer_request::InferInputTensor;
use baton_proto::kserve::{InferTensorContents, ModelInferRequest, ModelMetadataRequest};
use baton_proto::v1::{self, admin_client::AdminClient};
use baton_types::Role;
use serde_json::json;
use std::fmt::Debug;

/// More than the beginning and what is around it take.
const MESSAGE_BYTES_MAX: usize = 700;

/// Checks that a message has the beginning of a name, and not much more.
fn is_short(message: &str) {
    assert!(message.contains("nnnn") && message.len() < MESSAGE_BYTES_MAX, "{} bytes: {message:.999}", message.len());
}

fn refused<T: Debug>(answer: Result<T, tonic::Status>) {
    is_short(answer.unwrap_err().message());
}

#[tokio::test]
async fn names_of_100_000_bytes_give_short_messages() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    let name = "n".repeat(100_000);
    let http = cluster.router.http_addr;
    let grpc = format!("http://{}", cluster.router.grpc_addr);

    // A field of a body is shorter.
    let body = json!({"model": name[..60_000], "prompt": "x"});
    for (path, body) in [
        ("/v1/completions", body.clone()),
        ("/tokenize", body),
        (
            "/v1/messages",
            json!({"model": name[..60_000], "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
        ),
    ] {
        let refused = post(http, path, &body).await;
        assert_eq!(refused.status, 404, "{path}");
        is_short(refused.json().await["error"]["message"].as_str().unwrap());
    }
    let refused_body = post(http, "/v1/completions", &json!({"model": name, "prompt": "x"})).await.json().await;
    assert!(refused_body["error"]["message"].as_str().unwrap().len() < MESSAGE_BYTES_MAX);
    is_short(&send(http, &format!("GET /v1/models/{}", &name[..5_000]), "", "").await.text().await);
    let header = format!("x-request-timeout: {}\r\n", &name[..5_000]);
    is_short(&send(http, "POST /v1/completions", &header, r#"{"prompt": "x"}"#).await.text().await);

    refused(cluster.generate_within(v1::GenerateRequest { model: name.clone(), ..ask("x") }, None).await);
    let mut admin = AdminClient::connect(grpc.clone()).await.unwrap();
    refused(admin.drain(v1::DrainWorkerRequest { worker: name.clone(), timeout_ms: None }).await);
    refused(admin.trace(v1::TraceRequest { id: name.clone() }).await);

    let mut kserve = GrpcInferenceServiceClient::connect(grpc).await.unwrap();
    refused(kserve.model_metadata(ModelMetadataRequest { name: name.clone(), version: String::new() }).await);
    refused(kserve.model_metadata(ModelMetadataRequest { name: "m".into(), version: name.clone() }).await);
    let input = |named: &str, datatype: &str| {
        let contents = InferTensorContents { bytes_contents: vec!["x".into()], ..Default::default() };
        let (name, datatype) = (named.into(), datatype.into());
        InferInputTensor { name, datatype, shape: vec![1], contents: Some(contents), ..Default::default() }
    };
    let text = input("text_input", "BYTES");
    for (model, inputs) in [
        (&*name, vec![text.clone()]),
        ("m", vec![text.clone(), input(&name, "BYTES")]),
        ("m", vec![text, input(&name, "BYTES"), input(&name, "BYTES")]),
        ("m", vec![input("text_input", &name)]),
    ] {
        let request = ModelInferRequest { model_name: model.to_owned(), inputs, ..Default::default() };
        refused(kserve.model_infer(request).await);
    }
}
