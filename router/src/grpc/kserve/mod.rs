//! `inference.GRPCInferenceService`, the KServe v2 protocol, over the flow, with the tensors of Triton's vLLM backend.
//!
//! ```text
//!  messages (bytes, checked) ──> tensors ──> request ──> flow ──> response
//! ```

mod messages;
mod request;
mod response;
mod tensors;

pub(crate) use messages::CheckedMessages;

use super::inference::{CACHE_HIT, name};
use super::{access, convert};
use crate::auth::Caller;
use crate::deadline::Deadlines;
use crate::flow::{Core, Generation, Refused};
use crate::models::lookup;
use crate::output::{Events, Opened, Opening, cache_hit_percent};
use crate::request::{Request, request_id};
use baton_node::grpc::MessageHold;
use baton_node::intake::{Client, Hold};
use baton_proto::convert::status;
use baton_proto::kserve::grpc_inference_service_server::GrpcInferenceService;
use baton_proto::kserve::infer_parameter::ParameterChoice;
use baton_proto::kserve::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse,
    ModelReadyRequest, ModelReadyResponse, ModelStreamInferResponse, ServerLiveRequest, ServerLiveResponse,
    ServerMetadataRequest, ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
};
use baton_types::{ErrorKind, RequestError, RequestId, shown};
use futures::stream::{self, BoxStream};
use futures::{FutureExt as _, StreamExt as _};
use http::HeaderMap;
use messages::AnswerHold;
use request::Asked;
use response::{Responses, failed, streamed};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tonic::{Extensions, Response, Status, Streaming};

/// The only version of each model.
const VERSION: &str = "1";
/// Requests of one stream that run at once; further ones wait unread.
const IN_FLIGHT_MAX: usize = 256;

#[derive(Clone, Debug)]
pub(crate) struct KserveService {
    core: Arc<Core>,
    deadlines: Deadlines,
    /// Whether unknown parameters are refused.
    is_strict: bool,
    /// Cancelled: streams take no more requests.
    stop: CancellationToken,
}

/// A call without its messages.
#[derive(Debug)]
struct Call {
    caller: Caller,
    /// Whose shares of memory it uses.
    client: Client,
    headers: HeaderMap,
    received: Instant,
    /// The call's own timeout.
    stated: Result<Option<Duration>, RequestError>,
}

/// A request that has begun.
struct Begun {
    generation: Generation,
    responses: Responses,
    is_stream: bool,
}

impl KserveService {
    /// A service over the flow, whose streams end once `stop` is cancelled.
    pub(crate) fn new(core: Arc<Core>, deadlines: Deadlines, is_strict: bool, stop: CancellationToken) -> Self {
        Self { core, deadlines, is_strict, stop }
    }

    fn call(&self, metadata: tonic::metadata::MetadataMap, extensions: &Extensions) -> Result<Call, Status> {
        let received = self.core.runtime.now();
        let caller = access::caller(extensions)?;
        let (client, stated) = (caller.client(extensions), convert::timeout(&metadata));
        Ok(Call { caller, client, headers: metadata.into_headers(), received, stated })
    }

    /// The memory that is held for a message that has come.
    fn hold(&self, held: Option<&MessageHold>, client: &Client) -> Hold {
        let empty = self.core.intake.hold(client.clone());
        match held {
            Some(held) => held.with(|hold| std::mem::replace(hold, empty)),
            None => empty,
        }
    }

    /// Starts a request. Its memory is held until the prompt is tokenized.
    async fn begin(
        &self,
        call: &Call,
        (id, given): (RequestId, Result<(), RequestError>),
        message: ModelInferRequest,
        mut hold: Hold,
        may_stream: bool,
    ) -> Result<Begun, Refused> {
        let read = || {
            given?;
            let stated = call.stated.clone()?;
            let asked = request::request(message, may_stream, self.is_strict)?;
            Ok((asked, stated))
        };
        let (asked, stated) = read().map_err(|error| Refused { error, trace_id: String::new() })?;
        let Asked { parameters, prompt, timeout, shape, unknown } = asked;
        self.core.metrics.ignored_fields(unknown.len());
        let received = self.core.runtime.now();
        let mut deadline = self.deadlines.of(timeout.or(stated), received);
        if let Some(stated) = stated {
            // That of a stream is for all of its requests.
            deadline = deadline.min(self.deadlines.of(Some(stated), call.received));
        }
        let echoed: usize = shape.echoed.iter().map(String::len).sum();
        let bytes = prompt.bytes() + (echoed + parameters.model.len()) as u64;
        // A smaller hold always fits.
        let less = hold.set(bytes.min(hold.bytes()));
        debug_assert!(less.is_ok());
        let Caller { tenant, weight, key, .. } = call.caller.clone();
        let request = Request { id, tenant, weight, key, received, deadline, parameters };
        let generation = self.core.generate(request, prompt, &call.headers).await?;
        drop(hold);
        let is_stream = shape.is_stream;
        let responses = Responses::new(&generation.request, shape, unknown);
        Ok(Begun { generation, responses, is_stream })
    }

    /// A whole answer, the memory held for it, and the cached share of its prompts in percent.
    async fn whole(&self, begun: Begun, client: &Client) -> Result<(ModelInferResponse, Hold, u64), RequestError> {
        let Begun { generation, mut responses, .. } = begun;
        let hold = self.core.answers.hold(client.clone());
        let gathered = generation.events.gather(hold, responses.bytes_before(), Responses::bytes_of).await?;
        let response = responses.whole(&gathered);
        let percent = cache_hit_percent(gathered.total.usage.cached_tokens, generation.request.prompt_tokens());
        Ok((response, gathered.hold, percent))
    }

    /// The responses to one request of a stream; dropping them cancels it.
    async fn answer(
        self,
        call: Arc<Call>,
        message: ModelInferRequest,
        hold: Hold,
    ) -> BoxStream<'static, ModelStreamInferResponse> {
        let asked_id = message.id.clone();
        let id = request_id(Some(&*asked_id).filter(|id| !id.is_empty()), "id");
        // An invalid id is repeated, so that the client knows which request has failed.
        let named = if asked_id.is_empty() { id.0.as_str().to_owned() } else { asked_id };
        let begun = match self.begin(&call, id, message, hold, true).await {
            Ok(begun) => begun,
            Err(refused) => return one(failed(&named, &refused.error)),
        };
        if !begun.is_stream {
            return match self.whole(begun, &call.client).await {
                // The answer counts until the next one is asked for.
                Ok((response, hold, _)) => stream::unfold((Some(response), hold), async |(mut response, hold)| {
                    Some((streamed(response.take()?, true), (response, hold)))
                })
                .boxed(),
                Err(error) => one(failed(&named, &error)),
            };
        }
        let Begun { generation: Generation { request, events, .. }, responses, .. } = begun;
        let room = self.core.answers.hold(call.client.clone());
        let unread = match Opening::new(request.choices(), &events, 0, room) {
            // Nothing was read yet; it holds the memory of what waits for the client.
            Ok(opening) => opening.done().0,
            Err(error) => return one(failed(&named, &error)),
        };
        let next = async |(mut events, mut responses, unread, named): (Events, Responses, Opened, String)| {
            loop {
                let response = match events.next().await? {
                    Ok(event) => responses.of(&event),
                    Err(error) => Some(failed(&named, &error)),
                };
                if let Some(response) = response {
                    return Some((response, (events, responses, unread, named)));
                }
            }
        };
        stream::unfold((events, responses, unread, named), next).boxed()
    }
}

fn one(response: ModelStreamInferResponse) -> BoxStream<'static, ModelStreamInferResponse> {
    stream::once(std::future::ready(response)).boxed()
}

#[tonic::async_trait]
impl GrpcInferenceService for KserveService {
    type ModelStreamInferStream = BoxStream<'static, Result<ModelStreamInferResponse, Status>>;

    async fn server_live(&self, _: tonic::Request<ServerLiveRequest>) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: tonic::Request<ServerReadyRequest>,
    ) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.core.ready().is_ok() }))
    }

    async fn model_ready(
        &self,
        request: tonic::Request<ModelReadyRequest>,
    ) -> Result<Response<ModelReadyResponse>, Status> {
        let ModelReadyRequest { name, version } = request.into_inner();
        let models = self.core.workers.models(self.core.runtime.now());
        let is_served = check_version(&version).is_ok() && lookup(&models, &name).is_ok();
        Ok(Response::new(ModelReadyResponse { ready: is_served && self.core.ready().is_ok() }))
    }

    async fn server_metadata(
        &self,
        _: tonic::Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        let (name, version) = ("baton".into(), env!("CARGO_PKG_VERSION").into());
        Ok(Response::new(ServerMetadataResponse { name, version, extensions: vec!["parameters".into()] }))
    }

    async fn model_metadata(
        &self,
        request: tonic::Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let models = self.core.workers.models(self.core.runtime.now());
        let named = check_version(&version).and_then(|()| lookup(&models, &name));
        let named = named.map_err(|error| status::from_error(&error))?;
        let (inputs, outputs) = request::metadata();
        let name =
            if name.is_empty() { named.model.card.public_names().next().unwrap_or_default().to_owned() } else { name };
        let (versions, platform) = (vec![VERSION.into()], "baton".into());
        Ok(Response::new(ModelMetadataResponse { name, versions, platform, inputs, outputs }))
    }

    async fn model_infer(
        &self,
        request: tonic::Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let call = self.call(metadata, &extensions)?;
        let hold = self.hold(extensions.get(), &call.client);
        drop(extensions);
        let from_header = call.headers.get("x-request-id").and_then(|v| v.to_str().ok());
        let (id, given) = request_id(Some(&*message.id).filter(|id| !id.is_empty()).or(from_header), "id");
        let (answer, trace_id) = match self.begin(&call, (id.clone(), given), message, hold, false).await {
            Ok(mut begun) => {
                let trace_id = std::mem::take(&mut begun.generation.trace_id);
                (self.whole(begun, &call.client).await, trace_id)
            }
            Err(refused) => (Err(refused.error), refused.trace_id),
        };
        match answer {
            Ok((answer, hold, percent)) => {
                let mut response = Response::new(answer);
                response.extensions_mut().insert(AnswerHold::new(hold));
                name(response.metadata_mut(), &id, &trace_id);
                response.metadata_mut().insert(CACHE_HIT, percent.into());
                Ok(response)
            }
            Err(error) => {
                let mut status = status::from_error(&error);
                name(status.metadata_mut(), &id, &trace_id);
                Err(status)
            }
        }
    }

    async fn model_stream_infer(
        &self,
        request: tonic::Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let (metadata, extensions, messages) = request.into_parts();
        let call = Arc::new(self.call(metadata, &extensions)?);
        let held = extensions.get::<MessageHold>().cloned();
        let (service, stop) = (self.clone(), self.stop.clone());
        let answers = messages.take_until(stop.cancelled_owned()).map(move |message| match message {
            Ok(message) => {
                let hold = service.hold(held.as_ref(), &call.client);
                service.clone().answer(call.clone(), message, hold).flatten_stream().map(Ok).boxed()
            }
            Err(status) => stream::once(std::future::ready(Err(status))).boxed(),
        });
        Ok(Response::new(answers.flatten_unordered(IN_FLIGHT_MAX).boxed()))
    }
}

fn check_version(version: &str) -> Result<(), RequestError> {
    if matches!(version, "" | VERSION) {
        return Ok(());
    }
    let message = format!("models have the version {VERSION} only, got {}; leave it out", shown(version));
    Err(RequestError::new(ErrorKind::ModelNotFound, message).param("model_version"))
}

/// A text as parameter.
fn string(text: impl Into<String>) -> InferParameter {
    InferParameter { parameter_choice: Some(ParameterChoice::StringParam(text.into())) }
}
