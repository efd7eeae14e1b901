//! Which role may call which method: one table for all servers of a cluster, checked before any service receives a
//! call.

use super::{Role, Roles};
use crate::listen::Peer;
use futures::future::{Either, Ready, ready};
use http::{Request, Response};
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// Methods, or all methods of a service with a common prefix, and the roles that may call them; the first match counts.
/// A method without a match may not be called. The table does not apply to the client port of a router: its callers use API keys.
const RULES: &[(&str, &[Role])] = &[
    ("/baton.v1.Worker/Drain", &[Role::Router, Role::Operator]),
    ("/baton.v1.Worker/", &[Role::Router]),
    ("/baton.v1.Prefill/", &[Role::Router]),
    ("/baton.v1.Decode/", &[Role::Router]),
    ("/baton.v1.Telemetry/", &[Role::Router]),
    ("/baton.v1.Membership/", &[Role::Worker]),
    ("/baton.v1.Admin/", &[Role::Operator, Role::Router]),
    ("/grpc.health.v1.Health/", &Role::ALL),
    ("/grpc.reflection.", &Role::ALL),
];

/// The roles that may call the method with this path.
pub(super) fn allowed(path: &str) -> &'static [Role] {
    RULES.iter().find(|(prefix, _)| path.starts_with(prefix)).map_or(&[], |(_, allowed)| allowed)
}

/// Whether a peer with the proven `roles` may call the method with this path; else the refusal.
pub fn may_call(roles: &Roles, path: &str) -> Result<(), Status> {
    let allowed = allowed(path);
    if allowed.iter().any(|role| roles.has(*role)) {
        return Ok(());
    }
    if *roles == Roles::default() {
        let names = Role::ALL.map(Role::dns_name).join(", ");
        return Err(Status::unauthenticated(format!("your certificate bears no name of a role: {names}")));
    }
    let allowed = allowed.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ");
    let who = if allowed.is_empty() { "nobody" } else { allowed.as_str() };
    Err(Status::permission_denied(format!("{path} is for the role {who}; your certificate is that of {roles}")))
}

/// Checks the rules before all services of a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuardLayer;

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;

    fn layer(&self, inner: S) -> Guard<S> {
        Guard(inner)
    }
}

/// Services behind the rules.
#[derive(Clone, Debug)]
pub struct Guard<S>(S);

impl<S, B> Service<Request<B>> for Guard<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let allowed = match request.extensions().get::<Peer>() {
            // No TLS: this process has no identity, or this port is not for peers.
            Some(Peer { roles: None, .. }) => Ok(()),
            Some(Peer { roles: Some(roles), .. }) => may_call(roles, request.uri().path()),
            None => Err(Status::internal("nobody asked who calls")),
        };
        match allowed {
            Ok(()) => Either::Right(self.0.call(request)),
            Err(status) => Either::Left(ready(Ok(status.into_http()))),
        }
    }
}
