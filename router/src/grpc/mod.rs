//! gRPC, and the only module that uses protobuf: `baton.v1.Inference` and the KServe protocol over the flow,
//! `baton.v1.Admin` for operators, and the link to workers.

mod access;
mod admin;
mod convert;
mod inference;
mod kserve;
mod link;
mod one_message;
mod status;
mod subtree;
mod trace;

pub(crate) use admin::AdminService;
pub(crate) use inference::InferenceService;
pub(crate) use kserve::KserveService;
pub(crate) use link::GrpcConnector;
pub(crate) use trace::{REQUEST_ID, WORKER};

use crate::auth::Access;
use access::{callers, operators};
use baton_node::grpc::GrpcConfig;
use baton_proto::kserve::grpc_inference_service_server::{self, GrpcInferenceServiceServer};
use baton_proto::v1::admin_server::{self, AdminServer};
use baton_proto::v1::inference_server::{self, InferenceServer};
use baton_proto::v1::membership_server;
use kserve::CheckedMessages;
use one_message::WholeMessage;
use tonic::service::interceptor::{InterceptedService, Interceptor};

/// Full names of the gRPC services.
pub(crate) const INFERENCE: &str = inference_server::SERVICE_NAME;
pub(crate) const KSERVE: &str = grpc_inference_service_server::SERVICE_NAME;
pub(crate) const ADMIN: &str = admin_server::SERVICE_NAME;
pub(crate) const MEMBERSHIP: &str = membership_server::SERVICE_NAME;

/// `Inference` for callers that have a key.
pub(crate) fn inference(
    service: InferenceService,
    config: &GrpcConfig,
    access: Access,
) -> InterceptedService<WholeMessage<InferenceServer<InferenceService>>, impl Interceptor + Clone + Send + Sync + 'static>
{
    let server = InferenceServer::new(service).max_decoding_message_size(config.message_max());
    InterceptedService::new(WholeMessage::new(server, config.message_max()), callers(access))
}

/// The KServe protocol for callers that have a key.
pub(crate) fn kserve(
    service: KserveService,
    config: &GrpcConfig,
    access: Access,
) -> InterceptedService<
    CheckedMessages<GrpcInferenceServiceServer<KserveService>>,
    impl Interceptor + Clone + Send + Sync + 'static,
> {
    let server = GrpcInferenceServiceServer::new(service).max_decoding_message_size(config.message_max());
    InterceptedService::new(CheckedMessages::new(server, config.message_max()), callers(access))
}

/// `Admin` for a port that has already authenticated the caller.
pub(crate) fn admin(service: AdminService) -> AdminServer<AdminService> {
    AdminServer::new(service)
}

/// `Admin` for operators alone.
pub(crate) fn guarded_admin(
    service: AdminService,
    access: Access,
) -> InterceptedService<AdminServer<AdminService>, impl Interceptor + Clone + Send + Sync + 'static> {
    InterceptedService::new(admin(service), operators(access))
}
