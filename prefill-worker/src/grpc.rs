//! `baton.v1.Prefill`: the only module of this crate that names protobuf.

use crate::service::{PrefillRequest, PrefillService, Reply};
use baton_kv_transfer::{Peer, TransferAddress};
use baton_node::grpc::Router;
use baton_proto::convert::{required, status};
use baton_proto::v1;
use baton_proto::v1::prefill_server::{self, Prefill, PrefillServer};
use baton_types::RequestError;
use baton_worker::grpc::{Replies, replies, take_up};
use baton_worker::prefix_get::{self, PrefixGet};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

pub(crate) const SERVICE_NAME: &str = prefill_server::SERVICE_NAME;

pub(crate) fn add(server: Router, service: PrefillService) -> Router {
    let message_max = service.parts.message_max;
    server.add_service(PrefillServer::new(service).max_decoding_message_size(message_max))
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type RunStream = Replies<v1::PrefillEvent>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        let events = self.taken_up(request).map_err(|error| status::from_error(&error))?;
        Ok(Response::new(replies(events)))
    }
}

impl PrefillService {
    fn taken_up(&self, request: Request<v1::PrefillRequest>) -> Result<mpsc::Receiver<Reply>, RequestError> {
        let call = take_up(&request, &self.parts)?;
        let mut request = request.into_inner();
        self.parts.check_party(&required("party", request.party.take())?)?;
        self.prefill(call, parse(request)?)
    }
}

fn parse(request: v1::PrefillRequest) -> Result<PrefillRequest, RequestError> {
    let sequence = required("sequence", request.sequence)?;
    let party = required("sink", request.sink)?;
    let peer = Peer { party, address: address("sink_address", &request.sink_address)?, shard: 0 };
    let get = request.get.map(|get| {
        let owner = required("owner", get.owner).map_err(|e| e.within("get"))?;
        let owner = Peer { party: owner, address: address("get.owner_address", &get.owner_address)?, shard: 0 };
        let refused = |e: prefix_get::BlockTokens| RequestError::invalid("get.block_tokens", e.to_string());
        PrefixGet::try_new(owner, get.tokens, get.block_tokens).map_err(refused)
    });
    Ok(PrefillRequest { sequence, peer, get: get.transpose()? })
}

fn address(field: &str, bytes: &[u8]) -> Result<TransferAddress, RequestError> {
    TransferAddress::from_bytes(bytes).map_err(|e| RequestError::invalid(field, e.to_string()))
}
