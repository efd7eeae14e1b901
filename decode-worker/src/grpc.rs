//! `baton.v1.Decode`: the only module of this crate that names protobuf.

use crate::service::{DecodeRequest, DecodeService, Reply};
use baton_node::grpc::Router;
use baton_proto::convert::{ConvertError, required, status};
use baton_proto::v1::decode_server::{self, Decode, DecodeServer};
use baton_proto::v1::{self, decode_request::Prefill};
use baton_types::RequestError;
use baton_worker::grpc::{Replies, replies, take_up};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

pub(crate) const SERVICE_NAME: &str = decode_server::SERVICE_NAME;

pub(crate) fn add(server: Router, service: DecodeService) -> Router {
    let message_max = service.parts.message_max;
    server.add_service(DecodeServer::new(service).max_decoding_message_size(message_max))
}

#[tonic::async_trait]
impl Decode for DecodeService {
    type GenerateStream = Replies<v1::DecodeEvent>;

    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let events = self.taken_up(request).map_err(|error| status::from_error(&error))?;
        Ok(Response::new(replies(events)))
    }
}

impl DecodeService {
    fn taken_up(&self, request: Request<v1::DecodeRequest>) -> Result<mpsc::Receiver<Reply>, RequestError> {
        let call = take_up(&request, &self.parts)?;
        let mut request = request.into_inner();
        self.parts.check_party(&required("party", request.party.take())?)?;
        self.decode(call, parse(request)?)
    }
}

fn parse(request: v1::DecodeRequest) -> Result<DecodeRequest, ConvertError> {
    let sequence = required("sequence", request.sequence)?;
    let source = match request.prefill {
        Some(Prefill::AwaitKv(wait)) => Some(required("source", wait.source).map_err(|e| e.within("await_kv"))?),
        Some(Prefill::Local(_)) => None,
        None => return Err(ConvertError::missing("prefill")),
    };
    Ok(DecodeRequest { sequence, source })
}
