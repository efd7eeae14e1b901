//! Authenticates callers by key, and passes the caller to the services behind.

use crate::auth::{Access, Caller, Denied, KEY_HEADERS};
use http::HeaderMap;
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Status};

/// Accepts every caller that has a key.
pub(crate) fn callers(
    access: Access,
) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + Send + Sync + 'static {
    move |request| admit(request, |headers| access.caller(headers))
}

/// Accepts calls of operators only.
pub(crate) fn operators(
    access: Access,
) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + Send + Sync + 'static {
    move |request| admit(request, |headers| access.operator(headers))
}

/// Adds the caller to the request, and removes the key: no code behind this sees it.
fn admit(request: Request<()>, who: impl FnOnce(&HeaderMap) -> Result<Caller, Denied>) -> Result<Request<()>, Status> {
    let (metadata, mut extensions, ()) = request.into_parts();
    let mut headers = metadata.into_headers();
    let caller = who(&headers).map_err(|denied| denied.status(&headers))?;
    KEY_HEADERS.iter().for_each(|name| drop(headers.remove(name)));
    extensions.insert(caller);
    Ok(Request::from_parts(MetadataMap::from_headers(headers), extensions, ()))
}

/// The authenticated caller. A service without this check serves no request.
pub(super) fn caller(extensions: &Extensions) -> Result<Caller, Status> {
    extensions.get().cloned().ok_or_else(|| Status::internal("nobody asked who calls"))
}
