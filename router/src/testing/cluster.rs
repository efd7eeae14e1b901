//! A real router with scripted workers.

use super::fake::Fake;
use super::text::byte_bundle;
use crate::{Router, RouterConfig, RunningRouter};
use baton_proto::v1::{self, inference_client::InferenceClient};
use baton_types::{InstanceRecord, Role};
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Request, Streaming};

/// A router with a client, for tests.
pub(crate) struct Cluster {
    pub(crate) router: RunningRouter,
    pub(crate) client: InferenceClient<Channel>,
}

/// A configuration on free ports, without local prefill unless set.
pub(crate) fn config() -> RouterConfig {
    let mut config = RouterConfig::default();
    config.grpc.listen.set_port(0);
    config.http.listen.set_port(0);
    config.cluster.listen.set_port(0);
    config.placement.local_prefill_tokens_max = 0;
    config.retry.ready_ms_max = 50;
    // Independent of the memory of the test machine.
    config.limits.running_max = 1024;
    // Tests script the workers after the answer has begun.
    config.limits.head_ms_max = 0;
    config
}

impl Cluster {
    pub(crate) async fn start(change: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = config();
        change(&mut config);
        let router = Router::start(config).await.unwrap();
        let client = InferenceClient::connect(format!("http://{}", router.grpc_addr)).await.unwrap();
        Self { router, client }
    }

    /// With a router that uses this keys file.
    pub(crate) async fn with_keys(file: PathBuf, change: impl FnOnce(&mut RouterConfig)) -> Self {
        Self::start(|c| {
            change(c);
            c.auth.keys_file = Some(file);
        })
        .await
    }

    /// A worker of the model `m` with the byte tokenizer.
    pub(crate) async fn worker(&self, role: Role, name: &str) -> Fake {
        self.worker_with(role, name, |_| ()).await
    }

    pub(crate) async fn worker_with(&self, role: Role, name: &str, change: impl FnOnce(&mut InstanceRecord)) -> Fake {
        Fake::start(self.router.cluster_addr, (role, name), byte_bundle(""), change).await
    }

    /// Starts a request; its answer begins once the router has accepted it.
    pub(crate) async fn pair(&self) -> (Fake, Fake) {
        (self.worker(Role::Prefill, "p").await, self.worker(Role::Decode, "d").await)
    }

    /// Starts a request; its answer comes once the router has taken it up.
    pub(crate) async fn generate(&self, request: v1::GenerateRequest) -> Reader {
        self.generate_within(request, None).await.unwrap()
    }

    pub(crate) async fn generate_within(
        &self,
        request: v1::GenerateRequest,
        timeout: Option<Duration>,
    ) -> Result<Reader, tonic::Status> {
        let mut request = Request::new(request);
        if let Some(timeout) = timeout {
            request.set_timeout(timeout);
        }
        self.client.clone().generate(request).await.map(|r| Reader(r.into_inner()))
    }
}

/// An answer over gRPC.
#[derive(Debug)]
pub(crate) struct Reader(pub(crate) Streaming<v1::GenerateResponse>);

impl Reader {
    pub(crate) async fn next(&mut self) -> v1::GenerateResponse {
        self.0.message().await.expect("no error").expect("not the end")
    }

    /// Checks that the text of the next messages is `text`.
    pub(crate) async fn reads(&mut self, text: &str) {
        let mut got = String::new();
        while got.len() < text.len() {
            got += &self.next().await.text;
        }
        assert_eq!(got, text);
    }

    /// Text and finish reason of the rest.
    pub(crate) async fn rest(&mut self) -> (String, v1::FinishReason) {
        let mut text = String::new();
        loop {
            let message = self.next().await;
            text += &message.text;
            if message.finish_reason() != v1::FinishReason::Unspecified {
                assert!(self.0.message().await.unwrap().is_none(), "nothing follows the end");
                return (text, message.finish_reason());
            }
        }
    }

    pub(crate) async fn error(&mut self) -> tonic::Status {
        loop {
            match self.0.message().await {
                Ok(Some(message)) => assert_eq!(message.finish_reason, 0, "an end before the error"),
                Ok(None) => panic!("the stream ended without an error"),
                Err(status) => return status,
            }
        }
    }
}

/// A request for text.
pub(crate) fn ask(text: &str) -> v1::GenerateRequest {
    let segment = v1::Segment { kind: Some(v1::segment::Kind::Text(text.into())) };
    v1::GenerateRequest { model: "m".into(), prompt: vec![segment], ..Default::default() }
}

/// A request for text that a prefill worker must prefill.
pub(crate) fn remote(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { prefill_policy: v1::PrefillPolicy::Remote.into(), ..ask(text) }
}
